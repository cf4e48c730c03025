package pressure

import (
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// Watch calls a function when tasks wait for memory.
type Watch struct {
	stop  int // eventfd
	files []int
	once  sync.Once
	done  chan struct{}
}

// triggers are stalls within a time, in microseconds, as PSI takes them: the quicker one needs CAP_SYS_RESOURCE, and
// Linux before 6.5 takes none from others.
var triggers = []string{"some 100000 1000000\x00", "some 200000 2000000\x00"}

// NewWatch makes the kernel report stalls in those PSI files where it can, until Close, and calls notify for each
// report: at most once per file and window of a second or two, on a goroutine of its own. With no such file it returns
// an error; the caller then reads periodically only.
func NewWatch(files []string, notify func()) (*Watch, error) {
	w := &Watch{stop: -1, done: make(chan struct{})}
	var errs []error
	for _, name := range files {
		fd, err := trigger(name)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", name, err))
			continue
		}
		w.files = append(w.files, fd)
	}
	if len(w.files) == 0 {
		return nil, errors.Join(errs...)
	}
	var err error
	if w.stop, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		w.closeFiles()
		return nil, os.NewSyscallError("eventfd", err)
	}
	go w.run(notify)
	return w, nil
}

func trigger(name string) (fd int, err error) {
	fd, err = unix.Open(name, unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	for _, t := range triggers {
		if _, err = unix.Write(fd, []byte(t)); err == nil {
			return fd, nil
		}
	}
	_ = unix.Close(fd)
	return -1, err
}

func (w *Watch) run(notify func()) {
	defer close(w.done)
	fds := []unix.PollFd{{Fd: int32(w.stop), Events: unix.POLLIN}}
	for _, fd := range w.files {
		fds = append(fds, unix.PollFd{Fd: int32(fd), Events: unix.POLLPRI})
	}
	for {
		if _, err := unix.Poll(fds, -1); err != nil && !errors.Is(err, unix.EINTR) {
			return
		}
		if fds[0].Revents != 0 {
			return
		}
		told := false
		for i := 1; i < len(fds); i++ {
			switch ev := fds[i].Revents; {
			case ev&(unix.POLLERR|unix.POLLNVAL) != 0:
				fds[i].Fd = -1 // the cgroup is gone
			case ev&unix.POLLPRI != 0 && !told:
				told = true
				notify()
			}
		}
	}
}

// Close ends the reports; notify is not called after it returned. It is idempotent.
func (w *Watch) Close() {
	w.once.Do(func() {
		one := []byte{1, 0, 0, 0, 0, 0, 0, 0}
		_, _ = unix.Write(w.stop, one)
		<-w.done
		_ = unix.Close(w.stop)
		w.closeFiles()
	})
}

func (w *Watch) closeFiles() {
	for _, fd := range w.files {
		_ = unix.Close(fd)
	}
}
