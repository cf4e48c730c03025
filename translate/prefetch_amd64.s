#include "textflag.h"

// func prefetchRead(addr uintptr)
TEXT ·prefetchRead(SB), NOSPLIT, $0-8
	MOVQ addr+0(FP), AX
	PREFETCHT0 (AX)
	PREFETCHT0 64(AX)
	RET

// func prefetchWrite(addr uintptr)
TEXT ·prefetchWrite(SB), NOSPLIT, $0-8
	MOVQ addr+0(FP), AX
	// The assembler has no name for it.
	BYTE $0x0f; BYTE $0x0d; BYTE $0x08             // PREFETCHW (AX)
	BYTE $0x0f; BYTE $0x0d; BYTE $0x48; BYTE $0x40 // PREFETCHW 64(AX)
	RET
