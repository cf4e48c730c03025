package tap_test

import (
	"errors"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/vnicd/vnicd/device/ethernet/tap"
	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/testutil/nstest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type rig struct {
	t    testing.TB
	ns   *nstest.NS
	loop *loop.Loop
	pool *frame.Pool
	net  *vswitch.Network
	sink *sink
	att  *vswitch.Attachment
}

// sink is another port of the network. With keep set it also keeps references to the buffers.
type sink struct {
	frames chan string
	keep   bool // of the loop
	kept   []*frame.Buf
}

func (s *sink) Deliver(_ *loop.Loop, b *frame.Buf, _ vswitch.Destination) {
	if s.keep {
		b.Ref()
		s.kept = append(s.kept, b)
	}
	select {
	case s.frames <- string(b.Bytes()):
	default:
	}
}

func newRig(t testing.TB) *rig { return newRigAt(t, nil) }

// newRigAt makes a rig with the given clock; nil = the real one.
func newRigAt(t testing.TB, clock loop.Clock) *rig {
	t.Helper()
	r := &rig{t: t, ns: nstest.New(t, "tap"), sink: &sink{frames: make(chan string, 1000)}}
	var err error
	if r.loop, err = loop.New(loop.Config{Clock: clock}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.loop.Close)
	if err := r.loop.Start(); err != nil {
		t.Fatal(err)
	}
	if r.pool, err = frame.NewPool(frame.Config{Count: 256}); err != nil {
		t.Fatal(err)
	}
	if r.net, err = vswitch.NewNetwork(vswitch.Config{VNI: 5, Name: "five", MTU: 1450}); err != nil {
		t.Fatal(err)
	}
	if r.att, err = r.net.Attach(r.sink, vswitch.PortConfig{Name: "sink", Kind: vswitch.KindTAP}); err != nil {
		t.Fatal(err)
	}
	return r
}

func (r *rig) try(c tap.Config) (p *tap.TAP, err error) {
	if c.Network == nil {
		c.Network, c.Loop, c.Pool = r.net, r.loop, r.pool
	}
	r.ns.Do(func() { p, err = tap.Open(c) })
	return p, err
}

func (r *rig) open(c tap.Config) *tap.TAP {
	r.t.Helper()
	p, err := r.try(c)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() {
		for range 2 {
			if err := p.Close(); err != nil {
				r.t.Error(err)
			}
		}
		if n := r.pool.InUse(); n != 0 {
			r.t.Errorf("%d buffers leaked", n)
		}
	})
	return p
}

func (r *rig) inject(f string) {
	r.t.Helper()
	r.loop.Do(func() {
		b := r.pool.Get()
		if b == nil || !b.Append([]byte(f)) {
			r.t.Error("no buffer")
			return
		}
		r.att.Input(r.loop, b, vswitch.Source{})
		b.Free()
	})
}

func (r *rig) has(dev string) bool {
	return exec.Command("ip", "-n", r.ns.Name, "link", "show", dev).Run() == nil
}

