package worker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/confine"
	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/testutil/testlog"
)

// asDaemon makes the test binary start workers, as a daemon that is killed.
const asDaemon = "VNICD_TEST_DAEMON"

// kinds are the workers of these tests. Each answers messages as its name says.
var kinds = []Kind{
	{Name: "echo", MaxFiles: 64, Open: serving(func(p *Process, b []byte) error { return p.Conn.Send(b) })},
	{Name: "bind", MaxFiles: 64, Capabilities: []uint{unix.CAP_NET_BIND_SERVICE}, Calls: confine.TCPClient(),
		Open: openBind},
	{Name: "accept", MaxFiles: 64, Calls: confine.Connections(), Open: openAccept},
	{Name: "tries", MaxFiles: 64, MaxMemory: 256 << 20, Open: serving(tries)},
	{Name: "crash", MaxFiles: 64, Open: serving(func(*Process, []byte) error { panic("hostile input") })},
	{Name: "stall", MaxFiles: 64, Open: func(p *Process) (func() error, error) {
		return func() error { _ = p.Conn.Send([]byte("pid " + pid())); select {} }, nil
	}},
	{Name: "flood", MaxFiles: 64, Open: openFlood},
	{Name: "streams", MaxFiles: 64, Open: openStreams},
	{Name: "garbage", MaxFiles: 64, Open: openGarbage},
	{Name: "unable", MaxFiles: 64, Open: func(*Process) (func() error, error) { return nil, errors.New("no way") }},
}

func pid() string { return strconv.Itoa(os.Getpid()) }

// serving makes a worker that answers with its process id first and then calls f for each message.
func serving(f func(*Process, []byte) error) func(*Process) (func() error, error) {
	return func(p *Process) (func() error, error) {
		return func() error {
			if err := p.Conn.Send([]byte("pid " + pid())); err != nil {
				return err
			}
			for {
				b, err := p.Conn.Receive(MaxMessage)
				if err != nil {
					return nil
				}
				if err := f(p, b); err != nil {
					return err
				}
			}
		}, nil
	}
}

func TestMain(m *testing.M) {
	if status, is := Main(kinds, os.Args[1:]); is {
		os.Exit(status)
	}
	if os.Getenv(asDaemon) != "" {
		daemonToKill()
	}
	flag.Parse()
	// The fuzzing engine's own goroutines may end slightly after the run.
	if f := flag.Lookup("test.fuzz"); f != nil && f.Value.String() != "" {
		os.Exit(m.Run())
	}
	goleak.VerifyTestMain(m)
}

// rig is a spawner and one worker, whose messages are in from.
type rig struct {
	*testing.T
	s    *Spawner
	v    *Supervisor
	log  *testlog.Log
	conn atomic.Pointer[Conn]
	from chan string
}

