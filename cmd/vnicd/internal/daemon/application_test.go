package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/guestdrv"
)

// applications starts a daemon with two host applications, a and b, of one network.
func applications(t *testing.T) *Daemon {
	t.Helper()
	cfg, err := config.Parse("x.yaml", fmt.Appendf(nil, `
run-dir: %s
networks: [{name: n, vni: 1, mtu: 1500}]
applications:
  - {name: a, network: n, mac: "02:00:00:00:00:0a", ips: [10.0.0.10], socket-mode: 0o600, memory: 64MiB, limits: {qps: 4, mrs: 3, cqs: 2, pages: 100}}
  - {name: b, network: n, mac: "02:00:00:00:00:0b"}
`, t.TempDir()))
	if err != nil {
		t.Fatal(err)
	}
	d, err := Start(cfg, "v0.0.0", hclog.NewNullLogger())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	return d
}

func (d *Daemon) application(t *testing.T, name string) VMStatus {
	t.Helper()
	for _, v := range d.Status().VMs {
		if v.Name == name {
			return v
		}
	}
	t.Fatalf("no status of %s", name)
	return VMStatus{}
}

// client is a program on an application's socket, with a QP that is not connected yet, and a region.
type client struct {
	*guestdrv.Device
	gid guestdrv.GID
	cq  *guestdrv.CQ
	pd  *guestdrv.PD
	qp  *guestdrv.QP
	mr  *guestdrv.MR
	buf *guestdrv.Buffer
}

func open(t *testing.T, d *Daemon, name, addr string) *client {
	t.Helper()
	dev, err := guestdrv.Open(context.Background(), filepath.Join(d.cfg.RunDir, name+".hca"),
		guestdrv.Config{Memory: 16 << 20})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = dev.Close() })
	c := &client{Device: dev, gid: guestdrv.IPGID(netip.MustParseAddr(addr))}
	err = dev.SetGID(context.Background(), 0, c.gid, guestdrv.GIDOptions{})
	if err == nil {
		c.pd, err = dev.AllocPD(context.Background())
	}
	if err == nil {
		c.buf, err = dev.Alloc(8192)
	}
	if err == nil {
		c.mr, err = c.pd.Register(context.Background(), c.buf, guestdrv.AccessLocalWrite|guestdrv.AccessRemoteWrite)
	}
	if err == nil {
		c.cq, err = dev.CreateCQ(context.Background(), 16, guestdrv.CQOptions{})
	}
	if err == nil {
		c.qp, err = c.pd.CreateQP(context.Background(), guestdrv.QPConfig{Type: guestdrv.QPTypeRC, SendCQ: c.cq, RecvCQ: c.cq,
			MaxSendWR: 4, MaxRecvWR: 4})
	}
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// to resolves the address of another client and connects to its QP.
func (c *client) to(ctx context.Context, o *client) error {
	path, err := c.Resolve(ctx, o.gid, 0)
	if err != nil {
		return err
	}
	return c.qp.Connect(context.Background(), guestdrv.Peer{QPN: o.qp.Number(), Path: path},
		guestdrv.ConnectOptions{Access: guestdrv.AccessRemoteWrite})
}

