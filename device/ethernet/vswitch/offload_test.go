package vswitch

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"testing"

	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/gso"
	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/loop"
)

// keeper is a port that keeps the buffers delivered to it.
type keeper struct{ bufs []*frame.Buf }

func (p *keeper) Deliver(_ *loop.Loop, b *frame.Buf, _ Destination) {
	b.Ref()
	p.bufs = append(p.bufs, b)
}

func (p *keeper) free() {
	for _, b := range p.bufs {
		b.Free()
	}
	p.bufs = nil
}

// udp4 is a UDP packet with a pending checksum.
func udp4(dst, src MAC, dport uint16, n int) []byte {
	f := append(append(append([]byte{}, dst[:]...), src[:]...), 8, 0)
	f = append(f, make([]byte, header.IPv4Len+header.UDPLen)...)
	for i := range n {
		f = append(f, byte(i*3))
	}
	ip := header.IPv4{TotalLen: uint16(len(f) - HeaderLen), DontFrag: true, TTL: 64, Protocol: header.ProtoUDP,
		Src: [4]byte{10, 0, 0, 1}, Dst: [4]byte{10, 0, 0, 2}}
	ip.Encode(f[HeaderLen:])
	u := header.UDP{SrcPort: 5, DstPort: dport, Length: uint16(header.UDPLen + n)}
	u.Checksum = ^header.Checksum(nil, header.PseudoSum4(ip.Src, ip.Dst, header.ProtoUDP, u.Length))
	u.Encode(f[HeaderLen+header.IPv4Len:])
	return f
}

// offloaded puts a frame with offloads into a buffer, with segments of size bytes (0 = checksum only).
func (b *bench) offloaded(f []byte, size int) *frame.Buf {
	b.t.Helper()
	h := [gso.HeaderLen]byte{0: 1, 6: HeaderLen + header.IPv4Len, 8: 6}
	if size > 0 {
		h[1] = 5
		binary.LittleEndian.PutUint16(h[4:], uint16(size))
	}
	buf := b.pool.GetFor(len(f))
	if buf == nil || !buf.Append(f) {
		b.t.Fatal("no buffer")
	}
	if err := gso.Accept(h[:], buf, frame.NeedAll); err != nil {
		b.t.Fatal(err)
	}
	return buf
}

func sound(f []byte) bool {
	p := f[HeaderLen:]
	n := len(p) - header.IPv4Len
	return header.Checksum(p[:header.IPv4Len], 0) == 0 &&
		header.Checksum(p[header.IPv4Len:], header.PseudoSum4([4]byte(p[12:16]), [4]byte(p[16:20]), header.ProtoUDP,
			uint16(n))) == 0
}

// Each port gets a frame completed as far as it requires, without effect on the others.
func TestOffloadsPerPort(t *testing.T) {
	for _, size := range []int{0, 1000} {
		t.Run(fmt.Sprint("segments of ", size), func(t *testing.T) {
			b := newBench(t, Config{MTU: 1500})
			pool, err := frame.NewPool(frame.Config{Count: 64, Capacity: 2000, Big: 4})
			if err != nil {
				t.Fatal(err)
			}
			b.pool = pool
			from := b.port(PortConfig{Name: "from", Kind: KindTAP})
			n := 1400
			if size > 0 {
				n = 2500
			}
			takes := []frame.Need{frame.NeedAll, 0, frame.NeedCsum, frame.NeedAll, frame.NeedGSO, 0}
			var ports []*keeper
			for i, need := range takes {
				p := &keeper{}
				if _, err := b.net.Attach(p, PortConfig{Name: fmt.Sprint(i), Kind: KindTAP,
					Attached: func(a *Attachment) { a.SetOffloads(need) }}); err != nil {
					t.Fatal(err)
				}
				ports = append(ports, p)
				defer p.free()
			}
			f := udp4(broadcast, mac(1), 7, n)
			buf := b.offloaded(f, size)
			b.loop.Do(func() { from.att.Input(b.loop, buf, Source{}) })
			for i, p := range ports {
				whole := takes[i] == frame.NeedAll || takes[i] == frame.NeedGSO && size > 0
				want := 1
				if size > 0 && !whole {
					want = 3
				}
				if len(p.bufs) != want {
					t.Errorf("port %d: %d frames, want %d", i, len(p.bufs), want)
				}
				total := 0
				for _, x := range p.bufs {
					total += x.Len()
					switch {
					case whole:
						if string(x.Bytes()) != string(f) || x.Offload.Need == 0 {
							t.Errorf("port %d: the frame was changed: %+v", i, x.Offload)
						}
					case takes[i] == frame.NeedCsum && size == 0:
						if x.Offload.Need != frame.NeedCsum {
							t.Errorf("port %d: completed unnecessarily", i)
						}
					case x.Offload.Need != 0 || !sound(x.Bytes()):
						t.Errorf("port %d: not completed: %+v %x", i, x.Offload, x.Bytes())
					}
				}
				if total != len(f)+(want-1)*42 {
					t.Errorf("port %d: %d bytes", i, total)
				}
			}
			buf.Free()
		})
	}
}

