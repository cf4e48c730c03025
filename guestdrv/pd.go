package guestdrv

import (
	"context"
	"fmt"
	"math"

	"github.com/vnicd/vnicd/device/rdma/abi"
)

// PD is a protection domain: regions, windows, QPs, SRQs and address handles work together only within one PD.
type PD struct{ *object }

// AllocPD makes a protection domain.
func (d *Device) AllocPD(ctx context.Context) (*PD, error) {
	var h abi.Handle
	err := d.create(ctx, creation{request: request{op: abi.CmdCreatePD}, resp: &h, destroy: abi.CmdDestroyPD})
	if err != nil {
		return nil, err
	}
	return &PD{&object{d: d, destroy: abi.CmdDestroyPD, handle: h.Handle}}, nil
}

// Number returns the PD's number in the device.
func (p *PD) Number() uint32 { return p.handle }

// Close destroys the PD. It fails with StatusBusy while an object of the PD exists.
func (p *PD) Close() error { return p.close() }

// region is what MR and OnDemandMR have in common. SetPages is not part of it: the pages of an OnDemandMR change only
// in step with its Pager and Invalidate.
type region struct {
	*object
	lkey, rkey uint32
	iova       uint64
	length     uint64
}

// MR is a registered memory region.
type MR struct{ region }

// Register registers the whole of buf at its own VA. While the region exists, Buffer.Close fails. access must have
// AccessLocalWrite if it has AccessRemoteWrite or AccessRemoteAtomic.
func (p *PD) Register(ctx context.Context, buf *Buffer, access Access) (*MR, error) {
	size, err := buf.use()
	if err != nil {
		return nil, err
	}
	return p.registerRange(ctx, buf, 0, size, access)
}

// RegisterRange registers n bytes of buf from offset off on, at their own VA. While the region exists, Buffer.Close
// fails.
func (p *PD) RegisterRange(ctx context.Context, buf *Buffer, off, n int, access Access) (*MR, error) {
	size, err := buf.use()
	if err != nil {
		return nil, err
	}
	if off < 0 || n <= 0 || off > size || n > size-off {
		buf.release()
		return nil, invalid("region of %d bytes at %d in a buffer of %d", n, off, size)
	}
	return p.registerRange(ctx, buf, off, n, access)
}

// registerRange registers part of a buffer that is in use, see Buffer.use.
func (p *PD) registerRange(ctx context.Context, buf *Buffer, off, n int, access Access) (*MR, error) {
	first := (buf.PA() + uint64(off)) &^ (pageSize - 1)
	inPage := uint64(off) & (pageSize - 1)
	pas := make([]uint64, (inPage+uint64(n)+pageSize-1)>>pageShift)
	for i := range pas {
		pas[i] = first + uint64(i)<<pageShift
	}
	return p.registerPages(ctx, PageSpec{
		IOVA: buf.Addr() + uint64(off), Length: uint64(n), Offset: inPage, PageShift: pageShift, PAs: pas, Access: access,
	}, buf.release)
}

// PageSpec describes a region page by page.
type PageSpec struct {
	IOVA      uint64   // VA of the first byte
	Length    uint64   // bytes, at least 1
	Offset    uint64   // of the first byte in the first page
	PageShift uint8    // log2 of the page size, 12..30
	PAs       []uint64 // one per page, see Buffer.PA; PageAbsent: a page fault, see NextEvent
	Access    Access
	Physical  bool // VAs are PAs, and there are no pages
}

// Marks of a page in a list of PAs.
const (
	PageAbsent   = abi.MTTAbsent   // in place of a PA: the page faults
	PageReadOnly = abi.MTTReadOnly // added to a PA, in on-demand regions: writes fault
)

// RegisterPages registers a region from any pages of the driver's memory, in any order.
func (p *PD) RegisterPages(ctx context.Context, s PageSpec) (*MR, error) {
	return p.registerPages(ctx, s, func() {})
}

