package vswitch

import (
	"encoding/binary"
	"errors"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/loop"
)

// v4RoCE is an IPv4 packet, written out byte by byte; port 4791 is 0x12b7.
var v4RoCE = []byte{0x45, 0, 0, 28, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2, 0xc0, 0, 0x12, 0xb7, 0, 8,
	0, 0}

func eth(typ uint16, p []byte, tags ...uint16) []byte {
	f := make([]byte, 12)
	f[0], f[6] = 2, 2
	for _, t := range tags {
		f = append(binary.BigEndian.AppendUint16(f, t), 0, 7)
	}
	return append(binary.BigEndian.AppendUint16(f, typ), p...)
}

// with returns a copy of p with some bytes changed: offset, value, offset, value ...
func with(p []byte, changes ...int) []byte {
	p = slices.Clone(p)
	for i := 0; i < len(changes); i += 2 {
		p[changes[i]] = byte(changes[i+1])
	}
	return p
}

type face struct {
	up, paused bool
	got        int
}

func (f *face) Deliver(*loop.Loop, *frame.Buf) { f.got++ }
func (f *face) Up() bool                       { return f.up }
func (f *face) Paused() bool                   { return f.paused }

// card is a face whose driver can stop.
type card struct {
	face
	stopped bool
}

func (c *card) Running() bool { return !c.stopped }

// TestVMMigrates: a VM's address is its port's while one of its devices runs. Otherwise frames from a tunnel or the
// control plane may take it to another host, but no RoCE frame, and no port of this host; it returns when the VM runs
// here again (CO-5). A VM that has not run here is not announced.
func TestVMMigrates(t *testing.T) {
	b := newBench(t, Config{})
	tunnel, tap := b.port(PortConfig{Name: "vxlan", Kind: KindVTEP}), b.port(PortConfig{Name: "tap", Kind: KindTAP})
	vm, err := NewVMPort(b.net, VMPortConfig{Name: "vm", MAC: mac(1), Loop: b.loop})
	if err != nil {
		t.Fatal(err)
	}
	nic, hca := &card{stopped: true}, &face{}
	vm.SetNet(nic)
	vm.SetHCA(hca)
	told := 0
	b.net.OnChange(func() { told++ })
	at := func(port string, static, local bool) {
		t.Helper()
		e, ok := b.net.Lookup(mac(1))
		macs, _ := b.net.Locals()
		is := slices.ContainsFunc(macs, func(l Local) bool { return l.MAC == mac(1) })
		if !ok || e.Port != port || e.Static != static || is != local {
			t.Errorf("entry %+v %v, local: %v; want port %s, static %v, local %v", e, ok, is, port, static, local)
		}
		if s := b.net.Status(); s.Entries != len(s.FDB) || (s.Static == 1) != static {
			t.Errorf("%d entries, %d static: %+v", s.Entries, s.Static, s.FDB)
		}
	}
	claim := func(changes int) {
		t.Helper()
		if was := told; vm.Claim() != nil || told != was+changes {
			t.Errorf("claimed with %d changes, want %d", told-was, changes)
		}
	}
	frame := func(p *recPort) { b.input(p.att, buildFrame(broadcast, mac(1), "x"), Source{Remote: 2}) }
	at("vm", true, false)
	nic.stopped = false
	claim(1)
	at("vm", true, true)
	gen := b.net.gen.Load()
	claim(0)
	if b.net.gen.Load() != gen {
		t.Error("a claim that changes nothing ends the paths of others")
	}
	at("vm", true, true)
	frame(tunnel)
	at("vm", true, true)
	nic.stopped, hca.up = true, true
	frame(tunnel)
	at("vm", true, true)
	nic.stopped, hca.paused = false, true
	frame(tunnel)
	at("vm", true, true)
	nic.stopped = true
	frame(tap)
	roce := eth(0x800, v4RoCE)
	from, to := mac(1), mac(9)
	copy(roce, to[:])
	copy(roce[6:], from[:])
	b.input(tunnel.att, roce, Source{Remote: 2})
	at("vm", true, true)
	frame(tunnel)
	at("vxlan", false, false)
	nic.stopped, hca.up = false, false
	claim(1)
	at("vm", true, true)
	frame(tunnel)
	at("vm", true, true)
	if err := b.net.SetYielding(Address{MAC: mac(1)}, tunnel.att, 3); !errors.Is(err, ErrMACInUse) {
		t.Errorf("the control plane has moved a VM that runs here: %v", err)
	}
	nic.stopped = true
	if err := b.net.SetStatic(Address{MAC: mac(1)}, tunnel.att, 3); !errors.Is(err, ErrMACInUse) {
		t.Errorf("a static entry in place of a VM's own: %v", err)
	}
	if err := b.net.SetYielding(Address{MAC: mac(1)}, tunnel.att, 3); err != nil {
		t.Error(err)
	}
	at("vxlan", true, false)
	nic.stopped = false
	claim(1)
	at("vm", true, true)
	vm.Close()
	if err := vm.Claim(); !errors.Is(err, ErrClosed) {
		t.Errorf("claimed by a port that is closed: %v", err)
	}
}

