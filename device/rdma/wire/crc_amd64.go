package wire

import "golang.org/x/sys/cpu"

var hasCRC512 = cpu.X86.HasAVX512F && cpu.X86.HasAVX512DQ && cpu.X86.HasAVX512VPCLMULQDQ && cpu.X86.HasPCLMULQDQ &&
	cpu.X86.HasSSE41

// crcAVX512 continues the CRC-32 crc over head and the n bytes at p; n is a multiple of 64.
//
//go:noescape
func crcAVX512(crc uint32, head *[icrcHead]byte, p *byte, n int) uint32

// updateCRC is crc32.Update over head and then rest, whose length is a multiple of icrcStep.
func updateCRC(crc uint32, head *[icrcHead]byte, rest []byte) uint32 {
	if !hasCRC512 {
		return updateCRCPlain(crc, head, rest)
	}
	var p *byte
	if len(rest) > 0 {
		p = &rest[0]
	}
	return crcAVX512(crc, head, p, len(rest))
}
