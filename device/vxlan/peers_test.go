package vxlan_test

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/vnicd/vnicd/device/lfe"
	"github.com/vnicd/vnicd/device/tap"
	"github.com/vnicd/vnicd/device/vxlan/nstest"
)

// openVSwitch runs an Open vSwitch with its datapath in user space, which needs no kernel module, in a namespace.
type openVSwitch struct {
	t   *testing.T
	ns  *nstest.NS
	dir string
}

func newOpenVSwitch(t *testing.T, ns *nstest.NS) *openVSwitch {
	nstest.Require(t, "ovs-vswitchd", "openvswitch-switch")
	nstest.Require(t, "ovs-vsctl", "openvswitch-switch")
	// Sockets have short names only.
	dir, err := os.MkdirTemp("", "vnicd-ovs")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	o := &openVSwitch{t: t, ns: ns, dir: dir}
	db, sock := filepath.Join(dir, "conf.db"), "unix:"+filepath.Join(dir, "db.sock")
	nstest.Run(t, "ovsdb-tool", "create", db, "/usr/share/openvswitch/vswitch.ovsschema")
	env := []string{"env", "OVS_RUNDIR=" + dir, "OVS_LOGDIR=" + dir, "OVS_DBDIR=" + dir}
	ns.Start(env[0], append(env[1:], "ovsdb-server", db, "--remote=p"+sock, "--no-chdir", "--unixctl="+filepath.Join(dir, "db.ctl"))...)
	nstest.Eventually(t, "the OVS database answers", func() bool {
		_, err := ns.Exec("ovs-vsctl", "--timeout=5", "--no-wait", "--db="+sock, "init")
		return err == nil
	})
	ns.Start(env[0], append(env[1:], "ovs-vswitchd", sock, "--no-chdir", "--unixctl="+filepath.Join(dir, "vswitchd.ctl"), "--log-file="+filepath.Join(dir, "vswitchd.log"))...)
	t.Cleanup(func() {
		if t.Failed() {
			b, _ := os.ReadFile(filepath.Join(dir, "vswitchd.log"))
			t.Logf("ovs-vswitchd:\n%s", b[max(0, len(b)-4000):])
		}
	})
	return o
}

// ctl changes the switch's configuration and waits until it is in force.
func (o *openVSwitch) ctl(args ...string) {
	o.t.Helper()
	o.ns.MustExec("ovs-vsctl", append([]string{"--timeout=15", "--db=unix:" + filepath.Join(o.dir, "db.sock")}, args...)...)
}

