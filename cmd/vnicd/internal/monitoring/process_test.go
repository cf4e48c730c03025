package monitoring

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/monitoring/query"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/monitoring/web"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/worker"
	"github.com/vnicd/vnicd/device/testutil/testlog"
)

// kinds are the processes of these tests: the real one, and some with its rights that were taken over.
var kinds = []worker.Kind{
	web.Kind,
	like("tries", tries),
	like("garbage", func(p *worker.Process) { _, _ = p.Conn.Streams[0].Write(make([]byte, query.Size)) }),
	like("message", func(p *worker.Process) { _ = p.Conn.Send([]byte("hello")) }),
	like("closes", func(p *worker.Process) { _ = p.Conn.Streams[1].Close() }),
	like("flood", func(p *worker.Process) {
		q := query.Query{Kind: query.Metrics}
		text := []byte(strings.Repeat(string(q.Append(nil)), 100))
		for {
			if _, err := p.Conn.Streams[0].Write(text); err != nil {
				return
			}
		}
	}),
}

// like makes a kind with the rights of the real one that does something else, and then waits for the daemon.
func like(name string, do func(*worker.Process)) worker.Kind {
	k := web.Kind
	k.Name = name
	k.Open = func(p *worker.Process) (func() error, error) {
		if _, err := p.Conn.Receive(web.MaxConfig); err != nil {
			return nil, err
		}
		return func() error {
			do(p)
			for {
				if _, err := p.Conn.Receive(web.MaxConfig); err != nil {
					return nil
				}
			}
		}, nil
	}
	return k
}

// tries tells which of the things that it must not do it could do.
func tries(p *worker.Process) {
	could := ""
	for name, try := range map[string]func() error{
		"make a TCP socket": func() error {
			_, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
			return err
		},
		"make a UDP socket":  func() error { _, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0); return err },
		"make a unix socket": func() error { _, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0); return err },
		"listen": func() error {
			raw, err := p.Files[0].SyscallConn()
			if err != nil {
				return err
			}
			_ = raw.Control(func(fd uintptr) { err = unix.Listen(int(fd), 1) })
			return err
		},
		"connect": func() error {
			raw, err := p.Files[0].SyscallConn()
			if err != nil {
				return err
			}
			_ = raw.Control(func(fd uintptr) { err = unix.Connect(int(fd), &unix.SockaddrUnix{Name: "/nowhere"}) })
			return err
		},
		"read a file":      func() error { _, err := os.ReadFile("/proc/self/status"); return err },
		"write a file":     func() error { return os.WriteFile("/tmp/vnicd-test-monitoring", nil, 0o600) },
		"start a program":  func() error { return unix.Exec("/bin/true", []string{"true"}, nil) },
		"start a process":  func() error { return exec.Command("/bin/true").Run() },
		"signal a process": func() error { return unix.Kill(os.Getpid(), 0) },
	} {
		if err := try(); !errors.Is(err, unix.EPERM) {
			could += fmt.Sprintf("%s: %v; ", name, err)
		}
	}
	_ = p.Conn.Send([]byte(could))
}

// TestProcessRights: the process can accept on the socket that it got, and nothing else of what would be of use to one
// that was taken over.
func TestProcessRights(t *testing.T) {
	f, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	could := make(chan string, 1)
	v := newSpawner(t).Supervise(worker.Config{Kind: "tries", Log: hclog.NewNullLogger(), Files: []*os.File{f},
		Serve: func(ctx context.Context, c *worker.Conn) error {
			defer context.AfterFunc(ctx, func() { _ = c.Close() })()
			if err := c.Send(nil); err != nil {
				return err
			}
			text, err := c.Receive(1 << 20)
			if err != nil {
				text = []byte(err.Error())
			}
			select {
			case could <- string(text):
			default:
			}
			<-ctx.Done()
			return nil
		}})
	defer v.Close()
	select {
	case s := <-could:
		if s != "" {
			t.Errorf("it could %s", s)
		}
	case <-time.After(time.Minute):
		t.Error("no answer")
	}
}

// processOf returns the process that serves, once there is another one than before: the grandchild of this one.
func processOf(t *testing.T, before int) (pid int) {
	t.Helper()
	waitFor(t, "the process that serves", func() bool {
		for _, p := range children(t, os.Getpid()) {
			for _, w := range children(t, p) {
				if w != before {
					pid = w
					return true
				}
			}
		}
		return false
	})
	return pid
}

func children(t *testing.T, of int) (out []int) {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			continue // it has ended
		}
		// PID (NAME) STATE PPID
		fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(f))); err == nil && len(fields) > 1 &&
			fields[1] == strconv.Itoa(of) && fields[0] != "Z" {
			out = append(out, pid)
		}
	}
	return out
}

