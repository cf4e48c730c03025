// Package rig starts tenants' networks with applications on them for tests of packages that programs on the host use:
// in one process, without vnicd, but over the real sockets.
package rig

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
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

// Patience bounds every wait, with room for a busy machine under the race detector; only a failing test waits that
// long.
const Patience = 30 * time.Second

// Network is a tenant's network.
type Network struct {
	Hosts []*Host
}

// Host is an application's device, before its driver.
type Host struct {
	Path      string     // of the socket
	Addr      netip.Addr // that the application may use
	HCA       *hca.Device
	Port      *vswitch.VMPort
	attribute translate.Attribute
	stop      func()
}

// New makes a network with n applications, 10.0.0.1 and following. It ends with the test.
func New(tb testing.TB, n int) *Network {
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
	r := &Network{}
	for i := range n {
		h := &Host{Path: filepath.Join(dir, fmt.Sprintf("h%d", i)), Addr: netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)})}
		mac := [6]byte{2, 0, 0, 0, 0, byte(i + 1)}
		port, err := vswitch.NewVMPort(network, vswitch.VMPortConfig{Name: filepath.Base(h.Path), MAC: vswitch.MAC(mac),
			Loop: loops[i%len(loops)]})
		must(err)
		tb.Cleanup(port.Close)
		h.HCA, err = hca.New(hca.Config{Name: filepath.Base(h.Path), MAC: mac, Loops: loops, Pool: pool, MTU: network.MTU,
			Version: "test", DataPath: &hca.DataPath{LocalCopy: ways.LocalCopy(), ECN: ways.ECN(),
				SelectiveRepeat: ways.SelectiveRepeat()}, Log: log})
		must(err)
		h.Port = port
		h.HCA.SetPort(port)
		port.SetNet(h.HCA.Neighbours()) // answers ARP and ND, as in the daemon
		port.SetHCA(h.HCA.HCAFace())
		srv, err := vhostuser.Listen(vhostuser.Config{Sealed: true, Path: h.Path, Log: log, Attribute: &h.attribute,
			Budget: hostdriver.NewBudget(0)}, h.HCA, 0)
		must(err)
		h.stop = sync.OnceFunc(func() {
			if err := srv.Close(); err != nil {
				tb.Error(err)
			}
			port.SetHCA(nil)
			port.SetNet(nil)
			h.HCA.Close()
		})
		tb.Cleanup(h.stop)
		r.Hosts = append(r.Hosts, h)
	}
	return r
}

// Manager opens application i's device with a connection manager on it. Both are closed when the test ends.
func (r *Network) Manager(tb testing.TB, i int, cfg rdmacm.Config) *rdmacm.Manager {
	tb.Helper()
	h := r.Hosts[i]
	dev, err := guestdrv.Open(context.Background(), h.Path, guestdrv.Config{Memory: 128 << 20})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := dev.Close(); err != nil {
			tb.Error(err)
		}
	})
	cfg.Address = h.Addr
	m, err := rdmacm.New(Context(tb), dev, cfg)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := m.Close(); err != nil {
			tb.Error(err)
		}
	})
	return m
}

// Objects are the numbers of objects in a device.
type Objects struct{ PDs, CQs, MRs, QPs int }

// Objects counts the objects in the device.
func (h *Host) Objects() Objects {
	s := h.HCA.Describe()
	return Objects{s.PDs, s.CQs, s.MRs, len(s.QPs)}
}

// Kill ends the application as far as its peers can tell: nothing reaches it any more, and nothing comes from it.
func (h *Host) Kill() {
	h.HCA.SetPort(nil)
	h.Port.SetHCA(nil)
}

// Stop ends the device and its socket, as when vnicd ends for good: the application loses its connection.
func (h *Host) Stop() { h.stop() }

// Context returns a context that ends after Patience, or with the test.
func Context(tb testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	tb.Cleanup(cancel)
	return ctx
}

// Until waits for a condition.
func Until(tb testing.TB, what string, ok func() bool) {
	tb.Helper()
	for deadline := time.Now().Add(Patience); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			tb.Fatalf("%s: not within %v", what, Patience)
		}
	}
}
