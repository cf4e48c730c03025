package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/ethernet/overlay/evpn"
	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/testutil/nstest"
	"github.com/vnicd/vnicd/device/testutil/testlog"
)

// fabric is four hosts on one wire: two vnicds, a Linux host with FRR and the kernel's VXLAN, and an FRR as route
// reflector. Endpoint i is a namespace with the address 10.0.0.i, plugged into the tenant's bridge of a host.
type fabric struct {
	t       *testing.T // the current subtest
	all     *testing.T // owns the hosts
	wire    *nstest.NS
	hosts   map[string]*fabricHost
	binary  string
	dir     string
	reflect *fabricHost
	dumped  bool
}

type fabricHost struct {
	*fabric
	name    string
	addr    string
	ns      *nstest.NS
	dir     string
	daemons []*daemonProcess
}

type daemonProcess struct {
	cmd   *exec.Cmd
	log   *testlog.Log
	ended chan struct{}
}

// kill ends a process without a clean shutdown.
func (p *daemonProcess) kill(sig syscall.Signal) {
	_ = p.cmd.Process.Signal(sig)
	<-p.ended
}

// fabricPatience bounds each wait: sessions take several seconds to come back.
const fabricPatience = 90 * time.Second

func (f *fabric) eventually(what string, ok func() bool) {
	f.t.Helper()
	testutil.Eventually(f.t, what, ok)
}

const (
	frrLib  = "/usr/lib/frr/"
	bgpHold = 9 // seconds
)

func newFabric(t *testing.T) *fabric {
	t.Helper()
	f := newWire(t, "192.0.2.%d/24", "one", "two", "linux", "rr")
	f.reflect = f.hosts["rr"]
	f.reflect.frr()
	f.hosts["linux"].vxlan()
	f.hosts["linux"].frr()
	f.hosts["one"].vnicd()
	f.hosts["two"].vnicd()
	return f
}

// newWire makes hosts on one wire, without daemons. addr is a format for the host's number.
func newWire(t *testing.T, addr string, names ...string) *fabric {
	t.Helper()
	nstest.Require(t, "vtysh", "frr")
	f := &fabric{t: t, all: t, wire: nstest.New(t, "wire"), hosts: map[string]*fabricHost{}}
	dir, err := os.MkdirTemp("/tmp", "vnicd-evpn-") // a socket's path must be short
	if err != nil {
		t.Fatal(err)
	}
	f.dir = dir
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	f.binary = filepath.Join(dir, "vnicd")
	testutil.InstallProgram(t, os.Args[0], f.binary)
	f.wire.IP("link", "add", "sw", "type", "bridge")
	f.wire.IP("link", "set", "sw", "up")
	for i, name := range names {
		at := netip.MustParsePrefix(fmt.Sprintf(addr, i+1))
		h := &fabricHost{fabric: f, name: name, addr: at.Addr().String(), ns: nstest.New(t, name),
			dir: filepath.Join(dir, name)}
		if err := os.Mkdir(h.dir, 0o777); err != nil {
			t.Fatal(err)
		}
		f.wire.IP("link", "add", name, "type", "veth", "peer", "name", "under", "netns", h.ns.Name)
		f.wire.IP("link", "set", name, "master", "sw", "up")
		h.ns.IP("link", "set", "under", "up")
		h.ns.Addr("under", at.String())
		// Real NICs do this; veth leaves the checksums of encapsulated packets unfinished.
		h.ns.MustExec("ethtool", "-K", "under", "tx", "off")
		if name != "rr" {
			h.ns.IP("link", "add", "tenant", "mtu", "1450", "type", "bridge")
			h.ns.IP("link", "set", "tenant", "up")
		}
		f.hosts[name] = h
	}
	return f
}

func (f *fabric) dump() {
	for _, h := range f.hosts {
		f.t.Logf("%s: fdb\n%s", h.name, h.try("bridge", "fdb", "show"))
		for _, p := range h.daemons {
			log := p.log.String()
			f.t.Logf("%s: %s\n%s", h.name, p.cmd.Args[len(p.cmd.Args)-1], log[max(0, len(log)-8000):])
		}
		if h.name == "one" || h.name == "two" {
			var out bytes.Buffer
			Main("test", []string{"-c", h.dir + "/vnicd.yaml", "evpn"}, &out, &out)
			Main("test", []string{"-c", h.dir + "/vnicd.yaml", "evpn", "routes"}, &out, &out)
			Main("test", []string{"-c", h.dir + "/vnicd.yaml", "fdb"}, &out, &out)
			f.t.Logf("%s: %s", h.name, out.String())
		} else {
			f.t.Logf("%s: %s", h.name, h.vtysh("show bgp l2vpn evpn"))
		}
	}
}