// fakeStage is a server for a daemon that is none.
func fakeStage(t *testing.T, src Source, kind string) (*stage, *testlog.Log) {
	t.Helper()
	path, log := filepath.Join(t.TempDir(), "mon"), &testlog.Log{}
	srv, err := serve(config.Monitoring{Listen: path}, src, newSpawner(t), kind, time.Hour,
		hclog.New(&hclog.LoggerOptions{Output: log}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(srv.Close)
	s := &stage{t: t}
	s.client.Transport = unixTransport(path)
	return s, log
}

// The process serves TCP as well: the system calls that it has are enough for that.
func TestProcessTCP(t *testing.T) {
	srv, err := Serve(config.Monitoring{Listen: "127.0.0.1:0", PProf: true}, newBusy(100), newSpawner(t),
		hclog.NewNullLogger())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(srv.Close)
	client := http.Client{Transport: &http.Transport{}} // which asks for compressed answers, on few connections
	defer client.CloseIdleConnections()
	for range 3 {
		for path, want := range map[string]string{"/metrics": `vnicd_vm_attached{face="net",vm="vm99"}`, "/healthz": "ok",
			"/debug/pprof/heap": "\x1f\x8b"} {
			resp, err := client.Get("http://" + srv.listener.Addr().String() + path)
			if err != nil {
				t.Fatal(err)
			}
			text, err := io.ReadAll(resp.Body)
			_ = resp.Body.Close()
			if err != nil || resp.StatusCode != 200 || !strings.Contains(string(text), want) ||
				resp.Uncompressed != (path == "/metrics") {
				t.Errorf("%s: %v, %+v, %.100q", path, err, resp, text)
			}
		}
	}
}

// TestProcessKilled: a process that is killed during a scrape takes that scrape with it. The daemon goes on, the next
// process serves those who have connected meanwhile, on the same socket, and the scrape that the daemon still works on
// counts.
func TestProcessKilled(t *testing.T) {
	src := newBusy(1)
	src.wait = make(chan struct{})
	s, log := fakeStage(t, src, web.Kind.Name)
	pid := 0
	for n := range int32(2) {
		failed := make(chan error, 1)
		go func() {
			resp, err := s.client.Get("http://localhost/metrics")
			if err == nil {
				_ = resp.Body.Close()
				err = fmt.Errorf("status %d", resp.StatusCode)
			}
			failed <- err
		}()
		waitFor(t, "the daemon to work on the scrape", func() bool { return src.at.Load() == n+1 })
		if pid = processOf(t, pid); syscall.Kill(pid, syscall.SIGKILL) != nil {
			t.Fatal("cannot kill it")
		}
		if err := <-failed; err == nil || strings.Contains(err.Error(), "status") {
			t.Errorf("the scrape of a process that was killed: %v", err)
		}
		if status, text := s.get("GET", "/healthz"); status != 200 || text != "ok\n" {
			t.Errorf("then: %d %.100q", status, text)
		}
	}
	if status, text := s.get("GET", "/metrics"); status != 503 || src.top.Load() != 2 {
		t.Errorf("while the daemon works on both: %d %.100q, %d at once", status, text, src.top.Load())
	}
	close(src.wait)
	waitFor(t, "the daemon to end them", func() bool { return src.at.Load() == 0 })
	if status, text := s.get("GET", "/metrics"); status != 200 || !strings.Contains(text, "vnicd_build_info") {
		t.Errorf("in the end: %d %.100q", status, text)
	}
	if !strings.Contains(log.String(), "worker process ended; it is started again: why=\"signal: killed\"") {
		t.Errorf("no word about it in the log: %s", log)
	}
}

// TestTakenOver: a process that asks for what it may not, or speaks where it must not, is ended, and the log says why.
func TestTakenOver(t *testing.T) {
	for kind, why := range map[string]string{
		"garbage": "malformed question: kind 0", "message": "message is longer than permitted", "closes": "exit status 0",
	} {
		src := newBusy(1)
		_, log := fakeStage(t, src, kind)
		waitFor(t, "the end of "+kind, func() bool { return strings.Contains(log.String(), why) })
		if n := src.asked.Load(); n > 0 {
			t.Errorf("%s: the daemon was asked %d times", kind, n)
		}
	}
	// One that asks without end and reads nothing has one answer at a time.
	src := newBusy(200)
	_, log := fakeStage(t, src, "flood")
	waitFor(t, "a question", func() bool { return src.asked.Load() > 0 })
	time.Sleep(200 * time.Millisecond) // for what must not happen; otherwise the test shows less
	if n := src.asked.Load(); n != 1 {
		t.Errorf("%d answers to a process that reads none: %s", n, log)
	}
}

// TestFormats: a client gets the format that it prefers, and text if it says nothing. Native histograms are in the
// protocol buffers only.
func TestFormats(t *testing.T) {
	s, _ := fakeStage(t, newBusy(1), web.Kind.Name)
	for accept, want := range map[string]expfmt.FormatType{
		"": expfmt.TypeTextPlain, "*/*;q=0.1, text/plain;version=0.0.4": expfmt.TypeTextPlain,
		"image/png": expfmt.TypeTextPlain,
		"application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0.6," +
			"text/plain;version=0.0.4;q=0.3": expfmt.TypeProtoDelim,
	} {
		req, err := http.NewRequest("GET", "http://localhost/metrics", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Accept", accept)
		resp, err := s.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		format := expfmt.ResponseFormat(resp.Header)
		if resp.StatusCode != 200 || format.FormatType() != want {
			t.Errorf("accept %q: %d, %s", accept, resp.StatusCode, format)
		}
		native := false
		for d := expfmt.NewDecoder(resp.Body, format); ; {
			var f dto.MetricFamily
			if err = d.Decode(&f); err != nil {
				break
			}
			if f.GetName() == faultTime.name {
				native = len(f.Metric[0].Histogram.PositiveSpan) > 0
			}
		}
		if !errors.Is(err, io.EOF) || native != (want == expfmt.TypeProtoDelim) {
			t.Errorf("accept %q: native histograms %v, %v", accept, native, err)
		}
	}
}
