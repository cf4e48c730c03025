package vswitch

import (
	"time"

	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/loop"
)

// Flow describes untagged RoCE frames by the fields that the switch uses.
type Flow struct {
	Src, Dst MAC
	SrcIP    [16]byte // IPv4 as v4-mapped IPv6
	V1       bool     // RoCE v1: an IPv6 header also with IPv4 addresses
	Size     int      // bytes of the largest frame, without its Ethernet header
}

// Route is the switch's result for the frames of a flow, for callers that bypass it. It is valid until any change of
// ports, static addresses, monitors, MTU or the devices behind the ports. The zero Route is never current.
type Route struct {
	net *Network
	gen uint64
	hca HCAFace
}

// HCA returns the device that would get the frames, if that is the HCA of a VM's port and nothing else depends on them:
// no monitor at either port, no rate, no table entry that may age. Otherwise nil.
func (r *Route) HCA() HCAFace { return r.hca }

// Current reports whether nothing has changed since.
func (r *Route) Current() bool { return r.net != nil && r.net.gen.Load() == r.gen }

// Enter reports whether the route is current; if so, changes of the network wait until Leave, as for a frame in
// progress. Loop thread only; it may be nested.
func (r *Route) Enter(l *loop.Loop) bool {
	if r.net == nil {
		return false
	}
	in := r.net.enter(l)
	if !r.Current() {
		in.leave()
		return false
	}
	return true
}

// Leave ends a successful Enter.
func (r *Route) Leave(l *loop.Loop) { r.net.readers[l.ID()].leave() }

// RouteHCA returns the route of the HCA's frames. Loop thread only.
func (p *VMPort) RouteHCA(l *loop.Loop, f *Flow) Route {
	a := p.att.Load()
	n := a.net
	in := n.enter(l)
	defer in.leave()
	r := Route{net: n, gen: n.gen.Load()} // first: later changes are detected
	dst := f.Dst.key()
	if a.closed.Load() || !a.unseen() || a.limits.in.unit != 0 || !a.owns(f.Src.key()) || a.ips != nil &&
		!a.mayUseGID(f) ||
		f.Size > n.MTU() || dst&groupBit != 0 {
		return r
	}
	v, ok := n.find(dst, 0, uint32(l.Now()/int64(time.Second)))
	if !ok || !v.static() {
		return r
	}
	out := n.byID(v.port())
	if out == nil || out == a && !a.cfg.Hairpin || out.closed.Load() || !out.unseen() || out.limits.out.unit != 0 {
		return r
	}
	to, ok := out.port.(*VMPort)
	if !ok {
		return r
	}
	if h := to.hca.Load(); h != nil {
		r.hca = *h
	}
	return r
}

func (a *Attachment) unseen() bool { return a.monitor.Load() == nil }

func (a *Attachment) mayUseGID(f *Flow) bool {
	if !f.V1 && header.IsMapped4(f.SrcIP) {
		return a.mayUse(f.SrcIP)
	}
	return a.mayUse6(f.SrcIP)
}
