#include "textflag.h"

// Constants for CRC-32 by carry-less multiplication, bits reflected (Gopal et al., "Fast CRC Computation for Generic
// Polynomials Using PCLMULQDQ Instruction", Intel, 2009): multiplying the first half of a 128-bit lane by x^(D+32) and
// the second by x^(D-32), both modulo the polynomial, shifts the lane by D bits.
DATA crcBy2048<>+0(SB)/8, $0x11542778a
DATA crcBy2048<>+8(SB)/8, $0x1322d1430
GLOBL crcBy2048<>(SB), RODATA|NOPTR, $16
DATA crcBy512<>+0(SB)/8, $0x154442bd4
DATA crcBy512<>+8(SB)/8, $0x1c6e41596
GLOBL crcBy512<>(SB), RODATA|NOPTR, $16
// Shifts by 384, 256 and 128: from the lanes of a block to the last one.
DATA crcLanes<>+0(SB)/8, $0x03db1ecdc
DATA crcLanes<>+8(SB)/8, $0x174359406
DATA crcLanes<>+16(SB)/8, $0x0f1da05aa
DATA crcLanes<>+24(SB)/8, $0x15a546366
DATA crcLanes<>+32(SB)/8, $0x1751997d0
DATA crcLanes<>+40(SB)/8, $0x0ccaa009e
DATA crcLanes<>+48(SB)/8, $0
DATA crcLanes<>+56(SB)/8, $0
GLOBL crcLanes<>(SB), RODATA|NOPTR, $64
// x^64, and for Barrett's reduction the polynomial and x^64 divided by it.
DATA crcBy64<>+0(SB)/8, $0x163cd6124
GLOBL crcBy64<>(SB), RODATA|NOPTR, $8
DATA crcPoly<>+0(SB)/8, $0x1db710641
DATA crcPoly<>+8(SB)/8, $0x1f7011641
GLOBL crcPoly<>(SB), RODATA|NOPTR, $16

// MOVE shifts the lanes of Z by the constants in Z8 and adds the data at FROM.
#define MOVE(FROM, Z) \
	VPCLMULQDQ $0x00, Z8, Z, Z4 \
	VPCLMULQDQ $0x11, Z8, Z, Z  \
	VPTERNLOGQ $0x96, FROM, Z4, Z

// func crcAVX512(crc uint32, head *[128]byte, p *byte, n int) uint32
TEXT ·crcAVX512(SB), NOSPLIT, $0-36
	MOVL crc+0(FP), AX
	MOVQ head+8(FP), DI
	MOVQ p+16(FP), SI
	MOVQ n+24(FP), CX
	NOTL AX
	VMOVD AX, X4
	VPXORQ (DI), Z4, Z0
	VMOVDQU64 64(DI), Z1
	CMPQ CX, $384
	JLT few

	// Four blocks at a time, because each step depends on the previous one.
	VMOVDQU64 (SI), Z2
	VMOVDQU64 64(SI), Z3
	ADDQ $128, SI
	SUBQ $128, CX
	VBROADCASTI32X4 crcBy2048<>(SB), Z8
four:
	MOVE((SI), Z0)
	MOVE(64(SI), Z1)
	MOVE(128(SI), Z2)
	MOVE(192(SI), Z3)
	ADDQ $256, SI
	SUBQ $256, CX
	CMPQ CX, $256
	JGE four
	VBROADCASTI32X4 crcBy512<>(SB), Z8
	MOVE(Z1, Z0)
	MOVE(Z2, Z0)
	MOVE(Z3, Z0)
	JMP rest

few:
	VBROADCASTI32X4 crcBy512<>(SB), Z8
	MOVE(Z1, Z0)
rest:
	SUBQ $64, CX
	JLT lanes
	MOVE((SI), Z0)
	ADDQ $64, SI
	JMP rest

lanes:
	VMOVDQU64 crcLanes<>(SB), Z8
	VEXTRACTI32X4 $3, Z0, X3
	VPCLMULQDQ $0x00, Z8, Z0, Z4
	VPCLMULQDQ $0x11, Z8, Z0, Z0
	VPXORQ Z4, Z0, Z0
	VEXTRACTI32X4 $1, Z0, X1
	VEXTRACTI32X4 $2, Z0, X2
	VPXOR X0, X1, X1
	VPXOR X2, X3, X3
	VPXOR X1, X3, X1
	VMOVDQU crcLanes<>+32(SB), X0
	VZEROUPPER

	// From 128 bits to 96, to 64, to 32.
	PCLMULQDQ $1, X1, X0
	PSRLDQ $8, X1
	PXOR X0, X1
	PCMPEQB X3, X3
	PSRLQ $32, X3
	MOVOA X1, X2
	MOVQ crcBy64<>(SB), X0
	PSRLDQ $4, X2
	PAND X3, X1
	PCLMULQDQ $0, X0, X1
	PXOR X2, X1
	MOVOU crcPoly<>(SB), X0
	MOVOA X1, X2
	PAND X3, X1
	PCLMULQDQ $0x10, X0, X1
	PAND X3, X1
	PCLMULQDQ $0, X0, X1
	PXOR X2, X1
	PEXTRD $1, X1, AX
	NOTL AX
	MOVL AX, ret+32(FP)
	RET
