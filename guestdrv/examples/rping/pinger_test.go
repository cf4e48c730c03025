package main

import (
	"bytes"
	"testing"

	"github.com/vnicd/vnicd/guestdrv"
)

// The message of rping, byte for byte: struct rping_rdma_info of librdmacm's examples/rping.c.
func TestInfo(t *testing.T) {
	want := []byte{0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, 0xa1, 0xa2, 0xa3, 0xa4, 0, 0, 0xea, 0x60}
	r := guestdrv.Remote{Addr: 0x1122334455667788, RKey: 0xa1a2a3a4}
	b := make([]byte, infoLen)
	if encodeInfo(b, r, 60000); !bytes.Equal(b, want) {
		t.Errorf("%x, want %x", b, want)
	}
	if got, size := decodeInfo(want); got != r || size != 60000 {
		t.Errorf("%+v, %d", got, size)
	}
}
