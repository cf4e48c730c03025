package keeper

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/systemd"
)

// Config says what a keeper runs.
type Config struct {
	Program string   // the daemon's; "": this program, at its place in the file system
	Args    []string // the daemon's, without the program's name
	Check   []string // arguments with which a new program says, by its exit status, whether it can take over
	Log     hclog.Logger

	StartTime time.Duration // limit for a daemon's start; 0: a minute
	StopTime  time.Duration // limit for its end in good order; 0: half a minute
}

// Upgrade is the signal that makes a keeper replace the daemon by the program that is installed now.
const Upgrade = syscall.SIGUSR2

// A daemon that has crashed is started again at once, quickRestarts times within quickWindow; beyond that after
// restartDelay.
const (
	quickRestarts = 5
	quickWindow   = time.Minute
	restartDelay  = time.Second
	checkTime     = 30 * time.Second
)

// keeper runs one daemon after the other.
type keeper struct {
	Config
	store   *store
	current program // what runs, and what a failed upgrade goes back to
	crashes []time.Time
	said    Status

	// Each has room for one signal: more of the same ask for nothing else.
	ending   chan os.Signal // SIGTERM, SIGINT
	reloads  chan os.Signal // SIGHUP
	upgrades chan os.Signal // Upgrade
}

// Run runs the daemon until it ends by itself with status 0, or is told to by SIGTERM or SIGINT, which Run passes on,
// as it does SIGHUP. If the first daemon does not start that is an error; a later one is started again. status is the
// exit status of the last daemon.
func Run(c Config) (status int, err error) {
	// The daemon's parent, for PR_SET_PDEATHSIG, is this thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	k := &keeper{Config: c, ending: make(chan os.Signal, 1), reloads: make(chan os.Signal, 1),
		upgrades: make(chan os.Signal, 1), said: Status{PID: os.Getpid()}}
	if k.StartTime == 0 {
		k.StartTime = time.Minute
	}
	if k.StopTime == 0 {
		k.StopTime = 30 * time.Second
	}
	if k.Program == "" {
		if k.Program, err = installed(); err != nil {
			return 1, err
		}
	}
	if k.current, err = open(k.Program); err != nil {
		return 1, err
	}
	if k.store, err = newStore(c.Log, systemd.Passed(), k.forward); err != nil {
		return 1, err
	}
	defer k.store.close()
	k.said.File = statusFile(k.store.dir)
	if err := k.said.write(); err != nil {
		return 1, err
	}
	signal.Notify(k.ending, syscall.SIGTERM, syscall.SIGINT)
	defer signal.Stop(k.ending)
	signal.Notify(k.reloads, syscall.SIGHUP)
	defer signal.Stop(k.reloads)
	signal.Notify(k.upgrades, Upgrade)
	defer signal.Stop(k.upgrades)

	d, err := k.start(k.current)
	for err == nil {
		switch k.wait(d, nil) {
		case stopAsked:
			k.forward(systemd.Stopping)
			k.end(d)
			return d.status(), nil
		case upgradeAsked:
			d, err = k.replace(d)
			continue
		}
		if d.err == nil {
			return 0, nil
		}
		k.Log.Error("the daemon has ended; starting it again", "reason", d.err)
		d, err = k.again()
	}
	if errors.Is(err, errEnded) {
		err = nil
	}
	return d.status(), err
}

// forward passes a state of the daemon on to the keeper's own service manager, if there is one.
func (k *keeper) forward(state string) {
	if err := systemd.Notify(state); err != nil {
		k.Log.Warn("cannot notify the service manager", "state", state, "error", err)
	}
}

// daemon is one run of the program.
type daemon struct {
	*exec.Cmd
	ended chan error // capacity 1
	err   error      // its end; nil: status 0
}

// status is the exit status for the keeper: 0 without a daemon, 1 after a signal.
func (d *daemon) status() int {
	if d == nil || d.ProcessState == nil {
		return 0
	}
	if n := d.ProcessState.ExitCode(); n >= 0 {
		return n
	}
	return 1
}

// event is what wait has met.
type event int

const (
	ended event = iota
	started
	late
	stopAsked
	upgradeAsked
)

// wait returns when something has to be done. It passes SIGHUP on to a daemon that has started. What is asked for
// during a start is done after it: the daemon may have read its configuration already, and may be an older program.
func (k *keeper) wait(d *daemon, limit <-chan time.Time) event {
	starting, reloads, upgrades := limit != nil, k.reloads, k.upgrades
	if starting {
		reloads, upgrades = nil, nil
	}
	for {
		select {
		case d.err = <-d.ended:
			return ended
		case from := <-k.store.ready:
			if starting && from == d.Process.Pid {
				return started
			}
		case <-limit:
			return late
		case <-k.ending:
			return stopAsked
		case <-upgrades:
			return upgradeAsked
		case <-reloads:
			_ = d.Process.Signal(syscall.SIGHUP)
		}
	}
}

// errEnded: SIGTERM or SIGINT has arrived during a start.
var errEnded = errors.New("told to end")