func (h *fabricHost) try(argv ...string) string {
	out, err := h.ns.Exec(argv[0], argv[1:]...)
	if err != nil {
		return out + err.Error()
	}
	return out
}

// start starts a daemon of the host.
func (h *fabricHost) start(env []string, argv ...string) *daemonProcess {
	h.t.Helper()
	p := &daemonProcess{cmd: h.ns.Command(context.Background(), argv[0], argv[1:]...), log: &testlog.Log{},
		ended: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), env...)
	p.cmd.Stdout, p.cmd.Stderr = p.log, p.log
	if err := p.cmd.Start(); err != nil {
		h.t.Fatal(err)
	}
	go func() {
		_ = p.cmd.Wait()
		close(p.ended)
	}()
	h.all.Cleanup(func() { p.kill(syscall.SIGKILL) })
	h.all.Cleanup(func() { // runs before anything is killed
		if h.all.Failed() && !h.dumped {
			h.dumped = true
			h.dump()
		}
	})
	h.daemons = append(h.daemons, p)
	return p
}

const bgpPassword = "between-us"

// frr starts FRR: a reflector without kernel routes, or a host that serves its kernel's VXLAN devices.
func (h *fabricHost) frr() {
	h.t.Helper()
	var b strings.Builder
	fmt.Fprintf(&b,
		"router bgp 65001\n bgp router-id %s\n no bgp default ipv4-unicast\n bgp graceful-restart\n bgp graceful-restart preserve-fw-state\n bgp graceful-restart restart-time 12\n", h.addr)
	neighbours := []string{h.reflectAddr()}
	if h.name == "rr" {
		neighbours = []string{"192.0.2.1", "192.0.2.2", "192.0.2.3"}
	}
	for _, a := range neighbours {
		fmt.Fprintf(&b,
			" neighbor %s remote-as 65001\n neighbor %s password %s\n neighbor %s timers 3 %d\n neighbor %s timers connect 2\n",
			a, a, bgpPassword, a, bgpHold, a)
	}
	b.WriteString(" address-family l2vpn evpn\n")
	for _, a := range neighbours {
		fmt.Fprintf(&b, "  neighbor %s activate\n", a)
		if h.name == "rr" {
			fmt.Fprintf(&b, "  neighbor %s route-reflector-client\n", a)
		}
	}
	if h.name != "rr" {
		b.WriteString("  advertise-all-vni\n")
	}
	b.WriteString(" exit-address-family\n")
	nstest.Run(h.t, "chown", "frr:frr", h.dir) // the user of FRR's daemons
	for name, text := range map[string]string{"bgpd": b.String(), "zebra": ""} {
		if err := os.WriteFile(filepath.Join(h.dir, name+".conf"), []byte(text), 0o644); err != nil {
			h.t.Fatal(err)
		}
	}
	if h.name != "rr" {
		h.program("zebra")
		h.eventually("zebra", func() bool { _, err := os.Stat(h.dir + "/zserv.api"); return err == nil })
	}
	h.bgpd()
}

func (h *fabricHost) reflectAddr() string { return "192.0.2.4" }

func (h *fabricHost) bgpd() *daemonProcess {
	if h.name == "rr" {
		return h.program("bgpd", "-Z")
	}
	return h.program("bgpd")
}

func (h *fabricHost) program(name string, more ...string) *daemonProcess {
	h.t.Helper()
	argv := append([]string{frrLib + name, "--vty_socket", h.dir, "-z", h.dir + "/zserv.api", "-i", h.dir + "/" + name +
		".pid", "-f", h.dir + "/" + name + ".conf",
		"--log", "stdout", "-P", "0"}, more...)
	return h.start(nil, argv...)
}

func (h *fabricHost) vtysh(command string) string {
	return h.try("vtysh", "--vty_socket", h.dir, "-c", command)
}

