package guestdrv

import (
	"context"

	"github.com/vnicd/vnicd/device/rdma/abi"
)

// FastMR is a region that send requests register (NewRegister) and invalidate (NewLocalInvalidate, or a peer's
// NewSendInvalidate). The low byte of its key is the program's to choose.
type FastMR struct {
	*object
	list  *Buffer
	pages int // room of the region
}

// AllocFast makes a region that has no memory yet, for up to pages pages of 4 KiB, 1..DeviceAttr.MaxFastReg.
func (p *PD) AllocFast(ctx context.Context, pages int) (*FastMR, error) {
	list, err := p.d.Alloc(pageSize)
	if err != nil {
		return nil, err
	}
	mr, err := p.d.createMR(ctx, &abi.CreateMR{PDN: p.handle, Flags: abi.MRFast, PageShift: pageShift,
		NPages: uint64(pages)}, nil)
	if err != nil {
		list.free()
		return nil, err
	}
	return &FastMR{object: &object{d: p.d, destroy: abi.CmdDestroyMR, handle: mr.lkey, free: list.free}, list: list,
		pages: pages}, nil
}

// Key returns the region's first key.
func (m *FastMR) Key() uint32 { return m.handle }

// Registration is what a NewRegister request registers. FastMR.Map makes it.
type Registration struct {
	IOVA      uint64 // VA of the first byte
	Length    uint64 // bytes
	PageList  uint64 // PA of NPages PAs, 8-byte aligned, within one 4 KiB page
	NPages    uint32
	Offset    uint32 // of the first byte in the first page
	RKey      uint32 // the region's key from then on, its L_Key, too
	Access    Access
	PageShift uint8
}

func (r *Registration) encode(b []byte) {
	w := abi.RegWR{
		IOVA: r.IOVA, Length: r.Length, PageList: r.PageList, NPages: r.NPages, Offset: r.Offset, RKey: r.RKey,
		Access: uint32(r.Access), PageShift: r.PageShift,
	}
	w.Encode(b)
}

// Map writes the region's page list for n bytes of buf from offset off on, and returns the registration of these bytes
// at their own VA, under the key with low byte low. It fails with ErrInvalid if n is not positive, the bytes are not
// within buf, or touch more pages than AllocFast was called with; the list does not change then. The list must not
// change, by another Map, before the request is complete.
func (m *FastMR) Map(buf *Buffer, off, n int, low uint8, access Access) (*Registration, error) {
	if off < 0 || n <= 0 || off > buf.Len() || n > buf.Len()-off {
		return nil, invalid("registration of %d bytes at %d in a buffer of %d", n, off, buf.Len())
	}
	first := (buf.PA() + uint64(off)) &^ (pageSize - 1)
	inPage := off & (pageSize - 1)
	pages := (inPage + n + pageSize - 1) >> pageShift
	if pages > m.pages {
		return nil, invalid("registration of %d pages in a region for %d", pages, m.pages)
	}
	for i := range pages {
		le.PutUint64(m.list.Bytes()[8*i:], first+uint64(i)<<pageShift)
	}
	return &Registration{
		IOVA: buf.Addr() + uint64(off), Length: uint64(n), PageList: m.list.PA(), NPages: uint32(pages),
		Offset: uint32(inPage), RKey: m.handle&^0xff | uint32(low), Access: access, PageShift: pageShift,
	}, nil
}

// Close destroys the region. When it returns nil, the device has stopped using the memory (EP-3).
func (m *FastMR) Close() error { return m.close() }

// MW is a memory window.
type MW struct{ *object }

// AllocMW makes an unbound memory window of type (typ) 1 or 2. NewBind binds it.
func (p *PD) AllocMW(ctx context.Context, typ uint32) (*MW, error) {
	var h abi.Handle
	err := p.d.create(ctx, creation{
		request: request{op: abi.CmdCreateMW, fixed: &abi.CreateMW{PDN: p.handle, Type: typ}, size: abi.SizeCreateMW},
		resp:    &h, destroy: abi.CmdDestroyMW,
	})
	if err != nil {
		return nil, err
	}
	return &MW{&object{d: p.d, destroy: abi.CmdDestroyMW, handle: h.Handle}}, nil
}

// Key returns the window's first key.
func (m *MW) Key() uint32 { return m.handle }

// Close destroys the window, bound or not.
func (m *MW) Close() error { return m.close() }

// BindMW describes a NewBind request.
type BindMW struct {
	Key    uint32 // the window's present key
	NewKey uint32 // its low byte replaces that of Key
	Region uint32 // L_Key of the region to bind to, which has AccessMWBind
	Access Access // rights of the window
	Addr   uint64 // VA of the first byte
	Length uint64 // bytes; 0 unbinds a window of type 1
}
