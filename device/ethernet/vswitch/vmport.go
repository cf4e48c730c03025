package vswitch

import (
	"cmp"
	"net/netip"
	"sync"
	"sync/atomic"

	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/loop"
)

// Face is one of the two devices behind a VMPort. Deliver is as in Port, without a destination.
type Face interface {
	Deliver(l *loop.Loop, b *frame.Buf)
}

// NetFace is a network device that can tell whether its driver receives frames. Running is called on any loop.
type NetFace interface {
	Face
	Running() bool
}

// HCAFace is the RDMA device. Up reports whether a driver has brought it up; until then RoCE frames go to the network
// device, so that software RoCE in the guest works. Up is called for every frame, on any loop. Paused reports whether
// that driver does not run at present, because the VM does not. Any goroutine.
type HCAFace interface {
	Face
	Up() bool
	Paused() bool
}

// Inspector is an HCA that can tell whether it would accept a RoCE frame, of any content: the switch asks before it
// learns an unknown address from one. Wants is called on any loop.
type Inspector interface {
	Wants(l *loop.Loop, b *frame.Buf) bool
}

// VMPort is a VM's port: a network device and an HCA with one MAC. RoCE frames (header.IsRoCE) for the VM go to the HCA
// if it is up, all others to the network device. Frames of one device never go to the other, except frames to the VM's
// own MAC, which are delivered as if they had come from outside (a QP may be connected to a QP of the same VM).
type VMPort struct {
	att atomic.Pointer[Attachment]
	net atomic.Pointer[Face]
	hca atomic.Pointer[HCAFace]
	ran atomic.Bool // see claimed
	mu  sync.Mutex  // serialises SetNet, SetHCA, Move, Claim and Close
}

// VMPortConfig describes a VM's port.
type VMPortConfig struct {
	Name string
	MAC  MAC
	// IPs, Storm and Rate are as in PortConfig.
	IPs   []netip.Addr
	Storm int
	Rate  int64
	Loop  *loop.Loop
	// Kind is KindVM, or KindHCA for a host application's; 0: KindVM.
	Kind Kind
}

// NewVMPort attaches a VM's port, without faces yet. The MAC is the only source address that it may use.
func NewVMPort(n *Network, c VMPortConfig) (*VMPort, error) {
	p := &VMPort{}
	_, err := n.Attach(p, PortConfig{Name: c.Name, Kind: cmp.Or(c.Kind, KindVM), MACs: []MAC{c.MAC}, IPs: c.IPs,
		Storm: c.Storm, Rate: c.Rate, Loop: c.Loop, Hairpin: true,
		Attached: func(a *Attachment) {
			a.SetOffloads(frame.NeedTrain)
			p.att.Store(a)
		}})
	if err != nil {
		return nil, err
	}
	return p, nil
}

// Attachment returns the port's attachment to its present network, for its counters.
func (p *VMPort) Attachment() *Attachment { return p.att.Load() }

// Move moves the port to another network, with its MAC, IP addresses and limits; counters restart. On an error it stays
// where it is.
func (p *VMPort) Move(to *Network) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	old := p.att.Load()
	if old.closed.Load() {
		return ErrClosed
	}
	if old.net == to {
		return nil
	}
	// Attached stores the new attachment, and from then on the port sends there; once closed, the old one accepts no
	// frames.
	a, err := to.Attach(p, old.cfg)
	if err != nil {
		p.att.Store(old)
		return err
	}
	a.SetOffloads(frame.Need(old.offloads.Load()))
	old.Close()
	return nil
}

// SetOffloads sets what may be left undone in frames for the network device, as Attachment.SetOffloads does; a move
// keeps it. The HCA accepts trains.
func (p *VMPort) SetOffloads(n frame.Need) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.att.Load().SetOffloads(n | frame.NeedTrain)
}

// SetNet connects the network device, or with nil disconnects it. Once it has returned, the previous device gets no
// more frames.
func (p *VMPort) SetNet(f Face) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if f == nil {
		p.net.Store(nil)
	} else {
		p.net.Store(&f)
	}
	p.quiesce()
}

