package guestdrv

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/vnicd/vnicd/device/rdma/abi"
)

// GIDOptions are options of SetGID. The zero value means untagged RoCEv2.
type GIDOptions struct {
	RoCEv1 bool
	VLAN   uint16 // 1..4094; 0: untagged
}

// gidTable has the VLAN of each entry of the device's GID table that has one.
type gidTable struct {
	mu    sync.Mutex
	vlans map[int]uint16 // by index; guarded by mu
}

func (t *gidTable) set(index int, vlan uint16) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if vlan == 0 {
		delete(t.vlans, index)
		return
	}
	if t.vlans == nil {
		t.vlans = map[int]uint16{}
	}
	t.vlans[index] = vlan
}

// vlan returns the VLAN of entry index, 0 if it is untagged or empty.
func (t *gidTable) vlan(index int) uint16 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.vlans[index]
}

// checkGIDIndex fails unless the GID table has an entry index. Every index passes it before it becomes a uint16.
func (d *Device) checkGIDIndex(index int) error {
	if index < 0 || int64(index) >= int64(d.attr.MaxGID) {
		return invalid("GID index %d, expected 0..%d", index, int64(d.attr.MaxGID)-1)
	}
	return nil
}

// changeGID issues a command that gives entry index another VLAN.
func (d *Device) changeGID(ctx context.Context, index int, vlan uint16, r request) error {
	r.onLate = func(_ []byte, err error) {
		if err == nil {
			d.gids.set(index, vlan)
		}
	}
	_, err := d.call(ctx, r, nil)
	if err == nil {
		d.gids.set(index, vlan)
	}
	return err
}

// SetGID writes entry index, 0..DeviceAttr.MaxGID-1, of the GID table, which has the addresses of this end. vnicd
// answers ARP and ND requests for them. A Path refers to its source GID by the index (Path.SGIDIndex). Another index
// is ErrInvalid here and wherever an index is an argument.
func (d *Device) SetGID(ctx context.Context, index int, gid GID, o GIDOptions) error {
	if err := d.checkGIDIndex(index); err != nil {
		return err
	}
	req := abi.SetGID{Index: uint16(index), Type: abi.GIDRoCEv2, VLANID: vlanID(o.VLAN), SMAC: d.conf.MAC, GID: gid}
	if o.RoCEv1 {
		req.Type = abi.GIDRoCEv1
	}
	return d.changeGID(ctx, index, o.VLAN, request{op: abi.CmdSetGID, fixed: &req, size: abi.SizeSetGID})
}

// ClearGID clears entry index of the GID table.
func (d *Device) ClearGID(ctx context.Context, index int) error {
	if err := d.checkGIDIndex(index); err != nil {
		return err
	}
	req := abi.ClearGID{Index: uint16(index)}
	return d.changeGID(ctx, index, 0, request{op: abi.CmdClearGID, fixed: &req, size: abi.SizeClearGID})
}

func vlanID(v uint16) uint16 {
	if v == 0 {
		return abi.NoVLAN
	}
	return v
}

// Path describes how to reach a port. Device.Resolve returns one; TrafficClass and the fields after it may be set then.
type Path struct {
	GID          GID
	MAC          MAC    // of the port with that GID
	SGIDIndex    int    // source: entry of the GID table, 0..DeviceAttr.MaxGID-1
	VLAN         uint16 // that of the source GID (GIDOptions.VLAN); 0: untagged
	TrafficClass uint8
	HopLimit     uint8 // 0 means 64
	FlowLabel    uint32
	SL           uint8
}

// av returns the path for a command. The caller has checked SGIDIndex.
func (p *Path) av() abi.AV {
	return abi.AV{
		DGID: p.GID, DMAC: p.MAC, SGIDIndex: uint16(p.SGIDIndex), VLANID: vlanID(p.VLAN), TrafficClass: p.TrafficClass,
		HopLimit: p.hopLimit(), FlowLabel: p.FlowLabel, SL: p.SL,
	}
}

func pathOf(a *abi.AV) Path {
	p := Path{
		GID: a.DGID, MAC: a.DMAC, SGIDIndex: int(a.SGIDIndex), VLAN: a.VLANID, TrafficClass: a.TrafficClass,
		HopLimit: a.HopLimit, FlowLabel: a.FlowLabel, SL: a.SL,
	}
	if p.VLAN == abi.NoVLAN {
		p.VLAN = 0
	}
	return p
}

