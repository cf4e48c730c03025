package daemon

import (
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// lingering returns a TCP socket of which close(2) blocks until the other one is closed, or for a minute: it has sent
// what nobody receives.
func lingering(t *testing.T) (fd, other int) {
	t.Helper()
	l, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(l)
	fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var at unix.Sockaddr
	err = errors.Join(unix.Bind(l, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}), unix.Listen(l, 1))
	if err == nil {
		at, err = unix.Getsockname(l)
	}
	if err == nil {
		err = unix.Connect(fd, at)
	}
	if err == nil {
		other, _, err = unix.Accept4(l, unix.SOCK_CLOEXEC)
	}
	if err == nil {
		err = errors.Join(unix.SetNonblock(fd, true),
			unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1, Linger: 60}))
	}
	if err != nil {
		t.Fatal(err)
	}
	for b := make([]byte, 1<<20); err == nil; {
		_, err = unix.Write(fd, b)
	}
	if !errors.Is(err, unix.EAGAIN) {
		t.Fatal(err)
	}
	if err := unix.SetNonblock(fd, false); err != nil {
		t.Fatal(err)
	}
	return fd, other
}

// A VM whose descriptors block close(2) delays neither the ends of other VMs nor, for longer than the limit, that of
// the daemon.
func TestEndsTogether(t *testing.T) {
	var others [2]int
	ends := map[string]func(){}
	blocked := make(chan struct{}, 2)
	for i, name := range []string{"stuck1", "stuck2"} {
		fd, other := lingering(t)
		others[i] = other
		ends[name] = func() {
			_ = unix.Close(fd)
			blocked <- struct{}{}
		}
	}
	var ended atomic.Int32
	for _, name := range []string{"a", "m", "z"} {
		ends[name] = func() { ended.Add(1) }
	}
	left := together(time.Second, ends)
	if want := []string{"stuck1", "stuck2"}; !slices.Equal(left, want) {
		t.Errorf("%q have not ended, want %q", left, want)
	}
	if n := ended.Load(); n != 3 {
		t.Errorf("%d of three other VMs have ended", n)
	}
	select {
	case <-blocked:
		t.Error("a socket did not block close(2)")
	default:
	}
	for _, fd := range others { // with data that was not read: a reset
		_ = unix.Close(fd)
	}
	for range others {
		<-blocked
	}
	if left := together(time.Minute, map[string]func(){"a": func() {}}); left != nil {
		t.Errorf("%q have not ended", left)
	}
}