// The interface is as configured, and gone after Close.
func TestConfigured(t *testing.T) {
	r := newRig(t)
	mac := vswitch.MAC{2, 0, 0, 0, 0, 77}
	p := r.open(tap.Config{Offloads: true, Name: "host0", MTU: 1400, MAC: mac, Addrs: []netip.Prefix{
		netip.MustParsePrefix("10.1.2.3/24"), netip.MustParsePrefix("fd00::3/64")}})
	if p.Name() != "host0" || p.MAC() != mac || p.Index() == 0 {
		t.Errorf("%s %v %d", p.Name(), p.MAC(), p.Index())
	}
	out := r.ns.IP("addr", "show", "host0")
	for _, want := range []string{"mtu 1400", mac.String(), "10.1.2.3/24", "fd00::3/64", "UP"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	if _, after, _ := strings.Cut(out, "fd00::3/64"); strings.Contains(strings.SplitN(after, "\n", 2)[0], "tentative") {
		t.Errorf("IPv6 address is not usable yet\n%s", out)
	}
	r.ns.Do(func() {
		if err := p.SetMTU(1300); err != nil {
			t.Error(err)
		}
	})
	if out := r.ns.IP("link", "show", "host0"); !strings.Contains(out, "mtu 1300") {
		t.Error(out)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	if r.has("host0") {
		t.Error("interface is still there")
	}
	if len(r.net.Status().Ports) != 1 {
		t.Error("port is still there")
	}
	r.open(tap.Config{Offloads: true, Name: "host0"}) // the name is free again
	if out := r.ns.IP("link", "show", "host0"); !strings.Contains(out, "mtu 1450") {
		t.Errorf("MTU is not the network's\n%s", out)
	}
}

// The interface's MTU follows the network's, unless it was configured.
func TestFollowsMTU(t *testing.T) {
	r := newRig(t)
	n, err := vswitch.NewNetwork(vswitch.Config{VNI: 6, Name: "six"})
	if err != nil {
		t.Fatal(err)
	}
	p := r.open(tap.Config{Offloads: true, Name: "follows", Network: n, Loop: r.loop, Pool: r.pool})
	r.open(tap.Config{Offloads: true, Name: "fixed", Network: n, Loop: r.loop, Pool: r.pool, MTU: 1000})
	n.SetUnderlayMTU(1430)
	for dev, want := range map[string]string{"follows": "mtu 1430", "fixed": "mtu 1000"} {
		if out := r.ns.IP("link", "show", dev); !strings.Contains(out, want) {
			t.Errorf("want %s:\n%s", want, out)
		}
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	n.SetUnderlayMTU(1420) // no follower is left
	if err := p.SetMTU(1000); !errors.Is(err, tap.ErrClosed) {
		t.Errorf("SetMTU after Close: %v", err)
	}
}

// The host's own stack answers ARP, which tests both directions.
func TestFrames(t *testing.T) {
	r := newRig(t)
	p := r.open(tap.Config{Offloads: true, Name: "host0", Addrs: []netip.Prefix{netip.MustParsePrefix("10.1.2.3/24")}})
	me := "\x02\x00\x00\x00\x00\x01"
	arp := "\xff\xff\xff\xff\xff\xff" + me + "\x08\x06\x00\x01\x08\x00\x06\x04\x00\x01" + me + "\x0a\x01\x02\x04" +
		"\x00\x00\x00\x00\x00\x00" + "\x0a\x01\x02\x03"
	hw := p.MAC()
	want := me + string(hw[:]) + "\x08\x06\x00\x01\x08\x00\x06\x04\x00\x02" + string(hw[:]) + "\x0a\x01\x02\x03" + me +
		"\x0a\x01\x02\x04"
	ask := func() {
		t.Helper()
		r.inject(arp)
		for limit := time.After(10 * time.Second); ; {
			select {
			case f := <-r.sink.frames: // the host also sends IPv6 router solicitations
				if f == want {
					return
				}
			case <-limit:
				t.Fatal("no ARP answer")
			}
		}
	}
	ask()
	if e, ok := r.net.Lookup(hw); !ok || e.Port != "host0" {
		t.Errorf("%+v %v", e, ok)
	}
	// Without free buffers frames from the host are dropped and counted; afterwards frames pass again.
	var held []*frame.Buf
	for b := r.pool.Get(); b != nil; b = r.pool.Get() {
		held = append(held, b)
	}
	question := held[0]
	question.Append([]byte(arp))
	r.loop.Do(func() { r.sink.keep = true }) // also takes the buffer that the port still has
	testutil.Eventually(t, "a frame is lost", func() bool {
		r.loop.Do(func() { r.att.Input(r.loop, question, vswitch.Source{}) })
		return p.Attachment().Counters.Dropped(vswitch.NoBuffer) > 0
	})
	r.loop.Do(func() {
		r.sink.keep = false
		for _, b := range append(held, r.sink.kept...) {
			b.Free()
		}
	})
	ask()
	// An interface that is down refuses frames.
	r.ns.IP("link", "set", "host0", "down")
	r.inject(arp)
	if p.Attachment().Counters.Dropped(vswitch.NotReady) == 0 {
		t.Error("frame to an interface that is down was not counted")
	}
	r.ns.IP("link", "set", "host0", "up")
	ask()
}

// The interface is deleted by others: the loop does not spin, and Close still works.
func TestDeleted(t *testing.T) {
	r := newRig(t)
	p := r.open(tap.Config{Offloads: true, Name: "host0"})
	r.ns.IP("link", "del", "host0")
	testutil.Eventually(t, "the loop sleeps again", func() bool {
		before := r.loop.Stats()
		time.Sleep(5 * time.Millisecond)
		return r.loop.Stats().Rounds-before.Rounds < 5
	})
	r.inject("\xff\xff\xff\xff\xff\xff\x02\x00\x00\x00\x00\x01\x08\x00")
	if n := p.Attachment().Counters.Dropped(vswitch.SendError) +
		p.Attachment().Counters.Dropped(vswitch.NotReady); n == 0 {
		t.Error("frame to a deleted interface was not counted")
	}
}

// Two tenants' hosts and a Linux bridge: a host behind the bridge reaches the tenant's other TAP.
func TestBridgeMember(t *testing.T) {
	nstest.Require(t, "ping", "iputils-ping")
	r := newRig(t)
	other := nstest.New(t, "vm")
	r.ns.IP("link", "add", "bridge0", "type", "bridge")
	r.ns.IP("link", "set", "bridge0", "up")
	nstest.Pair(r.ns, other, "cable", 1450)
	r.ns.IP("link", "set", "cable", "master", "bridge0")
	other.Addr("cable", "10.1.2.4/24")
	r.open(tap.Config{Offloads: true, Name: "member", Bridge: "bridge0"})
	if out := r.ns.IP("link", "show", "member"); !strings.Contains(out, "master bridge0") {
		t.Errorf("not in the bridge:\n%s", out)
	}
	far := nstest.New(t, "far")
	var p *tap.TAP
	far.Do(func() {
		var err error
		if p, err = tap.Open(tap.Config{Offloads: true, Name: "host1", Network: r.net, Loop: r.loop, Pool: r.pool,
			Addrs: []netip.Prefix{netip.MustParsePrefix("10.1.2.5/24")}}); err != nil {
			t.Fatal(err)
		}
	})
	t.Cleanup(func() { p.Close() })
	far.Ping("10.1.2.4", "-s", "1422", "-Mdo")
	other.Ping("10.1.2.5", "-s", "1422", "-Mdo")
}

func TestErrors(t *testing.T) {
	r := newRig(t)
	r.ns.IP("link", "add", "nobridge0", "type", "veth", "peer", "name", "nobridge1")
	r.ns.IP("tuntap", "add", "kept", "mode", "tap")
	for _, c := range []struct {
		c   tap.Config
		is  error
		say string
	}{
		{tap.Config{Offloads: true, Name: ""}, nil, "not an interface name"},
		{tap.Config{Offloads: true, Name: "sixteen-letters-"}, nil, "not an interface name"},
		{tap.Config{Offloads: true, Name: "a/b"}, nil, "not an interface name"},
		{tap.Config{Offloads: true, Name: "tap%d"}, nil, "not an interface name"},
		{tap.Config{Offloads: true, Name: "x", MTU: 1451}, nil, "want 68 to 1450"},
		{tap.Config{Offloads: true, Name: "x", MTU: 20}, nil, "want 68 to 1450"},
		{tap.Config{Offloads: true, Name: "x", MAC: vswitch.MAC{1}}, nil, "group address"},
		{tap.Config{Offloads: true, Name: "x", Bridge: "b", Addrs: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/8")}}, nil,
			"give them to the bridge"},
		{tap.Config{Offloads: true, Name: "x", Addrs: []netip.Prefix{{}}}, nil, "invalid address"},
		{tap.Config{Offloads: true, Name: "x", Bridge: "absent"}, nil, "absent"},
		{tap.Config{Offloads: true, Name: "x", Bridge: "nobridge0"}, nil, "not a bridge"},
		{tap.Config{Offloads: true, Name: "nobridge0"}, tap.ErrExists, "nobridge0"},
		{tap.Config{Offloads: true, Name: "kept"}, tap.ErrExists, "kept"},
		{tap.Config{Offloads: true, Name: "x", Network: r.net}, nil, "required"},
	} {
		p, err := r.try(c.c)
		if err == nil {
			p.Close()
			t.Errorf("%+v was accepted", c.c)
			continue
		}
		if c.is != nil && !errors.Is(err, c.is) || !strings.Contains(err.Error(), c.say) {
			t.Errorf("%v; want %q", err, c.say)
		}
		if r.has("x") {
			t.Fatalf("a failed Open left the interface: %v", err)
		}
	}
	if !r.has("kept") {
		t.Error("Open removed a foreign persistent interface")
	}
	if n := len(r.net.Status().Ports); n != 1 {
		t.Errorf("failed Opens left %d ports", n-1)
	}
}

// Open and Close leak no descriptors.
func TestLeaks(t *testing.T) {
	r := newRig(t)
	open := func() {
		p, err := r.try(tap.Config{Offloads: true, Name: "host0"})
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
	}
	open() // now Go's poller and netlink have their descriptors
	before := nstest.OpenFDs(t)
	for range 5 {
		open()
	}
	if after := nstest.OpenFDs(t); after != before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}
