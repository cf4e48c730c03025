package vxlan_test

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/vnicd/vnicd/device/ethernet/tap"
	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/ethernet/vxlan"
	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/testutil/nstest"
)

// openVSwitch is an Open vSwitch with a userspace datapath, which needs no kernel module, in a namespace.
type openVSwitch struct {
	t   *testing.T
	ns  *nstest.NS
	dir string
}

func newOpenVSwitch(t *testing.T, ns *nstest.NS) *openVSwitch {
	nstest.Require(t, "ovs-vswitchd", "openvswitch-switch")
	nstest.Require(t, "ovs-vsctl", "openvswitch-switch")
	// Socket paths must be short.
	dir, err := os.MkdirTemp("", "vnicd-ovs")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	o := &openVSwitch{t: t, ns: ns, dir: dir}
	db, sock := filepath.Join(dir, "conf.db"), "unix:"+filepath.Join(dir, "db.sock")
	nstest.Run(t, "ovsdb-tool", "create", db, "/usr/share/openvswitch/vswitch.ovsschema")
	env := []string{"env", "OVS_RUNDIR=" + dir, "OVS_LOGDIR=" + dir, "OVS_DBDIR=" + dir}
	ns.Start(env[0], append(env[1:], "ovsdb-server", db, "--remote=p"+sock, "--no-chdir", "--unixctl="+
		filepath.Join(dir, "db.ctl"))...)
	testutil.Eventually(t, "the OVS database answers", func() bool {
		_, err := ns.Exec("ovs-vsctl", "--timeout=5", "--no-wait", "--db="+sock, "init")
		return err == nil
	})
	ns.Start(env[0], append(env[1:], "ovs-vswitchd", sock, "--no-chdir", "--unixctl="+filepath.Join(dir, "vswitchd.ctl"),
		"--log-file="+filepath.Join(dir, "vswitchd.log"))...)
	t.Cleanup(func() {
		if t.Failed() {
			b, _ := os.ReadFile(filepath.Join(dir, "vswitchd.log"))
			t.Logf("ovs-vswitchd:\n%s", b[max(0, len(b)-4000):])
		}
	})
	return o
}

// ctl changes the switch's configuration and waits until it is applied.
func (o *openVSwitch) ctl(args ...string) {
	o.t.Helper()
	o.ns.MustExec("ovs-vsctl", append([]string{"--timeout=15", "--db=unix:" + filepath.Join(o.dir, "db.sock")},
		args...)...)
}

// The peer is Open vSwitch, a VXLAN implementation that is neither ours nor Linux's: ping and iperf3 both ways, tagged
// frames, jumbo frames, over IPv4 and IPv6.
func TestOpenVSwitchPeer(t *testing.T) {
	nstest.Require(t, "ping", "iputils-ping")
	nstest.Require(t, "iperf3", "iperf3")
	for _, u := range wires {
		t.Run(u.name, func(t *testing.T) {
			a, b, guest := nstest.New(t, "a"), nstest.New(t, "b"), nstest.New(t, "g")
			nstest.Pair(a, b, "under", u.mtu)
			a.NoOffload("under")
			b.NoOffload("under")
			local, remote := u.addr(1), u.addr(2)
			underlay(a, "under", local)
			o := newOpenVSwitch(t, b)
			// The tunnels' bridge has the underlay's address; Open vSwitch uses the namespace's routes.
			o.ctl("add-br", "phy", "--", "set", "bridge", "phy", "datapath_type=netdev", "--", "add-port", "phy", "under")
			underlay(b, "phy", remote)
			b.IP("link", "set", "phy", "mtu", fmt.Sprint(u.mtu), "up")
			o.ctl("add-br", "tenant", "--", "set", "bridge", "tenant", "datapath_type=netdev", "--", "add-port", "tenant", "vx",
				"--",
				"set", "interface", "vx", "type=vxlan", "options:key=4711", "options:local_ip="+remote, "options:remote_ip="+local)
			h := newHost(t, a, newLoops(t, 2), hostConfig{vni: 4711, local: local, peers: []string{remote},
				tap: tap.Config{Offloads: true, Name: "tenant", Addrs: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24"),
					netip.MustParsePrefix("fd00::1/64")}}})
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
			for _, dir := range [][]string{nil, {"-R"}, {"-u", "-b10M", "-l1200"}} {
				runIperf(t, a, "10.0.0.2", append(dir, "-n4M")...)
			}
			nstest.Pair(guest, b, "guest", u.inner())
			guest.NoOffload("guest")
			o.ctl("add-port", "tenant", "guest")
			tagged(t, h, packetSocket(t, a, "tenant"), packetSocket(t, guest, "guest"), 2)
			if s := h.vt.Status(); len(s.Refused) > 0 {
				t.Errorf("refused: %+v", s.Refused)
			}
			if e, ok := h.net.Lookup(macOf(t, b, "tenant")); !ok || e.Kind != "vtep" {
				t.Errorf("the peer's address: %+v %v", e, ok)
			}
		})
	}
}