// The only reference to a frame: it is completed in place.
func TestFinishInPlace(t *testing.T) {
	b := newBench(t, Config{})
	from, to := b.port(PortConfig{Name: "from", Kind: KindTAP}), b.port(PortConfig{Name: "to", Kind: KindTAP})
	buf := b.offloaded(udp4(broadcast, mac(1), 7, 100), 0)
	b.loop.Do(func() { from.att.Input(b.loop, buf, Source{}) })
	if got := to.take(); len(got) != 1 || !sound([]byte(got[0].frame)) || !sound(buf.Bytes()) || buf.Offload.Need != 0 {
		t.Errorf("%d frames, %+v", len(got), buf.Offload)
	}
	buf.Free()
}

// Segments count against the MTU and the storm limit; without buffers each segment is counted as dropped; RoCE is not
// segmented.
func TestOffloadLimits(t *testing.T) {
	b := newBench(t, Config{MTU: 1028, Storm: 5})
	from := b.port(PortConfig{Name: "from", Kind: KindTAP})
	to := &keeper{}
	var out *Attachment
	if _, err := b.net.Attach(to, PortConfig{Name: "to", Kind: KindTAP,
		Attached: func(a *Attachment) { out = a }}); err != nil {
		t.Fatal(err)
	}
	defer to.free()
	in := func(f []byte, size int) {
		t.Helper()
		buf := b.offloaded(f, size)
		b.loop.Do(func() { from.att.Input(b.loop, buf, Source{}) })
		buf.Free()
	}
	in(udp4(broadcast, mac(1), 7, 3000), 1001)
	if n := from.att.Counters.Dropped(TooBig); n != 3 || len(to.bufs) != 0 {
		t.Errorf("%d too big, %d arrived", n, len(to.bufs))
	}
	in(udp4(broadcast, mac(1), 7, 3000), 1000)
	if len(to.bufs) != 3 {
		t.Errorf("%d arrived", len(to.bufs))
	}
	in(udp4(broadcast, mac(1), 7, 3000), 1000) // 3 of 5 are used up
	if n := from.att.Counters.Dropped(Storm); n != 3 || len(to.bufs) != 3 {
		t.Errorf("%d beyond the storm limit, %d arrived", n, len(to.bufs))
	}
	to.free()
	b.advance(1e9 * 2)
	var held []*frame.Buf
	buf := b.offloaded(udp4(broadcast, mac(1), 7, 3000), 1000)
	for x := b.pool.Get(); x != nil; x = b.pool.Get() {
		held = append(held, x)
	}
	held[0].Free()
	b.loop.Do(func() { from.att.Input(b.loop, buf, Source{}) })
	if n := out.Counters.Dropped(NoBuffer); n != 2 || len(to.bufs) != 1 {
		t.Errorf("%d segments without a buffer, %d arrived", n, len(to.bufs))
	}
	for _, x := range append(held[1:], buf) {
		x.Free()
	}
}

type upHCA struct {
	got  int
	down bool
}

func (h *upHCA) Deliver(*loop.Loop, *frame.Buf) { h.got++ }
func (h *upHCA) Up() bool                       { return !h.down }
func (h *upHCA) Paused() bool                   { return false }

func TestRoCEIsNotCut(t *testing.T) {
	b := newBench(t, Config{})
	from := b.port(PortConfig{Name: "from", Kind: KindTAP})
	vm, err := NewVMPort(b.net, VMPortConfig{Name: "vm", MAC: mac(9)})
	if err != nil {
		t.Fatal(err)
	}
	h := &upHCA{}
	vm.SetHCA(h)
	vm.Attachment().SetOffloads(frame.NeedAll)
	for _, size := range []int{0, 50} {
		buf := b.offloaded(udp4(mac(9), mac(1), header.PortRoCE, 100), size)
		b.loop.Do(func() { from.att.Input(b.loop, buf, Source{}) })
		buf.Free()
	}
	if n := vm.Attachment().Counters.Dropped(BadHeader); n != 1 || h.got != 1 {
		t.Errorf("%d refused, %d arrived", n, h.got)
	}
}

