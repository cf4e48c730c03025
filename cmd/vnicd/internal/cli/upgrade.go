package cli

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/keeper"
)

// upgraded is the result of an upgrade.
type upgraded struct {
	From    string                 `json:"from"` // versions
	To      string                 `json:"to"`
	Silence float64                `json:"silence_seconds"` // of the control socket
	HCAs    daemon.ContinuedStatus `json:"continued"`
	Waiting int                    `json:"waiting"` // HCAs and network cards that go on when the host has memory for them
}

func (a *app) upgradeCmd() *cobra.Command {
	var unit string
	c := &cobra.Command{
		Use:   "upgrade",
		Short: "Replace the running daemon by this program",
		Long: `Replaces the running daemon by the installed program: after an upgrade of the package, or
to apply a configuration that "vnicd reload" cannot. RDMA connections of VMs go on; the
command prints for how long their HCAs stood still. It first checks the configuration
with the new program, and does nothing if that has a mistake.

If the new program does not come up, the previous one runs again. Under systemd the
command restarts the unit, and goes back by a drop-in in /run/systemd, which the next
upgrade removes. A daemon that was started with "vnicd run --keep" is replaced by its
keeper. The command needs the rights to do so: root, or, with a keeper, its user. If the
configuration has another control socket now, name that of the running daemon by --control.`,
		Args: args(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error {
			cfg, err := a.loadAll()
			if err != nil {
				return err
			}
			client, err := a.client(c)
			if err != nil {
				return err
			}
			up := &upgrade{client: client, next: daemon.NewClient(cfg.Control, cfg.Status), unit: unit, limit: 2 * time.Minute}
			r, err := up.run(c.Context())
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(r)
			}
			fmt.Fprintf(a.out, "vnicd %s is now %s; no answer for %v\n", r.From, r.To,
				time.Duration(r.Silence*float64(time.Second)).Round(time.Millisecond))
			fmt.Fprintf(a.out, "HCAs that go on: %d, stood still for at most %v\n", r.HCAs.HCAs,
				time.Duration(r.HCAs.Silence*float64(time.Second)).Round(time.Millisecond))
			if r.Waiting > 0 {
				fmt.Fprintf(a.out, "devices that go on later: %d; they wait for memory of the host, see `vnicd status`\n", r.Waiting)
			}
			if n := r.HCAs.Lost; n > 0 {
				fmt.Fprintf(a.out, "HCAs that did not go on: %d; the log says why\n", n)
			}
			return nil
		},
	}
	a.askFlags(c)
	c.Flags().StringVar(&unit, "unit", "vnicd.service", "systemd `unit` of the daemon")
	return c
}

// upgrade replaces one daemon.
type upgrade struct {
	client *daemon.Client // of the daemon that runs
	next   *daemon.Client // of the new one, at the paths of the present configuration
	unit   string
	limit  time.Duration // for the new daemon's first answer
}

func (u *upgrade) status(ctx context.Context, client *daemon.Client) (*daemon.Status, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	s := &daemon.Status{}
	if err := client.Do(ctx, http.MethodGet, "/v1/status", nil, s); err != nil {
		return nil, err
	}
	return s, nil
}

func (u *upgrade) run(ctx context.Context) (*upgraded, error) {
	if ctx == nil {
		ctx = context.Background()
	}
	was, err := u.status(ctx, u.client)
	if err != nil {
		return nil, err
	}
	if was.Keeper != nil {
		return u.byKeeper(ctx, was)
	}
	return u.bySystemd(ctx)
}

// shortLong is how long a VM waits for memory before an upgrade ends without its devices.
const shortLong = 5 * time.Second

// waiting returns the number of HCAs and network cards, of two for each VM, that cannot be resumed because their VMs
// have waited for memory of the host for long. The previous program could not resume them either.
func waiting(s *daemon.Status) (n int) {
	for i := range s.VMs {
		devices := 2
		if s.VMs[i].IsApplication() {
			devices = 1
		}
		if m := &s.VMs[i].Memory; m.ShortFor >= shortLong {
			n += min(m.Short, devices)
		}
	}
	return min(n, s.Continued.Pending)
}

