package vnet

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"testing"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
	"github.com/vnicd/vnicd/translate"
)

const (
	hostAll  = FeatureCsum | FeatureHostTSO4 | FeatureHostTSO6 | FeatureHostECN | FeatureHostUSO
	guestAll = FeatureGuestCsum | FeatureGuestTSO4 | FeatureGuestTSO6 | FeatureGuestECN | FeatureGuestUSO4 |
		FeatureGuestUSO6
)

// ipPacket builds a TCP or UDP packet with n bytes of payload and a pending checksum, and its virtio header; size is
// the segment size, 0: none.
func ipPacket(dst, src vswitch.MAC, v6, tcp bool, n, size int) (h, f []byte) {
	f = append(append(append(f, dst[:]...), src[:]...), 8, 0)
	l4 := 14 + header.IPv4Len
	if v6 {
		f[12], f[13] = 0x86, 0xdd
		l4 = 14 + header.IPv6Len
	}
	proto, csum, hl, typ := uint8(header.ProtoUDP), 6, header.UDPLen, byte(5)
	if tcp {
		proto, csum, hl, typ = 6, 16, 20, 1
		if v6 {
			typ = 4
		}
	}
	f = append(f, make([]byte, l4-14+hl)...)
	for i := range n {
		f = append(f, byte(i*5+i>>8))
	}
	var sum uint32
	if v6 {
		ip := header.IPv6{PayloadLen: uint16(len(f) - l4), NextHeader: proto, HopLimit: 64, Src: [16]byte{0xfd, 15: 1},
			Dst: [16]byte{0xfd, 15: 2}}
		ip.Encode(f[14:])
		sum = header.PseudoSum6(ip.Src, ip.Dst, proto, uint32(len(f)-l4))
	} else {
		ip := header.IPv4{TotalLen: uint16(len(f) - 14), ID: 9, DontFrag: true, TTL: 64, Protocol: proto,
			Src: [4]byte{10, 0, 0, 1}, Dst: [4]byte{10, 0, 0, 2}}
		ip.Encode(f[14:])
		sum = header.PseudoSum4(ip.Src, ip.Dst, proto, uint16(len(f)-l4))
	}
	if tcp {
		f[l4+12] = 5 << 4
		f[l4+13] = 0x18 // ACK, PSH
	} else {
		binary.BigEndian.PutUint16(f[l4+4:], uint16(len(f)-l4))
	}
	binary.BigEndian.PutUint16(f[l4+csum:], ^header.Checksum(nil, sum))
	h = make([]byte, headerLen)
	h[0] = 1
	binary.LittleEndian.PutUint16(h[6:], uint16(l4))
	binary.LittleEndian.PutUint16(h[8:], uint16(csum))
	if size > 0 {
		h[1] = typ
		binary.LittleEndian.PutUint16(h[2:], uint16(l4+hl))
		binary.LittleEndian.PutUint16(h[4:], uint16(size))
	}
	return h, f
}

// check returns a complete packet's payload, and checks its checksums.
func check(t *testing.T, f []byte) []byte {
	t.Helper()
	l4, sum, proto := 14+header.IPv4Len, uint32(0), f[23]
	if f[12] == 0x86 {
		l4, proto = 14+header.IPv6Len, f[20]
		sum = header.PseudoSum6([16]byte(f[22:38]), [16]byte(f[38:54]), proto, uint32(len(f)-l4))
	} else {
		if header.Checksum(f[14:l4], 0) != 0 {
			t.Fatalf("IP checksum of %x", f[:l4])
		}
		sum = header.PseudoSum4([4]byte(f[26:30]), [4]byte(f[30:34]), proto, uint16(len(f)-l4))
	}
	if header.Checksum(f[l4:], sum) != 0 {
		t.Fatalf("checksum of %x…, %d bytes", f[:l4+20], len(f))
	}
	if proto == 6 {
		return f[l4+20:]
	}
	return f[l4+8:]
}

// sendBig sends a frame larger than the usual slots, and waits until its buffers are returned.
func (v *vm) sendBig(raw []byte) {
	t := v.h.t
	t.Helper()
	pa := v.alloc(len(raw))
	copy(v.bytes(pa, len(raw)), raw)
	q := v.fe.Queue(1)
	v.reap(0)
	if err := q.Add(1000, []frontend.Buf{{PA: pa, Len: uint32(len(raw))}}, nil); err != nil {
		t.Fatal(err)
	}
	q.Kick()
	for {
		wait(t, q)
		tok, _, ok, err := q.Get()
		switch {
		case err != nil:
			t.Fatal(err)
		case ok && tok == 1000:
			return
		case ok:
			v.tx[0].free = append(v.tx[0].free, int(tok))
		}
	}
}