// vxlan makes the kernel's VXLAN device without learning: FRR fills its forwarding table.
func (h *fabricHost) vxlan() {
	h.ns.IP("link", "add", "vx100", "mtu", "1450", "type", "vxlan", "id", "100", "local", h.addr, "dstport", "4789",
		"nolearning")
	h.ns.IP("link", "set", "vx100", "master", "tenant", "up")
	h.ns.MustExec("bridge", "link", "set", "dev", "vx100", "learning", "off", "flood", "off", "mcast_flood", "on",
		"bcast_flood", "on", "neigh_suppress", "on")
}

func (h *fabricHost) vnicd() *daemonProcess {
	h.t.Helper()
	return h.vnicdWith(fmt.Sprintf("as: 65001, hold-time: %ds, restart-time: 12s, neighbours: [{address: %s, password: %s, ttl-security: 1}]", bgpHold, h.reflectAddr(), bgpPassword))
}

// vnicdWith starts a vnicd with the given evpn section.
func (h *fabricHost) vnicdWith(evpn string) *daemonProcess {
	h.t.Helper()
	text := fmt.Sprintf(`
run-dir: %s
log-level: debug
vtep: {local: %q}
evpn: {%s}
networks:
  - {name: blue, vni: 100, flood-unknown: false, tap: {name: blue0, bridge: tenant}}
  - {name: red, vni: 101, flood-unknown: false}
`, h.dir, h.addr, evpn)
	if err := os.WriteFile(h.dir+"/vnicd.yaml", []byte(text), 0o600); err != nil {
		h.t.Fatal(err)
	}
	p := h.start([]string{asVNICD + "=1"}, h.binary, "-c", h.dir+"/vnicd.yaml", "run")
	h.eventually("vnicd is ready", func() bool { return strings.Contains(p.log.String(), "ready") })
	return p
}

// cli runs vnicd's command line against the host's daemon.
func (h *fabricHost) cli(words ...string) string {
	h.t.Helper()
	var out, errOut bytes.Buffer
	if code := Main("test", append([]string{"-c", h.dir + "/vnicd.yaml"}, words...), &out, &errOut); code != 0 {
		h.t.Fatalf("%s: vnicd %v: %d: %s", h.name, words, code, errOut.String())
	}
	return out.String()
}

// route finds the route of a MAC, without IP address, at a VTEP.
func (h *fabricHost) route(mac vswitch.MAC, vtep string) (r evpn.RouteStatus, ok bool) {
	h.t.Helper()
	var list []evpn.RouteStatus
	if err := json.Unmarshal([]byte(h.cli("evpn", "routes", "-j")), &list); err != nil {
		h.t.Fatal(err)
	}
	for _, r := range list {
		if r.MAC == mac && r.VTEP == netip.MustParseAddr(vtep) && !r.IP.IsValid() {
			return r, true
		}
	}
	return r, false
}

// endpoint is a container of the tenant.
type endpoint struct {
	*fabric
	ns   *nstest.NS
	n    int
	addr string
	mac  vswitch.MAC
	at   *fabricHost
}

func (f *fabric) endpoint(n int, at *fabricHost) *endpoint {
	f.t.Helper()
	e := &endpoint{fabric: f, ns: nstest.New(f.t, fmt.Sprint("end", n)), n: n, addr: fmt.Sprintf("10.0.0.%d", n),
		mac: vswitch.MAC{2, 0, 0, 0, 1, byte(n)}}
	e.ns.IP("link", "add", "eth0", "mtu", "1450", "address", e.mac.String(), "type", "veth", "peer", "name", e.plugName(),
		"mtu", "1450", "netns", at.ns.Name)
	e.ns.IP("link", "set", "eth0", "up")
	e.ns.Addr("eth0", e.addr+"/24")
	e.at = at
	at.ns.IP("link", "set", e.plugName(), "master", "tenant", "up")
	return e
}

func (e *endpoint) plugName() string { return fmt.Sprint("plug", e.n) }

// move moves the endpoint's cable to another host.
func (e *endpoint) move(to *fabricHost) {
	e.t.Helper()
	e.at.ns.IP("link", "set", e.plugName(), "netns", to.ns.Name)
	to.ns.IP("link", "set", e.plugName(), "master", "tenant", "up")
	e.at = to
}

