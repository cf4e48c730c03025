package integration

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/guestdrv/rdmacm"
	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

// TestHostConnections: programs of the host (guestdrv/rdmacm; PF-4, MT-10) and the distribution's rping, udaddy and
// ucmatose in VMs on the same host and on another find each other by address and port, in both roles. Data of rping is
// verified. A VM's request for a port without a listener is rejected with the reason, for programs and for the kernel's
// NVMe.
func TestHostConnections(t *testing.T) {
	l, ctx := newLab(t)
	w := newTwoHosts(ctx, t, l)
	addApplications(ctx, t, w.a, connectApps)
	h := newConnectingApps(ctx, t, l, w.a)
	a, b := w.load(ctx, t)
	t.Run("same host", func(t *testing.T) { h.connect(ctx, t, a) })
	t.Run("another host", func(t *testing.T) { h.connect(ctx, t, b) })
	t.Run("nobody listens", func(t *testing.T) {
		p := h.serve(ctx, t, h.rping, "")
		r, err := a.VM.Shell(ctx, "timeout -k 5 240 rping -c -a 10.0.0.103 -p 7999 -C 1")
		if err != nil || r.ExitCode == 0 || !strings.Contains(r.Stdout+r.Stderr, fmt.Sprint("error ", 8)) {
			t.Errorf("%v, exit %d\n%s%s", err, r.ExitCode, r.Stdout, r.Stderr)
		}
		// The kernel's NVMe client says what it was told.
		r, err = a.VM.Shell(ctx, "timeout -k 5 240 sh -c '"+lab.NVMe{Transport: "rdma", Addr: "10.0.0.103"}.Connect(0)+"'")
		if err != nil || r.ExitCode == 0 {
			t.Errorf("nvme: %v, exit %d\n%s%s", err, r.ExitCode, r.Stdout, r.Stderr)
		}
		run(ctx, t, a.VM, "dmesg | grep -E 'nvme.*rejected: status 8 \\(invalid service ID\\)'")
		p.Kill()
	})
	quietKernels(ctx, t, w.vms...)
}

// TestHostBesideRXE: the same programs of the host, and those with streams and mapped memory, with Linux rxe in a VM as
// the peer (PF-4).
func TestHostBesideRXE(t *testing.T) {
	l, ctx := newLabWithoutModule(t)
	h := must[*lab.Host](t)(l.Host("h1"))
	vm := vmB
	vm.NoHCA = true
	check(t, h.Run(ctx, fmt.Sprintf("networks: [{name: blue, vni: 100}]\nvms: [{name: %s, network: blue, mac: %q}]\n",
		vm.Name, vm.MAC)))
	addApplications(ctx, t, h, streamApps+connectApps)
	apps, streams := newConnectingApps(ctx, t, l, h), newStreamingApps(ctx, t, h)
	vms := must[[]*qemu.Machine](t)(l.Boot(ctx, must[qemu.Config](t)(h.Config(ctx, vm))))
	dumpOnFailure(t, []*lab.Host{h}, &vms)
	check(t, harness.AddRXE(ctx, vms[0], "rxe0", "eth0"))
	check(t, lab.WaitRDMA(ctx, vms[0], "rxe0"))
	rxe := must[lab.End](t)(lab.NewEnd(ctx, vms[0], "rxe0", vm.Addr))
	t.Run("connections", func(t *testing.T) { apps.connect(ctx, t, rxe) })
	t.Run("streams", func(t *testing.T) { streams.transfer(ctx, t, rxe) })
	t.Run("mapped memory", func(t *testing.T) { streams.transferMapped(ctx, t, rxe) })
	quietKernels(ctx, t, vms...)
}

// connectApps are the applications of connectingApps.
const connectApps = `  - {name: app3, network: blue, mac: "02:00:00:00:00:a3", ips: [10.0.0.103]}
  - {name: app4, network: blue, mac: "02:00:00:00:00:a4", ips: [10.0.0.104]}
`

// connectingApps are programs of a host that use guestdrv/rdmacm: the examples with the device of app3, the test's own
// with that of app4.
type connectingApps struct {
	host          *lab.Host
	rping, udaddy string // programs
	manager       *rdmacm.Manager
}

func newConnectingApps(ctx context.Context, t *testing.T, l *lab.Lab, host *lab.Host) *connectingApps {
	t.Helper()
	return &connectingApps{host, buildExample(ctx, t, l, "rping"), buildExample(ctx, t, l, "udaddy"),
		managerOf(ctx, t, host, "app4", "10.0.0.104")}
}