// start starts p, passes it the stored descriptors, and waits until it serves. After an error it has ended.
func (k *keeper) start(p program) (*daemon, error) {
	if err := k.store.settle(); err != nil {
		return nil, err
	}
	files, err := k.store.copies()
	if err != nil {
		return nil, err
	}
	defer closeFiles(files)
	names := make([]string, len(files))
	for i, f := range files {
		names[i] = f.Name()
	}
	d := &daemon{Cmd: p.run(context.Background(), files, k.Args...), ended: make(chan error, 1)}
	d.Env = append(slices.DeleteFunc(os.Environ(), func(v string) bool {
		return strings.HasPrefix(v, "WATCHDOG_PID=") // the daemon feeds the keeper's watchdog
	}), systemd.Environment(k.store.path(), names)...)
	d.Env = append(d.Env, k.said.environment())
	d.Stdin, d.Stdout, d.Stderr = os.Stdin, os.Stdout, os.Stderr
	// Signals of the terminal reach the keeper, which decides. A daemon does not outlive the keeper: the next keeper's
	// could not have its sockets and TAPs.
	d.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	if err := k.store.startSender(d.Cmd); err != nil {
		return nil, fmt.Errorf("%s cannot be started: %w", p.named, err)
	}
	go func() { d.ended <- d.Wait() }()
	switch k.wait(d, time.After(k.StartTime)) {
	case started:
		return d, nil
	case stopAsked:
		k.forward(systemd.Stopping)
		k.end(d)
		return d, errEnded
	case late:
		k.kill(d)
		return d, fmt.Errorf("the daemon did not serve within %v", k.StartTime)
	}
	if d.err == nil {
		return d, errors.New("the daemon has ended without serving")
	}
	return d, fmt.Errorf("the daemon has not started: %w", d.err)
}

// end ends a daemon in good order, or by force if that takes too long.
func (k *keeper) end(d *daemon) {
	_ = d.Process.Signal(syscall.SIGTERM)
	limit := time.NewTimer(k.StopTime)
	defer limit.Stop()
	select {
	case d.err = <-d.ended:
	case <-limit.C:
		k.Log.Error("the daemon does not end in good order; killing it", "limit", k.StopTime)
		k.kill(d)
	}
}

func (k *keeper) kill(d *daemon) {
	_ = d.Process.Kill()
	d.err = <-d.ended
}

// again starts the daemon until it serves or the keeper is told to end.
func (k *keeper) again() (*daemon, error) {
	for {
		if !k.pause() {
			return nil, errEnded
		}
		k.renew()
		d, err := k.start(k.current)
		if err == nil || errors.Is(err, errEnded) {
			return d, err
		}
		k.Log.Error("the daemon could not be started again", "reason", err)
	}
}

// renew takes the program that is installed now, if an upgrade was asked for while no daemon served.
func (k *keeper) renew() {
	select {
	case <-k.reloads: // each start reads the configuration
	default:
	}
	select {
	case <-k.upgrades:
	default:
		return
	}
	next, err := k.next()
	if err == nil {
		k.current.close()
		k.current = next
	}
	k.tried(err)
}

// next opens the program that is installed now, if that can take over.
func (k *keeper) next() (program, error) {
	p, err := open(k.Program)
	if err != nil {
		return p, err
	}
	if err := k.check(p); err != nil {
		p.close()
		return p, err
	}
	return p, nil
}

// pause waits before a restart, if there were many lately. False: told to end.
func (k *keeper) pause() bool {
	now := time.Now()
	for len(k.crashes) > 0 && now.Sub(k.crashes[0]) > quickWindow {
		k.crashes = k.crashes[1:]
	}
	delay := time.Duration(0)
	if len(k.crashes) >= quickRestarts {
		k.crashes, delay = k.crashes[1:], restartDelay
	}
	k.crashes = append(k.crashes, now)
	select {
	case <-time.After(delay):
		return true
	case <-k.ending:
		return false
	}
}

// replace replaces d by the program that is installed now, if that can take over; if it does not come up, by the one
// that ran.
func (k *keeper) replace(d *daemon) (*daemon, error) {
	next, err := k.next()
	if err != nil {
		k.Log.Error("no upgrade: the daemon runs on", "reason", err)
		k.tried(err)
		return d, nil
	}
	begin := time.Now()
	k.end(d)
	n, err := k.start(next)
	switch {
	case err == nil:
		k.current.close()
		k.current = next
		k.Log.Info("upgraded", "took", time.Since(begin).Round(time.Millisecond))
		k.tried(nil)
		return n, nil
	case errors.Is(err, errEnded):
		return n, err
	}
	next.close()
	k.Log.Error("the new program does not come up; going back to the previous one", "reason", err)
	// The daemon that is started now shows this; who waits for the result learns it when that daemon serves.
	said := k.said
	k.said.Upgrades, k.said.Failed, k.said.Failure = said.Upgrades+1, said.Failed+1, err.Error()
	n, failed := k.start(k.current)
	k.said = said
	if failed != nil && !errors.Is(failed, errEnded) {
		k.Log.Error("the daemon could not be started again", "reason", failed)
		n, failed = k.again()
	}
	k.tried(err)
	return n, failed
}

// tried records the result of an upgrade.
func (k *keeper) tried(err error) {
	k.said.Upgrades++
	if k.said.Failure = ""; err != nil {
		k.said.Failed++
		k.said.Failure = err.Error()
	}
	if err := k.said.write(); err != nil {
		k.Log.Error("the result of an upgrade cannot be written", "error", err)
	}
}

// check asks a new program whether it can run here with the present configuration.
func (k *keeper) check(p program) error {
	ctx, cancel := context.WithTimeout(context.Background(), checkTime)
	defer cancel()
	c := p.run(ctx, nil, k.Check...)
	c.WaitDelay = time.Second // for what it leaves behind with its output
	if out, err := c.CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w: %.500s", k.Program, strings.Join(k.Check, " "), err, out)
	}
	return nil
}
