package translate

//go:noescape
func prefetchRead(addr uintptr)

//go:noescape
func prefetchWrite(addr uintptr)
