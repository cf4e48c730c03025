package guestdrv

import (
	"github.com/vnicd/vnicd/device/rdma/abi"
)

// FastMR is a region that send requests register and invalidate (FastReg, and
// abi.WRLocalInv or a peer's abi.WRSendWithInv). Its key's low byte is the user's.
type FastMR struct {
	d    *Device
	key  uint32 // first; names it in commands
	list *Buffer
}

// AllocFast makes a region without memory that may have up to pages pages.
func (p *PD) AllocFast(pages int) (*FastMR, error) {
	list, err := p.d.Alloc(pageSize)
	if err != nil {
		return nil, err
	}
	mr, err := p.d.createMR(&abi.CreateMR{PDN: p.num, Flags: abi.MRFast, PageShift: pageShift, NPages: uint64(pages)})
	if err != nil {
		list.Free()
		return nil, err
	}
	return &FastMR{d: p.d, key: mr.lkey, list: list}, nil
}

// Key is the region's first key.
func (m *FastMR) Key() uint32 { return m.key }

// Map writes the page list for a registration of n bytes of buf from off on, at
// their own VA, under the key that has low byte low.
func (m *FastMR) Map(buf *Buffer, off, n int, low uint8, access uint32) *abi.RegWR {
	first := (buf.PA() + uint64(off)) &^ (pageSize - 1)
	inPage := off & (pageSize - 1)
	pages := (inPage + n + pageSize - 1) >> pageShift
	for i := range pages {
		le.PutUint64(m.list.Bytes()[8*i:], first+uint64(i)<<pageShift)
	}
	return &abi.RegWR{
		IOVA: buf.Addr() + uint64(off), Length: uint64(n), PageList: m.list.PA(), NPages: uint32(pages), Offset: uint32(inPage),
		RKey: m.key&^0xff | uint32(low), Access: access, PageShift: pageShift,
	}
}

// Deregister returns when nothing uses the memory any more (EP-3).
func (m *FastMR) Deregister() error {
	if err := m.d.onHandle(abi.CmdDestroyMR, m.key, nil); err != nil {
		return err
	}
	m.list.Free()
	return nil
}

// MW is a memory window.
type MW struct {
	d   *Device
	key uint32
}

// AllocMW makes a memory window of type 1 or 2 that is not bound.
func (p *PD) AllocMW(typ uint32) (*MW, error) {
	var h abi.Handle
	if err := p.d.do(abi.CmdCreateMW, &abi.CreateMW{PDN: p.num, Type: typ}, abi.SizeCreateMW, &h); err != nil {
		return nil, err
	}
	return &MW{p.d, h.Handle}, nil
}

// Key is the window's first key.
func (m *MW) Key() uint32 { return m.key }

// Free ends the window; it may be bound.
func (m *MW) Free() error { return m.d.onHandle(abi.CmdDestroyMW, m.key, nil) }

// BindMW is what an abi.WRBindMW request asks for.
type BindMW struct {
	Key    uint32 // the window's, as it is
	NewKey uint32 // its low byte is to be the window's
	Region uint32 // L_Key of the region to bind to
	Access uint32
	Addr   uint64
	Length uint64 // 0 unbinds a window of type 1
}
