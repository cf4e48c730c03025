package fastpath

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"net/netip"
	"os"
	"testing"

	"github.com/cilium/ebpf"
)

// These tests have the kernel run the programs over handmade and random frames, and compare with a model in Go.

const (
	lo      = 1 // interface that the kernel runs the programs for
	mtu     = 1450
	redirct = 7 // TC_ACT_REDIRECT
)

var (
	here, there = mac{2, 0, 0, 0, 0, 1}, mac{2, 0, 0, 0, 0, 2}
	ports       = []uint16{50000, 50001, 50002}
)

type rig struct {
	*table
	t          *testing.T
	v6         bool
	net        int
	gen        uint64
	host       *hostPort
	local, far netip.Addr
}

func newRig(t *testing.T, v6 bool) *rig {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("loading programs needs root")
	}
	r := &rig{t: t, v6: v6, local: netip.MustParseAddr("192.0.2.1"), far: netip.MustParseAddr("192.0.2.2")}
	if v6 {
		r.local, r.far = netip.MustParseAddr("fd01::1"), netip.MustParseAddr("fd01::2")
	}
	var err error
	if r.table, err = openTable(tableConfig{local: r.local, port: 4789, sourcePorts: ports}); err != nil {
		var v *ebpf.VerifierError
		if errors.As(err, &v) {
			t.Fatalf("%+v", v)
		}
		t.Fatal(err)
	}
	t.Cleanup(r.close)
	n, g, ok := r.takeNetwork()
	if !ok {
		t.Fatal("no network")
	}
	r.net, r.gen = n, g.Load()
	if r.host, err = r.attachHost(lo); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.host.close)
	r.put(r.way(true))
	r.put(r.way(false))
	return r
}

// way returns the flow from the host port, or back from the peer.
func (r *rig) way(out bool) flow {
	w := flow{out: out, host: lo, vni: 100, peer: r.far, dst: here, src: there}
	if out {
		w.dst, w.src = there, here
	}
	return w
}

func (r *rig) put(w flow) {
	r.t.Helper()
	if err := r.table.put(w, terms{network: r.net, generation: r.gen, host: r.host, underlay: lo,
		maxFrame: mtu + 14, lastPort: 1023}); err != nil {
		r.t.Fatal(err)
	}
}

// run returns a program's verdict and the frame after it.
func (r *rig) run(p *ebpf.Program, f []byte, gso int) (verdict int32, out []byte) {
	r.t.Helper()
	ctx := make([]byte, 192)
	binary.NativeEndian.PutUint32(ctx[skbIfindex:], lo)
	binary.NativeEndian.PutUint32(ctx[skbGSOSize:], uint32(gso))
	if gso != 0 {
		binary.NativeEndian.PutUint32(ctx[skbGSOSegs:], uint32((len(f)+gso-1)/gso))
	}
	o := ebpf.RunOptions{Data: f, DataOut: make([]byte, len(f)+256), Context: ctx}
	v, err := p.Run(&o)
	if err != nil {
		r.t.Fatalf("%v: %d bytes %x", err, len(f), f)
	}
	return int32(v), o.DataOut
}

type tcp struct {
	dst, src mac
	v6       bool
	flags    byte
	tos      byte
	payload  int
}

func (h tcp) frame() []byte {
	f := append(append([]byte{}, h.dst[:]...), h.src[:]...)
	if h.v6 {
		f = append(f, 0x86, 0xdd, 0x60|h.tos>>4, h.tos<<4, 0, 0)
		f = binary.BigEndian.AppendUint16(f, uint16(20+h.payload))
		f = append(f, protoTCP, 64)
		f = append(f, make([]byte, 32)...)
		f[22], f[38], f[37], f[53] = 0xfd, 0xfd, 1, 2
	} else {
		f = append(f, 8, 0, 0x45, h.tos)
		f = binary.BigEndian.AppendUint16(f, uint16(40+h.payload))
		f = append(f, 0, 0, 0x40, 0, 64, protoTCP, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2)
	}
	f = append(f, 0x12, 0x34, 0x14, 0x51, 0, 0, 0, 1, 0, 0, 0, 2, 0x50, h.flags, 1, 0, 0, 0, 0, 0)
	for i := range h.payload {
		f = append(f, byte(i))
	}
	return f
}