// Open vSwitch is the remote peer, a VXLAN implementation that is neither ours nor Linux': ping and iperf3 both ways, over IPv4 and IPv6.
func TestOpenVSwitchPeer(t *testing.T) {
	nstest.Require(t, "ping", "iputils-ping")
	nstest.Require(t, "iperf3", "iperf3")
	for _, u := range []struct{ name, local, remote string }{
		{"IPv4", "192.0.2.1", "192.0.2.2"},
		{"IPv6", "2001:db8::1", "2001:db8::2"},
	} {
		t.Run(u.name, func(t *testing.T) {
			a, b := nstest.New(t, "a"), nstest.New(t, "b")
			nstest.Pair(a, b, "under", 1500)
			a.NoOffload("under")
			b.NoOffload("under")
			underlay(a, "under", u.local)
			o := newOpenVSwitch(t, b)
			// The tunnels' bridge has the underlay's address; Open vSwitch looks into the namespace's routes.
			o.ctl("add-br", "phy", "--", "set", "bridge", "phy", "datapath_type=netdev", "--", "add-port", "phy", "under")
			underlay(b, "phy", u.remote)
			b.IP("link", "set", "phy", "up")
			o.ctl("add-br", "tenant", "--", "set", "bridge", "tenant", "datapath_type=netdev", "--", "add-port", "tenant", "vx", "--",
				"set", "interface", "vx", "type=vxlan", "options:key=4711", "options:local_ip="+u.remote, "options:remote_ip="+u.local)
			h := newHost(t, a, newLoops(t, 2), hostConfig{vni: 4711, local: u.local, peers: []string{u.remote}, tap: tap.Config{Name: "tenant",
				Addrs: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24"), netip.MustParsePrefix("fd00::1/64")}}})
			mtu := fmt.Sprint(h.net.MTU())
			b.IP("link", "set", "tenant", "mtu", mtu, "up")
			b.Addr("tenant", "10.0.0.2/24")
			b.Addr("tenant", "fd00::2/64")
			b.NoOffload("tenant")
			full := fmt.Sprint(h.net.MTU() - 28)
			a.Ping("10.0.0.2", "-s", full, "-Mdo")
			b.Ping("10.0.0.1", "-s", full, "-Mdo")
			a.Ping("fd00::2")
			b.Ping("fd00::1")
			b.Start("iperf3", "-s")
			waitListen(t, b, 5201)
			for _, dir := range [][]string{nil, {"-R"}, {"-u", "-b10M", "-l1200"}} {
				a.MustExec("iperf3", append([]string{"-c", "10.0.0.2", "-n4M", "-J"}, dir...)...)
			}
			if s := h.vt.Status(); len(s.Refused) > 0 {
				t.Errorf("refused: %+v", s.Refused)
			}
			if e, ok := h.net.Lookup(macOf(t, b, "tenant")); !ok || e.Kind != "vtep" {
				t.Errorf("the peer's address: %+v %v", e, ok)
			}
		})
	}
}

// Four Linux hosts with vxlan devices are peers of one network, which all know each other: everybody reaches everybody. A frame of one of them
// is not sent on to the others, who have it already.
func TestManyLinuxPeers(t *testing.T) {
	nstest.Require(t, "ping", "iputils-ping")
	const linux = 4
	wire, a := nstest.New(t, "wire"), nstest.New(t, "a")
	wire.IP("link", "add", "sw", "type", "bridge")
	wire.IP("link", "set", "sw", "up")
	join := func(ns *nstest.NS, dev string, i int) {
		nstest.Pair(ns, wire, dev, 1500)
		wire.IP("link", "set", dev, "master", "sw")
		ns.NoOffload(dev)
		ns.Addr(dev, fmt.Sprintf("192.0.2.%d/24", i))
	}
	join(a, "u1", 1)
	var peers []string
	var ends []*nstest.NS
	for i := 2; i < 2+linux; i++ {
		ns, dev := nstest.New(t, "p"), fmt.Sprint("u", i)
		join(ns, dev, i)
		ns.IP("link", "add", "vx", "type", "vxlan", "id", "4711", "dstport", "4789", "local", fmt.Sprint("192.0.2.", i), "dev", dev)
		ns.IP("link", "set", "vx", "up")
		for k := 1; k < 2+linux; k++ {
			if k != i {
				nstest.Run(t, "bridge", "-n", ns.Name, "fdb", "append", "00:00:00:00:00:00", "dev", "vx", "dst", fmt.Sprint("192.0.2.", k))
			}
		}
		ns.Addr("vx", fmt.Sprintf("10.0.0.%d/24", i))
		peers, ends = append(peers, fmt.Sprint("192.0.2.", i)), append(ends, ns)
	}
	h := newHost(t, a, newLoops(t, 2), hostConfig{vni: 4711, local: "192.0.2.1", peers: peers,
		tap: tap.Config{Name: "tenant", Addrs: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24")}}})
	for i, ns := range ends {
		a.Ping(ip(i + 2))
		ns.Ping(ip(1))
		ns.Ping(ip((i+1)%linux + 2))
		if e, ok := h.net.Lookup(macOf(t, ns, "vx")); !ok || e.Kind != "vtep" {
			t.Errorf("peer %d: %+v %v", i, e, ok)
		}
	}
	st := h.net.Status()
	for _, p := range st.Ports {
		if p.Kind == "vtep" && p.InFrames == 0 {
			t.Errorf("%+v", p)
		}
	}
	if st.Flaps != 0 || len(h.vt.Status().Refused) != 0 {
		t.Errorf("%d flaps, refused %+v", st.Flaps, h.vt.Status().Refused)
	}
}

// macOf is the address of an interface.
func macOf(t *testing.T, ns *nstest.NS, dev string) lfe.MAC {
	t.Helper()
	var m lfe.MAC
	b := ns.MustExec("cat", "/sys/class/net/"+dev+"/address")
	if err := m.UnmarshalText([]byte(b[:17])); err != nil {
		t.Fatal(err)
	}
	return m
}
