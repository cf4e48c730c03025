package systemd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// manager is the receiving end of notifications.
func manager(t *testing.T) *net.UnixConn {
	t.Helper()
	path := filepath.Join(t.TempDir(), "notify")
	c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	t.Setenv("NOTIFY_SOCKET", path)
	_ = c.SetReadDeadline(time.Now().Add(time.Minute))
	return c
}

func read(t *testing.T, c *net.UnixConn) string {
	t.Helper()
	b := make([]byte, 100)
	n, err := c.Read(b)
	if err != nil {
		t.Fatal(err)
	}
	return string(b[:n])
}

func TestNotify(t *testing.T) {
	c := manager(t)
	if err := Notify(Ready); err != nil {
		t.Fatal(err)
	}
	if s := read(t, c); s != "READY=1" {
		t.Errorf("got %q", s)
	}
	t.Setenv("NOTIFY_SOCKET", "")
	if err := Notify(Ready); err != nil {
		t.Error(err)
	}
	t.Setenv("NOTIFY_SOCKET", "/nowhere")
	if err := Notify(Ready); err == nil {
		t.Error("no error without a manager")
	}
}

// The watchdog is fed only while the daemon is healthy.
func TestWatch(t *testing.T) {
	c := manager(t)
	t.Setenv("WATCHDOG_USEC", "3000")
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	asked := 0
	done := make(chan struct{})
	go func() {
		defer close(done)
		Watch(ctx, func(context.Context) error {
			if asked++; asked > 3 {
				if asked > 6 {
					cancel()
				}
				return errors.New("stuck")
			}
			return nil
		})
	}()
	for range 3 {
		if s := read(t, c); s != "WATCHDOG=1" {
			t.Errorf("got %q", s)
		}
	}
	<-done
	_ = c.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
	if n, err := c.Read(make([]byte, 10)); err == nil {
		t.Errorf("fed although the daemon was stuck: %d bytes", n)
	}
	t.Setenv("WATCHDOG_PID", "1")
	Watch(context.Background(), nil) // the watchdog of another process: returns at once
}

// A passed socket is found by its name. A child process of the test is the service.
func TestListener(t *testing.T) {
	if os.Getenv("SYSTEMD_TEST_CHILD") != "" {
		os.Setenv("LISTEN_PID", fmt.Sprint(os.Getpid()))
		if l, err := Listener("other"); l != nil || err != nil {
			t.Fatal(l, err)
		}
		l, err := Listener("control")
		if err != nil || l == nil {
			t.Fatal(l, err)
		}
		c, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprint(c, "hello")
		_ = c.Close()
		_ = l.Close()
		return
	}
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	f, err := l.File()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	cmd := exec.Command(os.Args[0], "-test.run=TestListener$")
	cmd.Env = append(os.Environ(), "SYSTEMD_TEST_CHILD=1", "LISTEN_FDS=2", "LISTEN_FDNAMES=first:control")
	cmd.ExtraFiles = []*os.File{os.Stderr, f}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(c)
	if err != nil || string(b) != "hello" {
		t.Errorf("%q, %v", b, err)
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(path); err != nil {
		t.Errorf("the service removed the manager's socket: %v", err)
	}
}

// passBarrier reads a barrier, and passes it.
func passBarrier(t *testing.T, c *net.UnixConn) {
	t.Helper()
	b, oob := make([]byte, 100), make([]byte, 100)
	n, oobn, _, _, err := c.ReadMsgUnix(b, oob)
	if err != nil || string(b[:n]) != "BARRIER=1" {
		t.Fatalf("%q, %v", b[:n], err)
	}
	msgs, err := syscall.ParseSocketControlMessage(oob[:oobn])
	if err != nil || len(msgs) != 1 {
		t.Fatalf("%d control messages, %v", len(msgs), err)
	}
	fds, err := syscall.ParseUnixRights(&msgs[0])
	if err != nil || len(fds) != 1 {
		t.Fatalf("%d descriptors, %v", len(fds), err)
	}
	_ = syscall.Close(fds[0])
}

// A manager that does not read delays one Keep and no more.
func TestStuckManager(t *testing.T) {
	manager(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	var s Store
	begin := time.Now()
	for range 3 {
		if err := s.Keep("hca/one", int(r.Fd())); err != nil {
			t.Fatal(err)
		}
	}
	if d := time.Since(begin); d < keepLimit || d >= 2*keepLimit {
		t.Errorf("three took %v, want %v", d, keepLimit)
	}
}

// A kept descriptor arrives with its name, and is the same file.
func TestStore(t *testing.T) {
	c := manager(t)
	f, err := os.Create(filepath.Join(t.TempDir(), "kept"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var s Store
	stored := make(chan error, 1)
	go func() { stored <- s.Keep("hca/one", int(f.Fd())) }()
	b, oob := make([]byte, 100), make([]byte, 100)
	if got := read(t, c); got != "FDSTORE=1\nFDNAME=names/1" {
		t.Fatalf("%q", got)
	}
	n, oobn, _, _, err := c.ReadMsgUnix(b, oob)
	if err != nil || string(b[:n]) != "FDSTORE=1\nFDNAME=/0" {
		t.Fatalf("%q, %v", b[:n], err)
	}
	select {
	case err := <-stored:
		t.Fatalf("Keep has returned before the manager has the descriptor: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	msgs, err := syscall.ParseSocketControlMessage(oob[:oobn])
	if err != nil || len(msgs) != 1 {
		t.Fatalf("%d control messages, %v", len(msgs), err)
	}
	fds, err := syscall.ParseUnixRights(&msgs[0])
	if err != nil || len(fds) != 1 {
		t.Fatalf("%d descriptors, %v", len(fds), err)
	}
	got := os.NewFile(uintptr(fds[0]), "got")
	defer got.Close()
	want, _ := f.Stat()
	if st, err := got.Stat(); err != nil || !os.SameFile(st, want) {
		t.Errorf("a different file arrived: %v", err)
	}
	passBarrier(t, c)
	if err := <-stored; err != nil {
		t.Fatal(err)
	}
	if err := s.Forget("hca/one"); err != nil {
		t.Fatal(err)
	}
	if got := read(t, c); got != "FDSTOREREMOVE=1\nFDNAME=/0" {
		t.Errorf("%q", got)
	}
	flushed := make(chan error, 1)
	go func() { flushed <- s.Flush(time.Minute) }()
	if n, oobn, _, _, err = c.ReadMsgUnix(b, oob); err != nil || string(b[:n]) != "BARRIER=1" {
		t.Fatalf("%q, %v", b[:n], err)
	}
	if msgs, err = syscall.ParseSocketControlMessage(oob[:oobn]); err != nil || len(msgs) != 1 {
		t.Fatalf("%d control messages, %v", len(msgs), err)
	}
	if fds, err = syscall.ParseUnixRights(&msgs[0]); err != nil || len(fds) != 1 {
		t.Fatalf("%d descriptors, %v", len(fds), err)
	}
	select {
	case err := <-flushed:
		t.Fatal("Flush has not waited:", err)
	case <-time.After(20 * time.Millisecond):
	}
	_ = syscall.Close(fds[0])
	if err := <-flushed; err != nil {
		t.Error(err)
	}
	// A service that ends keeps its descriptors in the store.
	s.Freeze()
	if err := s.Forget("hca/one"); err != nil {
		t.Fatal(err)
	}
	_ = c.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
	if n, err := c.Read(b); err == nil {
		t.Errorf("forgotten: %q", b[:n])
	}
}
