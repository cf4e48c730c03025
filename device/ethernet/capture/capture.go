// Package capture writes the traffic of a network's port, or of the VTEP, as a pcapng stream for Wireshark.
//
// Loops copy packets into bounded rings, one per loop: if the reader is slow, packets are dropped and counted; the loop
// never waits. One goroutine reads the rings and writes the stream. Without a capture a port checks one pointer.
//
// At a port the capture has the frames that its device exchanges with the network (inner frames, RoCE included);
// outbound means sent by the device. At the VTEP it has datagrams. The sockets do not show their outer headers, so IP
// and UDP headers are reconstructed from the known fields (addresses, ports, traffic class, lengths; not hop limit,
// identification and UDP checksum), and there is no outer Ethernet header.
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
	// poll is the interval between two reads of the rings.
	poll = 2 * time.Millisecond
)

// Config describes a capture.
type Config struct {
	Name    string // of the port, for the file
	Link    uint16 // LinkEthernet for ports, LinkRaw for the VTEP
	SnapLen int    // bytes kept of each packet; 0 = DefaultSnapLen
	Count   uint64 // ends after this number of packets; 0 = no limit
	Program string // program that writes the file
}

// Capture records packets of loops. It implements vswitch.Monitor and vxlan.Monitor.
type Capture struct {
	cfg   Config
	rings [loop.MaxLoops]*ring // by loop; nil = that loop is not captured
	taken uint64               // packets written to the stream
}

// New makes a capture for the given loops; it records once it is set as a monitor.
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

// Datagram implements vxlan.Monitor. The datagram's payload is vxlan followed by inner.
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

// Taken returns the number of packets written to the stream. Only the goroutine of Run may call it.
func (k *Capture) Taken() uint64 { return k.taken }

// Dropped returns the number of packets lost because the reader was slow.
func (k *Capture) Dropped() (n uint64) {
	for i := range k.rings {
		if r := k.rings[i]; r != nil {
			n += r.dropped.Load()
		}
	}
	return n
}

// Run writes the stream to w until ctx ends or Count is reached; if w fails, it returns that error. flush, if set, is
// called whenever the rings have been emptied.
func (k *Capture) Run(ctx context.Context, w io.Writer, flush func()) error {
	p := NewWriter(w, k.cfg.Program)
	p.Interface(k.cfg.Link, uint32(k.cfg.SnapLen), k.cfg.Name)
	t := time.NewTicker(poll)
	defer t.Stop()
	for done := false; !done; {
		select {
		case <-ctx.Done():
			done = true // after the packets in the rings
		case <-t.C:
		}
		before := k.taken
		k.mark() // new packets may arrive without end
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

// mark limits step to the packets that are in the rings now.
func (k *Capture) mark() {
	for _, r := range k.rings {
		if r != nil {
			r.end = r.tail.Load()
		}
	}
}

// step writes the oldest packet of all rings; false if none is left before the mark.
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
