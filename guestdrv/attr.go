package guestdrv

import (
	"bytes"
	"context"
	"fmt"

	"github.com/vnicd/vnicd/device/rdma/abi"
)

// Info is the device's configuration space.
type Info struct {
	MAC        MAC // of the application's port in the tenant's network
	NumCEQs    int // completion event queues, see CQOptions.CEQ
	NumEngines int // data-path threads of vnicd that serve the device
	LinkUp     bool
	PortMTU    int    // largest RoCE path MTU in bytes, 256..4096
	Generation uint32 // changes whenever the device lost its state
	Name       string // of the device
	Firmware   string // vnicd's version
}

func infoOf(c *abi.Config) Info {
	return Info{
		MAC: c.MAC, NumCEQs: int(c.NumCEQs), NumEngines: int(c.NumEngines), LinkUp: c.LinkUp != 0, PortMTU: int(c.PortMTU),
		Generation: c.Generation, Name: cString(c.DeviceName[:]), Firmware: cString(c.FWVersion[:]),
	}
}

// cString returns the bytes before the first NUL.
func cString(b []byte) string {
	b, _, _ = bytes.Cut(b, []byte{0})
	return string(b)
}

// DeviceAttr are the limits of this application and the capabilities of the device.
type DeviceAttr struct {
	NodeGUID         [8]byte // in network order
	MaxMRSize        uint64  // bytes
	MaxQP            uint32
	MaxQPWR          uint32 // requests in a send or receive queue
	MaxSGE           uint32 // of a request
	MaxInline        uint32 // bytes
	MaxCQ            uint32
	MaxCQE           uint32
	MaxMR            uint32
	MaxMW            uint32
	MaxPD            uint32
	MaxSRQ           uint32
	MaxSRQWR         uint32
	MaxSRQSGE        uint32
	MaxAH            uint32
	MaxGID           uint32 // entries of the GID table, 1..256
	MaxQPRdAtom      uint32 // concurrent READs and atomics of a QP as responder
	MaxQPInitRdAtom  uint32 // concurrent READs and atomics of a QP as requester
	MaxMcastGrp      uint32
	MaxMcastQPAttach uint32
	MaxMTT           uint64 // pages of all regions together
	MaxFastReg       uint32 // pages of a FastMR
	Caps             Caps
	ODPRC            ODPCaps // on-demand paging on RC; the next two on UC and UD
	ODPUC            ODPCaps
	ODPUD            ODPCaps
}

func deviceAttrOf(a *abi.DeviceAttr) DeviceAttr {
	return DeviceAttr{
		NodeGUID: a.NodeGUID, MaxMRSize: a.MaxMRSize, MaxQP: a.MaxQP, MaxQPWR: a.MaxQPWR, MaxSGE: a.MaxSGE,
		MaxInline: a.MaxInline, MaxCQ: a.MaxCQ, MaxCQE: a.MaxCQE, MaxMR: a.MaxMR, MaxMW: a.MaxMW, MaxPD: a.MaxPD,
		MaxSRQ: a.MaxSRQ, MaxSRQWR: a.MaxSRQWR, MaxSRQSGE: a.MaxSRQSGE, MaxAH: a.MaxAH, MaxGID: a.MaxGID,
		MaxQPRdAtom: a.MaxQPRdAtom, MaxQPInitRdAtom: a.MaxQPInitRdAtom, MaxMcastGrp: a.MaxMcastGrp,
		MaxMcastQPAttach: a.MaxMcastQPAttach, MaxMTT: a.MaxMTT, MaxFastReg: a.MaxFastReg, Caps: Caps(a.Caps),
		ODPRC: ODPCaps(a.ODPRC), ODPUC: ODPCaps(a.ODPUC), ODPUD: ODPCaps(a.ODPUD),
	}
}

// PortAttr is the state of the port.
type PortAttr struct {
	State       PortState
	MaxMTU      uint32 // bytes
	ActiveMTU   uint32 // bytes
	ActiveSpeed uint32 // bit of enum ib_port_speed
	ActiveWidth uint32 // bit of enum ib_port_width
}

// MAC returns the HCA's MAC address in the tenant's network.
func (d *Device) MAC() MAC { return d.conf.MAC }

// Info returns the configuration space as it was when the device was opened.
func (d *Device) Info() Info { return infoOf(&d.conf) }

// ReadInfo reads the configuration space again: link state and MTU can change.
func (d *Device) ReadInfo(ctx context.Context) (Info, error) {
	c, err := d.readConfig(ctx)
	return infoOf(&c), err
}

// readConfig reads and checks the configuration space. The front end's request cannot be interrupted, so a goroutine
// finishes it when ctx ends first.
func (d *Device) readConfig(ctx context.Context) (c abi.Config, err error) {
	if err := d.users.enter(); err != nil {
		return c, fmt.Errorf("reading configuration space: %w", err)
	}
	type result struct {
		b   [abi.SizeConfig]byte
		err error
	}
	read := make(chan *result, 1)
	go func() {
		defer d.users.leave()
		var r result
		r.err = d.fe.ReadConfig(r.b[:], 0)
		read <- &r
	}()
	var r *result
	select {
	case r = <-read:
	case <-ctx.Done():
		return c, fmt.Errorf("reading configuration space: %w", context.Cause(ctx))
	}
	if r.err != nil {
		return c, fmt.Errorf("reading configuration space: %w", r.err)
	}
	b := r.b[:]
	// Magic and layout first: in another layout the other fields have other meanings.
	if m := le.Uint32(b[0:]); m != abi.Magic {
		return c, fmt.Errorf("%w: magic %#x, expected %#x", ErrNotVNICD, m, abi.Magic)
	}
	if v := le.Uint32(b[4:]); v < abi.Oldest || v > abi.Version {
		return c, fmt.Errorf("%w: device has %d, this driver %d to %d", ErrVersion, v, abi.Oldest, abi.Version)
	}
	if err := decode(&c, b); err != nil {
		return c, fmt.Errorf("configuration space: %w", err)
	}
	return c, nil
}

// ConfigChanged returns a channel that receives a value after one or more changes of the configuration space; see
// ReadInfo.
func (d *Device) ConfigChanged() <-chan struct{} { return d.fe.ConfigChanged() }

// Attr returns the device's capabilities and this application's limits.
func (d *Device) Attr() DeviceAttr { return deviceAttrOf(&d.attr) }

// Port queries the port's state.
func (d *Device) Port(ctx context.Context) (PortAttr, error) {
	var p abi.PortAttr
	err := d.do(ctx, abi.CmdQueryPort, nil, 0, &p)
	return PortAttr{
		State: PortState(p.State), MaxMTU: p.MaxMTU, ActiveMTU: p.ActiveMTU, ActiveSpeed: p.ActiveSpeed,
		ActiveWidth: p.ActiveWidth,
	}, err
}

// Stats queries the device's counters.
func (d *Device) Stats(ctx context.Context) (Stats, error) {
	var s abi.Stats
	err := d.do(ctx, abi.CmdQueryStats, nil, 0, &s)
	return Stats(s.Value), err
}
