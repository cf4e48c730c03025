package worker

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/confine"
)

// command is the hidden sub-command of spawner and workers.
const command = "worker"

// Descriptors of spawner and workers besides 0 to 2.
const (
	connFile  = 3
	firstFile = 4
)

// Kind is what one kind of worker is and may do.
type Kind struct {
	Name string
	// Capabilities are those that Open needs, if the daemon has them.
	Capabilities []uint
	// Calls are the system calls that the process needs after Open, besides confine.Runtime.
	Calls []confine.Rule
	// MaxFiles bounds its descriptors. MaxMemory, if not 0, bounds the memory that it takes besides what it has at its
	// start, in bytes (RLIMIT_DATA).
	MaxFiles, MaxMemory uint64
	// Open prepares the worker with the rights that it has at its start, and touches no foreign input. Then the process
	// gives these up and calls run. The process ends when run returns; run returns when Process.Conn ends.
	Open func(p *Process) (run func() error, err error)
}

// Process is what a worker has.
type Process struct {
	Conn  *Conn
	Files []*os.File // duplicates of Config.Files
	Log   hclog.Logger
}

func find(kinds []Kind, name string) (Kind, bool) {
	i := slices.IndexFunc(kinds, func(k Kind) bool { return k.Name == name })
	if i < 0 {
		return Kind{}, false
	}
	return kinds[i], true
}

// Main is the main function of spawner and workers. is: the arguments, without the program's name, are those of one;
// status is its exit status. Otherwise nothing has happened.
func Main(kinds []Kind, args []string) (status int, is bool) {
	if len(args) < 2 || args[0] != command {
		return 0, false
	}
	var err error
	if args[1] == spawnerName {
		err = spawn(kinds)
	} else {
		err = work(kinds, args[1:])
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "vnicd worker %s: %v\n", args[1], err)
		return 1, true
	}
	return 0, true
}

// work runs a worker; args are those that the spawner gives.
func work(kinds []Kind, args []string) error {
	if len(args) != 4 {
		return errors.New("`vnicd run` starts this process by itself")
	}
	k, ok := find(kinds, args[0])
	level, err := strconv.Atoi(args[1])
	files, err2 := strconv.Atoi(args[2])
	streams, err3 := strconv.Atoi(args[3])
	if !ok || err != nil || err2 != nil || err3 != nil || files < 0 || streams < 0 || files+streams > maxFiles {
		return errors.New("`vnicd run` starts this process by itself")
	}
	// The daemon ends its workers, once it has no more use for them: a signal to the group or the unit does not.
	signal.Ignore(syscall.SIGHUP, syscall.SIGINT, syscall.SIGTERM)
	_ = os.WriteFile("/proc/self/comm", []byte("vnicd-"+k.Name), 0) // for ps; otherwise it is "exe"
	p := &Process{Log: newLogger(os.Stderr, hclog.Level(level))}
	if err := closeInherited(firstFile + files + streams); err != nil {
		return err
	}
	f := os.NewFile(connFile, "daemon")
	if p.Conn, err = newConn(f); err != nil {
		return err
	}
	_ = f.Close()
	for i := range files {
		unix.CloseOnExec(firstFile + i)
		p.Files = append(p.Files, os.NewFile(uintptr(firstFile+i), "file"))
	}
	for i := range streams {
		f := os.NewFile(uintptr(firstFile+files+i), "stream")
		c, err := net.FileConn(f) // has a duplicate
		if err != nil {
			return fmt.Errorf("stream: %w", err)
		}
		_ = f.Close()
		p.Conn.Streams = append(p.Conn.Streams, c)
	}
	if err := k.limit(); err != nil {
		return err
	}
	run, err := k.Open(p)
	if err != nil {
		return err
	}
	if err := k.confine(p.Log); err != nil {
		return err
	}
	return run()
}

// maxThreads bounds the threads of a worker's user, which may be the daemon's, too. TasksMax= of the unit leaves more
// to the daemon, which ends if it cannot have a thread.
const maxThreads = 4096

// limit bounds what the process may use, and keeps others of its user from its memory.
func (k *Kind) limit() error {
	// When memory is short, workers die before the daemon. A kernel without this file has no such order.
	if err := os.WriteFile("/proc/self/oom_score_adj", []byte("0"), 0); err != nil && !errors.Is(err, os.ErrNotExist) &&
		!errors.Is(err, os.ErrPermission) { // of a program that this user may not read
		return err
	}
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("PR_SET_DUMPABLE: %w", err)
	}
	limits := map[int]uint64{unix.RLIMIT_CORE: 0, unix.RLIMIT_FSIZE: 0, unix.RLIMIT_NOFILE: k.MaxFiles,
		unix.RLIMIT_NPROC: maxThreads}
	if k.MaxMemory > 0 {
		now, err := dataSize()
		if err != nil {
			return err
		}
		limits[unix.RLIMIT_DATA] = now + k.MaxMemory
	}
	for what, most := range limits {
		var l unix.Rlimit
		if err := unix.Getrlimit(what, &l); err != nil {
			return fmt.Errorf("getrlimit %d: %w", what, err)
		}
		l.Max = min(l.Max, most)
		l.Cur = l.Max
		if err := unix.Setrlimit(what, &l); err != nil {
			return fmt.Errorf("setrlimit %d to %d: %w", what, l.Max, err)
		}
	}
	return nil
}

// dataSize returns the memory that RLIMIT_DATA bounds, in bytes.
func dataSize() (uint64, error) {
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0, err
	}
	for _, l := range strings.Split(string(text), "\n") {
		if v, ok := strings.CutPrefix(l, "VmData:"); ok {
			kib, err := strconv.ParseUint(strings.TrimSpace(strings.TrimSuffix(v, "kB")), 10, 64)
			return kib << 10, err
		}
	}
	return 0, errors.New("/proc/self/status has no VmData")
}

// confine gives up the rights that only Open needed.
func (k *Kind) confine(log hclog.Logger) error {
	switch err := confine.Keep(); {
	case errors.Is(err, confine.ErrCgo):
		if len(k.Capabilities) > 0 {
			log.Debug("capabilities of other threads remain", "reason", err)
		}
	case err != nil:
		return fmt.Errorf("capabilities: %w", err)
	}
	if err := confine.Only(append(confine.Runtime(os.Getpid()), k.Calls...)); err != nil {
		return fmt.Errorf("system calls: %w", err)
	}
	return nil
}