// SetHCA connects the HCA, or with nil disconnects it, as SetNet does.
func (p *VMPort) SetHCA(f HCAFace) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if f == nil {
		p.hca.Store(nil)
	} else {
		p.hca.Store(&f)
	}
	p.att.Load().net.advance()
	p.quiesce()
}

// InputNet passes a frame of the network device into the network, as Attachment.Input.
func (p *VMPort) InputNet(l *loop.Loop, b *frame.Buf) { p.att.Load().Input(l, b, Source{}) }

// InputHCA passes a frame of the HCA into the network, as Attachment.Input.
func (p *VMPort) InputHCA(l *loop.Loop, b *frame.Buf) { p.att.Load().Input(l, b, Source{}) }

// SendHCA passes a frame of the HCA into the network on a path, as Attachment.Send.
func (p *VMPort) SendHCA(l *loop.Loop, b *frame.Buf, path *Path) { p.att.Load().Send(l, b, path) }

// ResolveHCA looks up the path of frames of the HCA, as Attachment.Resolve.
func (p *VMPort) ResolveHCA(l *loop.Loop, header []byte, path *Path) bool {
	return p.att.Load().Resolve(l, header, path)
}

// Owner returns the MAC of an IP address in the port's network, as Network.Owner.
func (p *VMPort) Owner(addr [16]byte, vlan uint16) (MAC, bool) {
	return p.att.Load().net.Owner(addr, vlan)
}

// Claim makes the VM's MAC the port's own, although it was elsewhere while neither device ran: frames from a tunnel
// take it over then, as of a VM that has migrated. The devices call it when they begin to run; not on a loop.
func (p *VMPort) Claim() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	first := !p.ran.Swap(true)
	a := p.att.Load()
	moved, err := a.net.claim(a)
	if first || moved {
		a.net.tell()
	}
	return err
}

// claimed implements traveller.
func (p *VMPort) claimed() bool { return p.ran.Load() }

// away implements traveller: neither device has a driver that runs.
func (p *VMPort) away() bool {
	if h := p.hca.Load(); h != nil && (*h).Up() && !(*h).Paused() {
		return false
	}
	f := p.net.Load()
	if f == nil {
		return true
	}
	r, ok := (*f).(NetFace)
	return ok && !r.Running()
}

// wants implements judge.
func (p *VMPort) wants(l *loop.Loop, b *frame.Buf) bool {
	h := p.hca.Load()
	if h == nil || !(*h).Up() {
		return true
	}
	i, ok := (*h).(Inspector)
	return !ok || i.Wants(l, b)
}

// joined implements groupPort: an HCA that is up gets the frames of its groups only.
func (p *VMPort) joined(group ip) bool {
	h := p.hca.Load()
	if h == nil || !(*h).Up() {
		return true
	}
	m, ok := (*h).(GroupMember)
	return !ok || m.Joined(group)
}

// Deliver implements Port.
func (p *VMPort) Deliver(l *loop.Loop, b *frame.Buf, to Destination) {
	if h := p.hca.Load(); h != nil && b.Layout().Is(header.IsRoCE) && (*h).Up() {
		if b.Offload.GSOSize != 0 && b.Offload.Need != frame.NeedTrain { // RoCE packets are not cut: each has its ICRC
			p.att.Load().Counters.Drop(l, BadHeader, 1)
			return
		}
		(*h).Deliver(l, b)
		return
	}
	if b.Offload.Need == frame.NeedTrain { // for an HCA that has just gone down
		p.att.Load().Cut(l, b, to)
		return
	}
	if f := p.net.Load(); f != nil {
		(*f).Deliver(l, b)
		return
	}
	p.att.Load().Counters.Drop(l, NotReady, 1)
}

// Close removes the port from the network, as Attachment.Close.
func (p *VMPort) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.att.Load().Close()
}

func (p *VMPort) quiesce() {
	a := p.att.Load()
	a.net.quiesce(a.cfg.Loop)
}
