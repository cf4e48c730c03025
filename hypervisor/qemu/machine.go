// Package qemu starts and controls VMs: command lines, processes, and commands inside the guest.
//
// A Machine owns one QEMU process, its monitor and its guest agent. The kernel kills QEMU when this process ends,
// however it ends. A caller of Boot must call Kill or Shutdown; both join everything, are idempotent and may be called
// from several goroutines.
//
// A guest that migrates to another QEMU process takes its Machine with it (Become).
//
// Boot ──▶ running ──(Shutdown, Kill, QEMU ends by itself)──▶ ended
package qemu

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/hypervisor/qmp"
)

// ErrEnded reports that the VM's process has ended.
var ErrEnded = errors.New("the VM has ended")

// Machine is a VM with its QEMU process.
type Machine struct {
	*instance
	agent *agent
}

// instance is a QEMU process.
type instance struct {
	cfg  Config
	proc *os.Process
	done chan struct{} // closed when the process was reaped

	exitErr error // written before done is closed

	qmp *qmp.Client

	stopOnce sync.Once
}

func newMachine(cfg Config) *Machine {
	return &Machine{instance: &instance{cfg: cfg, done: make(chan struct{})}}
}

// startTimeout bounds the time until QEMU opens its sockets.
const startTimeout = 60 * time.Second

// Boot starts the VM and returns once QEMU runs its guest; WaitReady waits for the guest. On error nothing is left. If
// QEMU ends at once (a back end that refuses, an unknown device), the error has QEMU's message.
func Boot(ctx context.Context, cfg Config) (*Machine, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if err := cfg.checkHost(); err != nil {
		return nil, err
	}
	for _, p := range []string{cfg.qmp(), cfg.agent(), cfg.console()} {
		if err := os.Remove(p); err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("qemu: VM %s: %w", cfg.Name, err)
		}
	}
	m := newMachine(cfg)
	if err := m.spawn(); err != nil {
		return nil, fmt.Errorf("qemu: VM %s: %w", cfg.Name, err)
	}
	if err := m.connect(ctx); err != nil {
		m.Kill()
		return nil, fmt.Errorf("qemu: VM %s: %w", cfg.Name, err)
	}
	return m, nil
}

// Adopt connects to the guest agent of a VM that another process started. Only commands in its guest work; Kill does
// not end the VM.
func Adopt(ctx context.Context, name, agentSocket string) (*Machine, error) {
	m := newMachine(Config{Name: name})
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	conn, err := m.dial(ctx, agentSocket)
	if err != nil {
		return nil, m.wrap(err)
	}
	m.agent = newAgent(conn)
	return m, nil
}

// checkHost finds problems that QEMU would report less clearly.
func (c *Config) checkHost() error {
	sockets := map[string]string{}
	if c.HCA != nil {
		sockets["HCA"] = c.HCA.Socket
	}
	for i, n := range c.NICs {
		if n.Socket != "" {
			sockets[fmt.Sprintf("NIC %d", i)] = n.Socket
		}
	}
	for what, p := range sockets {
		st, err := os.Stat(p)
		if err != nil {
			return fmt.Errorf("qemu: VM %s: vhost-user socket of the %s: %w (is vnicd running?)", c.Name, what, err)
		}
		if st.Mode()&os.ModeSocket == 0 {
			return fmt.Errorf("qemu: VM %s: vhost-user socket of the %s: %s is not a socket", c.Name, what, p)
		}
	}
	if c.Netns != "" {
		if _, err := os.Stat(filepath.Join("/run/netns", c.Netns)); err != nil {
			return fmt.Errorf("qemu: VM %s: network namespace %q: %w", c.Name, c.Netns, err)
		}
	}
	if st, err := os.Stat(c.Dir); err != nil {
		return fmt.Errorf("qemu: VM %s: %w", c.Name, err)
	} else if !st.IsDir() {
		return fmt.Errorf("qemu: VM %s: %s is not a directory", c.Name, c.Dir)
	}
	return nil
}

// spawn starts QEMU on an OS thread that then waits for it. The thread must live as long as QEMU, because the
// parent-death signal is tied to the thread that forked. It also enters the namespace, so it can never be reused.
func (m *instance) spawn() error {
	log, err := os.Create(m.logPath())
	if err != nil {
		return err
	}
	cmd := exec.Command(m.cfg.Images.QEMU, m.cfg.Args()...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Env = append(os.Environ(), "TMPDIR="+m.cfg.Dir)
	// A separate process group: ^C on the terminal reaches only the VM's owner, which decides.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}

	started := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with this goroutine
		defer log.Close()
		if m.cfg.Netns != "" {
			if err := enterNetns(m.cfg.Netns); err != nil {
				started <- err
				return
			}
		}
		if err := cmd.Start(); err != nil {
			started <- err
			return
		}
		m.proc = cmd.Process
		started <- nil
		m.exitErr = cmd.Wait()
		close(m.done)
	}()
	return <-started
}

