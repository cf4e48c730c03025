package integration

import (
	"bytes"
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
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

//go:embed testdata/fetch.py testdata/curl.sh
var httpClients embed.FS

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
// So does riostream, which writes into memory that its peer has mapped; it fails at once where the peer has no room for
// mappings. Python's HTTP client and Debian 12's curl, with the preload library, get 1,000 files from net/http in
// guestdrv/examples/rhttp, and by TCP for comparison.
func TestHostStreams(t *testing.T) {
	l, ctx := newLab(t)
	w := newTwoHosts(ctx, t, l)
	addApplications(ctx, t, w.a, streamApps)
	h := newStreamingApps(ctx, t, w.a)
	a, b := w.load(ctx, t)
	for _, peer := range []struct {
		name string
		end  lab.End
	}{{"same host", a}, {"another host", b}} {
		t.Run(peer.name, func(t *testing.T) { h.transfer(ctx, t, peer.end) })
		t.Run(peer.name+", mapped memory", func(t *testing.T) { h.transferMapped(ctx, t, peer.end) })
	}
	t.Run("no room for mappings", func(t *testing.T) {
		accepted := make(chan net.Conn, 1)
		go func() {
			c, err := h.listener.Accept()
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

// hostHTTP: unmodified HTTP clients in a VM, and net/http on the host.
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
	const rdma = "10.0.0.102" // nothing answers TCP here
	p := must[*harness.Process](t)(w.a.NS.Start(filepath.Join(w.a.Dir, "rhttp.log"), nil, program,
		"-socket", w.a.Dir+"/app2.hca", "-address", rdma, "-dir", dir))
	t.Cleanup(p.Kill)
	eventually(ctx, t, "the program listens", func() bool { return strings.Contains(p.LogTail(), "serving") })
	// For comparison, over TCP by the VM's network card and a TAP port of the same host.
	const tap = "10.0.0.201"
	must[string](t)(w.a.CLI(ctx, "network", "add-tap", "blue", "blue0", "address", tap+"/24"))
	var ln net.Listener
	check(t, w.a.NS.Do(func() (err error) { ln, err = net.Listen("tcp4", tap+":8080"); return err }))
	server := http.Server{Handler: http.FileServer(http.Dir(dir))}
	go func() { _ = server.Serve(ln) }() // until Close
	t.Cleanup(func() { check(t, server.Close()) })
	get := func(command, file, address string) {
		t.Helper()
		check(t, vm.WriteFile(ctx, "/tmp/"+file, must[[]byte](t)(httpClients.ReadFile("testdata/"+file))))
		begin := time.Now()
		out := run(ctx, t, vm, lab.Limited(5*time.Minute, fmt.Sprintf("env %s /tmp/%s %s 8080 1000 %s", command, file,
			address, strings.Join(names, " "))))
		n := 0
		if _, err := fmt.Sscanf(out, "%d requests", &n); err != nil || n < 1000 {
			t.Errorf("%s: %s\n%s", command, out, p.LogTail())
		}
		t.Logf("%s: %s, %.1f s", command, strings.TrimSpace(out), time.Since(begin).Seconds())
	}
	get("LD_PRELOAD="+preload+" python3", "fetch.py", rdma)
	get("python3", "fetch.py", tap)
	get("sh", "curl.sh", tap)
	if l.Images.Release == debian12 { // later ones have curls that librspreload leaves with TCP
		get("PRELOAD="+preload+" sh", "curl.sh", rdma)
	}
}

// streamApps are the applications of streamingApps, and of the web server.
const streamApps = `  - {name: app1, network: blue, mac: "02:00:00:00:00:a1", ips: [10.0.0.101]}
  - {name: app2, network: blue, mac: "02:00:00:00:00:a2", ips: [10.0.0.102]}
`

// streamingApps are programs of a host that use guestdrv/rstream, with the device of app1.
type streamingApps struct {
	manager  *rdmacm.Manager
	listener *rstream.Listener // has room for no mappings
	mapped   *rstream.Listener // has
}

const mappedPort = 7472 // of streamingApps.mapped

var withMaps = rstream.Config{Maps: 1}

func newStreamingApps(ctx context.Context, t *testing.T, host *lab.Host) *streamingApps {
	t.Helper()
	m := managerOf(ctx, t, host, "app1", "10.0.0.101")
	h := &streamingApps{m, must[*rstream.Listener](t)(rstream.Listen(m, 7471, rstream.Config{})),
		must[*rstream.Listener](t)(rstream.Listen(m, mappedPort, withMaps))}
	for _, ln := range []*rstream.Listener{h.listener, h.mapped} {
		t.Cleanup(func() { check(t, ln.Close()) })
	}
	return h
}

// transfer transfers data to and from rstream at an end, in both roles.
func (h *streamingApps) transfer(ctx context.Context, t *testing.T, end lab.End) {
	for _, run := range streamRuns {
		cmd := fmt.Sprintf("rstream -T v %s -S %d -C %d -I %d", run.options, run.size, run.count, run.iterations)
		x := streamPeer{bytes: run.size * run.count, iterations: run.iterations}
		bothRoles(ctx, t, end, run.name, cmd, "-s 10.0.0.101", func() error { x := x; return x.serve(h.listener) },
			func(address string) error { x := x; return x.dial(ctx, h.manager, address) })
	}
}

// transferMapped does so with riostream.
func (h *streamingApps) transferMapped(ctx context.Context, t *testing.T, end lab.End) {
	for _, run := range []struct {
		name                    string
		size, count, iterations int
		options                 string
	}{
		{"1 B", 1, 20, 20, ""}, {"65 B, blocking", 65, 20, 20, "-T b"}, {"5,000 B, poll", 5000, 5, 10, "-T a"},
		{"300,001 B, small buffers", 300001, 2, 3, "-B 8192"}, {"1 MiB, nothing inline", 1 << 20, 2, 3, "-i 0"},
	} {
		cmd := fmt.Sprintf("riostream -T v %s -S %d -C %d -I %d", run.options, run.size, run.count, run.iterations)
		x := mappedPeer{size: run.size, count: run.count, iterations: run.iterations}
		bothRoles(ctx, t, end, run.name, cmd, fmt.Sprintf("-s 10.0.0.101 -p %d", mappedPort),
			func() error { x := x; return x.serve(h.manager, h.mapped) },
			func(address string) error { x := x; return x.dial(ctx, h.manager, address) })
	}
}

// bothRoles runs a program at an end, as the client of serve and as the server of dial.
func bothRoles(ctx context.Context, t *testing.T, end lab.End, name, cmd, asClient string, serve func() error,
	dial func(address string) error) {
	t.Helper()
	t.Run(name+", host serves", func(t *testing.T) {
		served := make(chan error, 1)
		go func() { served <- serve() }()
		r, err := end.VM.Shell(ctx, lab.Limited(4*time.Minute, cmd+" "+asClient))
		if serr := <-served; serr != nil || err != nil || r.ExitCode != 0 {
			t.Fatalf("host: %v\nVM: %v, exit %d\n%s%s", serr, err, r.ExitCode, r.Stdout, r.Stderr)
		}
	})
	t.Run(name+", VM serves", func(t *testing.T) {
		srv := must[*qemu.Process](t)(lab.Listen(ctx, end.VM, cmd+" -b 0.0.0.0", 0))
		cerr := dial(end.Addr + ":7471")
		if cerr != nil {
			_ = srv.Kill(ctx)
		}
		if r, err := srv.Wait(ctx); cerr != nil || err != nil || r.ExitCode != 0 {
			t.Fatalf("host: %v\nVM: %v, exit %d\n%s%s", cerr, err, r.ExitCode, r.Stdout, r.Stderr)
		}
	})
}

// mappedPeer is riostream's other end on the host, with -T v. Each end maps memory, and the other one writes all of it,
// count times in each turn and the client first. The last byte is the turn's number once that is over; what is before
// it is compared then.
type mappedPeer struct {
	size, count, iterations int
	sent, received          byte // as for streamPeer
	turn                    byte

	conn   *rstream.Conn
	memory *guestdrv.Buffer // mapped for riostream
}

func (p *mappedPeer) serve(m *rdmacm.Manager, l net.Listener) error {
	c, err := l.Accept()
	if err != nil {
		return err
	}
	return p.run(c.(*rstream.Conn), m, false)
}

func (p *mappedPeer) dial(ctx context.Context, m *rdmacm.Manager, address string) error {
	c, err := rstream.Dial(ctx, m, address, withMaps)
	if err != nil {
		return err
	}
	return p.run(c, m, true)
}

func (p *mappedPeer) run(c *rstream.Conn, m *rdmacm.Manager, client bool) (err error) {
	p.conn = c
	p.memory, err = m.Device().Alloc((p.size + 7) &^ 7)
	if err != nil {
		return errors.Join(err, c.Close())
	}
	defer func() { err = errors.Join(err, c.Close(), p.memory.Close()) }()
	p.memory.Bytes()[p.size-1] = 0xff
	if _, err := c.Map(p.memory, 0, p.size, 0); err != nil {
		return err
	}
	if err := c.SetDeadline(time.Now().Add(4 * time.Minute)); err != nil {
		return err
	}
	// riostream receives this into its mapped memory, where a turn must not seem to be over.
	hello := bytes.Repeat([]byte{0xff}, 16)
	say := func() error { _, err := c.Write(hello); return err }
	hear := func() error { _, err := io.ReadFull(c, make([]byte, len(hello))); return err }
	first, second, turns := hear, say, []func() error{p.receive, p.send}
	if client {
		first, second = say, hear
		slices.Reverse(turns)
	}
	if err := errors.Join(first(), second()); err != nil {
		return err
	}
	for i := range p.iterations {
		if err := errors.Join(turns[0](), turns[1]()); err != nil {
			return fmt.Errorf("round %d of %d: %w", i, p.iterations, err)
		}
	}
	return nil
}

// send is a turn of this end's.
func (p *mappedPeer) send() error {
	data := bytes.Clone(p.memory.Bytes()[:p.size]) // riostream sends what it has received, too
	for i := range p.count {
		if i == p.count-1 {
			copy(data, pattern(&p.sent, p.size-1))
			data[p.size-1] = p.turn
			p.turn++
		}
		if _, err := p.conn.WriteAt(data, 0); err != nil {
			return err
		}
	}
	return nil
}

// receive waits for the end of a turn of riostream's.
func (p *mappedPeer) receive() error {
	last := p.size - 1
	for end := time.Now().Add(4 * time.Minute); byte(p.memory.Load64(last&^7)>>(last&7*8)) != p.turn; {
		if time.Now().After(end) {
			return fmt.Errorf("turn %d does not end", p.turn)
		}
		time.Sleep(100 * time.Microsecond)
	}
	p.turn++
	if !bytes.Equal(p.memory.Bytes()[:last], pattern(&p.received, last)) {
		return fmt.Errorf("turn %d: %d bytes differ from what was expected", p.turn-1, last)
	}
	return nil
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
