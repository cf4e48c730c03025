// Side: control

package hca

import (
	"errors"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/translate"
)

// Memory that must not be absent: completion rings and their arm words, doorbells,
// the table of address handles. Writing a completion cannot wait for a page, and
// these areas are small. Work rings are many, and may be absent (PF-12).

// holds is the memory that one object holds.
type holds []func()

func (h *holds) release() {
	for _, f := range *h {
		f()
	}
	*h = nil
}

// holdMemory holds n bytes from pa on and adds them to h. It may wait for the host's driver.
func (c *cmd) holdMemory(h *holds, pa translate.PA, n uint64) error {
	f, err := c.t.conn.Hold(c.ctx, pa, n)
	if err != nil {
		s := abi.StatusNoMemory // hostdriver.ErrBudget, or the host has none
		if errors.Is(err, translate.ErrMiss) {
			s = abi.StatusFault
		}
		return &statusError{status: s, msg: err.Error()}
	}
	*h = append(*h, f)
	return nil
}

// holdPages adds the first length bytes of a list of pages, adjacent pages as one.
func (c *cmd) holdPages(h *holds, list []byte, shift uint8, length uint64) error {
	pas := decodePAs(list)
	for len(pas) > 0 && length > 0 {
		k := 1
		for k < len(pas) && pas[k] == pas[0]+translate.PA(uint64(k)<<shift) {
			k++
		}
		n := min(uint64(k)<<shift, length)
		if err := c.holdMemory(h, pas[0], n); err != nil {
			return err
		}
		pas, length = pas[k:], length-n
	}
	return nil
}
