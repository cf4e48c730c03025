#include "textflag.h"

// func streamBlocks(dst, src *byte, n int)
TEXT ·streamBlocks(SB), NOSPLIT, $0-24
	MOVQ dst+0(FP), DI
	MOVQ src+8(FP), SI
	MOVQ n+16(FP), CX

	// Copy the first 16 bytes, then continue where the destination is aligned.
	MOVQ DI, AX
	NEGQ AX
	ANDQ $15, AX
	JEQ blocks
	MOVOU (SI), X0
	MOVOU X0, (DI)
	ADDQ AX, DI
	ADDQ AX, SI
	SUBQ AX, CX

blocks:
	SUBQ $64, CX

loop:
	PREFETCHNTA 512(SI)
	MOVOU (SI), X0
	MOVOU 16(SI), X1
	MOVOU 32(SI), X2
	MOVOU 48(SI), X3
	MOVNTO X0, (DI)
	MOVNTO X1, 16(DI)
	MOVNTO X2, 32(DI)
	MOVNTO X3, 48(DI)
	ADDQ $64, SI
	ADDQ $64, DI
	SUBQ $64, CX
	JGE loop

	// CX is the number of bytes left minus 64: copy the block that ends with the last byte.
	CMPQ CX, $-64
	JEQ done
	ADDQ CX, SI
	ADDQ CX, DI
	MOVOU (SI), X0
	MOVOU 16(SI), X1
	MOVOU 32(SI), X2
	MOVOU 48(SI), X3
	MOVOU X0, (DI)
	MOVOU X1, 16(DI)
	MOVOU X2, 32(DI)
	MOVOU X3, 48(DI)

done:
	SFENCE // stores are visible before any later store
	RET
