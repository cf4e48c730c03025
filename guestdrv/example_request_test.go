package guestdrv_test

import (
	"fmt"

	"github.com/vnicd/vnicd/guestdrv"
)

// Requests are made by constructors and modified by flags.
func ExampleNewWrite() {
	wr := guestdrv.NewWrite(1, guestdrv.Remote{Addr: 0x1000, RKey: 0x55},
		guestdrv.SGE{Addr: 0x2000, Length: 64, LKey: 0x66})
	wr.With(guestdrv.SendSignaled | guestdrv.SendFence)
	fmt.Println(wr.Opcode(), wr.Flags)
	// Output: RDMA_WRITE fence|signaled
}