// registerPages is RegisterPages. It calls release once the device cannot use the pages any more, see object.free.
func (p *PD) registerPages(ctx context.Context, s PageSpec, release func()) (*MR, error) {
	req := abi.CreateMR{
		PDN: p.handle, Access: uint32(s.Access), PageShift: s.PageShift, IOVA: s.IOVA, Length: s.Length,
		Offset: s.Offset, NPages: uint64(len(s.PAs)),
	}
	if s.Physical {
		req.Flags = abi.MRPhys
	}
	base, err := p.d.createMR(ctx, &req, release)
	if err != nil {
		return nil, err
	}
	mr := &MR{*base}
	faults, key := &p.d.faults, mr.lkey
	faults.add(key, nil)
	mr.free = func() { faults.forget(key); release() }
	if err := mr.SetPages(ctx, 0, s.PAs); err != nil {
		_ = mr.Close() // the caller gets the first error; Device.Close releases the rest
		return nil, err
	}
	return mr, nil
}

// createMR makes a region. If that fails, it calls release, unless that is nil, as create does.
func (d *Device) createMR(ctx context.Context, req *abi.CreateMR, release func()) (*region, error) {
	var resp abi.CreateMRResp
	err := d.create(ctx, creation{
		request: request{op: abi.CmdCreateMR, fixed: req, size: abi.SizeCreateMR},
		resp:    &resp, destroy: abi.CmdDestroyMR, free: release, handle: func(payload []byte) uint32 {
			var r abi.CreateMRResp
			_ = r.Decode(payload) // handle 0 does not exist
			return r.Handle
		},
	})
	if err != nil {
		return nil, err
	}
	return &region{
		object: &object{d: d, destroy: abi.CmdDestroyMR, handle: resp.Handle},
		lkey:   resp.LKey, rkey: resp.RKey, iova: req.IOVA, length: req.Length,
	}, nil
}

// SetPages replaces the region's pages from number first on. A long list takes several commands; if one fails, the
// pages of earlier ones are set.
func (m *MR) SetPages(ctx context.Context, first uint64, pas []uint64) error {
	return m.setPages(ctx, first, pas)
}

func (m *region) setPages(ctx context.Context, first uint64, pas []uint64) error {
	const most = (abi.CmdMax - abi.SizeReq - abi.SizeSetMTT) / 8
	for len(pas) > 0 {
		n := min(len(pas), most)
		req := abi.SetMTT{Handle: m.handle, Count: uint16(n), First: first}
		if err := m.d.do(ctx, abi.CmdSetMTT, &req, abi.SizeSetMTT, nil, pas[:n]...); err != nil {
			return err
		}
		first, pas = first+uint64(n), pas[n:]
	}
	return nil
}

// Close deregisters the region. When it returns nil, the device has stopped using the memory (EP-3). It fails with
// StatusBusy while windows are bound to the region, which then stays registered.
func (m *MR) Close() error { return m.close() }

// LKey returns the L_Key, for SGEs of this device's requests.
func (m *region) LKey() uint32 { return m.lkey }

// RKey returns the R_Key, for requests of a peer; see Remote.
func (m *region) RKey() uint32 { return m.rkey }

// Addr returns the VA of the region's first byte.
func (m *region) Addr() uint64 { return m.iova }

// Len returns the region's length in bytes.
func (m *region) Len() uint64 { return m.length }

// SGE returns an SGE for n bytes of the region from offset off on. Like a slice expression, it panics if the range is
// not within the region; also if n is greater than math.MaxUint32, the most that an SGE can describe.
func (m *region) SGE(off, n int) SGE { return m.sgeAt(m.iova+uint64(off), n) }

func (m *region) sgeAt(va uint64, n int) SGE {
	// A negative number becomes one that is greater than any length.
	if off := va - m.iova; off > m.length || uint64(n) > m.length-off || uint64(n) > math.MaxUint32 {
		panic(fmt.Sprintf("guestdrv: SGE of %d bytes at offset %d of a region of %d bytes", n, int64(off), m.length))
	}
	return SGE{Addr: va, Length: uint32(n), LKey: m.lkey}
}

// Remote returns the place at offset off, for a peer's requests: the program sends it to the peer. It panics if off is
// not within the region.
func (m *region) Remote(off int) Remote { return m.remoteAt(m.iova + uint64(off)) }

func (m *region) remoteAt(va uint64) Remote {
	if off := va - m.iova; off > m.length {
		panic(fmt.Sprintf("guestdrv: place at offset %d of a region of %d bytes", int64(off), m.length))
	}
	return Remote{Addr: va, RKey: m.rkey}
}
