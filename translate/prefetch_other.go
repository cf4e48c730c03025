//go:build !amd64

package translate

func prefetchRead(uintptr)  {}
func prefetchWrite(uintptr) {}