// pinger pings an address continuously and measures the longest gap without an answer.
type pinger struct {
	cmd *exec.Cmd
	log testlog.Log
}

const pingEvery = 20 * time.Millisecond

func (e *endpoint) ping(addr string) *pinger {
	e.t.Helper()
	p := &pinger{cmd: e.ns.Command(context.Background(), "ping", "-n", "-i", fmt.Sprint(pingEvery.Seconds()), addr)}
	p.cmd.Stdout, p.cmd.Stderr = &p.log, &p.log
	if err := p.cmd.Start(); err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(func() { _ = p.cmd.Process.Kill() })
	return p
}

var icmpSeq = regexp.MustCompile(`icmp_seq=(\d+) ttl`)

// answers lists the sequence numbers of the answered pings.
func (p *pinger) answers() (out []int) {
	for _, m := range icmpSeq.FindAllStringSubmatch(p.log.String(), -1) {
		n, _ := strconv.Atoi(m[1])
		out = append(out, n)
	}
	return out
}

// longest is the longest time without an answer.
func (p *pinger) longest() time.Duration {
	last, gap := 0, 0
	for _, n := range p.answers() {
		gap = max(gap, n-last-1)
		last = max(last, n)
	}
	return time.Duration(gap) * pingEvery
}

// goesOn waits for more answers.
func (p *pinger) goesOn(f *fabric, what string) {
	f.t.Helper()
	n := len(p.answers())
	f.eventually(what, func() bool { return len(p.answers()) > n+10 })
}

func (p *pinger) stop() {
	_ = p.cmd.Process.Signal(syscall.SIGINT)
	_ = p.cmd.Wait()
}

// talker is a TCP connection with continuous requests and answers.
type talker struct {
	ends    [2]net.Conn
	done    sync.WaitGroup
	answers atomic.Int64
	longest atomic.Int64 // nanoseconds without an answer
}

func (e *endpoint) talk(to *endpoint) *talker {
	e.t.Helper()
	x := &talker{}
	var l net.Listener
	var err error
	to.ns.Do(func() { l, err = net.Listen("tcp", to.addr+":7000") })
	if err != nil {
		e.t.Fatal(err)
	}
	defer l.Close()
	e.ns.Do(func() { x.ends[0], err = net.DialTimeout("tcp", l.Addr().String(), fabricPatience) })
	if err != nil {
		e.t.Fatal(err)
	}
	if x.ends[1], err = l.Accept(); err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(x.stop)
	x.done.Go(func() { _, _ = io.Copy(x.ends[1], x.ends[1]) })
	x.done.Go(func() {
		b := make([]byte, 1)
		for last := time.Now(); ; time.Sleep(pingEvery) {
			if _, err := x.ends[0].Write(b); err != nil {
				return
			}
			if _, err := x.ends[0].Read(b); err != nil {
				return
			}
			now := time.Now()
			x.longest.Store(max(x.longest.Load(), int64(now.Sub(last))))
			x.answers.Add(1)
			last = now
		}
	})
	return x
}

func (x *talker) goesOn(f *fabric, what string) {
	f.t.Helper()
	n := x.answers.Load()
	f.eventually("TCP: "+what, func() bool { return x.answers.Load() > n+10 })
}

func (x *talker) stop() {
	for _, c := range x.ends {
		_ = c.Close()
	}
	x.done.Wait()
}