func newSpawner(t *testing.T, log hclog.Logger) *Spawner {
	t.Helper()
	s, err := Start(log)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

func newRig(t *testing.T, kind string, files ...*os.File) *rig {
	t.Helper()
	r := &rig{T: t, log: &testlog.Log{}, from: make(chan string, 1000)}
	log := hclog.New(&hclog.LoggerOptions{Output: r.log, Level: hclog.Debug})
	r.s = newSpawner(t, log)
	r.v = r.s.Supervise(Config{Kind: kind, Log: log.Named(kind), Files: files, Serve: r.serve})
	t.Cleanup(r.v.Close)
	t.Cleanup(func() {
		if t.Failed() {
			s := r.log.String()
			t.Log(s[:min(len(s), 4000)])
		}
	})
	return r
}

func (r *rig) serve(ctx context.Context, c *Conn) error {
	r.conn.Store(c)
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	defer stop()
	for {
		b, err := c.Receive(1 << 20)
		if err != nil {
			return err
		}
		select {
		case r.from <- string(b):
		case <-ctx.Done():
			return nil
		}
	}
}

const patience = 60 * time.Second

func (r *rig) next() string {
	r.Helper()
	select {
	case s := <-r.from:
		return s
	case <-time.After(patience):
		r.Fatal("no message")
		return ""
	}
}

// pid returns the process id that the worker says first.
func (r *rig) pid() int {
	r.Helper()
	n, err := strconv.Atoi(strings.TrimPrefix(r.next(), "pid "))
	if err != nil {
		r.Fatal(err)
	}
	return n
}

func (r *rig) ask(s string) string {
	r.Helper()
	if err := r.conn.Load().Send([]byte(s)); err != nil {
		r.Fatal(err)
	}
	return r.next()
}

func running(pid int) bool { return syscall.Kill(pid, 0) == nil }

// openStreams makes a worker that answers on each stream with the stream's number.
func openStreams(p *Process) (func() error, error) {
	return func() error {
		for i, s := range p.Conn.Streams {
			go func() {
				for b := make([]byte, 1); ; {
					if _, err := s.Read(b); err != nil {
						return
					}
					_, _ = s.Write([]byte{byte(i), b[0]})
				}
			}()
		}
		if err := p.Conn.Send([]byte("pid " + pid())); err != nil {
			return err
		}
		_, _ = p.Conn.Receive(0)
		return nil
	}, nil
}

// Each process has streams of its own, which end with it.
func TestStreams(t *testing.T) {
	r := newRig(t, "streams")
	if r.pid(); len(r.conn.Load().Streams) > 0 {
		t.Error("a worker without streams has some")
	}
	r.v.Close()
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	r.v = r.s.Supervise(Config{Kind: "streams", Log: hclog.New(&hclog.LoggerOptions{Output: r.log}), Streams: 9,
		Files: []*os.File{null}, Serve: r.serve})
	t.Cleanup(r.v.Close)
	var before []net.Conn
	for range 2 {
		pid := r.pid()
		b := make([]byte, 2)
		for _, s := range before {
			if err := s.SetReadDeadline(time.Now().Add(patience)); err != nil && !errors.Is(err, net.ErrClosed) {
				t.Error(err)
			}
			if _, err := s.Read(b); !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
				t.Errorf("a stream of the process before: %v", err)
			}
		}
		if before = r.conn.Load().Streams; len(before) != 9 {
			t.Fatalf("%d streams, want 9", len(before))
		}
		for i, s := range before {
			if _, err := s.Write([]byte{'x'}); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(s, b); err != nil || b[0] != byte(i) || b[1] != 'x' {
				t.Errorf("stream %d: %v, %v", i, b, err)
			}
		}
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
}

// A worker that is killed is started again; another one does not notice.
func TestKilled(t *testing.T) {
	r, other := newRig(t, "echo"), newRig(t, "echo")
	first, others := r.pid(), other.pid()
	long := strings.Repeat("x", 3*packetSize-3) // whole packets
	for _, s := range []string{"a", "", long, long + "y"} {
		if got := r.ask(s); got != s {
			t.Errorf("%d bytes are answered by %d", len(s), len(got))
		}
	}
	for range 3 {
		if err := syscall.Kill(first, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		next := r.pid()
		if next == first || running(first) {
			t.Errorf("process %d after %d", next, first)
		}
		first = next
		if r.ask("again") != "again" || other.ask("still") != "still" {
			t.Error("a worker does not answer")
		}
	}
	if !running(others) || !strings.Contains(r.log.String(), "worker process ended; it is started again: why=\"signal: killed\"") {
		t.Errorf("the other runs: %v", running(others))
	}
	r.v.Close()
	if running(first) {
		t.Error("the worker outlives its supervisor")
	}
}

// Signals for the whole process group or unit do not end a worker before the daemon does.
func TestSignalsOfGroup(t *testing.T) {
	r := newRig(t, "echo")
	p := r.pid()
	for _, s := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP} {
		for _, to := range []int{p, r.s.process.Pid} {
			if err := syscall.Kill(to, s); err != nil {
				t.Fatal(err)
			}
		}
	}
	if r.ask("there") != "there" {
		t.Error("the worker does not answer")
	}
}

// A worker that crashes is named in the log, with its stack; one that cannot start, with its reason.
func TestCrash(t *testing.T) {
	r := newRig(t, "crash")
	r.pid()
	if err := r.conn.Load().Send([]byte("x")); err != nil {
		t.Fatal(err)
	}
	r.pid()
	for _, want := range []string{"[WARN]  crash: panic: hostile input", "[WARN]  crash: goroutine ", "exit status 2"} {
		if !strings.Contains(r.log.String(), want) {
			t.Errorf("no %q in the log", want)
		}
	}
	u := newRig(t, "unable")
	testutil.Eventually(t, "the reason", func() bool { return strings.Contains(u.log.String(), "no way") })
	n := newRig(t, "unknown")
	testutil.Eventually(t, "the reason", func() bool {
		return strings.Contains(n.log.String(), `no kind of worker is named \"unknown\"`)
	})
}

// A worker that reads nothing and ignores the end of its connection is killed; until then only its Serve waits.
func TestStall(t *testing.T) {
	r := newRig(t, "stall")
	first := r.pid()
	c := r.conn.Load()
	for i := 0; ; i++ {
		if err := c.Send(make([]byte, packetSize)); err != nil {
			break
		}
		if i > 1000 {
			t.Fatal("sent without end")
		}
	}
	_ = c.Close()
	r.pid()
	if running(first) {
		t.Error("it still runs")
	}
	r.v.Close() // one that does not end by itself
}

func openFlood(p *Process) (func() error, error) {
	return func() error {
		junk := bytes.Repeat([]byte{'[', 'E', 'R', 'R', 'O', 'R', ']', ' ', 0x1b, 'f', '\r', 'o'}, 1000)
		for i := range 4000 {
			fmt.Fprintf(os.Stderr, "[ERROR] line %d\n2026-01-01T00:00:00.000Z [ERROR] vnicd: forged\n", i)
		}
		_, _ = os.Stderr.Write(junk)
		_, _ = os.Stderr.Write([]byte("\n"))
		_ = p.Conn.Send([]byte("done"))
		for {
			if err := p.Conn.Send(make([]byte, 2<<20)); err != nil {
				return nil
			}
		}
	}, nil
}

// A flood of log lines and a message beyond the bound: few lines get through, each with the worker's name, and the
// process is ended.
func TestFlood(t *testing.T) {
	r := newRig(t, "flood")
	for range 2 { // it is started again
		if got := r.next(); got != "done" {
			t.Errorf("message %q", got)
		}
	}
	testutil.Eventually(t, "the reason", func() bool { return strings.Contains(r.log.String(), ErrTooLong.Error()) })
	r.v.Close()
	log := r.log.String()
	lines := strings.Split(strings.TrimSpace(log), "\n")
	if len(lines) > 500 {
		t.Errorf("%d lines", len(lines))
	}
	for _, l := range lines {
		// The time and the level are the daemon's own.
		if rest := l[strings.Index(l, "["):]; !strings.Contains(rest[:min(len(rest), 14)], "flood:") ||
			strings.ContainsAny(l, "\x1b\r") || len(l) > maxLine+200 {
			t.Errorf("forged: %.300q", l)
		}
	}
}

func openGarbage(p *Process) (func() error, error) {
	raw, err := p.Conn.sock.SyscallConn()
	if err != nil {
		return nil, err
	}
	return func() error {
		_ = p.Conn.Send([]byte("pid " + pid()))
		b, err := p.Conn.Receive(MaxMessage)
		if err != nil {
			return nil
		}
		_ = raw.Write(func(fd uintptr) bool { _, _ = unix.Write(int(fd), b); return true })
		_, _ = p.Conn.Receive(1) // until it is killed
		return nil
	}, nil
}

// Packets that are none of a message's end the process.
func TestGarbage(t *testing.T) {
	r := newRig(t, "garbage")
	for _, b := range [][]byte{{}, {2}, {more, 1, 2}, make([]byte, packetSize+100)} {
		p := r.pid()
		if err := r.conn.Load().Send(b); err != nil {
			t.Fatal(err)
		}
		testutil.Eventually(t, fmt.Sprintf("the end after %.10q", b), func() bool { return !running(p) })
	}
}

// tries does what a worker may not do, and answers with what succeeded.
func tries(p *Process, secret []byte) error {
	var did []string
	try := func(what string, err error) {
		if err == nil {
			did = append(did, what)
		}
	}
	parent := string(secret)
	try("open", func() error { _, err := os.Open("/etc/passwd"); return err }())
	try("create", os.WriteFile("/tmp/vnicd-worker-test", nil, 0o600))
	try("the daemon's memory", func() error { _, err := os.OpenFile("/proc/"+parent+"/mem", os.O_RDWR, 0); return err }())
	try("exec", syscall.Exec("/bin/true", []string{"true"}, nil))
	try("program", exec.Command("/bin/true").Run())
	for _, c := range []struct{ family, kind int }{{unix.AF_INET, unix.SOCK_STREAM}, {unix.AF_INET, unix.SOCK_DGRAM},
		{unix.AF_UNIX, unix.SOCK_STREAM}, {unix.AF_NETLINK, unix.SOCK_RAW}, {unix.AF_PACKET, unix.SOCK_RAW}} {
		_, err := unix.Socket(c.family, c.kind, 0)
		try(fmt.Sprint("socket ", c), err)
	}
	n, _ := strconv.Atoi(parent)
	try("kill", syscall.Kill(n, 0))
	try("ptrace", unix.PtraceAttach(n))
	for name, call := range map[string]uintptr{"bpf": unix.SYS_BPF, "clone3": unix.SYS_CLONE3, "unshare": unix.SYS_UNSHARE,
		"io_uring": unix.SYS_IO_URING_SETUP, "process_vm_readv": unix.SYS_PROCESS_VM_READV, "setuid": unix.SYS_SETUID,
		"memfd": unix.SYS_MEMFD_CREATE, "pidfd": unix.SYS_PIDFD_OPEN, "fork": unix.SYS_FORK} {
		_, _, errno := unix.RawSyscall(call, 0, 0, 0)
		if errno != unix.EPERM && (call != unix.SYS_CLONE3 || errno != unix.ENOSYS) {
			try(name, fmt.Errorf("%d", errno))
			did = append(did, fmt.Sprintf("%s: %v", name, errno))
		}
	}
	var threads unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NPROC, &threads); err != nil || threads.Max > maxThreads {
		did = append(did, fmt.Sprint("threads ", threads.Max, err))
	}
	_, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_EXEC, unix.MAP_ANON|unix.MAP_PRIVATE)
	try("code", err)
	b, err := json.Marshal(did)
	if err != nil {
		return err
	}
	return p.Conn.Send(b)
}

