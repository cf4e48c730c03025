// Package capture shows what passes a port of a network, or the VTEP, as a pcapng stream that Wireshark reads.
//
// Loops copy packets into rings, one per loop, bounded: a slow reader costs packets, which are counted, and never holds
// a loop up. One goroutine reads the rings and writes the stream. Without a capture a port pays for looking at one
// pointer.
//
// A port's frames are what its device exchanges with the network (inner frames, RoCE included); outbound is what the
// device sends. At the VTEP it is the datagrams; of these the sockets do not show the outer headers below UDP, so IP
// and UDP headers are made anew from what is known (addresses, ports, traffic class, lengths; hop limit, identification
// and UDP checksum are not), and there is no outer Ethernet header.
package capture

import (
	"context"
	"io"
	"net/netip"
	"time"

	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/loop"
)

// Defaults and bounds of Config.
const (
	DefaultSnapLen = 65535
	ringSize       = 1 << 20 // bytes per loop
	// poll is how often the rings are looked at.
	poll = 2 * time.Millisecond
)

// Config describes a capture.
type Config struct {
	Name    string // of the port, for the file
	Link    uint16 // LinkEthernet for ports, LinkRaw for the VTEP
	SnapLen int    // bytes kept of each packet; 0 = DefaultSnapLen
	Count   uint64 // packets after which it ends; 0 = none
	Program string // who writes the file
}

// Capture takes packets from loops. It implements vswitch.Monitor and vxlan.Monitor.
type Capture struct {
	cfg   Config
	rings [loop.MaxLoops]*ring // by loop; nil = that loop brings nothing
	taken uint64               // written to the stream
}

// New makes a capture that nothing feeds yet, for the loops that may.
func New(c Config, loops []*loop.Loop) *Capture {
	if c.SnapLen == 0 {
		c.SnapLen = DefaultSnapLen
	}
	k := &Capture{cfg: c}
	for _, l := range loops {
		k.rings[l.ID()] = newRing(ringSize)
	}
	return k
}

// Frame implements vswitch.Monitor.
func (k *Capture) Frame(l *loop.Loop, out bool, f []byte) {
	if r := k.rings[l.ID()]; r != nil {
		r.put(record{time: time.Now().UnixNano(), out: out}, k.cfg.SnapLen, f)
	}
}

// Datagram implements vxlan.Monitor: a UDP datagram, whose payload is header and inner one behind the other.
func (k *Capture) Datagram(l *loop.Loop, out bool, src, dst netip.AddrPort, tos uint8, vxlan, inner []byte) {
	r := k.rings[l.ID()]
	if r == nil {
		return
	}
	var h [header.IPv6Len + header.UDPLen]byte
	n := header.UDPLen + len(vxlan) + len(inner)
	udp := header.UDP{SrcPort: src.Port(), DstPort: dst.Port(), Length: uint16(n)}
	at := header.IPv4Len
	if src.Addr().Is4() {
		ip := header.IPv4{TOS: tos, TotalLen: uint16(at + n), DontFrag: true, TTL: 64, Protocol: header.ProtoUDP,
			Src: src.Addr().As4(), Dst: dst.Addr().As4()}
		ip.Encode(h[:])
	} else {
		at = header.IPv6Len
		ip := header.IPv6{TrafficClass: tos, PayloadLen: uint16(n), NextHeader: header.ProtoUDP, HopLimit: 64,
			Src: src.Addr().As16(), Dst: dst.Addr().As16()}
		ip.Encode(h[:])
	}
	udp.Encode(h[at:])
	r.put(record{time: time.Now().UnixNano(), out: out}, k.cfg.SnapLen, h[:at+header.UDPLen], vxlan, inner)
}

// Taken counts packets that were written to the stream; for the goroutine that called Run.
func (k *Capture) Taken() uint64 { return k.taken }

// Dropped counts packets that were lost because the reader was slow.
func (k *Capture) Dropped() (n uint64) {
	for i := range k.rings {
		if r := k.rings[i]; r != nil {
			n += r.dropped.Load()
		}
	}
	return n
}

// Run writes the stream to w until ctx ends, Count is reached, or w fails, whose error it returns. flush, if set, is
// called whenever nothing more is there.
func (k *Capture) Run(ctx context.Context, w io.Writer, flush func()) error {
	p := NewWriter(w, k.cfg.Program)
	p.Interface(k.cfg.Link, uint32(k.cfg.SnapLen), k.cfg.Name)
	t := time.NewTicker(poll)
	defer t.Stop()
	for done := false; !done; {
		select {
		case <-ctx.Done():
			done = true // what is in the rings still goes out
		case <-t.C:
		}
		before := k.taken
		k.mark() // what comes meanwhile may never end
		for p.Err() == nil && !k.full() && k.step(p) {
		}
		if k.full() {
			done = true
		}
		if done {
			p.Stats(0, time.Now().UnixNano(), k.taken+k.Dropped(), k.Dropped())
		}
		if err := p.Err(); err != nil {
			return err
		}
		if flush != nil && (k.taken != before || done) {
			flush()
		}
	}
	return nil
}

func (k *Capture) full() bool { return k.cfg.Count > 0 && k.taken >= k.cfg.Count }

// mark has step stop at what is in the rings now.
func (k *Capture) mark() {
	for _, r := range k.rings {
		if r != nil {
			r.end = r.tail.Load()
		}
	}
}

// step writes the oldest packet of all rings; false when there is none up to the mark.
func (k *Capture) step(p *Writer) bool {
	var best *ring
	var rec record
	var a, b []byte
	for i := range k.rings {
		r := k.rings[i]
		if r == nil || r.head.Load() == r.end {
			continue
		}
		if x, xa, xb, ok := r.peek(); ok && (best == nil || x.time < rec.time) {
			best, rec, a, b = r, x, xa, xb
		}
	}
	if best == nil {
		return false
	}
	p.Packet(0, rec.time, rec.out, int(rec.n), a, b)
	best.next(rec)
	k.taken++
	return true
}