// Four Linux hosts with vxlan devices are the peers of one network and know each other: full reachability with tagged
// and with large frames. A frame from one of them is not sent on to the others, which have it already.
func TestManyLinuxPeers(t *testing.T) {
	nstest.Require(t, "ping", "iputils-ping")
	const linux = 4
	for _, u := range wires {
		t.Run(u.name, func(t *testing.T) {
			wire, a := nstest.New(t, "wire"), nstest.New(t, "a")
			wire.IP("link", "add", "sw", "mtu", fmt.Sprint(u.mtu), "type", "bridge")
			wire.IP("link", "set", "sw", "up")
			join := func(ns *nstest.NS, dev string, i int) {
				nstest.Pair(ns, wire, dev, u.mtu)
				wire.IP("link", "set", dev, "master", "sw")
				ns.NoOffload(dev)
				underlay(ns, dev, u.addr(i))
			}
			join(a, "u1", 1)
			var peers []string
			var ends []*nstest.NS
			for i := 2; i < 2+linux; i++ {
				ns, dev := nstest.New(t, "p"), fmt.Sprint("u", i)
				join(ns, dev, i)
				ns.IP("link", "add", "vx", "type", "vxlan", "id", "4711", "dstport", "4789", "local", u.addr(i), "dev", dev)
				ns.IP("link", "set", "vx", "up")
				for k := 1; k < 2+linux; k++ {
					if k != i {
						nstest.Run(t, "bridge", "-n", ns.Name, "fdb", "append", "00:00:00:00:00:00", "dev", "vx", "dst", u.addr(k))
					}
				}
				ns.Addr("vx", fmt.Sprintf("10.0.0.%d/24", i))
				peers, ends = append(peers, u.addr(i)), append(ends, ns)
			}
			h := newHost(t, a, newLoops(t, 2), hostConfig{vni: 4711, local: u.addr(1), peers: peers,
				tap: tap.Config{Offloads: true, Name: "tenant", Addrs: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24")}}})
			full := fmt.Sprint(u.inner() - 28)
			ours := packetSocket(t, a, "tenant")
			for i, ns := range ends {
				a.Ping(ip(i+2), "-s", full, "-Mdo")
				ns.Ping(ip(1), "-s", full, "-Mdo")
				ns.Ping(ip((i+1)%linux + 2))
				if e, ok := h.net.Lookup(macOf(t, ns, "vx")); !ok || e.Kind != "vtep" {
					t.Errorf("peer %d: %+v %v", i, e, ok)
				}
				tagged(t, h, ours, packetSocket(t, ns, "vx"), byte(i))
			}
			st := h.net.Status()
			for _, p := range st.Ports {
				if p.Kind == "vtep" && p.InFrames == 0 {
					t.Errorf("%+v", p)
				}
			}
			// The peers' kernels may have sent frames before our VTEP had its network.
			refused := slices.DeleteFunc(h.vt.Status().Refused,
				func(r vxlan.Refused) bool { return r.Reason == vswitch.UnknownVNI.String() })
			if st.Flaps != 0 || len(refused) != 0 {
				t.Errorf("%d flaps, refused %+v", st.Flaps, refused)
			}
		})
	}
}

// macOf returns an interface's address.
func macOf(t *testing.T, ns *nstest.NS, dev string) vswitch.MAC {
	t.Helper()
	var m vswitch.MAC
	b := ns.MustExec("cat", "/sys/class/net/"+dev+"/address")
	if err := m.UnmarshalText([]byte(b[:17])); err != nil {
		t.Fatal(err)
	}
	return m
}