// What a worker may not do fails, and the kernel shows what it has given up.
func TestRights(t *testing.T) {
	t.Setenv("SECRET", "of the daemon")
	secret, err := os.Open("/proc/self/status") // a descriptor that is not passed on
	if err != nil {
		t.Fatal(err)
	}
	defer secret.Close()
	if _, err := unix.FcntlInt(secret.Fd(), unix.F_SETFD, 0); err != nil { // not even if it is inherited
		t.Fatal(err)
	}
	r := newRig(t, "tries")
	p := r.pid()
	if got := r.ask(pid()); got != "null" {
		t.Errorf("a worker can do: %s", got)
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p))
	if err != nil {
		t.Fatal(err)
	}
	zero := strings.Repeat("0", 16)
	for _, l := range []string{"CapEff:\t" + zero, "CapPrm:\t" + zero, "CapInh:\t" + zero, "CapAmb:\t" + zero,
		"NoNewPrivs:\t1", "Seccomp:\t2"} {
		if !strings.Contains(string(status), l+"\n") {
			t.Errorf("no %q in %s", l, status)
		}
	}
	if os.Geteuid() == 0 && !strings.Contains(string(status), "Uid:\t65534\t65534\t65534\t65534\n") {
		t.Errorf("user: %s", status)
	}
	if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", p)); err != nil || len(b) > 0 {
		t.Errorf("environment %q, %v", b, err)
	}
	for _, process := range []int{p, r.s.process.Pid} {
		fds, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", process))
		if err != nil || len(fds) < 4 {
			t.Errorf("descriptors %v, %v", fds, err)
		}
		for _, f := range fds {
			if to, err := os.Readlink(f); err == nil && strings.Contains(to, "/status") {
				t.Errorf("%s is %s", f, to)
			}
		}
	}
}

