package evpn

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"reflect"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/vnicd/vnicd/device/testutil"
)

// packets is a Conn on a socket that keeps messages apart.
type packets struct{ net.Conn }

func (p packets) Send(b []byte) error {
	_, err := p.Write(b)
	return err
}

func (p packets) Receive(most int) ([]byte, error) {
	b := make([]byte, most+1)
	n, err := p.Read(b)
	if err == nil && n > most {
		err = errors.New("too long")
	}
	return b[:n], err
}

func connect(t testing.TB) (ends [2]packets) {
	t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_SEQPACKET|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "")
		if ends[i].Conn, err = net.FileConn(f); err != nil {
			t.Fatal(err)
		}
		_ = f.Close()
	}
	return ends
}

// processes runs what another process would as goroutines, again and again.
type processes struct {
	t    *testing.T
	log  hclog.Logger
	open func(Conn, hclog.Logger) (func() error, error)
	// hold, while it is locked, keeps the next process from starting.
	hold sync.Mutex

	mu   sync.Mutex
	now  Conn // the process's end
	runs int
	whys []error // of the ends of serve
}

func newProcesses(t *testing.T, log hclog.Logger, open func(Conn, hclog.Logger) (func() error, error)) *processes {
	return &processes{t: t, log: log, open: open}
}

// run implements Config.Process.
func (p *processes) run(serve func(context.Context, Conn) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var done sync.WaitGroup
	done.Go(func() {
		for ctx.Err() == nil {
			p.hold.Lock()
			ends := connect(p.t)
			p.mu.Lock()
			p.now, p.runs = ends[1], p.runs+1
			p.mu.Unlock()
			p.hold.Unlock()
			var process sync.WaitGroup
			process.Go(func() {
				defer ends[1].Close()
				if run, err := p.open(ends[1], p.log); err == nil {
					_ = run()
				}
			})
			why := serve(ctx, ends[0])
			_ = ends[0].Close()
			process.Wait()
			p.mu.Lock()
			p.whys = append(p.whys, why)
			p.mu.Unlock()
			if len(p.whys) > 1000 {
				p.t.Error("processes without end")
				return
			}
		}
	})
	return func() { cancel(); done.Wait() }
}

// kill ends the process.
func (p *processes) kill() {
	p.mu.Lock()
	defer p.mu.Unlock()
	_ = p.now.Close()
}

// The process ends: with graceful restart, routes stay until the neighbour has sent all of them again, and those that
// were withdrawn meanwhile go then; without, they go at once and come again. The sessions and this host's routes
// return.
func TestProcessEnds(t *testing.T) {
	for _, keep := range []time.Duration{0, 2 * patience} {
		t.Run(keep.String(), func(t *testing.T) {
			f := newFabric(t)
			f.apart = true
			ca, cb := f.config(1, 2), f.config(2, 1)
			ca.RestartTime, cb.RestartTime = keep, keep
			one, two := f.host(1, ca), f.host(2, cb)
			a, b := one.tenant(100, NetworkConfig{}), two.tenant(100, NetworkConfig{})
			a.attach("vm1", hwaddr(1))
			b.attach("vm2", hwaddr(2))
			b.attach("vm3", hwaddr(3))
			testutil.Eventually(t, "routes", func() bool {
				return a.behind(hwaddr(2)) == vtepAddr(2) && a.behind(hwaddr(3)) == vtepAddr(2) &&
					b.behind(hwaddr(1)) == vtepAddr(1)
			})
			one.bgp.hold.Lock()
			one.bgp.kill()
			testutil.Eventually(t, "the session is down", func() bool {
				s := one.s.Status().Sessions
				return len(s) == 1 && s[0].State == "idle" && strings.Contains(s[0].Why, "process")
			})
			testutil.Eventually(t, "the log says what happens to routes", func() bool {
				return strings.Contains(one.log.String(), "BGP sessions lost: their process has ended: routes-kept="+keep.String())
			})
			if keep == 0 {
				testutil.Eventually(t, "routes are removed", func() bool {
					return !a.behind(hwaddr(2)).IsValid() && len(a.peers()) == 0
				})
			} else if a.behind(hwaddr(2)) != vtepAddr(2) || len(a.peers()) != 1 {
				t.Error("routes are removed, though they may stay")
			}
			// Changes meanwhile, on both sides.
			b.net.Port("vm3").Close()
			two.s.Retry()
			testutil.Eventually(t, "the withdrawal", func() bool { _, ok := two.route(hwaddr(3)); return !ok })
			a.attach("vm4", hwaddr(4))
			a.net.Port("vm1").Close()
			one.s.Retry()
			one.bgp.hold.Unlock()
			testutil.Eventually(t, "the session is up", func() bool {
				s := one.s.Status().Sessions
				return len(s) == 1 && s[0].State == "established"
			})
			testutil.Eventually(t, "routes after it", func() bool {
				return a.behind(hwaddr(2)) == vtepAddr(2) && !a.behind(hwaddr(3)).IsValid() &&
					b.behind(hwaddr(4)) == vtepAddr(1) && !b.behind(hwaddr(1)).IsValid()
			})
		})
	}
}

