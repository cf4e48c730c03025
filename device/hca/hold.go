package hca

import (
	"context"
	"errors"

	"github.com/vnicd/vnicd/device/abi"
	"github.com/vnicd/vnicd/translate"
)

// Memory that must not be absent: completion rings and their arm words, doorbells,
// the table of address handles. Who writes a completion cannot wait for it, and
// these are small. Work rings are many, and may be absent (PF-12).

// holder is the part of vhostuser.Conn that keeps memory resident and in the table
// until release is called. Connections whose memory never leaves need not have it.
type holder interface {
	Hold(ctx context.Context, pa translate.PA, n uint64) (release func(), err error)
}

// held is the memory that one object holds.
type held []func()

func (h *held) release() {
	for _, f := range *h {
		f()
	}
	*h = nil
}

// hold adds n bytes from pa on to h. It may wait for the host's driver.
func (c *cmd) hold(h *held, pa translate.PA, n uint64) error {
	k, ok := c.t.conn.(holder)
	if !ok {
		return nil
	}
	f, err := k.Hold(c.ctx, pa, n)
	if err != nil {
		if errors.Is(err, translate.ErrNotMapped) {
			return memoryError(err)
		}
		return &statusError{status: abi.StatusNoMemory, msg: "memory to be held: " + err.Error()}
	}
	*h = append(*h, f)
	return nil
}

// holdPages adds the first length bytes of a list of pages, neighbours as one.
func (c *cmd) holdPages(h *held, list []byte, shift uint8, length uint64) error {
	pas := decodePAs(list)
	for len(pas) > 0 && length > 0 {
		k := 1
		for k < len(pas) && pas[k] == pas[0]+translate.PA(uint64(k)<<shift) {
			k++
		}
		n := min(uint64(k)<<shift, length)
		if err := c.hold(h, pas[0], n); err != nil {
			return err
		}
		pas, length = pas[k:], length-n
	}
	return nil
}