// follow waits until done, and then for the daemon's answer when it has resumed all devices but those that wait for
// memory. silence is the longest time without an answer.
func (u *upgrade) follow(ctx context.Context, done func() (bool, error)) (now *daemon.Status, silence time.Duration,
	err error) {
	over := false
	last := time.Now()
	for begin := last; time.Since(begin) < u.limit; time.Sleep(5 * time.Millisecond) {
		if !over {
			if over, err = done(); err != nil {
				return nil, 0, err
			}
		}
		if now, err = u.status(ctx, u.client); err != nil && over {
			now, err = u.status(ctx, u.next)
		}
		if err != nil {
			continue
		}
		silence, last = max(silence, time.Since(last)), time.Now()
		if over && waiting(now) == now.Continued.Pending {
			return now, silence, nil
		}
	}
	if over && err == nil {
		return nil, 0, fmt.Errorf("the new daemon has not resumed all VMs within %v", u.limit)
	}
	if err == nil {
		return nil, 0, fmt.Errorf("the daemon was not replaced within %v", u.limit)
	}
	return nil, 0, fmt.Errorf("no new daemon has answered within %v: %w", u.limit, err)
}

var errUpgrading = errors.New("another upgrade of this daemon is running")

// lockUpgrade locks the file at path until release, so that one upgrade runs at a time: two would take each other's
// results for their own. flags are of open(2).
func lockUpgrade(path string, flags int) (release func(), err error) {
	f, err := os.OpenFile(path, flags|os.O_RDONLY|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock of upgrades: %w", err)
	}
	err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		err = errUpgrading
	}
	if err == nil { // a keeper replaces its file when an upgrade ends
		var locked, there os.FileInfo
		if locked, err = f.Stat(); err == nil {
			if there, err = os.Stat(path); err == nil && !os.SameFile(locked, there) {
				err = errUpgrading
			}
		}
	}
	if err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("lock of upgrades, %s: %w", path, err)
	}
	return func() { _ = f.Close() }, nil
}

func (u *upgrade) byKeeper(ctx context.Context, was *daemon.Status) (*upgraded, error) {
	before, err := was.Keeper.Now()
	if err != nil {
		return nil, fmt.Errorf("the daemon's keeper, process %d: %w", was.Keeper.PID, err)
	}
	release, err := lockUpgrade(before.File, 0)
	if err != nil {
		return nil, err
	}
	defer release()
	if before, err = was.Keeper.Now(); err != nil { // again: another upgrade may have ended meanwhile
		return nil, fmt.Errorf("the daemon's keeper, process %d: %w", was.Keeper.PID, err)
	}
	if err := syscall.Kill(before.PID, keeper.Upgrade); err != nil {
		return nil, fmt.Errorf("the daemon's keeper, process %d: %w", before.PID, err)
	}
	var after *keeper.Status
	now, silence, err := u.follow(ctx, func() (_ bool, err error) {
		after, err = was.Keeper.Now()
		return err == nil && after.Upgrades > before.Upgrades, err
	})
	switch {
	case err != nil:
		return nil, fmt.Errorf("%w; the log of the keeper, process %d, says why", err, before.PID)
	case after.Failure != "" && now.PID == was.PID:
		return nil, fmt.Errorf("the daemon runs on: %s", after.Failure)
	case after.Failure != "":
		return nil, fmt.Errorf("the new program does not come up, the previous one runs again: %s", after.Failure)
	}
	return result(was, now, silence), nil
}

func result(was, now *daemon.Status, silence time.Duration) *upgraded {
	return &upgraded{was.Version, now.Version, silence.Seconds(), now.Continued, waiting(now)}
}

// Under systemd, the program that ran is copied to previousDir before the unit is restarted. A drop-in of the unit
// makes systemd run it again. It is not in /run, from where Debian executes nothing.
const previousDir = "/var/lib/vnicd/previous"

func (u *upgrade) dropIn() string {
	// Drop-ins of all directories are sorted by name: after override.conf of `systemctl edit`.
	return filepath.Join("/run/systemd/system", u.unit+".d", "zzz-vnicd-previous.conf")
}

