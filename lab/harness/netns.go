// Package harness holds the parts of which labs are made: network namespaces as hosts, processes in them, VMs, and
// common steps in guests.
//
// Nothing here needs a *testing.T: functions return errors, and Close or Kill undoes what was created. Cleanup collects
// such functions for programs other than tests.
package harness

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Namespace is a named network namespace that represents a host. The zero value is the caller's namespace.
type Namespace struct {
	Name string // under /run/netns; "" for the caller's

	once sync.Once
	err  error
}

var nsCount atomic.Uint32

// NewNamespace creates a namespace called PREFIX-PID-N with its loopback up. It needs iproute2 and root, possibly root
// of a user namespace.
func NewNamespace(prefix string) (*Namespace, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("harness: network namespaces need root: run this with vm-images/rootless --net")
	}
	ns := &Namespace{Name: fmt.Sprintf("%s-%d-%d", prefix, os.Getpid(), nsCount.Add(1))}
	ctx := context.Background()
	if _, err := command(ctx, "ip", "netns", "add", ns.Name); err != nil {
		return nil, err
	}
	if _, err := ns.Run(ctx, "ip", "link", "set", "lo", "up"); err != nil {
		return nil, errors.Join(err, ns.Close())
	}
	return ns, nil
}

// Close kills the processes in the namespace and removes it with all its interfaces. Idempotent.
func (ns *Namespace) Close() error {
	if ns.Name == "" {
		return nil
	}
	ns.once.Do(func() {
		ctx := context.Background()
		out, err := command(ctx, "ip", "netns", "pids", ns.Name)
		for _, f := range strings.Fields(out) {
			if pid, perr := strconv.Atoi(f); perr == nil && pid > 1 && pid != os.Getpid() {
				_ = unix.Kill(pid, unix.SIGKILL)
			}
		}
		_, derr := command(ctx, "ip", "netns", "del", ns.Name)
		ns.err = errors.Join(err, derr)
	})
	return ns.err
}

// Argv prefixes a command so that it runs in the namespace.
func (ns *Namespace) Argv(argv []string) []string {
	if ns == nil || ns.Name == "" {
		return argv
	}
	return append([]string{"ip", "netns", "exec", ns.Name}, argv...)
}

// Run runs a program in the namespace and returns its standard output.
func (ns *Namespace) Run(ctx context.Context, argv ...string) (string, error) {
	return command(ctx, ns.Argv(argv)...)
}

// Shell runs a line of /bin/sh in the namespace and returns its standard output.
func (ns *Namespace) Shell(ctx context.Context, line string) (string, error) {
	return ns.Run(ctx, "/bin/sh", "-c", line)
}

func command(ctx context.Context, argv ...string) (string, error) {
	var out, errOut bytes.Buffer
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Stdout, cmd.Stderr = &out, &errOut
	cmd.WaitDelay = 5 * time.Second
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("%s: %w: %s", strings.Join(argv, " "), err, strings.TrimSpace(errOut.String()))
	}
	return out.String(), nil
}

// Do calls f on a thread in the namespace; sockets that f creates belong to it. Goroutines that f starts do not run
// there.
func (ns *Namespace) Do(f func() error) error {
	if ns == nil || ns.Name == "" {
		return f()
	}
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		h, err := os.Open(filepath.Join("/run/netns", ns.Name))
		if err != nil {
			result <- err
			return
		}
		defer h.Close()
		if err := unix.Setns(int(h.Fd()), unix.CLONE_NEWNET); err != nil {
			result <- fmt.Errorf("entering namespace %s: %w", ns.Name, err)
			return
		}
		result <- f()
	}()
	return <-result
}

// AddVeth joins two namespaces by a veth pair with the given interface names, both ends up. mtu 0 keeps the default.
// Removing either namespace removes the pair.
func AddVeth(a *Namespace, ifA string, b *Namespace, ifB string, mtu int) error {
	ctx := context.Background()
	if _, err := a.Run(ctx, "ip", "link", "add", ifA, "type", "veth", "peer", "name", ifB, "netns", b.Name); err != nil {
		return err
	}
	for _, end := range []struct {
		ns  *Namespace
		if_ string
	}{{a, ifA}, {b, ifB}} {
		args := []string{"ip", "link", "set", end.if_, "up"}
		if mtu > 0 {
			args = append(args, "mtu", strconv.Itoa(mtu))
		}
		if _, err := end.ns.Run(ctx, args...); err != nil {
			return err
		}
	}
	return nil
}