// Two vnicds and a Linux host with FRR, through a route reflector: all endpoints reach each other although unknown
// unicast is not flooded.
func TestEVPN(t *testing.T) {
	t.Parallel() // it mostly waits
	f := newFabric(t)
	one, two, linux := f.hosts["one"], f.hosts["two"], f.hosts["linux"]
	a, b, c := f.endpoint(11, one), f.endpoint(12, two), f.endpoint(13, linux)
	for _, x := range []*endpoint{a, b, c} {
		for _, y := range []*endpoint{a, b, c} {
			if x != y {
				f.eventually(fmt.Sprintf("%s answers %s", y.addr, x.addr),
					func() bool { _, err := x.ns.Exec("ping", "-c1", "-W1", y.addr); return err == nil })
			}
		}
	}
	f.eventually("FRR has our routes", func() bool {
		s := linux.vtysh("show bgp l2vpn evpn")
		return strings.Contains(s, "[3]:[0]:[32]:["+one.addr+"]") &&
			strings.Contains(s, "[2]:[0]:[48]:["+a.mac.String()+"]") &&
			strings.Contains(s, "[2]:[0]:[48]:["+b.mac.String()+"]:[32]:["+b.addr+"]")
	})
	f.eventually("FRR uses them", func() bool {
		s := linux.vtysh("show evpn mac vni 100")
		return regexp.MustCompile(a.mac.String() + ` +remote +.*` + one.addr).MatchString(s)
	})
	f.eventually("we have FRR's", func() bool {
		r, ok := one.route(c.mac, linux.addr)
		return ok && r.Active && r.Neighbour.String() == f.reflect.addr
	})
	t.Logf("vnicd evpn on host one:\n%s%s", one.cli("evpn"), one.cli("evpn", "routes"))

	t.Run("moves", func(t *testing.T) { f.moves(t, a, c) })
	t.Run("restarts", func(t *testing.T) { f.restarts(t, a, b, c) })
	t.Run("process", func(t *testing.T) { f.process(t, a, b, c) })
	t.Run("partition", func(t *testing.T) { f.partition(t, b, c) })
}

// moves moves an endpoint through all hosts during ping and TCP.
func (f *fabric) moves(t *testing.T, e, from *endpoint) {
	f.t = t
	defer func() { f.t = f.all }()
	x := from.talk(e) // one connection for all moves
	defer x.stop()
	for _, to := range []*fabricHost{f.hosts["two"], f.hosts["linux"], f.hosts["one"]} {
		old := e.at
		var before evpn.RouteStatus
		f.eventually("its route is known at "+old.name, func() (ok bool) {
			before, ok = f.hosts["one"].route(e.mac, old.addr)
			return ok
		})
		p := from.ping(e.addr)
		p.goesOn(f, "ping before the move")
		x.goesOn(f, "before the move")
		x.longest.Store(0)
		e.move(to)
		// The endpoint announces itself, as a resumed VM does.
		_, _ = e.ns.Exec("ping", "-c1", "-W1", "-b", "10.0.0.255") // broadcasts get no answer
		p.goesOn(f, "ping after the move from "+old.name+" to "+to.name)
		x.goesOn(f, "after the move from "+old.name+" to "+to.name)
		p.stop()
		t.Logf("%s moved from %s to %s: no answer to ping for %v, on the TCP connection for %v", e.addr, old.name, to.name,
			p.longest(), time.Duration(x.longest.Load()).Round(time.Millisecond))
		for _, h := range []*fabricHost{f.hosts["one"], f.hosts["two"]} {
			f.eventually("its route is gone at "+old.name, func() bool { _, stays := h.route(e.mac, old.addr); return !stays })
			var after evpn.RouteStatus
			f.eventually("it is used at "+to.name, func() (ok bool) {
				after, ok = h.route(e.mac, to.addr)
				return ok && after.Active
			})
			// FRR starts a new sequence if the old route is gone before it learns the address.
			if to.name != "linux" && after.Sequence <= before.Sequence {
				t.Errorf("sequence number %d at %s, %d at %s", before.Sequence, old.name, after.Sequence, to.name)
			}
		}
		f.eventually("FRR uses the new place alone", func() bool {
			s := f.hosts["linux"].vtysh("show evpn mac vni 100 mac " + e.mac.String())
			if to.name == "linux" {
				return strings.Contains(s, e.plugName()) && !strings.Contains(s, "Remote VTEP")
			}
			return strings.Contains(s, "Remote VTEP: "+to.addr)
		})
	}
}

