package confine

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// role makes the test binary act as a process that gives up rights, because a test cannot get them back.
const role = "VNICD_TEST_CONFINE"

var roles = map[string]func() error{"filter": filtered, "drop": dropped, "refused": refused, "only": allowed}

func TestMain(m *testing.M) {
	if f := roles[os.Getenv(role)]; f != nil {
		if err := f(); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func as(t *testing.T, name string) string {
	t.Helper()
	c := exec.Command(os.Args[0])
	c.Env = append(os.Environ(), role+"="+name)
	out, err := c.CombinedOutput()
	if err != nil {
		t.Errorf("%v: %s", err, out)
	}
	return string(out)
}

// onThreads runs f on n threads that exist before change, on the one that calls change, and on one that it creates.
func onThreads(n int, change, f func() error) error {
	var ready, done sync.WaitGroup
	changed := make(chan struct{})
	errs := make([]error, n+2)
	ready.Add(n)
	for i := range n {
		done.Go(func() {
			runtime.LockOSThread()
			ready.Done()
			<-changed
			errs[i] = f()
		})
	}
	ready.Wait()
	err := change()
	close(changed)
	if err != nil {
		done.Wait()
		return err
	}
	errs[n] = f()
	done.Go(func() {
		runtime.LockOSThread()
		errs[n+1] = f()
	})
	done.Wait()
	return errors.Join(errs...)
}

// TestForbid: what vnicd does not need once it serves fails on every thread; the rest works.
func TestForbid(t *testing.T) { as(t, "filter") }

func filtered() error {
	tries := func() error {
		var errs []error
		for _, c := range AfterStart {
			var args [2]uintptr
			want := unix.EPERM
			switch {
			case c.Except != nil:
				args[0] = unix.BPF_PROG_LOAD
			case c.Flags != 0:
				args[0] = unix.CLONE_NEWUSER | unix.CLONE_FS // the kernel refuses that, too, with another error
			case c.Errno != 0:
				want = c.Errno
			}
			if _, _, errno := unix.Syscall(c.Number, args[0], 0, 0); errno != want {
				errs = append(errs, fmt.Errorf("system call %d: %v", c.Number, errno))
			}
			for _, x := range c.Except {
				// As root: another error, about the missing arguments.
				if _, _, errno := unix.Syscall(c.Number, uintptr(x), 0, 0); errno == unix.EPERM || errno == 0 {
					errs = append(errs, fmt.Errorf("system call %d with %d: %v", c.Number, x, errno))
				}
			}
		}
		if runtime.GOARCH == "amd64" {
			if _, _, errno := unix.Syscall(x32|unix.SYS_EXECVE, 0, 0, 0); errno != unix.EPERM {
				errs = append(errs, fmt.Errorf("execve of the x32 ABI: %v", errno))
			}
		}
		if err := exec.Command("/bin/true").Run(); !errors.Is(err, unix.EPERM) {
			errs = append(errs, fmt.Errorf("a program: %w", err))
		}
		if _, err := os.ReadFile("/proc/self/status"); err != nil {
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	}
	return onThreads(4, func() error { return Forbid(AfterStart) }, tries)
}

// TestDrop: no thread keeps a capability that was dropped; with cgo, which the race detector needs, Drop says that it
// cannot.
func TestDrop(t *testing.T) { as(t, "drop") }

func dropped() error {
	none := func() error {
		if Holds(unix.CAP_BPF) {
			return errors.New("a thread holds it")
		}
		// It cannot come back.
		sets, err := capabilities(0)
		if err != nil {
			return err
		}
		sets[1].Permitted |= 1 << (unix.CAP_BPF - 32)
		h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		if err := unix.Capset(&h, &sets[0]); !errors.Is(err, unix.EPERM) {
			return fmt.Errorf("taking it back: %w", err)
		}
		return nil
	}
	err := onThreads(4, func() error { return Drop(unix.CAP_BPF) }, none)
	if errors.Is(err, ErrCgo) {
		return nil
	}
	return errors.Join(err, Drop(unix.CAP_BPF)) // nothing is left to drop
}

// TestDropRefused: Drop fails if the kernel refuses, and verifyDropped finds the threads that have the capability.
func TestDropRefused(t *testing.T) { as(t, "refused") }

func refused() error {
	if err := verifyDropped(unix.CAP_BPF); err == nil || !strings.Contains(err.Error(), "still has it") {
		return fmt.Errorf("a capability that all threads have: %w", err)
	}
	if err := Forbid([]Call{{Number: unix.SYS_CAPSET}}); err != nil {
		return err
	}
	if err := Drop(unix.CAP_BPF); !errors.Is(err, unix.EPERM) && !errors.Is(err, ErrCgo) {
		return fmt.Errorf("capset is refused, but Drop returns %w", err)
	}
	return nil
}

// TestOnly: no call works but those of the rules, with the arguments of the rules, on every thread.
func TestOnly(t *testing.T) { as(t, "only") }

func allowed() error {
	status, err := os.Open("/proc/self/status")
	if err != nil {
		return err
	}
	tries := func() error {
		var errs []error
		refused := func(what string, err error) {
			if !errors.Is(err, unix.EPERM) {
				errs = append(errs, fmt.Errorf("%s: %v", what, err))
			}
		}
		socket := func(family, kind int) error {
			fd, err := unix.Socket(family, kind, 0)
			if err == nil {
				err = unix.Close(fd)
			}
			return err
		}
		for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
			if err := socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK); err != nil {
				errs = append(errs, err)
			}
			refused("datagram socket", socket(family, unix.SOCK_DGRAM))
		}
		refused("unix socket", socket(unix.AF_UNIX, unix.SOCK_STREAM))
		_, err := os.Open("/proc/self/status")
		refused("open", err)
		if _, err := status.ReadAt(make([]byte, 10), 0); err != nil {
			errs = append(errs, err)
		}
		_, err = unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_EXEC, unix.MAP_ANON|unix.MAP_PRIVATE)
		refused("code", err)
		_, err = unix.Mmap(int(status.Fd()), 0, 4096, unix.PROT_READ, unix.MAP_PRIVATE)
		refused("file in memory", err)
		refused("signal", unix.Tgkill(os.Getppid(), os.Getppid(), 0))
		refused("listen", unix.Listen(0, 1))
		refused("descriptors", unix.Sendmsg(0, []byte{0}, unix.UnixRights(0), nil, 0))
		refused("end of reading", unix.Shutdown(0, unix.SHUT_RD))
		refused("end of a connection", unix.Shutdown(0, unix.SHUT_RDWR))
		for _, name := range []int{unix.SO_LINGER, unix.SO_ATTACH_FILTER, unix.SO_LOCK_FILTER, unix.SO_MARK} {
			refused(fmt.Sprint("option ", name), unix.SetsockoptInt(0, unix.SOL_SOCKET, name, 1))
		}
		_, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_MPTCP)
		refused("MPTCP", err)
		if _, _, errno := unix.Syscall(unix.SYS_CLONE3, 0, 0, 0); errno != unix.ENOSYS {
			errs = append(errs, fmt.Errorf("clone3: %w", errno))
		}
		if _, _, errno := unix.Syscall(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0); errno != unix.EPERM {
			errs = append(errs, fmt.Errorf("fork: %w", errno))
		}
		if runtime.GOARCH == "amd64" {
			if _, _, errno := unix.Syscall(x32|unix.SYS_READ, 0, 0, 0); errno != unix.EPERM {
				errs = append(errs, fmt.Errorf("read of the x32 ABI: %w", errno))
			}
		}
		return errors.Join(errs...)
	}
	for _, bad := range [][]Rule{{{unix.SYS_READ, []Condition{{Arg: 6}}}}, Any(make([]uintptr, maxFilter)...),
		{{unix.SYS_READ, make([]Condition, 40)}}} {
		if err := Only(bad); err == nil {
			return errors.New("a filter that cannot be was installed")
		}
	}
	return onThreads(4, func() error { return Only(append(Runtime(os.Getpid()), TCPClient()...)) }, tries)
}