// route returns a MAC's own route of a host.
func (h *host) route(m [6]byte) (RouteStatus, bool) {
	for _, r := range h.s.Routes("net100") {
		if r.MAC == m && !r.Neighbour.IsValid() {
			return r, true
		}
	}
	return RouteStatus{}, false
}

// The neighbour never comes back: kept routes go after the restart time.
func TestProcessEndsForGood(t *testing.T) {
	f := newFabric(t)
	f.apart = true
	c := f.config(1, 9)
	c.RestartTime = time.Second
	h := f.host(1, c)
	x := f.intruder()
	n := h.tenant(100, NetworkConfig{})
	x.serve(vtepAddr(9), 100)
	x.tell(truth(1))
	testutil.Eventually(t, "the route", func() bool { return n.behind(hwaddr(1)) == vtepAddr(9) })
	h.bgp.hold.Lock()
	defer h.bgp.hold.Unlock()
	h.bgp.kill()
	testutil.Eventually(t, "the route is removed",
		func() bool { return !n.behind(hwaddr(1)).IsValid() && len(n.peers()) == 0 })
	if got := len(h.s.Routes("net100")); got != 1 { // its own
		t.Errorf("%d routes are left", got)
	}
}

// A port that cannot be used is an error of New, with its errno, and no process is left.
func TestProcessCannotListen(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	at := l.Addr().(*net.TCPAddr)
	p := newProcesses(t, hclog.NewNullLogger(), Open)
	_, err = New(Config{AS: testAS, RouterID: vtepAddr(1), VTEP: vtepAddr(1), Listen: []netip.Addr{at.AddrPort().Addr()},
		Port: uint16(at.Port), Process: p.run})
	if !errors.Is(err, syscall.EADDRINUSE) || !strings.Contains(err.Error(), "address already in use") {
		t.Errorf("error %v", err)
	}
}

// liar is a process that was taken over: it accepts the configuration and sends what it is told to.
type liar struct {
	*processes
	says chan []byte
}

func newLiar(t *testing.T) *liar {
	l := &liar{says: make(chan []byte)}
	l.processes = newProcesses(t, hclog.NewNullLogger(), func(c Conn, _ hclog.Logger) (func() error, error) {
		if _, err := c.Receive(maxWire); err != nil {
			return nil, err
		}
		return func() error {
			if err := c.Send([]byte{msgOpened}); err != nil {
				return err
			}
			gone := make(chan struct{})
			go func() {
				defer close(gone)
				for {
					if _, err := c.Receive(maxWire); err != nil {
						return
					}
				}
			}()
			for {
				select {
				case <-gone:
					return io.EOF
				case b := <-l.says:
					_ = c.Send(b)
				}
			}
		}, nil
	})
	return l
}

// lied returns a route as the process would send it.
func lied(n int) path {
	return path{nlri: nlri{kind: bgp.EVPN_ROUTE_TYPE_MAC_IP_ADVERTISEMENT, rd: [8]byte{0, 1, 192, 0, 2, 9, 0, 100},
		mac: hwaddr(n)}, used: true, from: netip.AddrFrom4([4]byte{127, 0, 1, 9}), nextHop: vtepAddr(9), vni: 100,
		labelled: true, targets: []RouteTarget{derived(testAS, 100)}}
}

