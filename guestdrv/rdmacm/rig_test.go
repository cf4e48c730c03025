package rdmacm_test

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"go.uber.org/goleak"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/rdma/hca"
	"github.com/vnicd/vnicd/device/testutil/ways"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/guestdrv/rdmacm"
	"github.com/vnicd/vnicd/hypervisor/hostdriver"
	"github.com/vnicd/vnicd/translate"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds every wait, with room for a busy machine under the race detector; only a failing test waits that
// long.
const patience = 30 * time.Second

// rig is a tenant's network with applications on it, in one process but with real sockets.
type rig struct {
	hosts []*host
}

// host is an application's device, before its driver.
type host struct {
	path      string
	addr      netip.Addr
	hca       *hca.Device
	port      *vswitch.VMPort
	attribute translate.Attribute
}

// newRig makes a network with n applications, 10.0.0.1 and following.
func newRig(tb testing.TB, n int) *rig {
	tb.Helper()
	must := func(err error) {
		tb.Helper()
		if err != nil {
			tb.Fatal(err)
		}
	}
	level := hclog.Error
	if os.Getenv("VNICD_TEST_LOG") != "" {
		level = hclog.Trace
	}
	log := hclog.New(&hclog.LoggerOptions{Name: "rig", Level: level})
	pool, err := frame.NewPool(frame.Config{Count: 4096})
	must(err)
	tb.Cleanup(func() {
		if n := pool.InUse(); n != 0 {
			tb.Errorf("%d frame buffers leaked", n)
		}
	})
	var loops []*loop.Loop
	for i := range ways.Engines(2) {
		l, err := loop.New(loop.Config{ID: i, SpinFor: ways.Spin(0), Log: log})
		must(err)
		must(l.Start())
		tb.Cleanup(l.Close)
		loops = append(loops, l)
	}
	network, err := vswitch.NewNetwork(vswitch.Config{VNI: 7, Name: "tenant", MTU: 1500})
	must(err)
	dir := tb.TempDir()
	r := &rig{}
	for i := range n {
		h := &host{path: filepath.Join(dir, fmt.Sprintf("h%d", i)), addr: netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)})}
		mac := [6]byte{2, 0, 0, 0, 0, byte(i + 1)}
		port, err := vswitch.NewVMPort(network, vswitch.VMPortConfig{Name: filepath.Base(h.path), MAC: vswitch.MAC(mac),
			Loop: loops[i%len(loops)]})
		must(err)
		tb.Cleanup(port.Close)
		h.hca, err = hca.New(hca.Config{Name: filepath.Base(h.path), MAC: mac, Loops: loops, Pool: pool, MTU: network.MTU,
			Version: "test", DataPath: &hca.DataPath{LocalCopy: ways.LocalCopy(), ECN: ways.ECN(),
				SelectiveRepeat: ways.SelectiveRepeat()}, Log: log})
		must(err)
		h.port = port
		h.hca.SetPort(port)
		port.SetNet(h.hca.Neighbours()) // answers ARP and ND, as in the daemon
		port.SetHCA(h.hca.HCAFace())
		srv, err := vhostuser.Listen(vhostuser.Config{Path: h.path, Log: log, Attribute: &h.attribute,
			Budget: hostdriver.NewBudget(0)}, h.hca, 0)
		must(err)
		tb.Cleanup(func() {
			if err := srv.Close(); err != nil {
				tb.Error(err)
			}
			port.SetHCA(nil)
			port.SetNet(nil)
			h.hca.Close()
		})
		r.hosts = append(r.hosts, h)
	}
	return r
}

// end is an application with its connection manager.
type end struct {
	*rdmacm.Manager
	h *host
}

// open opens application i's device and a connection manager on it.
func (r *rig) open(tb testing.TB, i int, cfg rdmacm.Config) *end {
	tb.Helper()
	h := r.hosts[i]
	dev, err := guestdrv.Open(context.Background(), h.path, guestdrv.Config{Memory: 128 << 20})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := dev.Close(); err != nil {
			tb.Error(err)
		}
	})
	cfg.Address = h.addr
	m, err := rdmacm.New(ctxFor(tb), dev, cfg)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := m.Close(); err != nil {
			tb.Error(err)
		}
	})
	return &end{m, h}
}

func ctxFor(tb testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	tb.Cleanup(cancel)
	return ctx
}

// until waits for a condition.
func until(tb testing.TB, what string, ok func() bool) {
	tb.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			tb.Fatalf("%s: not within %v", what, patience)
		}
	}
}