// managerOf opens an application's device.
func managerOf(ctx context.Context, t *testing.T, host *lab.Host, name, addr string) *rdmacm.Manager {
	t.Helper()
	dev := must[*guestdrv.Device](t)(guestdrv.Open(ctx, host.Dir+"/"+name+".hca", guestdrv.Config{}))
	t.Cleanup(func() { check(t, dev.Close()) })
	m := must[*rdmacm.Manager](t)(rdmacm.New(ctx, dev, rdmacm.Config{Address: netip.MustParseAddr(addr)}))
	t.Cleanup(func() { check(t, m.Close()) })
	return m
}

func (h *connectingApps) command(program, opts string) []string {
	return append([]string{program, "-socket", h.host.Dir + "/app3.hca", "-address", "10.0.0.103", "-timeout", "4m"},
		strings.Fields(opts)...)
}

func (h *connectingApps) serve(ctx context.Context, t *testing.T, program, opts string) *harness.Process {
	t.Helper()
	p := must[*harness.Process](t)(h.host.NS.Start(filepath.Join(h.host.Dir, "app.log"), nil, h.command(program, opts)...))
	t.Cleanup(p.Kill)
	eventually(ctx, t, "the program listens", func() bool { return strings.Contains(p.LogTail(), "waiting for a client") })
	return p
}

// connect connects with programs at an end, in both roles.
func (h *connectingApps) connect(ctx context.Context, t *testing.T, end lab.End) {
	const limited = "timeout -k 5 240 "
	for _, x := range []struct{ name, program, server, client, vmServer, vmClient, done string }{
		{"rping", h.rping, "-size 4096", "-n 20 -size 4096", "rping -s -a 0.0.0.0 -S 4096",
			"rping -c -a 10.0.0.103 -C 20 -S 4096 -V", "20 rounds"},
		{"udaddy", h.udaddy, "-n 10", "-n 10", "udaddy", "udaddy -s 10.0.0.103", "10 messages received"},
	} {
		t.Run(x.name+" serves", func(t *testing.T) {
			p := h.serve(ctx, t, x.program, x.server)
			r, err := end.VM.Shell(ctx, "exec "+limited+x.vmClient)
			if werr := p.Wait(ctx); err != nil || r.ExitCode != 0 || werr != nil || !strings.Contains(p.LogTail(), x.done) {
				t.Fatalf("program: %v\n%s\nVM: %v, exit %d\n%s%s", werr, p.LogTail(), err, r.ExitCode, r.Stdout, r.Stderr)
			}
		})
		t.Run("VM serves "+x.name, func(t *testing.T) {
			srv := must[*qemu.Process](t)(lab.Listen(ctx, end.VM, limited+x.vmServer, 0))
			out, err := h.host.NS.Run(ctx, h.command(x.program, x.client+" "+end.Addr)...)
			if err != nil {
				_ = srv.Kill(ctx)
			}
			r, werr := srv.Wait(ctx)
			if err != nil || !strings.Contains(out, x.done) {
				t.Fatalf("program: %v\n%s\nVM: %v, exit %d\n%s%s", err, out, werr, r.ExitCode, r.Stdout, r.Stderr)
			}
		})
	}
	c := cmatose{connections: 8, messages: 20, size: 3000}
	options := fmt.Sprintf("ucmatose -c %d -C %d -S %d", c.connections, c.messages, c.size)
	t.Run("ucmatose is served", func(t *testing.T) {
		ln := must[*rdmacm.Listener](t)(h.manager.Listen(7471, rdmacm.ListenConfig{}))
		defer func() { check(t, ln.Close()) }()
		served := make(chan error, 1)
		go func() { served <- c.serve(ctx, h.manager, ln) }()
		r, err := end.VM.Shell(ctx, limited+options+" -s 10.0.0.104")
		if serr := <-served; serr != nil || err != nil || r.ExitCode != 0 {
			t.Fatalf("host: %v\nVM: %v, exit %d\n%s%s", serr, err, r.ExitCode, r.Stdout, r.Stderr)
		}
	})
	t.Run("ucmatose serves", func(t *testing.T) {
		srv := must[*qemu.Process](t)(lab.Listen(ctx, end.VM, limited+options, 0))
		cerr := c.dial(ctx, h.manager, end.Addr+":7471")
		if cerr != nil {
			_ = srv.Kill(ctx)
		}
		if r, err := srv.Wait(ctx); cerr != nil || err != nil || r.ExitCode != 0 {
			t.Fatalf("host: %v\nVM: %v, exit %d\n%s%s", cerr, err, r.ExitCode, r.Stdout, r.Stderr)
		}
	})
}