func flood9() path {
	p := lied(0)
	p.kind, p.mac, p.ip = bgp.EVPN_INCLUSIVE_MULTICAST_ETHERNET_TAG, [6]byte{}, vtepAddr(9)
	p.replicates, p.tunnel = true, vtepAddr(9)
	return p
}

// A process that was taken over can do no more than its neighbours: no VTEPs that they may not name, no more routes, no
// VM's MAC. What is no message ends it.
func TestProcessLies(t *testing.T) {
	f := newFabric(t)
	c := f.config(1, 9)
	c.Neighbours[0].NextHops = []netip.Prefix{netip.PrefixFrom(vtepAddr(9), 32)}
	c.Neighbours[0].MaxRoutes = 50
	l := newLiar(t)
	c.Process = l.run
	h := f.host(1, c)
	n := h.tenant(100, NetworkConfig{MaxEntries: 20})
	n.attach("vm1", hwaddr(1))
	routes := func(edit func(*path), ns ...int) []byte {
		b := []byte{msgPaths}
		for _, i := range ns {
			p := lied(i)
			if edit != nil {
				edit(&p)
			}
			b = putPath(b, &c, &p)
		}
		return b
	}
	base := flood9()
	l.says <- putPath([]byte{msgPaths}, &c, &base)
	l.says <- routes(nil, 50)
	testutil.Eventually(t, "a route that the neighbour may send",
		func() bool { return n.behind(hwaddr(50)) == vtepAddr(9) })

	l.says <- routes(func(p *path) { p.nextHop = vtepAddr(7) }, 51)
	l.says <- routes(func(p *path) { p.nextHop = vtepAddr(1) }, 52)
	l.says <- routes(func(p *path) { p.vni = 101 }, 53)
	l.says <- routes(func(p *path) { p.ip, p.hasIP = netip.AddrFrom4([4]byte{224, 0, 0, 1}), true }, 54)
	l.says <- routes(func(p *path) { p.seq, p.sticky = 1<<32-1, true }, 1) // the VM's MAC
	l.says <- routes(nil, 55)
	testutil.Eventually(t, "the last route", func() bool { return n.behind(hwaddr(55)) == vtepAddr(9) })
	for i := 51; i < 55; i++ {
		if _, ok := n.net.Lookup(hwaddr(i)); ok {
			t.Errorf("route %d was installed", i)
		}
	}
	if e, ok := n.net.Lookup(hwaddr(1)); !ok || e.Port != "vm1" {
		t.Errorf("the VM's MAC is at %+v", e)
	}
	for _, why := range []error{errForeign, errOwn, errVNI, errIP} {
		if h.s.Status().Refused[why.Error()] == 0 {
			t.Errorf("%v: not counted", why)
		}
	}
	// Too many.
	for i := range 400 {
		l.says <- routes(nil, 1000+3*i, 1001+3*i, 1002+3*i)
	}
	testutil.Eventually(t, "routes beyond the limit are refused", func() bool {
		return h.s.Status().Refused[errLimit.Error()] >= 1100
	})
	if got := len(h.s.Routes("net100")); got > 50+10 {
		t.Errorf("%d routes are kept", got)
	}
	if s := h.s.Status().Networks[0]; s.MACs != 20 {
		t.Errorf("%d MACs are installed", s.MACs)
	}
	h.s.mu.Lock()
	held := h.s.held[c.Neighbours[0].Address]
	h.s.mu.Unlock()
	if held != 50 {
		t.Errorf("%d routes are counted", held)
	}

	// What no process of ours sends.
	u16 := binary.BigEndian.AppendUint16
	good := routes(nil, 60)
	for what, b := range map[string][]byte{
		"nothing known":        {'?'},
		"truncated":            good[:len(good)-1],
		"trailing":             append(bytes.Clone(good), 0),
		"unknown flags":        append(u16([]byte{msgPaths}, flagsEnd), good[3:]...),
		"unknown neighbour":    u16([]byte{msgEnded}, 1),
		"no neighbour":         u16([]byte{msgEnded}, noNeighbour),
		"states":               append(u16([]byte{msgSessions}, 0), 99),
		"too long":             make([]byte, maxWire+1),
		"a second opening":     {msgOpened},
		"IP that is no IP":     routes(func(p *path) { p.ip, p.hasIP = netip.AddrFrom4([4]byte{224, 0, 0, 1}), false }, 61),
		"a type that is none":  routes(func(p *path) { p.kind = 9 }, 61),
		"a foreign community":  routes(func(p *path) { p.targets = []RouteTarget{{9, 9}} }, 61),
		"refusal of truncated": {msgRefused, 1},
	} {
		l.mu.Lock()
		before := len(l.whys)
		l.mu.Unlock()
		l.says <- b
		testutil.Eventually(t, "the end of the process after: "+what, func() bool {
			l.mu.Lock()
			defer l.mu.Unlock()
			return len(l.whys) == before+1 && l.whys[before] != nil
		})
	}
	// It refuses this host's own routes for ever, and answers what was not asked.
	a := advert{own: own{rd: n.src.rd, vni: 100, claim: claim{mac: hwaddr(1)}}}
	for range 100 {
		l.says <- putAdvert([]byte{msgRefused}, &a)
		l.says <- append(binary.BigEndian.AppendUint32([]byte{msgListed}, 7), 1)
	}
	l.says <- putPath([]byte{msgPaths}, &c, &base)
	l.says <- routes(nil, 70)
	testutil.Eventually(t, "the speaker goes on", func() bool { return n.behind(hwaddr(70)) == vtepAddr(9) })
}