// Resolve returns the path from the GID at sgidIndex, in its VLAN, to the port with the GID gid. vnicd repeats ARP or
// ND requests in the tenant's network until a host answers or ctx ends: Config.Timeout bounds each attempt, not their
// number.
func (d *Device) Resolve(ctx context.Context, gid GID, sgidIndex int) (Path, error) {
	if err := d.checkGIDIndex(sgidIndex); err != nil {
		return Path{}, err
	}
	req := abi.Resolve{DGID: gid, SGIDIndex: uint16(sgidIndex)}
	for wait := firstRetry; ; wait = min(2*wait, lastRetry) {
		var resp abi.ResolveResp
		if err := d.do(ctx, abi.CmdResolve, &req, abi.SizeResolve, &resp); err != nil {
			return Path{}, err
		}
		if resp.MAC != ([6]byte{}) {
			return Path{GID: gid, MAC: resp.MAC, SGIDIndex: sgidIndex, VLAN: d.gids.vlan(sgidIndex)}, nil
		}
		select {
		case <-time.After(wait):
		case <-d.done:
			return Path{}, fmt.Errorf("resolving %v: %w", gid, d.Err())
		case <-ctx.Done():
			return Path{}, fmt.Errorf("no host in the network has the address %v: %w", gid, ctx.Err())
		}
	}
}

// The interval between two RESOLVE commands, each of which sends a request, doubles from the first value to the last.
// RFC 1122, 2.3.2.1 recommends at most one request per second.
const firstRetry, lastRetry = 2 * time.Millisecond, time.Second

func (p *Path) hopLimit() uint8 {
	if p.HopLimit == 0 {
		return 64
	}
	return p.HopLimit
}

// ahTable is the address handle table in shared memory. Entry 0 is never used.
type ahTable struct {
	mu   sync.Mutex
	buf  *Buffer
	free []uint32
}

func (d *Device) setupAHs(ctx context.Context) error {
	n := min(d.cfg.AHEntries, int(min(d.attr.MaxAH, 1<<20)))
	if n < 2 {
		return nil
	}
	buf, err := d.mem.alloc(uint64(n)*abi.SizeAH, pageSize)
	if err != nil {
		return fmt.Errorf("address handle table: %w", err)
	}
	pas := buf.pagePAs()
	req := abi.SetAHTable{NumEntries: uint32(n), NPages: uint32(len(pas))}
	if err := d.do(ctx, abi.CmdSetAHTable, &req, abi.SizeSetAHTable, nil, pas...); err != nil {
		return err
	}
	d.ahs.buf = buf
	for i := n - 1; i > 0; i-- {
		d.ahs.free = append(d.ahs.free, uint32(i))
	}
	return nil
}

// AH is an address handle: the path of UD requests, see Datagram.
type AH struct {
	d      *Device
	num    uint32
	closed bool // guarded by ahTable.mu
}

// CreateAH makes an address handle. It issues no command, so it does not wait. It fails with ErrNoMemory if the table
// (Config.AHEntries) is full.
func (p *PD) CreateAH(path Path) (*AH, error) {
	if err := p.d.checkGIDIndex(path.SGIDIndex); err != nil {
		return nil, err
	}
	if err := p.d.users.enter(); err != nil {
		return nil, err
	}
	defer p.d.users.leave()
	t := &p.d.ahs
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.free) == 0 {
		return nil, fmt.Errorf("%w: no free address handle", ErrNoMemory)
	}
	n := t.free[len(t.free)-1]
	t.free = t.free[:len(t.free)-1]
	e := abi.AH{
		PDN: p.handle, DGID: path.GID, DMAC: path.MAC, SGIDIndex: uint16(path.SGIDIndex), VLANID: vlanID(path.VLAN),
		TrafficClass: path.TrafficClass, HopLimit: path.hopLimit(), FlowLabel: path.FlowLabel, SL: path.SL,
	}
	b := t.buf.data[n*abi.SizeAH:][:abi.SizeAH]
	e.Encode(b)
	atomic32(b, 0).Store(1) // valid: written last
	return &AH{d: p.d, num: n}, nil
}

// Number returns the handle's index in the table.
func (a *AH) Number() uint32 { return a.num }

// Close releases the handle. Requests that use it must have completed. It always returns nil.
func (a *AH) Close() error {
	if a.d.users.enter() != nil {
		return nil // Device.Close has released the table
	}
	defer a.d.users.leave()
	t := &a.d.ahs
	t.mu.Lock()
	defer t.mu.Unlock()
	if !a.closed {
		a.closed = true
		atomic32(t.buf.data, int(a.num)*abi.SizeAH).Store(0)
		t.free = append(t.free, a.num)
	}
	return nil
}

// AttachMulticast makes a UD QP a member of the multicast group gid.
func (q *QP) AttachMulticast(ctx context.Context, gid GID) error {
	return q.d.do(ctx, abi.CmdAttachMcast, &abi.Mcast{QPN: q.num, GID: gid}, abi.SizeMcast, nil)
}

// DetachMulticast ends the membership of the group gid.
func (q *QP) DetachMulticast(ctx context.Context, gid GID) error {
	return q.d.do(ctx, abi.CmdDetachMcast, &abi.Mcast{QPN: q.num, GID: gid}, abi.SizeMcast, nil)
}