// cmatose is ucmatose's other end on the host: over each connection the server sends messages, then the client. The
// server ends the connections.
type cmatose struct{ connections, messages, size int }

// cmatoseEnd is one connection.
type cmatoseEnd struct {
	conn    *rdmacm.Conn
	buf     *guestdrv.Buffer
	mr      *guestdrv.MR
	arrived int
}

func (c *cmatose) params(ctx context.Context, m *rdmacm.Manager, e *cmatoseEnd) (rdmacm.Params, error) {
	var err error
	if e.buf, err = m.Device().Alloc(c.size); err != nil {
		return rdmacm.Params{}, err
	}
	if e.mr, err = m.PD().Register(ctx, e.buf, guestdrv.AccessLocalWrite); err != nil {
		return rdmacm.Params{}, err
	}
	return rdmacm.Params{QP: guestdrv.QPConfig{MaxSendWR: c.messages, MaxRecvWR: c.messages, SigAll: true},
		Prepare: func(conn *rdmacm.Conn) error {
			for range c.messages {
				if err := conn.QP().PostRecv(guestdrv.NewRecv(1, e.mr.SGE(0, c.size))); err != nil {
					return err
				}
			}
			return nil
		}}, nil
}

// send sends all messages, and counts those that arrive meanwhile.
func (c *cmatose) send(ctx context.Context, e *cmatoseEnd) error {
	for range c.messages {
		if err := e.conn.QP().PostSend(guestdrv.NewSend(2, e.mr.SGE(0, c.size))); err != nil {
			return err
		}
	}
	return c.poll(ctx, e, c.messages)
}

// poll waits for completions: of so many messages sent, or, with 0, until all of the peer's have arrived.
func (c *cmatose) poll(ctx context.Context, e *cmatoseEnd, sent int) error {
	for receiving := sent == 0; sent > 0 || receiving && e.arrived < c.messages; {
		var wcs [1]guestdrv.Completion
		if _, err := e.conn.RecvCQ().PollWait(ctx, wcs[:]); err != nil {
			return err
		}
		wc := &wcs[0]
		switch {
		case wc.Err() != nil:
			return wc.Err()
		case wc.ID == 2:
			sent--
		case wc.ByteLen != uint32(c.size):
			return fmt.Errorf("a message of %d bytes, want %d", wc.ByteLen, c.size)
		default:
			e.arrived++
		}
	}
	return nil
}

func (e *cmatoseEnd) close() error {
	var err error
	if e.conn != nil {
		err = e.conn.Close()
	}
	if e.mr != nil {
		err = errors.Join(err, e.mr.Close())
	}
	if e.buf != nil {
		err = errors.Join(err, e.buf.Close())
	}
	return err
}

func (c *cmatose) serve(ctx context.Context, m *rdmacm.Manager, ln *rdmacm.Listener) (err error) {
	var ends []*cmatoseEnd
	defer func() {
		for _, e := range ends {
			err = errors.Join(err, e.close())
		}
	}()
	for range c.connections {
		req, err := ln.Accept(ctx)
		if err != nil {
			return err
		}
		e := &cmatoseEnd{}
		ends = append(ends, e)
		p, err := c.params(ctx, m, e)
		if err != nil {
			return err
		}
		if e.conn, err = req.Accept(ctx, p); err != nil {
			return err
		}
	}
	for _, step := range []func(*cmatoseEnd) error{
		func(e *cmatoseEnd) error { return c.send(ctx, e) },
		func(e *cmatoseEnd) error { return c.poll(ctx, e, 0) },
	} {
		for _, e := range ends {
			if err := step(e); err != nil {
				return err
			}
		}
	}
	return nil
}

func (c *cmatose) dial(ctx context.Context, m *rdmacm.Manager, address string) (err error) {
	var ends []*cmatoseEnd
	defer func() {
		for _, e := range ends {
			err = errors.Join(err, e.close())
		}
	}()
	for range c.connections {
		e := &cmatoseEnd{}
		ends = append(ends, e)
		p, err := c.params(ctx, m, e)
		if err != nil {
			return err
		}
		if e.conn, err = m.Dial(ctx, address, p); err != nil {
			return err
		}
	}
	for _, e := range ends {
		if err := errors.Join(c.poll(ctx, e, 0), c.send(ctx, e)); err != nil {
			return err
		}
	}
	for _, e := range ends {
		select {
		case <-e.conn.Done():
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}