// wrap encapsulates a frame as the peer does.
func (r *rig) wrap(f []byte, tos byte) []byte {
	d := make([]byte, 12, 200)
	n := uint16(len(f) + 16)
	if r.v6 {
		d = append(d, 0x86, 0xdd, 0x60|tos>>4, tos<<4, 0, 0)
		d = binary.BigEndian.AppendUint16(d, n)
		d = append(d, protoUDP, 64)
	} else {
		d = append(d, 8, 0, 0x45, tos)
		d = binary.BigEndian.AppendUint16(d, 20+n)
		d = append(d, 0, 0, 0x40, 0, 64, protoUDP, 0, 0)
	}
	d = append(append(d, r.far.AsSlice()...), r.local.AsSlice()...)
	if !r.v6 {
		r.sum(d)
	}
	d = append(d, 0x01, 0x2c, 4789>>8, 4789&0xff, byte(n>>8), byte(n), 0, 0, 8, 0, 0, 0, 0, 0, 100, 0)
	return append(d, f...)
}

// sum writes the checksum of an IPv4 header that follows an Ethernet header.
func (r *rig) sum(d []byte) {
	d[24], d[25] = 0, 0
	binary.BigEndian.PutUint16(d[24:], ^sum16(d[14:34]))
}

func sum16(b []byte) uint16 {
	s := uint32(0)
	for i := 0; i < len(b); i += 2 {
		s += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	s = s>>16 + s&0xffff
	return uint16(s>>16 + s)
}

// goes is the model of what both programs require of a tenant's frame.
func goes(f []byte, gso int, whole bool) (ecn byte, ok bool) {
	if len(f) < 14 {
		return 0, false
	}
	var hdr, end int
	ip := f[14:]
	switch binary.BigEndian.Uint16(f[12:]) {
	case etherIPv4:
		if len(ip) < 40 || ip[0] != 0x45 || binary.BigEndian.Uint16(ip[6:])&0x3fff != 0 || ip[9] != protoTCP {
			return 0, false
		}
		ecn, hdr, end = ip[1], 20, int(binary.BigEndian.Uint16(ip[2:]))
	case etherIPv6:
		if len(ip) < 60 || ip[0]>>4 != 6 || ip[6] != protoTCP {
			return 0, false
		}
		ecn, hdr, end = ip[1]>>4, 40, 40+int(binary.BigEndian.Uint16(ip[4:]))
	default:
		return 0, false
	}
	if whole && end != len(ip) || ip[hdr+13]&7 != 0 {
		return 0, false
	}
	size := len(f)
	if gso != 0 {
		size = 14 + hdr + int(ip[hdr+12]>>4*4) + gso
	}
	return ecn & 3, size <= mtu+14
}

// sent is the model of sending; nil: left alone.
func (r *rig) sent(f []byte, gso int) []byte {
	ecn, ok := goes(f, gso, false)
	if !ok || gso != 0 || mac(f) != there || mac(f[6:]) != here || len(f)+16+20 > 65535 {
		return nil
	}
	r.local, r.far = r.far, r.local
	d := r.wrap(f, ecn)
	r.local, r.far = r.far, r.local
	copy(d, f[:12])
	if !r.v6 {
		r.sum(d)
	}
	return d
}

// received is the model of receiving; nil: left alone.
func (r *rig) received(d []byte, gso int) []byte {
	ip := 20
	if r.v6 {
		ip = 40
	}
	n := 14 + ip + 16
	if gso != 0 || len(d) < n || mac(d) != (mac{}) { // a test run cannot be given superframes of TCP
		return nil
	}
	udp := d[14+ip:]
	var tos byte
	if r.v6 {
		if binary.BigEndian.Uint16(d[12:]) != etherIPv6 || d[20] != protoUDP ||
			int(binary.BigEndian.Uint16(d[18:])) != len(udp) ||
			!bytes.Equal(d[22:54], append(r.far.AsSlice(), r.local.AsSlice()...)) {
			return nil
		}
		tos = d[15] >> 4
	} else {
		if binary.BigEndian.Uint16(d[12:]) != etherIPv4 || d[14] != 0x45 || d[23] != protoUDP ||
			int(binary.BigEndian.Uint16(d[16:])) != 20+len(udp) ||
			!bytes.Equal(d[26:34], append(r.far.AsSlice(), r.local.AsSlice()...)) || sum16(d[14:34]) != 0xffff ||
			binary.BigEndian.Uint16(d[20:])&0x3fff != 0 {
			return nil
		}
		tos = d[15]
	}
	if binary.BigEndian.Uint16(udp) > 1023 || binary.BigEndian.Uint16(udp[2:]) != 4789 ||
		int(binary.BigEndian.Uint16(udp[4:])) != len(udp) || udp[6] != 0 || udp[7] != 0 ||
		!bytes.Equal(udp[8:16], []byte{8, 0, 0, 0, 0, 0, 100, 0}) {
		return nil
	}
	f := udp[16:]
	ecn, ok := goes(f, gso, true)
	if !ok || tos&3 != 0 && tos&3 != ecn || mac(f) != here || mac(f[6:]) != there {
		return nil
	}
	return f
}

// check runs a program over a frame and compares.
func (r *rig) check(what string, p *ebpf.Program, f []byte, gso int, want []byte) bool {
	r.t.Helper()
	if p == r.receive {
		r.put(r.way(false)) // the frame before may have suspended it
	}
	verdict, got := r.run(p, f, gso)
	if want == nil {
		if verdict != verdictNext || !bytes.Equal(got, f) {
			r.t.Errorf("%s: verdict %d; want it left alone:\n%x\n%x", what, verdict, f, got)
			return false
		}
		return true
	}
	if p == r.send && len(got) == len(want) { // the source port is one of the VTEP's
		at := len(want) - len(f) - 16
		if port := binary.BigEndian.Uint16(got[at:]); port < ports[0] || int(port-ports[0]) >= len(ports) {
			r.t.Errorf("%s: source port %d", what, port)
		}
		copy(want[at:], got[at:at+2])
	}
	if verdict != redirct || !bytes.Equal(got, want) {
		r.t.Errorf("%s: verdict %d\n%x\nwant\n%x", what, verdict, got, want)
		return false
	}
	return true
}

func each(t *testing.T, f func(t *testing.T, r *rig)) {
	for _, v6 := range []bool{false, true} {
		t.Run(map[bool]string{false: "IPv4", true: "IPv6"}[v6], func(t *testing.T) { f(t, newRig(t, v6)) })
	}
}

const ack = 0x10

// Table of frames: those that take the short path, and those that are left alone.
func TestFrames(t *testing.T) {
	each(t, func(t *testing.T, r *rig) {
		for _, inner6 := range []bool{false, true} {
			ip := 14
			l4 := ip + 20
			if inner6 {
				l4 = ip + 40
			}
			base := func(out bool) []byte {
				w := r.way(out)
				return tcp{dst: w.dst, src: w.src, v6: inner6, flags: ack, payload: 100}.frame()
			}
			for _, x := range []struct {
				what   string
				gso    int
				change func(f []byte) []byte
				goes   bool
			}{
				{"plain", 0, func(f []byte) []byte { return f }, true},
				{"ECT(0)", 0, func(f []byte) []byte { return withTOS(f, 2) }, true},
				{"the tenant's DSCP", 0, func(f []byte) []byte { return withTOS(f, 0xb9) }, true},
				{"SYN", 0, func(f []byte) []byte { f[l4+13] = 2; return f }, false},
				{"FIN", 0, func(f []byte) []byte { f[l4+13] |= 1; return f }, false},
				{"RST", 0, func(f []byte) []byte { f[l4+13] |= 4; return f }, false},
				{"UDP", 0, func(f []byte) []byte { return withProto(f, protoUDP) }, false},
				{"another destination", 0, func(f []byte) []byte { f[5]++; return f }, false},
				{"another source", 0, func(f []byte) []byte { f[11]++; return f }, false},
				{"group", 0, func(f []byte) []byte { f[0] |= 1; return f }, false},
				{"VLAN", 0, func(f []byte) []byte {
					return append(append(append([]byte{}, f[:12]...), 0x81, 0, 0, 5), f[12:]...)
				}, false},
				{"ARP", 0, func(f []byte) []byte { f[12], f[13] = 8, 6; return f }, false},
				{"the other IP version", 0, func(f []byte) []byte { f[14] ^= 0x20; return f }, false},
				{"truncated", 0, func(f []byte) []byte { return f[:l4+19] }, false},
				{"largest", 0, func(f []byte) []byte { return resized(f, mtu) }, true},
				{"too large", 0, func(f []byte) []byte { return resized(f, mtu+1) }, false},
			} {
				f := x.change(base(true))
				want := r.sent(f, x.gso)
				if (want != nil) != x.goes {
					t.Fatalf("%s: the model is wrong", x.what)
				}
				r.check("sending "+x.what, r.send, f, x.gso, want)
				d := r.wrap(x.change(base(false)), 0)
				want = r.received(d, x.gso)
				if (want != nil) != x.goes {
					t.Fatalf("%s: the model is wrong", x.what)
				}
				r.check("receiving "+x.what, r.receive, d, x.gso, want)
			}
			// Superframes other than TCP are left alone, so coalesced datagrams are not taken from a tunnel. (A test
			// run cannot be given superframes of TCP.)
			r.check("sending", r.send, resized(base(true), 3000), 1000, nil)
			r.check("receiving coalesced datagrams", r.receive, r.wrap(resized(base(false), 3000), 0), 1000, nil)
			if inner6 {
				continue
			}
			f := base(false)
			for _, x := range []struct {
				what   string
				change func(d []byte)
			}{
				{"for another host's address", func(d []byte) { d[0] = 2 }},
				{"from another source", func(d []byte) { d[14+map[bool]int{false: 15, true: 23}[r.v6]]++ }},
				{"to another destination", func(d []byte) { d[14+map[bool]int{false: 19, true: 39}[r.v6]]++ }},
				{"from a port that any user may use", func(d []byte) { d[len(d)-len(f)-16] = 4 }},
				{"to another port", func(d []byte) { d[len(d)-len(f)-13]++ }},
				{"with a checksum", func(d []byte) { d[len(d)-len(f)-9] = 1 }},
				{"without the I flag", func(d []byte) { d[len(d)-len(f)-8] = 0 }},
				{"with a reserved flag", func(d []byte) { d[len(d)-len(f)-8] = 0x88 }},
				{"with reserved bits", func(d []byte) { d[len(d)-len(f)-6] = 1 }},
				{"with more reserved bits", func(d []byte) { d[len(d)-len(f)-1] = 1 }},
				{"of another network", func(d []byte) { d[len(d)-len(f)-2]++ }},
				{"with another UDP length", func(d []byte) { d[len(d)-len(f)-11]-- }},
				{"with another IP length", func(d []byte) { d[map[bool]int{false: 17, true: 19}[r.v6]]-- }},
				{"of another protocol", func(d []byte) { d[map[bool]int{false: 23, true: 20}[r.v6]] = 136 }},
				{"with a congestion mark", func(d []byte) {
					if r.v6 {
						d[15] |= 0x30
					} else {
						d[15] |= 3
					}
				}},
			} {
				d := r.wrap(f, 0)
				x.change(d)
				if !r.v6 {
					r.sum(d)
				}
				r.check(x.what, r.receive, d, 0, nil)
			}
			if !r.v6 {
				d := r.wrap(f, 0)
				d[24]++
				r.check("with a wrong IP checksum", r.receive, d, 0, nil)
				for _, frag := range []uint16{0x2000, 1} {
					d = r.wrap(f, 0)
					binary.BigEndian.PutUint16(d[20:], frag)
					r.sum(d)
					r.check("fragment", r.receive, d, 0, nil)
				}
			}
			for inner := range byte(4) {
				for outer := range byte(4) {
					f := withTOS(base(false), inner)
					d := r.wrap(f, outer)
					want := f
					if outer != 0 && outer != inner {
						want = nil
					}
					r.check("ECN", r.receive, d, 0, want)
				}
			}
		}
	})
}

func withTOS(f []byte, tos byte) []byte {
	if f[14]>>4 == 6 {
		f[14], f[15] = 0x60|tos>>4, tos<<4
	} else {
		f[15] = tos
	}
	return f
}

func withProto(f []byte, proto byte) []byte {
	if f[14]>>4 == 6 {
		f[20] = proto
	} else {
		f[23] = proto
	}
	return f
}

// resized returns a frame whose IP packet has n bytes.
func resized(f []byte, n int) []byte {
	f = append(f, make([]byte, 14+n)...)[:14+n]
	if f[14]>>4 == 6 {
		binary.BigEndian.PutUint16(f[18:], uint16(n-40))
	} else {
		binary.BigEndian.PutUint16(f[16:], uint16(n))
	}
	return f
}

// The programs treat randomly damaged frames as the model does.
func TestRandomFrames(t *testing.T) {
	each(t, func(t *testing.T, r *rig) {
		seed := rand.Uint64()
		rnd := rand.New(rand.NewPCG(seed, 0))
		went := 0
		for range 20000 {
			out := rnd.IntN(2) == 0
			w := r.way(out)
			f := tcp{dst: w.dst, src: w.src, v6: rnd.IntN(2) == 0, flags: ack, tos: byte(rnd.Uint32()),
				payload: rnd.IntN(200)}.frame()
			gso := 0
			p, model := r.send, r.sent
			if out && rnd.IntN(4) == 0 {
				gso = 1 + rnd.IntN(1500)
			}
			if !out {
				p, model = r.receive, r.received
				f = r.wrap(f, byte(rnd.Uint32()))
			}
			for range rnd.IntN(3) {
				at := rnd.IntN(min(len(f), 130))
				switch rnd.IntN(3) {
				case 0:
					f[at] = byte(rnd.Uint32())
				case 1:
					f[at] ^= 1 << rnd.IntN(8)
				default:
					if n := rnd.IntN(len(f)); rnd.IntN(8) == 0 && n >= 14+41 { // the kernel runs no shorter ones
						f = f[:n]
					}
				}
			}
			want := model(f, gso)
			if want != nil {
				went++
			}
			if !r.check("random", p, f, gso, bytes.Clone(want)) {
				t.Fatal("seed ", seed)
			}
		}
		if went < 1000 {
			t.Errorf("only %d frames took the short path", went)
		}
	})
}

// An entry is valid until the network changes; its use is recorded; its frames are counted; it can be removed.
func TestEntry(t *testing.T) {
	each(t, func(t *testing.T, r *rig) {
		frame := func(out bool) ([]byte, *ebpf.Program) {
			w := r.way(out)
			f := tcp{dst: w.dst, src: w.src, flags: ack, payload: 10}.frame()
			if out {
				return f, r.send
			}
			return r.wrap(f, 0), r.receive
		}
		for _, out := range []bool{true, false} {
			w := r.way(out)
			f, p := frame(out)
			takes := func(what string, want bool) {
				t.Helper()
				before := r.host.totals()
				v, _ := r.run(p, f, 0)
				after := r.host.totals()
				if (v == redirct) != want {
					t.Errorf("%s: verdict %d", what, v)
				}
				n := uint64(0)
				if want {
					n = 1
				}
				d := totals{after.sentFrames - before.sentFrames, after.sentBytes - before.sentBytes,
					after.receivedFrames - before.receivedFrames, after.receivedBytes - before.receivedBytes}
				if expect := (totals{n, 64 * n, 0, 0}); out && d != expect {
					t.Errorf("%s: counted %+v", what, d)
				}
				if expect := (totals{0, 0, n, 64 * n}); !out && d != expect {
					t.Errorf("%s: counted %+v", what, d)
				}
			}
			if tick, ok := r.used(w); tick != 0 || !ok {
				t.Error("an unused entry is marked as used", tick, ok)
			}
			takes("fresh", true)
			// The kernel's coarse clock may be a tick behind.
			if tick, ok := r.used(w); !ok || tick > now() || tick+2 < now() {
				t.Errorf("its use is marked as of %d, now is %d", tick, now())
			}
			r.generations[r.net].Add(1)
			takes("of an older generation", false)
			r.gen++
			r.put(w)
			takes("renewed", true)
			r.remove(w)
			takes("deleted", false)
			if _, ok := r.used(w); ok {
				t.Error("the entry is still there after its removal")
			}
			r.put(w)
			r.gen--
			r.generations[r.net].Store(r.gen) // the generation of the other direction's entry
			r.put(w)
		}
		// A full table refuses entries; the programs still work.
		var err error
		for i := 0; i <= maxEntries && err == nil; i++ {
			w := r.way(false)
			binary.BigEndian.PutUint32(w.src[2:], uint32(i+1000))
			err = r.table.put(w, terms{network: r.net, host: r.host})
		}
		if err == nil {
			t.Error("the table accepted more entries than its bound")
		}
		f, p := frame(false)
		if v, _ := r.run(p, f, 0); v != redirct {
			t.Errorf("verdict %d in a full table", v)
		}
	})
}

// After a datagram of an entry that passes through vnicd, all datagrams of that entry do so for a moment, but none of
// other entries.
func TestSuspend(t *testing.T) {
	each(t, func(t *testing.T, r *rig) {
		w, other := r.way(false), r.way(false)
		other.src[5]++
		plain := func(w flow) []byte { return r.wrap(tcp{dst: w.dst, src: w.src, flags: ack, payload: 10}.frame(), 0) }
		at := len(plain(w)) - len(tcp{payload: 10}.frame()) - 16 // the outer UDP header
		for what, change := range map[string]func(d []byte){
			"a checksum":                     func(d []byte) { d[at+6] = 1 },
			"a checksum, and several in one": func(d []byte) { d[at+6], d[at+16+14+3] = 1, 40 },
			"congestion": func(d []byte) {
				if r.v6 {
					d[15] |= 0x30
				} else {
					d[15] |= 3
					r.sum(d)
				}
			},
		} {
			for _, w := range []flow{w, other} {
				r.remove(w)
				r.put(w)
			}
			goes := func(when string, w flow, change func([]byte), want int32) {
				t.Helper()
				d := plain(w)
				if change != nil {
					change(d)
				}
				if v, _ := r.run(r.receive, d, 0); v != want {
					t.Errorf("%s, %s: verdict %d", what, when, v)
				}
			}
			goes("before", w, nil, redirct)
			goes("itself", w, change, verdictNext)
			goes("behind it", w, nil, verdictNext)
			goes("another's", other, nil, redirct)
			m, k := r.key(&w)
			v, err := m.LookupBytes(k)
			if err != nil {
				t.Fatal(err)
			}
			if used := binary.NativeEndian.Uint32(v[valueUsed:]); used == 0 {
				t.Errorf("%s: a suspended entry looks unused", what)
			}
			binary.NativeEndian.PutUint32(v[valueSuspended:], uint32(monotonic()>>momentShift)-suspendMoments-1)
			if err := m.Put(k, v); err != nil {
				t.Fatal(err)
			}
			goes("later", w, nil, redirct)
		}
		r.remove(other)
	})
}

// Datagrams from ports that are not accepted from the peer pass through vnicd, which refuses them, and suspend nothing;
// where all ports are accepted, they take the short path (TR-3).
func TestSourcePort(t *testing.T) {
	each(t, func(t *testing.T, r *rig) {
		w := r.way(false)
		f := tcp{dst: w.dst, src: w.src, flags: ack, payload: 10}.frame()
		goes := func(what string, port uint16, sum byte, want int32) {
			t.Helper()
			d := r.wrap(f, 0)
			udp := d[len(d)-len(f)-16:]
			binary.BigEndian.PutUint16(udp, port)
			udp[6] = sum
			if v, _ := r.run(r.receive, d, 0); v != want {
				t.Errorf("%s: verdict %d, want %d", what, v, want)
			}
		}
		goes("the last reserved port", 1023, 0, redirct)
		goes("the first other port", 1024, 0, verdictNext)
		goes("another port, with a checksum", 65535, 1, verdictNext)
		goes("a reserved port afterwards", 300, 0, redirct)
		if err := r.table.put(w, terms{network: r.net, generation: r.gen, host: r.host, underlay: lo,
			maxFrame: mtu + 14, lastPort: 65535}); err != nil {
			t.Fatal(err)
		}
		goes("any port where all are accepted", 65535, 0, redirct)
		goes("a reserved port where all are accepted", 300, 0, redirct)
	})
}

// A reused network number does not make old entries valid.
func TestNumbers(t *testing.T) {
	r := newRig(t, false)
	r.giveNetwork(r.net)
	for range maxNetworks {
		n, g, ok := r.takeNetwork()
		if !ok {
			t.Fatal("freed numbers were not reused")
		}
		if n == r.net && g.Load() <= r.gen {
			t.Error("a reused number has an old generation")
		}
	}
	if _, _, ok := r.takeNetwork(); ok {
		t.Error("takeNetwork exceeded its bound")
	}
}