// TestOffloads: every kind of frame to every kind of driver: unchanged to drivers that accept it, completed for others.
func TestOffloads(t *testing.T) {
	for loops := 1; loops <= 2; loops++ {
		bothRings(t, loops, offloadsBetween)
	}
}

func offloadsBetween(t *testing.T, h *host) {
	loops := len(h.loops)
	a := h.vm(1, 1).boot(hostAll, 2000, 4)
	for i, g := range []struct {
		features uint64
		rx       int
	}{
		{FeatureMrgRxbuf | guestAll, 1526}, {FeatureMrgRxbuf | guestAll, 4096}, {guestAll, 66000},
		{FeatureMrgRxbuf, 2048}, {0, 2048},
		{FeatureMrgRxbuf | FeatureGuestCsum, 2048}, {FeatureMrgRxbuf | FeatureGuestCsum | FeatureGuestTSO6, 2048},
		{FeatureMrgRxbuf | FeatureGuestTSO4, 2048}, // without GUEST_CSUM: none
		{FeatureMrgRxbuf | guestAll&^FeatureGuestUSO4, 2048},
	} {
		count := 100
		if g.rx > 60000 {
			count = 8
		}
		b := h.vm(2+i, 1).boot(g.features, g.rx, count)
		takes := guestTakes(g.features)
		for _, c := range []struct {
			v6, tcp bool
			n, size int
			need    frame.Need
		}{
			{false, true, 60001, 1400, frame.NeedTSO4}, {true, true, 64000, 1400, frame.NeedTSO6},
			{false, false, 10001, 1000, frame.NeedUSO4}, {true, false, 10000, 1000, frame.NeedUSO6},
			{false, true, 1001, 0, 0}, {true, false, 8000, 0, 0}, {true, true, 100, 1400, frame.NeedTSO6},
		} {
			name := fmt.Sprintf("%d loops, features %#x, rx %d, %+v", loops, g.features, g.rx, c)
			hdr, f := ipPacket(b.mac, a.mac, c.v6, c.tcp, c.n, c.size)
			if c.n+1000 > g.rx && g.features&FeatureMrgRxbuf == 0 && (c.size == 0 || takes&c.need != 0) {
				continue // does not fit one buffer
			}
			a.sendBig(append(bytes.Clone(hdr), f...))
			need := c.need | frame.NeedCsum
			left, data := 1, []byte(nil)
			if c.size > 0 && need&^takes != 0 {
				left = (c.n + c.size - 1) / c.size
			}
			want := f[len(f)-c.n:]
			for ; left > 0; left-- {
				wait(t, b.fe.Queue(0))
				got, x, err := b.takeAny(0)
				if err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				if need&^takes == 0 {
					if !bytes.Equal(got[:10], hdr[:10]) && (c.size > 0 || got[0] != 1) || !bytes.Equal(x, f) {
						t.Fatalf("%s: header %x, want %x; %d bytes, want %d", name, got, hdr, len(x), len(f))
					}
					data = x[len(f)-c.n:]
					break
				}
				if got[0]&1 != 0 || got[1] != 0 || got[0] != 0 && takes == 0 {
					t.Fatalf("%s: header %x", name, got)
				}
				data = append(data, check(t, x)...)
			}
			if !bytes.Equal(data, want) {
				t.Fatalf("%s: %d bytes of payload, want %d with the same contents", name, len(data), len(want))
			}
		}
	}
}