// FuzzProcess: whatever the process sends, routes stay within the limits, and valid messages are read as they were
// written.
func FuzzProcess(f *testing.F) {
	c := Config{AS: testAS, RouterID: vtepAddr(1), VTEP: vtepAddr(1), Log: hclog.NewNullLogger(), Clock: time.Now,
		Neighbours: []Neighbour{{Address: netip.AddrFrom4([4]byte{127, 0, 1, 9}), AS: testAS, MaxRoutes: 4}}}
	one, two := lied(1), flood9()
	gone := lied(1)
	gone.withdrawn = true
	b := []byte{msgPaths}
	for _, p := range []*path{&one, &two, &gone} {
		b = putPath(b, &c, p)
	}
	f.Add(b)
	f.Add(append(append(binary.BigEndian.AppendUint32([]byte{msgListed}, 1), 1), b[1:]...))
	f.Add(encodeSessions(&c, []SessionStatus{{Neighbour: c.Neighbours[0].Address, State: "established",
		Since: time.Unix(1, 2), Why: "x"}}))
	f.Add(putAdvert([]byte{msgRefused}, &advert{own: own{vni: 100, claim: claim{mac: hwaddr(1)}},
		targets: []RouteTarget{derived(testAS, 100)}}))
	f.Add([]byte{msgEnded, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		s := &Speaker{cfg: c, log: c.Log, clock: time.Now, networks: map[uint32]*Network{}, routes: map[nlri]*route{},
			held: map[netip.Addr]int{}, swept: map[netip.Addr]uint64{}, ignored: map[string]uint64{},
			kick: make(chan struct{}, 1)}
		r := newRemote(s)
		if _, err := r.take(b); err != nil {
			return
		}
		if len(r.sessions()) > len(c.Neighbours) || len(s.ignored) > 30 {
			t.Errorf("sessions %v, refusals %v", r.sessions(), s.ignored)
		}
		if b[0] != msgPaths {
			return
		}
		for in := (reader{b: b[1:]}); len(in.b) > 0; {
			p := in.path(&c)
			if p.from.IsValid() && p.from != c.Neighbours[0].Address {
				t.Errorf("a route of %v", p.from)
			}
			again := reader{b: putPath(nil, &c, &p)}
			if q := again.path(&c); again.end() != nil || !reflect.DeepEqual(p, q) {
				t.Errorf("%+v is read as %+v", p, q)
			}
		}
	})
}