func openBind(p *Process) (func() error, error) {
	l, err := net.Listen("tcp", "127.0.0.1:179")
	if err != nil {
		return nil, err
	}
	return func() error {
		_ = p.Conn.Send([]byte("pid " + pid()))
		for {
			b, err := p.Conn.Receive(100)
			if err != nil {
				return nil
			}
			c, err := net.Dial("tcp", string(b)) // permitted
			_, err2 := net.Listen("tcp", "127.0.0.1:0")
			var err3 error
			if raw, err := p.Conn.sock.SyscallConn(); err == nil {
				_ = raw.Control(func(fd uintptr) {
					err3 = unix.Bind(int(fd), &unix.SockaddrUnix{Name: "/tmp/vnicd-worker-test.socket"})
				})
			}
			answer := fmt.Sprint("dial ", err, ", listen ", err2 != nil, ", file ", err3)
			if err == nil {
				_ = c.Close()
			}
			if err := p.Conn.Send([]byte(answer)); err != nil {
				return nil
			}
			_ = l
		}
	}, nil
}

// A kind gets the capability that it needs to open, and nothing of it afterwards; it can connect, but not listen, nor
// make a file of its connection.
func TestPort(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	r := newRig(t, "bind")
	r.pid()
	if got := r.ask(l.Addr().String()); got != "dial <nil>, listen true, file invalid argument" {
		t.Error(got)
	}
}