// TestHostileOffloads: offloads that were not negotiated, or are malformed, are dropped and counted as bad-header; gso
// tests all kinds of errors.
func TestHostileOffloads(t *testing.T) {
	h := newHost(t, 1, true)
	b := h.vm(2, 1).boot(FeatureMrgRxbuf|guestAll, 4096, 64)
	for i, features := range []uint64{0, FeatureCsum, FeatureHostTSO4, hostAll &^ FeatureHostTSO4} {
		a := h.vm(3+i, 1).boot(features, 2000, 4)
		hdr, f := ipPacket(b.mac, a.mac, false, true, 5000, 1000)
		a.sendRaw(0, append(hdr, f...))
		good := buildFrame(b.mac, a.mac, 100, 1)
		a.send(0, good)
		if got := b.recv(0); !bytes.Equal(got, good) || a.dropped(vswitch.BadHeader) != 1 {
			t.Errorf("features %#x: %d refused", features, a.dropped(vswitch.BadHeader))
		}
	}
	a := h.vm(9, 1).boot(hostAll, 2000, 4)
	for i, spoil := range []func(h []byte){
		func(h []byte) { binary.LittleEndian.PutUint16(h[6:], 0xfff0) },
		func(h []byte) { binary.LittleEndian.PutUint16(h[8:], 0xfff0) },
		func(h []byte) { binary.LittleEndian.PutUint16(h[4:], 0) },
		func(h []byte) { binary.LittleEndian.PutUint16(h[4:], 2) },
		func(h []byte) { h[1] = 3 },
		func(h []byte) { h[0] = 0 },
	} {
		hdr, f := ipPacket(b.mac, a.mac, false, true, 5000, 1000)
		spoil(hdr)
		a.sendRaw(0, append(hdr, f...))
		good := buildFrame(b.mac, a.mac, 100, byte(i))
		a.send(0, good)
		if got := b.recv(0); !bytes.Equal(got, good) || a.dropped(vswitch.BadHeader) != uint64(i+1) {
			t.Errorf("case %d: %d refused", i, a.dropped(vswitch.BadHeader))
		}
	}
	// The checksum's place is the source MAC: the switch checks the completed frame, and drops it.
	hdr, f := ipPacket(b.mac, a.mac, false, true, 100, 0)
	binary.LittleEndian.PutUint16(hdr[6:], 6)
	binary.LittleEndian.PutUint16(hdr[8:], 0)
	a.sendRaw(0, append(hdr, f...))
	testutil.Eventually(t, "the changed source", func() bool { return a.dropped(vswitch.Spoofed) == 1 })
}

// TestOffered: without buffers for large frames only checksums are offered.
func TestOffered(t *testing.T) {
	small, err := frame.NewPool(frame.Config{Count: 1})
	if err != nil {
		t.Fatal(err)
	}
	if f := offered(small); f != FeatureCsum|FeatureGuestCsum {
		t.Errorf("%#x", f)
	}
	big, err := frame.NewPool(frame.Config{Count: 1, Big: 1})
	if err != nil {
		t.Fatal(err)
	}
	if f := offered(big); f != hostAll|guestAll {
		t.Errorf("%#x", f)
	}
}

// benchTSO measures a frame of 64 KiB from guest to guest on one loop.
func benchTSO(b *testing.B, dstFeatures uint64) {
	h := newHost(b, 1, false)
	l := h.loops[0]
	src := h.vm(1, 1).boot(hostAll, 2048, 16)
	dst := h.vm(2, 1).boot(FeatureMrgRxbuf|dstFeatures, 4096, 100)
	hdr, f := ipPacket(dst.mac, src.mac, false, true, 64000, 1400)
	raw := append(hdr, f...)
	pa := src.alloc(len(raw))
	copy(src.bytes(pa, len(raw)), raw)
	out, in := []frontend.Buf{{PA: pa, Len: uint32(len(raw))}}, make([]frontend.Buf, 1)
	tx, rx := src.fe.Queue(1), dst.fe.Queue(0)
	cycle := func() {
		if err := tx.Add(1, out, nil); err != nil {
			b.Fatal(err)
		}
		tx.Kick()
		l.Step()
		stepUntil(b, l, tx)
		for got := 0; got < len(f); {
			tok, n := stepUntil(b, l, rx)
			got += int(n)
			in[0] = frontend.Buf{PA: translate.PA(tok), Len: 4096}
			if err := rx.Add(tok, nil, in); err != nil {
				b.Fatal(err)
			}
		}
		rx.Kick()
	}
	for range 16 { // until each buffer was used, and its page is resident
		cycle()
	}
	b.SetBytes(int64(len(f)))
	b.ReportAllocs()
	b.ResetTimer()
	for range b.N {
		cycle()
	}
}

func BenchmarkTSO(b *testing.B) {
	b.Run("whole", func(b *testing.B) { benchTSO(b, guestAll) })
	b.Run("cut", func(b *testing.B) { benchTSO(b, 0) })
}

func TestOffloadsAllocateNothing(t *testing.T) {
	for _, f := range []uint64{guestAll, 0} {
		allocatesNothing(t, func(b *testing.B) { benchTSO(b, f) })
	}
}