// restarts kills the reflector and a vnicd.
func (f *fabric) restarts(t *testing.T, a, b, c *endpoint) {
	f.t = t
	defer func() { f.t = f.all }()
	one, two := f.hosts["one"], f.hosts["two"]

	// The reflector crashes. Between vnicds its routes survive (graceful restart); FRR does not keep routes of this
	// address family.
	p := a.ping(b.addr)
	p.goesOn(f, "ping before the crash")
	f.reflect.daemons[0].kill(syscall.SIGKILL)
	f.eventually("the session is down", func() bool { return !strings.Contains(one.cli("evpn"), "established") })
	if r, ok := two.route(c.mac, f.hosts["linux"].addr); !ok || !r.Active {
		t.Errorf("the route did not outlive the reflector: %+v %v", r, ok)
	}
	for range 3 {
		p.goesOn(f, "ping without a reflector")
	}
	if gap := p.longest(); gap > 500*time.Millisecond {
		t.Errorf("without a reflector: no answer for %v", gap)
	}
	f.reflect.bgpd()
	for _, h := range []*fabricHost{one, two} {
		f.eventually("the session is up", func() bool { return strings.Contains(h.cli("evpn"), "established") })
	}
	p.goesOn(f, "ping with the new reflector")
	p.stop()
	t.Logf("reflector killed and started again under ping: no answer for %v", p.longest())
	f.eventually("the routes are advertised again", func() bool {
		r, ok := two.route(c.mac, f.hosts["linux"].addr)
		return ok && r.Active
	})

	// Each of the other hosts crashes and comes back.
	linux := f.hosts["linux"]
	for _, x := range []struct {
		host  *fabricHost
		from  *endpoint
		to    *endpoint
		died  *daemonProcess
		again func() *daemonProcess
		asked *fabricHost // has its routes
	}{
		{two, c, b, two.daemons[0], two.vnicd, one},
		{one, c, a, one.daemons[0], one.vnicd, two},
		{linux, a, c, linux.daemons[1], linux.bgpd, one}, // zebra keeps running
	} {
		p = x.from.ping(x.to.addr)
		p.goesOn(f, "ping before the crash")
		x.died.kill(syscall.SIGKILL)
		x.again()
		p.goesOn(f, "ping after the crash")
		p.stop()
		t.Logf("speaker of %s killed and started again under ping: no answer for %v", x.host.name, p.longest())
		f.eventually("its routes are there", func() bool {
			r, ok := x.asked.route(x.to.mac, x.host.addr)
			return ok && r.Active
		})
	}
}

// process kills the process that runs a vnicd's BGP: the daemon, its tunnels and its routes stay, and the session
// returns.
func (f *fabric) process(t *testing.T, a, b, c *endpoint) {
	f.t = t
	defer func() { f.t = f.all }()
	one := f.hosts["one"]
	d := one.daemons[len(one.daemons)-1]
	x := a.talk(b)
	defer x.stop()
	x.goesOn(f, "before the end of the process")
	for range 2 {
		bgp := bgpProcess(t, d)
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", bgp))
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range []string{"Uid:\t65534\t65534\t65534\t65534", "NoNewPrivs:\t1", "Seccomp:\t2"} {
			if !strings.Contains(string(status), l+"\n") {
				t.Errorf("the process has no %q: %s", l, status)
			}
		}
		if err := syscall.Kill(bgp, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		f.eventually("the session is down", func() bool { return !strings.Contains(one.cli("evpn"), "established") })
		if r, ok := one.route(c.mac, f.hosts["linux"].addr); !ok || !r.Active {
			t.Errorf("the route has gone with the process: %+v %v", r, ok)
		}
		f.eventually("the session is up", func() bool { return strings.Contains(one.cli("evpn"), "established") })
		f.eventually("our routes are there", func() bool {
			r, ok := f.hosts["two"].route(a.mac, one.addr)
			return ok && r.Active
		})
		x.goesOn(f, "with the next process")
		if bgpProcess(t, d) == bgp {
			t.Error("it is the same process")
		}
	}
	t.Logf("BGP's process killed twice under TCP: no answer for %v", time.Duration(x.longest.Load()))
	select {
	case <-d.ended:
		t.Error("the daemon has ended")
	default:
	}
}

func (f *fabric) partition(t *testing.T, b, c *endpoint) {
	f.t = t
	defer func() { f.t = f.all }()
	one, two := f.hosts["one"], f.hosts["two"]
	f.wire.IP("link", "set", "two", "down")
	f.eventually("host two's routes are gone", func() bool { _, ok := one.route(b.mac, two.addr); return !ok })
	f.eventually("host two has no routes", func() bool {
		_, ok := two.route(c.mac, f.hosts["linux"].addr)
		return !ok
	})
	f.wire.IP("link", "set", "two", "up")
	f.eventually("host two is back", func() bool { r, ok := one.route(b.mac, two.addr); return ok && r.Active })
	f.eventually("host two's endpoint answers", func() bool {
		_, err := c.ns.Exec("ping", "-c1", "-W1", b.addr)
		return err == nil
	})
}
