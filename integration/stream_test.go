package integration

import (
	"bytes"
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/guestdrv/rdmacm"
	"github.com/vnicd/vnicd/guestdrv/rstream"
	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

//go:embed testdata/fetch.py
var fetch string

// preload is the library with which unmodified programs use rsockets.
const preload = "/usr/lib/x86_64-linux-gnu/rsocket/librspreload.so"

// streamRuns are runs of rstream (rdmacm-utils): each end sends count transfers of size bytes, the client first, as
// often as iterations says. Data is verified at both ends.
var streamRuns = []struct {
	name                    string
	size, count, iterations int
	options                 string
}{
	{"1 B", 1, 300, 2, ""},
	{"64 B, blocking", 64, 500, 2, "-T b"},
	{"65 B, not inline", 65, 500, 2, ""},
	{"4 KiB, poll", 4096, 200, 2, "-T a"},
	{"64 KiB", 65536, 40, 2, ""},
	{"1 MiB, blocking", 1 << 20, 10, 2, "-T b"},
	{"1,000 B, small buffers", 1000, 300, 1, "-B 8192"},
	{"10,000 B, nothing inline", 10000, 50, 1, "-i 0 -T a"},
}

// TestHostStreams: programs of the host with guestdrv/rstream (PF-4, MT-10) and unmodified programs of rsockets in
// VMs on the same host and on another. The distribution's rstream transfers data of several sizes, in both roles.
// Python's HTTP client, with the preload library, gets 1,000 files from net/http in guestdrv/examples/rhttp.
// riostream, which needs iomaps, fails with an error at once, and the server goes on.
func TestHostStreams(t *testing.T) {
	l, ctx := newLab(t)
	w := newTwoHosts(ctx, t, l)
	addApplications(ctx, t, w.a, `  - {name: app1, network: blue, mac: "02:00:00:00:00:a1", ips: [10.0.0.101]}
  - {name: app2, network: blue, mac: "02:00:00:00:00:a2", ips: [10.0.0.102]}`)
	a, b := w.load(ctx, t)
	dev := must[*guestdrv.Device](t)(guestdrv.Open(ctx, w.a.Dir+"/app1.hca", guestdrv.Config{}))
	t.Cleanup(func() { check(t, dev.Close()) })
	m := must[*rdmacm.Manager](t)(rdmacm.New(ctx, dev, rdmacm.Config{Address: netip.MustParseAddr("10.0.0.101")}))
	t.Cleanup(func() { check(t, m.Close()) })
	ln := must[*rstream.Listener](t)(rstream.Listen(m, 7471, rstream.Config{}))
	t.Cleanup(func() { check(t, ln.Close()) })
	for _, peer := range []struct {
		name string
		end  lab.End
	}{{"same host", a}, {"another host", b}} {
		t.Run(peer.name, func(t *testing.T) {
			for _, run := range streamRuns {
				cmd := fmt.Sprintf("rstream -T v %s -S %d -C %d -I %d", run.options, run.size, run.count, run.iterations)
				x := &streamPeer{bytes: run.size * run.count, iterations: run.iterations}
				t.Run(run.name+", host serves", func(t *testing.T) {
					x := *x
					served := make(chan error, 1)
					go func() { served <- x.serve(ln) }()
					r, err := peer.end.VM.Shell(ctx, lab.Limited(4*time.Minute, cmd+" -s 10.0.0.101"))
					if serr := <-served; serr != nil || err != nil || r.ExitCode != 0 {
						t.Fatalf("host: %v\nVM: %v, exit %d\n%s%s", serr, err, r.ExitCode, r.Stdout, r.Stderr)
					}
				})
				t.Run(run.name+", VM serves", func(t *testing.T) {
					x := *x
					srv := must[*qemu.Process](t)(lab.Listen(ctx, peer.end.VM, cmd+" -b 0.0.0.0", 0))
					cerr := x.dial(ctx, m, peer.end.Addr+":7471")
					if cerr != nil {
						_ = srv.Kill(ctx)
					}
					if r, err := srv.Wait(ctx); cerr != nil || err != nil || r.ExitCode != 0 {
						t.Fatalf("host: %v\nVM: %v, exit %d\n%s%s", cerr, err, r.ExitCode, r.Stdout, r.Stderr)
					}
				})
			}
		})
	}
	t.Run("riostream", func(t *testing.T) {
		accepted := make(chan net.Conn, 1)
		go func() {
			c, err := ln.Accept()
			if err != nil {
				t.Error(err)
			}
			accepted <- c
		}()
		r, err := a.VM.Shell(ctx, lab.Limited(time.Minute, "riostream -s 10.0.0.101 -S 64 -C 1 -I 1 2>&1"))
		if err != nil || r.ExitCode == 124 || !strings.Contains(r.Stdout, "riomap: Cannot allocate memory") {
			t.Errorf("%v, exit %d\n%s", err, r.ExitCode, r.Stdout)
		}
		if c := <-accepted; c != nil {
			check(t, c.Close())
		}
	})
	t.Run("HTTP", func(t *testing.T) { hostHTTP(ctx, t, l, w, b.VM) })
	quietKernels(ctx, t, w.vms...)
}

// hostHTTP: an unmodified HTTP client in a VM, and net/http on the host.
func hostHTTP(ctx context.Context, t *testing.T, l *lab.Lab, w *twoHosts, vm *qemu.Machine) {
	dir := t.TempDir()
	var names []string
	rng := rand.NewChaCha8([32]byte{1})
	for _, size := range []int{0, 1, 100, 4096, 65536, 200000, 1 << 20} {
		data := make([]byte, size)
		_, _ = rng.Read(data) // never fails
		sum := sha256.Sum256(data)
		names = append(names, hex.EncodeToString(sum[:]))
		check(t, os.WriteFile(filepath.Join(dir, names[len(names)-1]), data, 0o644))
	}
	program := buildExample(ctx, t, l, "rhttp")
	p := must[*harness.Process](t)(w.a.NS.Start(filepath.Join(w.a.Dir, "rhttp.log"), nil, program,
		"-socket", w.a.Dir+"/app2.hca", "-address", "10.0.0.102", "-dir", dir))
	t.Cleanup(p.Kill)
	eventually(ctx, t, "the program listens", func() bool { return strings.Contains(p.LogTail(), "serving") })
	check(t, vm.WriteFile(ctx, "/tmp/fetch.py", []byte(fetch)))
	cmd := fmt.Sprintf("env LD_PRELOAD=%s python3 /tmp/fetch.py 10.0.0.102 8080 1000 ", preload)
	out := run(ctx, t, vm, lab.Limited(5*time.Minute, cmd+strings.Join(names, " ")))
	if !strings.Contains(out, "1000 requests") {
		t.Errorf("fetch.py: %s\n%s", out, p.LogTail())
	}
	t.Log(strings.TrimSpace(out))
}

// streamPeer is rstream's other end on the host, with -T v: each end sends the numbers 0, 1, … as bytes.
type streamPeer struct {
	bytes, iterations int // of each transfer; transfers in each direction
	sent, received    byte
}

// serve is the server's role, with the next connection. It lets the client end the connection: with -T a rstream takes
// the server's end for an error if it polls once more.
func (p *streamPeer) serve(l net.Listener) error {
	c, err := l.Accept()
	if err != nil {
		return err
	}
	defer c.Close()
	if err := p.run(c, p.receive, p.send); err != nil {
		return err
	}
	if n, err := c.Read(make([]byte, 1)); err != io.EOF {
		return fmt.Errorf("%d bytes, %w: expected the client to close", n, err)
	}
	return c.Close()
}

// dial is the client's.
func (p *streamPeer) dial(ctx context.Context, m *rdmacm.Manager, address string) error {
	c, err := rstream.Dial(ctx, m, address, rstream.Config{})
	if err != nil {
		return err
	}
	defer c.Close()
	if err := p.run(c, p.send, p.receive); err != nil {
		return err
	}
	return c.Close()
}

func (p *streamPeer) run(c net.Conn, first, second func(net.Conn, int) error) error {
	const syncLen = 16
	if err := c.SetDeadline(time.Now().Add(4 * time.Minute)); err != nil {
		return err
	}
	for i := range p.iterations + 1 {
		n := p.bytes
		if i == 0 {
			n = syncLen
		}
		if err := first(c, n); err != nil {
			return fmt.Errorf("round %d of %d: %w", i, p.iterations, err)
		}
		if err := second(c, n); err != nil {
			return fmt.Errorf("round %d of %d: %w", i, p.iterations, err)
		}
	}
	return nil
}

func (p *streamPeer) send(c net.Conn, n int) error {
	data := pattern(&p.sent, n)
	_, err := c.Write(data)
	return err
}

func (p *streamPeer) receive(c net.Conn, n int) error {
	got := make([]byte, n)
	if _, err := io.ReadFull(c, got); err != nil {
		return err
	}
	if !bytes.Equal(got, pattern(&p.received, n)) {
		return fmt.Errorf("%d bytes differ from what was expected", n)
	}
	return nil
}

// pattern returns the next n bytes of a sequence.
func pattern(next *byte, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = *next
		*next++
	}
	return b
}