func TestVMPort(t *testing.T) {
	b := newBench(t, Config{})
	vm, err := NewVMPort(b.net, VMPortConfig{Name: "vm", MAC: mac(1), Loop: b.loop})
	if err != nil {
		t.Fatal(err)
	}
	tap := b.port(PortConfig{Kind: KindTAP})
	nic, hca := &face{}, &face{}
	check := func(what string, wantNIC, wantHCA, wantTAP int) {
		t.Helper()
		if nic.got != wantNIC || hca.got != wantHCA || len(tap.got) != wantTAP {
			t.Errorf("%s: nic %d hca %d tap %d, want %d %d %d", what, nic.got, hca.got, len(tap.got), wantNIC, wantHCA, wantTAP)
		}
		nic.got, hca.got, tap.got = 0, 0, nil
	}
	roce := func(dst, src MAC) []byte {
		f := eth(0x800, v4RoCE)
		copy(f, dst[:])
		copy(f[6:], src[:])
		return f
	}
	send := func(f func(*loop.Loop, *frame.Buf), data []byte) {
		buf := b.pool.Get()
		buf.Append(data)
		b.loop.Do(func() { f(b.loop, buf) })
		buf.Free()
	}
	b.input(tap.att, roce(mac(1), mac(2)), Source{})
	check("no faces", 0, 0, 0)
	if vm.Attachment().Counters.Dropped(NotReady) != 1 {
		t.Error("a frame without a face to deliver to was not counted")
	}
	vm.SetNet(nic)
	vm.SetHCA(hca)
	b.input(tap.att, roce(mac(1), mac(2)), Source{})
	check("HCA down: RoCE to the NIC", 1, 0, 0)
	hca.up = true
	b.input(tap.att, roce(mac(1), mac(2)), Source{})
	check("HCA up", 0, 1, 0)
	b.input(tap.att, buildFrame(mac(1), mac(2), "x"), Source{})
	check("other frames", 1, 0, 0)
	b.input(tap.att, buildFrame(broadcast, mac(2), "x"), Source{})
	check("broadcast", 1, 0, 0)
	b.input(tap.att, roce(MAC{1, 0, 0x5e, 0, 0, 1}, mac(2)), Source{})
	check("RoCE multicast", 0, 1, 0)
	send(vm.InputHCA, roce(mac(1), mac(1)))
	check("HCA loopback", 0, 1, 0)
	send(vm.InputNet, buildFrame(mac(1), mac(1), "x"))
	check("NIC loopback", 1, 0, 0)
	send(vm.InputHCA, roce(broadcast, mac(1)))
	check("HCA group frame stays out of its own VM", 0, 0, 1)
	send(vm.InputNet, buildFrame(broadcast, mac(1), "arp"))
	check("NIC broadcast stays out of its own VM", 0, 0, 1)
	send(vm.InputHCA, roce(mac(2), mac(1)))
	check("HCA to the TAP", 0, 0, 1)
	send(vm.InputHCA, roce(mac(2), mac(3)))
	check("HCA with another MAC", 0, 0, 0)
	vm.SetHCA(nil)
	b.input(tap.att, roce(mac(1), mac(2)), Source{})
	check("HCA removed", 1, 0, 0)
	vm.SetNet(nil)
	b.input(tap.att, roce(mac(1), mac(2)), Source{})
	check("both removed", 0, 0, 0)
	if _, err := NewVMPort(b.net, VMPortConfig{Name: "twin", MAC: mac(1)}); err == nil {
		t.Error("second VM with the same MAC")
	}
	vm.Close()
	vm.Close()
}

