package guestdrv

import (
	"errors"

	"github.com/vnicd/vnicd/device/rdma/abi"
)

// PD is a protection domain: regions, QPs, SRQs and address handles of one PD work together.
type PD struct {
	d   *Device
	num uint32
}

// AllocPD makes a protection domain.
func (d *Device) AllocPD() (*PD, error) {
	var h abi.Handle
	if err := d.do(abi.CmdCreatePD, nil, 0, &h); err != nil {
		return nil, err
	}
	return &PD{d, h.Handle}, nil
}

// Number is the PD's number in the device.
func (p *PD) Number() uint32 { return p.num }

// Destroy fails with abi.StatusBusy while something uses the PD.
func (p *PD) Destroy() error { return p.d.onHandle(abi.CmdDestroyPD, p.num, nil) }

// MR is a registered memory region.
type MR struct {
	d          *Device
	buf        *Buffer // nil if made by RegisterPages
	lkey, rkey uint32
	handle     uint32
	iova       uint64
	length     uint64
}

// Register registers the whole of buf at its own VA. access are abi.Access bits.
func (p *PD) Register(buf *Buffer, access uint32) (*MR, error) {
	return p.RegisterRange(buf, 0, buf.Len(), access)
}

// RegisterRange registers n bytes of buf from off on, at their own VA.
func (p *PD) RegisterRange(buf *Buffer, off, n int, access uint32) (*MR, error) {
	if off < 0 || n <= 0 || off > buf.Len() || n > buf.Len()-off {
		return nil, invalid("region of %d bytes at %d in a buffer of %d", n, off, buf.Len())
	}
	first := (buf.PA() + uint64(off)) &^ (pageSize - 1)
	inPage := uint64(off) & (pageSize - 1)
	pas := make([]uint64, (inPage+uint64(n)+pageSize-1)>>pageShift)
	for i := range pas {
		pas[i] = first + uint64(i)<<pageShift
	}
	mr, err := p.RegisterPages(PageSpec{IOVA: buf.Addr() + uint64(off), Length: uint64(n), Offset: inPage, PageShift: pageShift, PAs: pas, Access: access})
	if err != nil {
		return nil, err
	}
	mr.buf = buf
	return mr, nil
}

// PageSpec describes a region page by page.
type PageSpec struct {
	IOVA      uint64   // VA of the first byte
	Length    uint64   // bytes, > 0
	Offset    uint64   // of the first byte in the first page
	PageShift uint8    // 12..30
	PAs       []uint64 // one per page; abi.MTTAbsent set: absent, faults of which come from NextEvent
	Access    uint32   // abi.Access bits
	Flags     uint32   // abi.MRPhys: no PAs, VAs are PAs
}

// RegisterPages registers a region from any pages of the driver's memory, in any order.
func (p *PD) RegisterPages(s PageSpec) (*MR, error) {
	req := abi.CreateMR{
		PDN: p.num, Access: s.Access, Flags: s.Flags, PageShift: s.PageShift, IOVA: s.IOVA, Length: s.Length,
		Offset: s.Offset, NPages: uint64(len(s.PAs)),
	}
	mr, err := p.d.createMR(&req)
	if err != nil {
		return nil, err
	}
	p.d.faults.add(mr.lkey, nil)
	if err := mr.SetPages(0, s.PAs); err != nil {
		_ = mr.Deregister()
		return nil, err
	}
	return mr, nil
}

func (d *Device) createMR(req *abi.CreateMR) (*MR, error) {
	var resp abi.CreateMRResp
	if err := d.do(abi.CmdCreateMR, req, abi.SizeCreateMR, &resp); err != nil {
		return nil, err
	}
	return &MR{d: d, lkey: resp.LKey, rkey: resp.RKey, handle: resp.Handle, iova: req.IOVA, length: req.Length}, nil
}

// SetPages replaces the table entries from first on. Large lists take several
// commands.
func (m *MR) SetPages(first uint64, pas []uint64) error {
	const most = (abi.CmdMax - abi.SizeReq - abi.SizeSetMTT) / 8
	for len(pas) > 0 {
		n := min(len(pas), most)
		req := abi.SetMTT{Handle: m.handle, Count: uint32(n), First: first}
		if err := m.d.do(abi.CmdSetMTT, &req, abi.SizeSetMTT, nil, pas[:n]...); err != nil {
			return err
		}
		first, pas = first+uint64(n), pas[n:]
	}
	return nil
}

// Deregister returns when nothing uses the memory any more (EP-3). While windows are bound to the region, it goes on:
// abi.StatusBusy.
func (m *MR) Deregister() error {
	err := m.d.onHandle(abi.CmdDestroyMR, m.handle, nil)
	if !errors.Is(err, abi.StatusBusy) {
		m.d.faults.forget(m.lkey)
	}
	return err
}

// LKey is the key for local segments.
func (m *MR) LKey() uint32 { return m.lkey }

// RKey is the key for remote access.
func (m *MR) RKey() uint32 { return m.rkey }

// Addr is the VA of the region's first byte, Len its length.
func (m *MR) Addr() uint64 { return m.iova }

// Len is the region's length in bytes.
func (m *MR) Len() uint64 { return m.length }

// SGE names n bytes from off on; the device checks that they lie in the region.
func (m *MR) SGE(off, n int) abi.SGE {
	return abi.SGE{Addr: m.iova + uint64(off), Length: uint32(n), LKey: m.lkey}
}