// AddAddress adds an address to an interface. IPv6 skips duplicate detection, so that the address is usable at once.
func (ns *Namespace) AddAddress(ifname string, p netip.Prefix) error {
	args := []string{"ip", "addr", "add", p.String(), "dev", ifname}
	if p.Addr().Is6() {
		args = append(args, "nodad")
	}
	_, err := ns.Run(context.Background(), args...)
	return err
}

// Process is a program started in a namespace.
type Process struct {
	Log  string // file with its standard output and error
	name string
	proc *os.Process
	done chan struct{}
	err  error // written before done is closed
}

// Start starts a program in the namespace with its output in the file log. It dies with the caller. env is added to the
// caller's environment.
func (ns *Namespace) Start(log string, env []string, argv ...string) (*Process, error) {
	f, err := os.Create(log)
	if err != nil {
		return nil, err
	}
	return ns.start(f, env, nil, argv...)
}

// start is Start with open files passed from descriptor 3 on. It closes the log.
func (ns *Namespace) start(f *os.File, env []string, files []*os.File, argv ...string) (*Process, error) {
	p := &Process{Log: f.Name(), name: strings.Join(argv, " "), done: make(chan struct{})}
	full := ns.Argv(argv)
	cmd := exec.Command(full[0], full[1:]...)
	cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = f, f, files
	cmd.Env = append(os.Environ(), env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	started := make(chan error, 1)
	go func() {
		// The parent-death signal is sent when the forking thread ends, so this thread waits for the child.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer f.Close()
		err := cmd.Start()
		p.proc = cmd.Process
		started <- err
		if err != nil {
			return
		}
		p.err = cmd.Wait()
		close(p.done)
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("%s: %w", p.name, err)
	}
	return p, nil
}

// PID returns the process id. `ip netns exec` execs the program, so it is the program's own.
func (p *Process) PID() int { return p.proc.Pid }

// Done is closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Signal sends a signal to the process.
func (p *Process) Signal(s os.Signal) error {
	if err := p.proc.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("%s: %w", p.name, err)
	}
	return nil
}

// Wait waits for the process to exit. A non-zero status is an error that includes the end of the log.
func (p *Process) Wait(ctx context.Context) error {
	select {
	case <-p.done:
	case <-ctx.Done():
		return fmt.Errorf("%s: %w", p.name, ctx.Err())
	}
	if p.err != nil {
		return fmt.Errorf("%s: %w: %s", p.name, p.err, p.LogTail())
	}
	return nil
}

// Stop sends SIGTERM, waits until ctx ends, then kills. The error tells the exit status.
func (p *Process) Stop(ctx context.Context) error {
	if err := p.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	err := p.Wait(ctx)
	if ctx.Err() != nil {
		p.Kill()
	}
	return err
}

// Kill kills the process group with SIGKILL and waits for the process. Idempotent.
func (p *Process) Kill() {
	select {
	case <-p.done:
		return
	default:
	}
	_ = unix.Kill(-p.proc.Pid, unix.SIGKILL)
	<-p.done
}

// LogTail returns the end of the process's output.
func (p *Process) LogTail() string {
	b, err := os.ReadFile(p.Log)
	if err != nil {
		return err.Error()
	}
	if len(b) > 3000 {
		b = b[len(b)-3000:]
	}
	return strings.TrimSpace(string(b))
}

// Cleanup collects functions that undo things, for programs without a testing.T. The zero value is ready.
type Cleanup struct {
	mu    sync.Mutex
	funcs []func() // guarded by mu
}

// Add registers f; the functions run in reverse order.
func (c *Cleanup) Add(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.funcs = append(c.funcs, f)
}

// Run runs and removes the registered functions. It may be called twice, and from a signal handler's goroutine.
func (c *Cleanup) Run() {
	for {
		c.mu.Lock()
		n := len(c.funcs)
		if n == 0 {
			c.mu.Unlock()
			return
		}
		f := c.funcs[n-1]
		c.funcs = c.funcs[:n-1]
		c.mu.Unlock()
		f()
	}
}
