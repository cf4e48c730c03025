package hca

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/testutil/testlog"
	"github.com/vnicd/vnicd/device/virtio/virtq"
	"github.com/vnicd/vnicd/hypervisor/loglimit"
)

// New reports each mistake of its Config.
func TestConfigErrors(t *testing.T) {
	w := newWorld(t, 1, 0, Limits{})
	good := Config{Name: "x", MAC: [6]byte{2, 0, 0, 0, 0, 1}, Loops: w.loops, Pool: w.pool}
	for name, mod := range map[string]func(*Config){
		"no name":         func(c *Config) { c.Name = "" },
		"long name":       func(c *Config) { c.Name = string(make([]byte, 32)) },
		"multicast MAC":   func(c *Config) { c.MAC[0] = 1 },
		"zero MAC":        func(c *Config) { c.MAC = [6]byte{} },
		"no loops":        func(c *Config) { c.Loops = nil },
		"one loop twice":  func(c *Config) { c.Loops = append(c.Loops[:1:1], c.Loops[0]) },
		"no pool":         func(c *Config) { c.Pool = nil },
		"too many CEQs":   func(c *Config) { c.CEQs = 9 },
		"long version":    func(c *Config) { c.Version = string(make([]byte, 24)) },
		"limit too high":  func(c *Config) { c.Limits.QPs = 1 << 20 },
		"limit too low":   func(c *Config) { c.Limits.SGEs = -1 },
		"MR size too big": func(c *Config) { c.Limits.MRSize = 1 << 60 },
	} {
		c := good
		mod(&c)
		if _, err := New(c); !errors.Is(err, ErrConfig) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// The configuration space is read-only.
func TestConfigSpace(t *testing.T) {
	w := newWorld(t, 2, 1, Limits{})
	g := w.guests[0]
	read := func() (c abi.Config) {
		b := make([]byte, abi.SizeConfig)
		for i := 0; i < len(b); i += 8 { // in pieces, as drivers read it
			if err := g.ReadConfig(b[i:i+8], uint32(i)); err != nil {
				t.Fatal(err)
			}
		}
		if err := c.Decode(b); err != nil {
			t.Fatal(err)
		}
		return c
	}
	c := read()
	if c.Magic != abi.Magic || c.ABIVersion != abi.Version || c.MAC != g.cfg.MAC || c.NumCEQs != 2 || c.NumEngines != 2 ||
		c.LinkUp != 1 || c.PortMTU != 4096 || string(c.DeviceName[:3]) != "g1\x00" {
		t.Errorf("%+v", c)
	}
	if g.NumQueues() != 6 {
		t.Errorf("%d queues, want 1 command, 1 event, 2 completion event, 2 doorbell", g.NumQueues())
	}
	if err := g.ReadConfig(make([]byte, 8), abi.SizeConfig-4); err == nil {
		t.Error("a read past the end succeeded")
	}
	if err := g.WriteConfig(0, []byte{1}); err == nil {
		t.Error("a write succeeded")
	}
	g.SetLink(false)
	g.SetLink(false)
	if g.notes != 1 || read().LinkUp != 0 {
		t.Errorf("%d notices after the link went down, link_up %d", g.notes, read().LinkUp)
	}
	var p abi.PortAttr
	if err := p.Decode(g.must(abi.CmdQueryPort, nil)); err != nil || p.State != abi.PortDown {
		t.Errorf("port %+v, %v", p, err)
	}
	g.SetLink(true)

	// A reset that loses state notifies the driver; one that does not raises no notice.
	g.notes = 0
	g.Reset()
	if g.notes != 0 {
		t.Error("a notice though no state was lost")
	}
	g.pd()
	g.Reset()
	if g.notes != 1 || read().Generation != c.Generation+2 {
		t.Errorf("%d notices, generation %d after %d", g.notes, read().Generation, c.Generation)
	}
}

// The path MTU leaves room for every header.
func TestPortMTU(t *testing.T) {
	mtu := 0
	d := &dataSide{mtu: func() int { return mtu }}
	for _, c := range [][2]int{{9000, 4096}, {4192, 4096}, {4191, 2048}, {1500, 1024}, {1450, 1024}, {1120, 1024},
		{1119, 512}, {352, 256}, {100, 256}, {0, 256}} {
		if mtu = c[0]; d.portMTU() != c[1] {
			t.Errorf("network MTU %d: path MTU %d, want %d", c[0], d.portMTU(), c[1])
		}
	}
}

// Up needs a running command queue.
func TestUp(t *testing.T) {
	g := newWorld(t, 1, 1, Limits{}).guests[0]
	g.up.Store(false)
	dq := g.eventQueue(abi.EventQueue, 4, 64) // any queue works as a command queue
	g.StopQueue(abi.EventQueue)
	step := func(what string, want bool) {
		t.Helper()
		if g.Up() != want {
			t.Errorf("%s: up is %v", what, g.Up())
		}
	}
	if err := g.StartQueue(abi.CommandQueue, dq.q); err != nil {
		t.Fatal(err)
	}
	step("command queue", true)
	if err := g.StartQueue(abi.CommandQueue, dq.q); err == nil {
		t.Error("the command queue started twice")
	}
	g.StopQueue(abi.CommandQueue)
	step("queue stopped", false)
	if err := g.StartQueue(abi.CommandQueue, dq.q); err != nil {
		t.Fatal(err)
	}
	step("queue restarted", true)
	g.Reset()
	step("reset", false)
	if err := g.StartQueue(99, dq.q); err == nil {
		t.Error("queue 99 started")
	}
}

// While the command queue is stopped, guest memory is not accessed, whatever packets
// arrive or timers expire. Afterwards everything continues, unless the queue starts at
// index 0: then a new driver finds an empty device.
func TestPause(t *testing.T) {
	w := newWorld(t, 1, 2, Limits{})
	a, b := w.pair()
	g := b.g
	dst := g.alloc(4096)
	key := g.mr(1, dst, 4096, 1|remoteAll)
	g.eventQueue(abi.EventQueue, 4, 64)
	dq := g.eventQueue(abi.CEQQueue(0), 4, 64)
	start := func(base uint16) {
		t.Helper()
		q, err := virtq.New(g.space, virtq.Config{Size: 4, Desc: dq.desc, Avail: g.alloc(4096), Used: g.alloc(4096),
			Base: base, Kick: dq.kick})
		if err != nil {
			t.Fatal(err)
		}
		if err := g.StartQueue(abi.CommandQueue, q); err != nil {
			t.Fatal(err)
		}
	}
	start(7)
	pds := len(g.tables.pds)
	s := b.wqe()
	s.SetRequest(4, abi.WRRDMAWrite, abi.SendSignaled)
	b.post()
	w.losing(func([]byte) bool { return true })
	w.step(5) // sent and lost
	w.lose = nil
	g.StopQueue(abi.CommandQueue)
	before := string(g.mem)
	s = a.wqe()
	s.SetRequest(5, abi.WRRDMAWrite, abi.SendSignaled|abi.SendInline)
	s.SetRDMA(uint64(dst), key)
	s.SetInline([]byte("hello"))
	a.post()
	for range 600 {
		w.step(5)
		w.clock.Advance(100 * time.Millisecond) // a minute: no retry limit lasts as long (CO-3)
	}
	if string(g.mem) != before {
		t.Fatal("guest memory changed during the pause")
	}
	if !g.Up() || !g.Describe().Paused {
		t.Error("a paused device is down: its frames go to the network card")
	}
	if e := g.engines[0]; e.Prepare() {
		t.Error("a paused VM keeps its loop awake")
	}
	start(7)
	if wc := b.scq.await(1)[0]; wc.ID != 4 || wc.Status != 0 {
		t.Errorf("the request from before the pause: %+v", wc)
	}
	if wc := a.scq.await(1)[0]; wc.ID != 5 || wc.Status != 0 || string(g.at(dst, 5)) != "hello" {
		t.Errorf("the peer's request: %+v", wc)
	}
	if len(g.tables.pds) != pds || b.state() != abi.QPRTS {
		t.Error("the pause lost objects")
	}
	g.StopQueue(abi.CommandQueue)
	gen := g.generation.Load()
	start(0)
	if len(g.tables.pds)+g.tables.qps != 0 || g.generation.Load() != gen {
		t.Error("a new driver found its predecessor's objects, or the generation changed")
	}
}

// A reset of the machine looks like a pause at the device. Told of it, the device drops what the driver has left: the
// peer is not held any longer, and fails by its retries. A running driver does not notice.
func TestMachineReset(t *testing.T) {
	w := newWorld(t, 1, 2, Limits{})
	a, b := w.pair()
	g := b.g
	dst := g.alloc(4096)
	key := g.mr(1, dst, 4096, 1|remoteAll)
	g.eventQueue(abi.EventQueue, 4, 64)
	q := g.eventQueue(abi.CEQQueue(0), 4, 64).q // any queue works as a command queue
	g.StopQueue(abi.CEQQueue(0))
	if err := g.StartQueue(abi.CommandQueue, q); err != nil {
		t.Fatal(err)
	}
	gen := g.generation.Load()
	g.MachineReset()
	if b.state() != abi.QPRTS || g.generation.Load() != gen {
		t.Fatal("a running driver has lost its state")
	}
	g.StopQueue(abi.CommandQueue)
	s := a.wqe()
	s.SetRequest(5, abi.WRRDMAWrite, abi.SendSignaled|abi.SendInline)
	s.SetRDMA(uint64(dst), key)
	s.SetInline([]byte("hello"))
	a.post()
	for range 600 {
		w.step(5)
		w.clock.Advance(100 * time.Millisecond)
	}
	if n := len(a.scq.poll()); n != 0 {
		t.Fatalf("%d completions while the VM is paused", n)
	}
	g.MachineReset()
	if len(g.tables.pds)+g.tables.qps != 0 || g.generation.Load() == gen || g.Up() || g.Describe().Paused {
		t.Error("the driver's objects remain")
	}
	var got []abi.WC
	w.until("the peer's request ends", func() bool {
		w.clock.Advance(100 * time.Millisecond)
		got = append(got, a.scq.poll()...)
		return len(got) > 0
	})
	if got[0].Status != abi.WCRetryExcErr {
		t.Errorf("the peer's request ends with status %d", got[0].Status)
	}
	g.MachineReset()
	if err := g.StartQueue(abi.CommandQueue, q); err != nil {
		t.Fatal(err)
	}
}

// Log lines about a guest are limited, and tell the number of suppressed lines (loglimit).
func TestLogLimit(t *testing.T) {
	w, out, begin := newWorld(t, 1, 0, Limits{}), &testlog.Log{}, time.Now()
	d, err := New(Config{Name: "x", MAC: [6]byte{2, 0, 0, 0, 0, 1}, Loops: w.loops, Pool: w.pool, Log: out.Logger()})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	for range 100 {
		d.data.warn("mistake")
		d.log.Warn("another")
	}
	lines, most := strings.Count(out.String(), "\n"), loglimit.Burst+int(time.Since(begin)/loglimit.Interval)+1
	if lines == 0 || lines > most {
		t.Errorf("%d lines about 200 mistakes, want 1 to %d", lines, most)
	}
}