func (u *upgrade) bySystemd(ctx context.Context) (*upgraded, error) {
	if _, err := u.serving(ctx); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Dir(previousDir), 0o755); err != nil {
		return nil, err
	}
	release, err := lockUpgrade(filepath.Join(filepath.Dir(previousDir), "upgrade.lock"), os.O_CREATE)
	if err != nil {
		return nil, err
	}
	defer release()
	was, err := u.serving(ctx) // again: another upgrade may have ended meanwhile
	if err != nil {
		return nil, err
	}
	// The way back is this process: a terminal that is lost does not end it, nor does an impatient user.
	signal.Ignore(syscall.SIGHUP, syscall.SIGINT, syscall.SIGTERM)
	command, err := u.save(was.PID)
	if err != nil {
		return nil, err
	}
	switch err := os.Remove(u.dropIn()); {
	case err == nil:
		if err := systemctl(ctx, "daemon-reload"); err != nil {
			return nil, err
		}
	case !errors.Is(err, os.ErrNotExist):
		return nil, err
	}
	restarted := make(chan error, 1)
	go func() { restarted <- systemctl(ctx, "restart", u.unit) }()
	now, silence, err := u.follow(ctx, func() (bool, error) {
		select {
		case err := <-restarted:
			return true, err
		default:
			return false, nil
		}
	})
	if err == nil {
		return result(was, now, silence), nil
	}
	if back := u.goBack(ctx, command); back != nil {
		return nil, fmt.Errorf("%w; going back to the previous program: %w", err, back)
	}
	return nil, fmt.Errorf("%w; the previous program %s runs again (see `journalctl -u %s`)", err, was.Version, u.unit)
}

// serving returns the status of the daemon that answers, which must be the unit's main process.
func (u *upgrade) serving(ctx context.Context) (*daemon.Status, error) {
	now, err := u.status(ctx, u.client)
	if err != nil {
		return nil, err
	}
	owner, err := u.owner(ctx)
	if err != nil {
		return nil, err
	}
	if owner != now.PID {
		return nil, fmt.Errorf("the daemon that answers is process %d, but %s has %d; a daemon without systemd is "+
			"replaced if it was started with `vnicd run --keep`", now.PID, u.unit, owner)
	}
	return now, nil
}

// owner returns the unit's main process.
func (u *upgrade) owner(ctx context.Context) (pid int, err error) {
	out, err := exec.CommandContext(ctx, "systemctl", "show", "-P", "MainPID", u.unit).CombinedOutput()
	if err != nil {
		return 0, fmt.Errorf("systemctl show %s: %w: %s", u.unit, err, out)
	}
	if _, err := fmt.Sscan(string(out), &pid); err != nil {
		return 0, fmt.Errorf("the main process of %s: %q", u.unit, out)
	}
	return pid, nil
}

func systemctl(ctx context.Context, args ...string) error {
	if out, err := exec.CommandContext(ctx, "systemctl", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("systemctl %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return nil
}

// save copies the program of a process, and returns the command line that runs the copy as the process was run.
func (u *upgrade) save(pid int) (command string, err error) {
	fail := func(err error) (string, error) { return "", fmt.Errorf("a copy of the program that runs: %w", err) }
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/exe", pid))
	if err != nil {
		return fail(err)
	}
	line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		return fail(err)
	}
	path := filepath.Join(previousDir, "vnicd")
	if err := os.MkdirAll(previousDir, 0o755); err != nil {
		return fail(err)
	}
	if err := os.WriteFile(path+".new", b, 0o755); err != nil {
		return fail(err)
	}
	for _, name := range []string{filepath.Dir(previousDir), previousDir, path + ".new"} {
		if err := os.Chmod(name, 0o755); err != nil { // whatever the umask: the unit's user runs it
			return fail(err)
		}
	}
	if err := os.Rename(path+".new", path); err != nil {
		return fail(err)
	}
	return unitCommand(path, string(line)), nil
}

// unitCommand returns the command line of a unit that runs a program with the arguments of a process, as its cmdline in
// /proc lists them.
func unitCommand(path, cmdline string) string {
	words := strings.Split(strings.TrimSuffix(cmdline, "\x00"), "\x00")
	words[0] = path
	quote := strings.NewReplacer(`\`, `\\`, `"`, `\"`, "%", "%%", "$", "$$", "\n", `\n`)
	for i, w := range words {
		words[i] = `"` + quote.Replace(w) + `"`
	}
	return strings.Join(words, " ")
}

// goBack makes systemd run the previous program.
func (u *upgrade) goBack(ctx context.Context, command string) error {
	text := "# Written by `vnicd upgrade`, because the new program did not come up; the next upgrade removes it.\n" +
		"[Service]\nExecStartPre=\nExecStart=\nExecStart=" + command + "\n"
	if err := os.MkdirAll(filepath.Dir(u.dropIn()), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(u.dropIn(), []byte(text), 0o644); err != nil {
		return err
	}
	if err := systemctl(ctx, "daemon-reload"); err != nil {
		return err
	}
	return systemctl(ctx, "restart", u.unit)
}