// TestApplications: two programs of the host find each other by address and write to each other's memory, under GVMI 0,
// each with its own keys. When a program ends, its objects are removed and its place is free for another.
func TestApplications(t *testing.T) {
	d := applications(t)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for round := range 2 {
		a, b := open(t, d, "a", "10.0.0.10"), open(t, d, "b", "10.0.0.11")
		if err := errors.Join(a.to(ctx, b), b.to(ctx, a)); err != nil {
			t.Fatal(err)
		}
		want := fmt.Sprintf("round %d", round)
		copy(a.buf.Bytes(), want)
		write := guestdrv.NewWrite(7, b.mr.Remote(0), a.mr.SGE(0, len(want))).With(guestdrv.SendSignaled)
		if err := a.qp.PostSend(write); err != nil {
			t.Fatal(err)
		}
		wcs := make([]guestdrv.Completion, 2)
		if n, err := a.cq.PollWait(ctx, wcs); n != 1 || err != nil || wcs[0].Status != guestdrv.WCSuccess {
			t.Fatalf("%d %v %+v", n, err, wcs[0])
		}
		if got := string(b.buf.Bytes()[:len(want)]); got != want {
			t.Errorf("b has %q, want %q", got, want)
		}
		if s := d.application(t, "a"); !s.IsApplication() || !s.HCA.Up || len(s.HCA.QPs) != 1 || s.HCA.MRs != 1 {
			t.Errorf("%+v", s)
		}
		if n := len(d.gvms.Spaces(0)); n != 2 {
			t.Errorf("%d memories under GVMI 0, want 2", n)
		}
		// The programs end without destroying their objects.
		_, _ = a.Close(), b.Close()
		for _, name := range []string{"a", "b"} {
			for {
				s := d.application(t, name)
				if !s.HCA.Connected && len(s.HCA.QPs)+s.HCA.MRs+s.HCA.CQs+s.HCA.PDs == 0 && s.Memory.Resident == 0 {
					break
				}
				if ctx.Err() != nil {
					t.Fatalf("%s has ended, and left %+v %+v", name, s.HCA, s.Memory)
				}
				time.Sleep(time.Millisecond)
			}
		}
	}
	// A connection's memory leaves the table last.
	testutil.Eventually(t, "no memory is left under GVMI 0", func() bool { return len(d.gvms.Spaces(0)) == 0 })
}

// TestApplicationQuota: a program that exceeds its quota gets an error, and the connected program is not disturbed.
func TestApplicationQuota(t *testing.T) {
	d := applications(t)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	path := filepath.Join(d.cfg.RunDir, "a.hca")
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("socket: %v, %v", st.Mode(), err)
	}
	if _, err := os.Stat(filepath.Join(d.cfg.RunDir, "a.net")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a network socket for an application: %v", err)
	}
	if _, err := guestdrv.Open(context.Background(), path, guestdrv.Config{Memory: 65 << 20}); err == nil {
		t.Error("shared 65 MiB of memory; 64 are allowed")
	}
	a := open(t, d, "a", "10.0.0.10")
	if _, err := guestdrv.Open(context.Background(), path, guestdrv.Config{Timeout: 20 * time.Second}); err == nil {
		t.Error("two programs connected as one application")
	}
	for what, f := range map[string]func() error{
		"QPs": func() error {
			_, err := a.pd.CreateQP(context.Background(), guestdrv.QPConfig{Type: guestdrv.QPTypeUD, SendCQ: a.cq, RecvCQ: a.cq})
			return err
		},
		"CQs": func() error { _, err := a.CreateCQ(context.Background(), 1, guestdrv.CQOptions{}); return err },
		"MRs": func() error {
			_, err := a.pd.Register(context.Background(), a.buf, guestdrv.AccessLocalWrite)
			return err
		},
	} {
		n := 0
		for err := error(nil); err == nil && n < 100; n++ {
			err = f()
			if err != nil && !errors.Is(err, guestdrv.StatusNoMemory) {
				t.Errorf("%s: %v", what, err)
			}
		}
		if n > 4 {
			t.Errorf("%s: %d more; the quota is 4", what, n)
		}
	}
	big, err := a.Alloc(101 * 4096)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := a.pd.Register(context.Background(), big, guestdrv.AccessLocalWrite); !errors.Is(err,
		guestdrv.StatusNoMemory) {
		t.Errorf("a region of 101 pages, 100 are allowed: %v", err)
	}
	// With a foreign address: the switch drops the ARP requests, so resolution fails.
	if err := a.SetGID(context.Background(), 1, guestdrv.IPGID(netip.MustParseAddr("10.0.0.99")),
		guestdrv.GIDOptions{}); err != nil {
		t.Fatal(err)
	}
	b := open(t, d, "b", "10.0.0.11")
	short, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
	defer cancel()
	if p, err := a.Resolve(short, b.gid, 1); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("resolved with a foreign source address: %+v, %v", p, err)
	}
	if p, err := a.Resolve(ctx, b.gid, 0); err != nil || p.MAC != b.MAC() {
		t.Errorf("resolved with its own address: %+v, %v", p, err)
	}
	if err := d.RemoveVM("a"); err != nil {
		t.Fatal(err)
	}
	if _, err := a.AllocPD(context.Background()); !errors.Is(err, guestdrv.ErrDisconnected) {
		t.Errorf("after the application was removed: %v", err)
	}
}
