package standin

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

func pair(t *testing.T) (near, far *net.UnixConn) {
	t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var c [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "")
		x, err := net.FileConn(f)
		if err != nil {
			t.Fatal(err)
		}
		_ = f.Close()
		c[i] = x.(*net.UnixConn)
		t.Cleanup(func() { _ = c[i].Close() })
	}
	return c[0], c[1]
}

func message(request, size uint32) []byte {
	b := make([]byte, headerSize+size)
	binary.LittleEndian.PutUint32(b, request)
	binary.LittleEndian.PutUint32(b[8:], size)
	return b
}

// Messages that wait in the socket together arrive unmerged, each with its own descriptors.
func TestDescriptorsKeepTheirMessage(t *testing.T) {
	front, in := pair(t)
	out, back := pair(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	before := open(t)
	for i, fds := range [][]int{nil, {int(w.Fd())}, nil, {int(w.Fd()), int(r.Fd())}} {
		var rights []byte
		if fds != nil {
			rights = syscall.UnixRights(fds...)
		}
		if _, _, err := front.WriteMsgUnix(message(uint32(i), uint32(8*i)), rights, nil); err != nil {
			t.Fatal(err)
		}
	}
	_ = front.Close()
	served := make(chan error, 1)
	f := &Front{conn: in}
	go func() {
		served <- f.Serve(context.Background(), func(context.Context) (*net.UnixConn, error) { return out, nil }, nil)
	}()
	for i, want := range []int{0, 1, 0, 2} {
		b, oob := make([]byte, headerSize), make([]byte, 100)
		n, oobn, _, _, err := back.ReadMsgUnix(b, oob)
		if err != nil || n != headerSize || b[0] != byte(i) {
			t.Fatalf("message %d: %d bytes, %x, %v; served: %v", i, n, b, err, <-served)
		}
		got := 0
		if msgs, _ := syscall.ParseSocketControlMessage(oob[:oobn]); len(msgs) == 1 {
			fds, _ := syscall.ParseUnixRights(&msgs[0])
			got = len(fds)
		}
		closeAll(oob[:oobn])
		if got != want {
			t.Errorf("message %d came with %d descriptors, want %d", i, got, want)
		}
		if _, err := io.ReadFull(back, make([]byte, 8*i)); err != nil {
			t.Fatal(err)
		}
	}
	if err := <-served; err != nil {
		t.Error(err)
	}
	if n, err := back.Read(make([]byte, 1)); n != 0 || err != io.EOF {
		t.Errorf("the end of the connection does not arrive: %d, %v", n, err)
	}
	_ = w.Close()
	if n, err := r.Read(make([]byte, 1)); n != 0 || err != io.EOF {
		t.Errorf("a descriptor stays open: %d, %v", n, err)
	}
	if after := open(t); after > before {
		t.Errorf("%d descriptors are open, %d before", after, before)
	}
}

// open counts this process's descriptors.
func open(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

// Listen replaces the socket of a process that has died, and nothing else.
func TestListen(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	if err := os.WriteFile(path, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(path); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("at the path of a file: %v", err)
	}
	if b, _ := os.ReadFile(path); string(b) != "precious" {
		t.Error("the file is gone")
	}
	_ = os.Remove(path)
	first, err := Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(path); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("at the path of a live socket: %v", err)
	}
	first.ln.SetUnlinkOnClose(false)
	_ = first.ln.Close()
	second, err := Listen(path)
	if err != nil {
		t.Fatalf("at the path of a dead process's socket: %v", err)
	}
	_ = second.ln.Close()
}

// Dial fails at once without permission; it waits only for a daemon that is not running.
func TestDial(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	if _, err := Dial(t.Context(), filepath.Join(path, "s"), 0); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("nothing there: %v", err)
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Dial(t.Context(), filepath.Join(path, "s"), time.Hour); !errors.Is(err, syscall.ENOTDIR) {
		t.Errorf("a path through a missing directory: %v", err)
	}
}

func TestRefused(t *testing.T) {
	for name, b := range map[string][]byte{"too large": func() []byte { m := message(1, 0); m[10] = 2; return m }(),
		"cut short": message(1, 8)[:headerSize+3]} {
		front, in := pair(t)
		out, _ := pair(t)
		if _, err := front.Write(b); err != nil {
			t.Fatal(err)
		}
		_ = front.Close()
		f := &Front{conn: in}
		if err := f.Serve(context.Background(), func(context.Context) (*net.UnixConn, error) { return out, nil },
			nil); err == nil {
			t.Errorf("a message that is %s was taken", name)
		}
	}
	if _, err := Passed(1 << 20); err == nil {
		t.Error("a number without a descriptor was taken")
	}
}