func openAccept(p *Process) (func() error, error) {
	l, err := net.FileListener(p.Files[0])
	if err != nil {
		return nil, err
	}
	return func() error {
		_ = p.Conn.Send([]byte("pid " + pid()))
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				_, _ = io.WriteString(c, "hello "+pid())
				_ = c.Close()
			}
		}()
		_, _ = p.Conn.Receive(1)
		return nil
	}, nil
}

// Each process of a kind accepts on the sockets that the daemon passes.
func TestListener(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	f, err := l.(*net.TCPListener).File()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	r := newRig(t, "accept", f)
	for range 2 {
		p := r.pid()
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(c)
		if err != nil || string(b) != "hello "+strconv.Itoa(p) {
			t.Errorf("%q, %v", b, err)
		}
		_ = c.Close()
		if err := syscall.Kill(p, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
}

// daemonToKill prints the process ids of its spawner and its worker.
func daemonToKill() {
	s, err := Start(hclog.NewNullLogger())
	if err != nil {
		panic(err)
	}
	s.Supervise(Config{Kind: "stall", Log: hclog.NewNullLogger(), Serve: func(_ context.Context, c *Conn) error {
		b, err := c.Receive(100)
		fmt.Println(s.process.Pid, strings.TrimPrefix(string(b), "pid "), err)
		_, err = c.Receive(100)
		return err
	}})
	select {}
}

// Whatever ends the daemon or the spawner, no process is left.
func TestNothingLeft(t *testing.T) {
	for _, who := range []string{"daemon", "spawner"} {
		c := exec.Command(os.Args[0])
		c.Env = append(os.Environ(), asDaemon+"=1")
		out, err := c.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		var spawner, worker int
		if _, err := fmt.Fscan(out, &spawner, &worker); err != nil {
			t.Fatal(err)
		}
		if !running(spawner) || !running(worker) {
			t.Errorf("processes %d and %d", spawner, worker)
		}
		end := map[string]int{"daemon": c.Process.Pid, "spawner": spawner}[who]
		if err := syscall.Kill(end, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		testutil.Eventually(t, "the worker's end with the "+who, func() bool { return !running(worker) })
		testutil.Eventually(t, "the spawner's end with the "+who, func() bool { return !running(spawner) })
		_ = c.Process.Kill()
		_ = c.Wait()
	}
}

// The daemon goes on without the spawner, and says so.
func TestSpawnerDies(t *testing.T) {
	r := newRig(t, "echo")
	p := r.pid()
	if err := syscall.Kill(r.s.process.Pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	testutil.Eventually(t, "the worker's end", func() bool { return !running(p) })
	testutil.Eventually(t, "the spawner's end", r.s.Ended)
	testutil.Eventually(t, "the log", func() bool {
		return strings.Contains(r.log.String(), "worker process cannot be started again until vnicd is restarted")
	})
}

// FuzzConn: any packets make messages within the bound, or an error.
func FuzzConn(f *testing.F) {
	f.Add([]byte{last, 'a'}, []byte{last})
	f.Add(append([]byte{more}, make([]byte, packetSize-1)...), []byte{last, 'b'})
	f.Fuzz(func(t *testing.T, x, y []byte) {
		a, b, err := Pair()
		if err != nil {
			t.Fatal(err)
		}
		defer a.Close()
		defer b.Close()
		for _, p := range [][]byte{x, y} {
			if _, err := a.sock.Write(p[:min(len(p), 100<<10)]); err != nil {
				t.Fatal(err)
			}
		}
		_ = a.Close()
		for range 3 {
			if msg, err := b.Receive(packetSize + 10); err != nil {
				return
			} else if len(msg) > packetSize+10 {
				t.Errorf("%d bytes", len(msg))
			}
		}
		t.Error("more messages than packets")
	})
}