func enterNetns(name string) error {
	f, err := os.Open(filepath.Join("/run/netns", name))
	if err != nil {
		return fmt.Errorf("network namespace: %w", err)
	}
	defer f.Close()
	if err := unix.Setns(int(f.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("entering network namespace %s: %w", name, err)
	}
	return nil
}

// connect connects to monitor and agent as soon as QEMU has opened their sockets.
func (m *Machine) connect(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	conn, err := m.dial(ctx, m.cfg.agent())
	if err != nil {
		return err
	}
	m.agent = newAgent(conn)
	// The monitor precedes the agent on the command line, so its socket exists by now; its greeting comes when the
	// machine is complete.
	m.qmp, err = qmp.Dial(ctx, m.cfg.qmp())
	if err != nil {
		// Most likely QEMU has just ended because of a device and printed why.
		select {
		case <-m.done:
			return m.ended()
		case <-time.After(time.Second):
		}
		return err
	}
	return nil
}

func (m *instance) dial(ctx context.Context, path string) (net.Conn, error) {
	for {
		conn, err := net.Dial("unix", path)
		if err == nil {
			return conn, nil
		}
		select {
		case <-m.done:
			return nil, m.ended()
		case <-ctx.Done():
			return nil, fmt.Errorf("waiting for %s: %w", path, ctx.Err())
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// ended returns the error for the end of the process, with its last output.
func (m *instance) ended() error {
	text, _ := os.ReadFile(m.logPath())
	words := strings.TrimSpace(tail(string(text), 1500))
	if m.exitErr != nil {
		return fmt.Errorf("%w: %v: %s", ErrEnded, m.exitErr, words)
	}
	return fmt.Errorf("%w: %s", ErrEnded, words)
}

func (m *instance) logPath() string { return filepath.Join(m.cfg.Dir, "qemu.log") }

// Socket is the path of a file in the folder of QEMU.
func (m *Machine) Socket(name string) string { return filepath.Join(m.cfg.Dir, name) }

// Name is the VM's name.
func (m *Machine) Name() string { return m.cfg.Name }

// PID is the process id of QEMU.
func (m *Machine) PID() int { return m.proc.Pid }

// Console is the path of the log of the guest's serial console.
func (m *Machine) Console() string { return m.cfg.console() }

// QMP is the VM's monitor, owned by the machine.
func (m *Machine) QMP() *qmp.Client { return m.qmp }

// Done is closed when QEMU has ended.
func (m *Machine) Done() <-chan struct{} { return m.done }

// WaitReady waits until the guest has booted and runs commands. If the guest does not come up, the error says where its
// processors are and has the end of its console log.
func (m *Machine) WaitReady(ctx context.Context) error {
	err := m.agent.ready(ctx)
	if err == nil {
		return nil
	}
	if errors.Is(err, ErrAgentClosed) {
		select {
		case <-m.done:
			err = m.ended()
		case <-ctx.Done():
		}
	}
	where := ""
	select {
	case <-m.done:
	default:
		where = "; processors: " + m.processors()
	}
	text, _ := os.ReadFile(m.Console())
	return fmt.Errorf("qemu: VM %s is not ready: %w%s; console: %s", m.cfg.Name, err, where, tail(string(text), 1500))
}

// processors says where the guest's processors are: one that hangs is at the same place twice.
func (m *Machine) processors() string {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	var seen []string
	for i := range 2 {
		time.Sleep(time.Duration(i) * 200 * time.Millisecond)
		var registers string
		err := m.qmp.Run(ctx, "human-monitor-command", map[string]string{"command-line": "info registers -a"}, &registers)
		if err != nil {
			return "not known: " + err.Error()
		}
		seen = append(seen, whereabouts(registers))
	}
	return strings.Join(seen, ", then ")
}

var whereabout = regexp.MustCompile(`CPU#\d+|[RE]IP=[0-9a-f]+|CPL=\d|HLT=1`)

// whereabouts returns instruction pointer, privilege level and whether it is halted of each processor in QEMU's
// description of the registers.
func whereabouts(registers string) string {
	return strings.Join(whereabout.FindAllString(registers, -1), " ")
}

// Exec runs a program in the guest and waits for it; an exit status other than 0 is in the result, not an error. If ctx
// ends first, the command and its children are killed.
func (m *Machine) Exec(ctx context.Context, argv ...string) (Result, error) {
	return m.ExecCommand(ctx, Command{Argv: argv})
}

// ExecCommand is Exec with standard input and environment.
func (m *Machine) ExecCommand(ctx context.Context, cmd Command) (Result, error) {
	r, err := m.agent.exec(ctx, cmd)
	return r, m.wrap(err)
}

// Shell runs a line of /bin/sh in the guest, otherwise like Exec.
func (m *Machine) Shell(ctx context.Context, line string) (Result, error) {
	return m.Exec(ctx, "/bin/sh", "-c", line)
}

// Run runs a line of /bin/sh and returns its standard output; an exit status other than 0 is an *ExitError.
func (m *Machine) Run(ctx context.Context, line string) (string, error) {
	r, err := m.Shell(ctx, line)
	if err == nil && r.ExitCode != 0 {
		err = m.wrap(&ExitError{Command: line, Result: r})
	}
	return r.Stdout, err
}

// Start starts a program in the guest and returns at once.
func (m *Machine) Start(ctx context.Context, argv ...string) (*Process, error) {
	p, err := m.agent.start(ctx, Command{Argv: argv})
	return p, m.wrap(err)
}

// StartShell starts a line of /bin/sh in the guest and returns at once.
func (m *Machine) StartShell(ctx context.Context, line string) (*Process, error) {
	return m.Start(ctx, "/bin/sh", "-c", line)
}

// WriteFile creates or replaces a file in the guest.
func (m *Machine) WriteFile(ctx context.Context, path string, data []byte) error {
	return m.wrap(m.agent.writeFile(ctx, path, data))
}

// ReadFile reads a guest file of at most 64 MiB. For files under /proc and /sys use Run with cat.
func (m *Machine) ReadFile(ctx context.Context, path string) ([]byte, error) {
	data, err := m.agent.readFile(ctx, path, 64<<20)
	return data, m.wrap(err)
}

func (m *Machine) wrap(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("VM %s: %w", m.cfg.Name, err)
}

// Reboot shuts the guest down cleanly and waits until it is up again. Guest processes are lost.
func (m *Machine) Reboot(ctx context.Context) error {
	return m.restart(ctx, func() error { return m.poweroff(ctx, "reboot") })
}

// Reset resets the VM without a clean shutdown and waits until the guest is up again.
func (m *Machine) Reset(ctx context.Context) error {
	return m.restart(ctx, func() error { return m.qmp.Reset(ctx) })
}

func (m *Machine) restart(ctx context.Context, act func() error) error {
	events := m.qmp.Events()
	for stale := true; stale; {
		select {
		case _, ok := <-events:
			stale = ok
		default:
			stale = false
		}
	}
	if err := act(); err != nil {
		return m.wrap(err)
	}
	for {
		select {
		case e, ok := <-events:
			if !ok {
				return m.wrap(ErrEnded)
			}
			// Only after this event does an answer come from the restarted guest's agent.
			if e.Event == "RESET" {
				return m.WaitReady(ctx)
			}
		case <-ctx.Done():
			return m.wrap(fmt.Errorf("waiting for the guest to reset: %w", ctx.Err()))
		}
	}
}

// poweroff sends guest-shutdown, which has no reply if it succeeds.
func (m *Machine) poweroff(ctx context.Context, mode string) error {
	id, reply, err := m.agent.send(ctx, "guest-shutdown", map[string]string{"mode": mode})
	if err != nil {
		return err
	}
	defer m.agent.forget(id)
	select {
	case l := <-reply:
		return decode("guest-shutdown", l, nil)
	case <-time.After(200 * time.Millisecond):
	case <-m.done:
	case <-ctx.Done():
	}
	return nil
}

// Shutdown shuts the guest down cleanly and waits for QEMU to end. If ctx ends first, or the guest refuses, the VM is
// killed and an error returned.
func (m *Machine) Shutdown(ctx context.Context) error {
	var err error
	select {
	case <-m.done:
	default:
		if err = m.poweroff(ctx, "powerdown"); err == nil {
			select {
			case <-m.done:
			case <-ctx.Done():
				err = fmt.Errorf("the guest did not shut down: %w", ctx.Err())
			}
		}
	}
	m.Kill()
	return m.wrap(err)
}

// Kill ends QEMU with SIGKILL and joins everything. Idempotent.
func (m *Machine) Kill() {
	m.stopOnce.Do(func() {
		if m.proc != nil {
			// This fails only if it has ended already.
			_ = m.proc.Kill()
			<-m.done
		} else {
			close(m.done)
		}
		if m.agent != nil {
			m.agent.close()
		}
		if m.qmp != nil {
			_ = m.qmp.Close()
		}
	})
	<-m.done
}

// Become makes m, whose guest QEMU has migrated to o's process, the owner of that process, and ends its own. Programs
// in the guest, and what refers to m or to them, go on; no call may be under way. o is not to be used any more, except
// to kill it.
func (m *Machine) Become(ctx context.Context, o *Machine) error {
	m.Kill()
	o.agent.close()
	m.instance = o.instance
	conn, err := m.dial(ctx, m.cfg.agent())
	if err != nil {
		return m.wrap(err)
	}
	m.agent.reopen(conn)
	return m.WaitReady(ctx)
}

// Wait waits for QEMU to end by itself. It returns nil for exit status 0.
func (m *Machine) Wait(ctx context.Context) error {
	select {
	case <-m.done:
		if m.exitErr != nil {
			return m.wrap(m.ended())
		}
		return nil
	case <-ctx.Done():
		return m.wrap(ctx.Err())
	}
}