// An HCA gets a train whole, other ports get its packets; while a port is captured there are no trains.
func TestTrain(t *testing.T) {
	const n, size = 3, 100
	b := newBench(t, Config{})
	from := b.port(PortConfig{Name: "from", Kind: KindTAP})
	vm, err := NewVMPort(b.net, VMPortConfig{Name: "vm", MAC: mac(9)})
	if err != nil {
		t.Fatal(err)
	}
	tap := b.port(PortConfig{Name: "tap", Kind: KindTAP, MACs: []MAC{mac(8)}})
	h, guest := &upHCA{}, &recPort{} // with RoCE in software
	vm.SetHCA(h)
	vm.SetNet(deliverTo{guest})
	in := func(dst MAC) {
		t.Helper()
		first := udp4(dst, mac(1), header.PortRoCE, size)
		buf := b.pool.GetFor(len(first) + (n-1)*size)
		buf.Append(first)
		for i := 1; i < n; i++ {
			buf.Append(bytes.Repeat([]byte{byte(i)}, size))
		}
		buf.Offload = frame.Offload{Need: frame.NeedTrain, GSOSize: size, Payload: 42}
		b.loop.Do(func() { from.att.Input(b.loop, buf, Source{}) })
		buf.Free()
	}
	arrived := func(what string, p *recPort, dst MAC) {
		t.Helper()
		got := p.take()
		if len(got) != n {
			t.Fatalf("%s: %d frames arrived, want %d", what, len(got), n)
		}
		want := udp4(dst, mac(1), header.PortRoCE, size)
		for i := range got {
			if i > 0 {
				copy(want[42:], bytes.Repeat([]byte{byte(i)}, size))
			}
			if got[i].frame != string(want) {
				t.Errorf("%s, frame %d: %x, want %x", what, i, got[i].frame, want)
			}
		}
	}
	accepts := func(dst MAC) (need frame.Need) {
		f := udp4(dst, mac(1), header.PortRoCE, size)
		b.loop.Do(func() { need = from.att.Accepts(b.loop, f, header.Locate(f)) })
		return need
	}

	in(mac(9))
	if h.got != 1 || len(guest.got) != 0 {
		t.Errorf("HCA: %d frames, want 1", h.got)
	}
	if c := vm.Attachment().Counters.Totals(); c.OutFrames != n {
		t.Errorf("%d frames are counted, want %d", c.OutFrames, n)
	}
	h.down = true
	in(mac(9))
	arrived("network device", guest, mac(9))
	in(mac(8))
	arrived("TAP", tap, mac(8))
	if got := accepts(mac(9)); got != frame.NeedTrain {
		t.Errorf("the VM accepts %#x", got)
	}
	if got := accepts(mac(8)); got != 0 {
		t.Errorf("the TAP accepts %#x", got)
	}
	for _, a := range []*Attachment{from.att, vm.Attachment()} {
		if err := a.SetMonitor(&watcher{}); err != nil {
			t.Fatal(err)
		}
		if got := accepts(mac(9)); got != 0 {
			t.Errorf("the VM accepts %#x while %q is captured", got, a.Config().Name)
		}
		a.RemoveMonitor()
	}
	if _, err := NewVMPort(b.net, VMPortConfig{Name: "slow", MAC: mac(7), Rate: 1e6}); err != nil {
		t.Fatal(err)
	}
	if got := accepts(mac(7)); got != 0 {
		t.Errorf("a VM with a rate accepts %#x", got)
	}
}

type deliverTo struct{ p *recPort }

func (d deliverTo) Deliver(l *loop.Loop, b *frame.Buf) { d.p.Deliver(l, b, Destination{}) }

// A VM keeps its offloads in another network.
func TestMoveKeepsOffloads(t *testing.T) {
	b := newBench(t, Config{})
	other, err := NewNetwork(Config{VNI: 8, Name: "eight", Clock: b.clock})
	if err != nil {
		t.Fatal(err)
	}
	vm, err := NewVMPort(b.net, VMPortConfig{Name: "vm", MAC: mac(9)})
	if err != nil {
		t.Fatal(err)
	}
	vm.SetOffloads(frame.NeedCsum | frame.NeedTSO4)
	if err := vm.Move(other); err != nil {
		t.Fatal(err)
	}
	if got := frame.Need(vm.Attachment().offloads.Load()); got != frame.NeedCsum|frame.NeedTSO4|frame.NeedTrain {
		t.Errorf("%#x", got)
	}
}

func BenchmarkSoftwareSegments(b *testing.B) {
	bb := newBench(b, Config{MTU: 1500})
	pool, err := frame.NewPool(frame.Config{Count: 64, Capacity: 2000, Big: 1})
	if err != nil {
		b.Fatal(err)
	}
	bb.pool = pool
	var to *Attachment
	if to, err = bb.net.Attach(&count{}, PortConfig{Name: "to", Kind: KindTAP}); err != nil {
		b.Fatal(err)
	}
	f := udp4(broadcast, mac(1), 7, 64000)
	buf := bb.offloaded(f, 1400)
	b.SetBytes(int64(len(f)))
	b.ReportAllocs()
	bb.loop.Do(func() {
		for b.Loop() {
			to.output(bb.loop, buf, Destination{})
		}
	})
	buf.Free()
}

type count struct{ n int }

func (c *count) Deliver(*loop.Loop, *frame.Buf, Destination) { c.n++ }
