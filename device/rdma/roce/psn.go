package roce

import (
	"math/bits"

	"github.com/vnicd/vnicd/device/rdma/wire"
)

// Packet sequence numbers have 24 bits on the wire and wrap (IBTA 9.7.1). Internally they have 64 bits and never wrap,
// so comparisons are plain: extend maps a wire number to the 2^23 numbers from base on, or to the 2^23 before it.

const (
	psnMask = 1<<24 - 1
	psnHalf = 1 << 23
	// psnBase is added to a starting PSN, so that nothing before it underflows.
	psnBase = 1 << 32
)

// extend returns the extended number nearest to base whose low 24 bits are wire:
// base .. base+2^23-1 for numbers ahead, base-2^23 .. base-1 for numbers behind.
func extend(base uint64, wire uint32) uint64 {
	d := (uint64(wire) - base) & psnMask
	if d < psnHalf {
		return base + d
	}
	return base + d - (1 << 24)
}

// packets returns the number of packets of a message of n bytes: at least one. mtu is a power of two.
func packets(n uint64, mtu uint32) uint64 {
	if n <= uint64(mtu) {
		return 1
	}
	return (n + uint64(mtu) - 1) >> bits.TrailingZeros32(mtu)
}

// rnrTimer maps the 5-bit timer field of an RNR NAK to the wait in ns (IBTA table 46).
var rnrTimer = [32]int64{
	655360e3, 10e3, 20e3, 30e3, 40e3, 60e3, 80e3, 120e3,
	160e3, 240e3, 320e3, 480e3, 640e3, 960e3, 1280e3, 1920e3,
	2560e3, 3840e3, 5120e3, 7680e3, 10240e3, 15360e3, 20480e3, 30720e3,
	40960e3, 61440e3, 81920e3, 122880e3, 163840e3, 245760e3, 327680e3, 491520e3,
}

// rnrCode returns the timer field for the shortest wait of at least d ns, or for the longest one.
func rnrCode(d int64) wire.Syndrome {
	for c := 1; c < len(rnrTimer); c++ {
		if rnrTimer[c] >= d {
			return wire.Syndrome(c)
		}
	}
	return 0 // 655 ms
}

// minTimeout bounds the retransmission timeout from below. IBTA 9.7.6.1.3 lets a
// channel adapter wait up to four times the configured time; the smallest
// settings (from 8.2 us on) are below what a peer in an emulated VM can answer.
const minTimeout = 1e6

// timeoutNS converts the local ACK timeout field (4.096 us * 2^t) to ns; 0 is never.
func timeoutNS(t uint8) int64 {
	if t == 0 {
		return 0
	}
	return max(int64(4096)<<t, minTimeout)
}