// A port moves between networks: its address moves with it, its frames arrive only there, and if the address is in use
// there the port stays.
func TestVMPortMove(t *testing.T) {
	a, b := newBench(t, Config{VNI: 1}), newBench(t, Config{VNI: 2})
	vm, err := NewVMPort(a.net, VMPortConfig{Name: "vm", MAC: mac(1), Loop: a.loop})
	if err != nil {
		t.Fatal(err)
	}
	nic := &face{}
	vm.SetNet(nic)
	oldPort, newPort := a.port(PortConfig{Kind: KindTAP}), b.port(PortConfig{Kind: KindTAP})
	send := func() {
		buf := a.pool.Get()
		defer buf.Free()
		buf.Append(buildFrame(broadcast, mac(1), "x"))
		a.loop.Do(func() { vm.InputNet(a.loop, buf) })
	}
	taken := b.port(PortConfig{Name: "taken", Kind: KindVM, MACs: []MAC{mac(1)}})
	if err := vm.Move(b.net); !errors.Is(err, ErrMACInUse) {
		t.Fatalf("move to a network with the MAC in use: %v", err)
	}
	send()
	if len(oldPort.take()) != 1 || len(newPort.take())+len(taken.take()) != 0 {
		t.Error("a refused move changed the port")
	}
	taken.att.Close()
	if err := vm.Move(b.net); err != nil {
		t.Fatal(err)
	}
	send()
	if len(oldPort.take()) != 0 || len(newPort.take()) != 1 {
		t.Error("the port sends into the old network")
	}
	b.input(newPort.att, buildFrame(mac(1), mac(2), "x"), Source{})
	a.input(oldPort.att, buildFrame(mac(1), mac(2), "x"), Source{})
	if nic.got != 1 {
		t.Errorf("%d frames arrived, want 1", nic.got)
	}
	if _, ok := a.net.Lookup(mac(1)); ok || vm.Attachment().Network() != b.net {
		t.Error("the port is still in the old network")
	}
	vm.Close()
	if err := vm.Move(a.net); !errors.Is(err, ErrClosed) {
		t.Errorf("move of a closed port: %v", err)
	}
}

// A batch's frames are counted when it ends, each at its port; after a move, also within a batch, frames go to the new
// network.
func TestBatch(t *testing.T) {
	a, b := newBench(t, Config{VNI: 1}), newBench(t, Config{VNI: 2})
	vm, err := NewVMPort(a.net, VMPortConfig{Name: "vm", MAC: mac(1)})
	if err != nil {
		t.Fatal(err)
	}
	first := vm.Attachment()
	p, q := a.port(PortConfig{Kind: KindVM, MACs: []MAC{mac(2)}}), a.port(PortConfig{Kind: KindVM, MACs: []MAC{mac(3)}})
	there := b.port(PortConfig{Kind: KindVM, MACs: []MAC{mac(2)}})
	buf := a.pool.Get()
	defer buf.Free()
	moved := make(chan error)
	a.loop.Do(func() {
		in := vm.Begin(a.loop)
		send := func(to MAC, payload string) {
			buf.Reset()
			buf.Append(buildFrame(to, mac(1), payload))
			in.Input(buf)
		}
		for range 3 {
			send(mac(2), "")
			send(mac(2), "x")
			send(mac(3), "yy")
		}
		go func() { moved <- vm.Move(b.net) }()
		for vm.Attachment() == first {
			time.Sleep(time.Millisecond)
		}
		send(mac(2), "new")
		in.End()
	})
	if err := <-moved; err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		att *Attachment
		out bool
		n   uint64
		len uint64
	}{{first, false, 9, 9*14 + 3 + 6}, {p.att, true, 6, 6*14 + 3}, {q.att, true, 3, 3*14 + 6},
		{vm.Attachment(), false, 1, 17}, {there.att, true, 1, 17}} {
		got := c.att.Counters.Totals()
		want := Totals{InFrames: c.n, InBytes: c.len}
		if c.out {
			want = Totals{OutFrames: c.n, OutBytes: c.len}
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("counted %+v, want %+v", got, want)
		}
	}
	if len(p.got) != 6 || len(q.got) != 3 || len(there.got) != 1 {
		t.Errorf("%d, %d and %d frames arrived", len(p.got), len(q.got), len(there.got))
	}
}

// A memory fault in a VM during a delivery leaves the network usable: no loop stays inside Input.
func TestPanicInDeliver(t *testing.T) {
	b := newBench(t, Config{})
	tap := b.port(PortConfig{Kind: KindTAP})
	vm := panicPort{}
	att, err := b.net.Attach(vm, PortConfig{Kind: KindVM, MACs: []MAC{mac(1)}})
	if err != nil {
		t.Fatal(err)
	}
	func() {
		defer func() { _ = recover() }()
		buf := b.pool.Get()
		defer buf.Free()
		buf.Append(buildFrame(mac(1), mac(2), ""))
		b.loop.Do(func() { tap.att.Input(b.loop, buf, Source{}) })
	}()
	att.Close() // would otherwise wait for ever
	b.net.Quiesce()
}

type panicPort struct{}

func (panicPort) Deliver(*loop.Loop, *frame.Buf, Destination) { panic("fault") }
