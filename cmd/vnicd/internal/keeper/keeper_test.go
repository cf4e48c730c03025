package keeper

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/systemd"
	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/testutil/testlog"
)

// The test's program is also the keeper and the daemons of the tests. What a daemon does is appended to its program's
// file: what an upgrade installs is another file.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "keeper":
			os.Exit(keep(os.Args[2], os.Args[3]))
		case "daemon":
			os.Exit(serve(os.Args[2]))
		case "check":
			if behaviour() == "unfit" {
				fmt.Println("this is no program for here")
				os.Exit(2)
			}
			os.Exit(0)
		}
	}
	os.Exit(m.Run())
}

func keep(dir, limit string) int {
	start, err := time.ParseDuration(limit)
	if err != nil {
		panic(err)
	}
	status, err := Run(Config{Program: filepath.Join(dir, "program"), Args: []string{"daemon", dir},
		Check: []string{"check"}, Log: hclog.New(&hclog.LoggerOptions{Output: os.Stderr}),
		StartTime: start, StopTime: 2 * time.Second})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	return status
}

const behaviourSize = 16

func behaviour() string {
	b, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		panic(err)
	}
	return strings.TrimSpace(string(b[len(b)-behaviourSize:]))
}

// serve is a daemon. It writes what it meets into the file journal, a line each, and keeps a pipe's writing end with
// the keeper: the next one finds out that it is the same pipe.
func serve(dir string) int {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGHUP)
	j, err := os.OpenFile(filepath.Join(dir, "journal"), os.O_APPEND|os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		panic(err)
	}
	is := behaviour()
	var s systemd.Store
	kept, err := s.Kept()
	if err != nil {
		panic(err)
	}
	line := fmt.Sprintf("%s %d upgrades=%d failed=%d", is, os.Getpid(), Mine().Upgrades, Mine().Failed)
	if fd, ok := kept["hca/pipe"]; ok {
		_, err := syscall.Write(fd, []byte(is))
		line += fmt.Sprintf(" kept=%d %v", len(kept), err)
	}
	fmt.Fprintln(j, line) // at once: the test reads lines
	switch is {
	case "fails":
		return 3
	case "fails-later":
		if len(kept) > 0 {
			return 3
		}
	case "hangs":
		select {}
	}
	if len(kept) == 0 {
		r, w, err := os.Pipe()
		if err != nil {
			panic(err)
		}
		for _, f := range []*os.File{r, w} {
			if err := s.Keep("hca/end", int(f.Fd())); err != nil {
				panic(err)
			}
		}
		if err := s.Forget("hca/end"); err != nil {
			panic(err)
		}
		if err := s.Keep("hca/pipe", int(w.Fd())); err != nil {
			panic(err)
		}
		if err := s.Keep("hca/reader", int(r.Fd())); err != nil {
			panic(err)
		}
	}
	if err := systemd.Notify(systemd.Ready); err != nil {
		panic(err)
	}
	defer func() { _ = systemd.Notify(systemd.Stopping) }()
	for sig := range signals {
		fmt.Fprintln(j, "signal", sig)
		if sig == syscall.SIGTERM && is != "stuck" {
			if fd, ok := kept["hca/reader"]; ok {
				b := make([]byte, 100)
				n, _ := syscall.Read(fd, b)
				fmt.Fprintf(j, "pipe %s\n", b[:n])
			}
			break
		}
	}
	s.Freeze()
	if err := s.Flush(time.Minute); err != nil {
		panic(err)
	}
	return 0
}

// rig is a keeper that runs.
type rig struct {
	*testing.T
	dir   string
	cmd   *exec.Cmd
	ended chan error
	log   testlog.Log
}

func newRig(t *testing.T, first string) *rig { return newRigWithin(t, first, "5m") }

// newRigWithin gives daemons that time to start.
func newRigWithin(t *testing.T, first, limit string) *rig {
	r := &rig{T: t, dir: t.TempDir(), ended: make(chan error, 1)}
	t.Setenv("TMPDIR", r.dir)
	r.install(first)
	r.cmd = exec.Command(os.Args[0], "keeper", r.dir, limit)
	r.cmd.Stderr = &r.log
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { r.ended <- r.cmd.Wait() }()
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("journal:\n%s\nlog:\n%s", r.journal(), r.log.String())
		}
		_ = r.cmd.Process.Kill()
		for _, l := range r.runs() {
			_ = syscall.Kill(pid(l), syscall.SIGKILL)
		}
	})
	return r
}

// install replaces the program, as a package does.
func (r *rig) install(behaviour string) {
	r.Helper()
	b, err := os.ReadFile(os.Args[0])
	if err != nil {
		r.Fatal(err)
	}
	to := filepath.Join(r.dir, "program")
	b = append(b, fmt.Sprintf("%*s", behaviourSize, behaviour)...)
	if err := os.WriteFile(to+".new", b, 0o700); err != nil {
		r.Fatal(err)
	}
	if err := os.Rename(to+".new", to); err != nil {
		r.Fatal(err)
	}
}

func (r *rig) journal() string {
	b, _ := os.ReadFile(filepath.Join(r.dir, "journal"))
	return string(b)
}

// runs returns the daemons' first lines.
func (r *rig) runs() (lines []string) {
	for l := range strings.Lines(r.journal()) {
		if strings.Contains(l, "upgrades=") {
			lines = append(lines, strings.TrimSpace(l))
		}
	}
	return lines
}

func pid(line string) (n int) {
	_, _ = fmt.Sscan(strings.Fields(line)[1], &n)
	return n
}

// run waits for the nth run and returns its line.
func (r *rig) run(n int) string {
	r.Helper()
	testutil.Eventually(r, fmt.Sprintf("run %d", n), func() bool { return len(r.runs()) >= n })
	return r.runs()[n-1]
}

// status returns what the keeper has written.
func (r *rig) status() (*Status, error) {
	found, _ := filepath.Glob(filepath.Join(r.dir, "vnicd-keeper-*"))
	if len(found) != 1 {
		return nil, fmt.Errorf("%v", found)
	}
	s := Status{PID: r.cmd.Process.Pid, File: statusFile(found[0])}
	return s.Now()
}

func (r *rig) expect(line, want string) {
	r.Helper()
	f := strings.Fields(line)
	if got := strings.Join(append(f[:1:1], f[2:]...), " "); got != want {
		r.Errorf("a daemon says %q, want %q", got, want)
	}
}

// serves waits until the newest daemon is the keeper's: it passes a signal on.
func (r *rig) serves() {
	r.Helper()
	before := strings.Count(r.journal(), "signal hangup")
	testutil.Eventually(r, "the daemon gets a signal", func() bool {
		_ = r.cmd.Process.Signal(syscall.SIGHUP)
		return strings.Count(r.journal(), "signal hangup") > before
	})
}

// ends ends the keeper and returns its exit status.
func (r *rig) ends() int {
	r.Helper()
	_ = r.cmd.Process.Signal(syscall.SIGTERM)
	return r.over()
}

func (r *rig) over() int {
	r.Helper()
	select {
	case <-r.ended:
	case <-time.After(time.Minute):
		r.Fatal("the keeper does not end")
	}
	if left, _ := filepath.Glob(filepath.Join(r.dir, "vnicd-keeper-*")); len(left) > 0 {
		r.Errorf("left over: %v", left)
	}
	return r.cmd.ProcessState.ExitCode()
}

// A daemon that is killed is started again at once and finds what the one before has stored, in the same place (CO-1).
// It is also started again if that happens often.
func TestKilled(t *testing.T) {
	r := newRig(t, "good")
	r.expect(r.run(1), "good upgrades=0 failed=0")
	const kills = quickRestarts + 1
	for i := range kills {
		r.serves()
		if err := syscall.Kill(pid(r.run(i+1)), syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		r.expect(r.run(i+2), "good upgrades=0 failed=0 kept=2 <nil>")
	}
	r.serves()
	if status := r.ends(); status != 0 {
		t.Errorf("status %d", status)
	}
	if want := "pipe " + strings.Repeat("good", kills); !strings.Contains(r.journal(), want) {
		t.Errorf("not all daemons had the same pipe: want %q", want)
	}
}

// An upgrade runs the program that is installed now; what does not come up is replaced by what ran before.
func TestUpgrade(t *testing.T) {
	r := newRig(t, "good")
	r.run(1)
	r.serves()
	for i, c := range []struct {
		install string
		runs    []string
	}{
		{"better", []string{"better upgrades=0 failed=0 kept=2 <nil>"}},
		{"fails", []string{"fails upgrades=1 failed=0 kept=2 <nil>", "better upgrades=2 failed=1 kept=2 <nil>"}},
		{"unfit", nil},
		{"best", []string{"best upgrades=3 failed=2 kept=2 <nil>"}},
	} {
		r.install(c.install)
		n := len(r.runs())
		if err := r.cmd.Process.Signal(Upgrade); err != nil {
			t.Fatal(err)
		}
		for k, want := range c.runs {
			r.expect(r.run(n+k+1), want)
		}
		testutil.Eventually(t, "the keeper writes the result", func() bool {
			now, err := r.status()
			return err == nil && now.Upgrades == i+1
		})
		now, err := r.status()
		if err != nil || (now.Failure != "") != (c.install == "fails" || c.install == "unfit") {
			t.Errorf("upgrade %d to %s: %+v, %v", i, c.install, now, err)
		}
		r.serves()
		if got := len(r.runs()); got != n+len(c.runs) {
			t.Errorf("upgrade %d to %s: %d runs, want %d", i, c.install, got-n, len(c.runs))
		}
	}
	if !strings.Contains(r.log.String(), "this is no program for here") {
		t.Error("the log does not say why there was no upgrade")
	}
	// One that was killed is the program that runs, not the one that is installed.
	r.install("fails")
	n := len(r.runs())
	_ = syscall.Kill(pid(r.run(n)), syscall.SIGKILL)
	r.expect(r.run(n+1), "best upgrades=4 failed=2 kept=2 <nil>")
	r.serves()
	if status := r.ends(); status != 0 {
		t.Errorf("status %d", status)
	}
}

// A new program that neither serves nor ends is given up.
func TestUpgradeHangs(t *testing.T) {
	r := newRigWithin(t, "good", "10s")
	r.run(1)
	r.serves()
	r.install("hangs")
	_ = r.cmd.Process.Signal(Upgrade)
	r.expect(r.run(2), "hangs upgrades=0 failed=0 kept=2 <nil>")
	r.expect(r.run(3), "good upgrades=1 failed=1 kept=2 <nil>")
	r.serves()
	r.ends()
}

// A keeper ends with its daemon's status if the first one does not start, and if one ends by itself in good order.
func TestEnds(t *testing.T) {
	r := newRig(t, "fails")
	if status := r.over(); status != 3 {
		t.Errorf("status %d, want the daemon's", status)
	}
	r = newRig(t, "good")
	l := r.run(1)
	r.serves()
	_ = syscall.Kill(pid(l), syscall.SIGTERM)
	if status := r.over(); status != 0 {
		t.Errorf("status %d", status)
	}
	// One that does not end in good order is killed.
	r = newRig(t, "stuck")
	r.run(1)
	r.serves()
	if status := r.ends(); status != 1 {
		t.Errorf("status %d", status)
	}
}

// A daemon that cannot be started again is replaced by the program that is installed meanwhile, when that is asked for.
func TestUpgradeOfNone(t *testing.T) {
	r := newRig(t, "fails-later")
	l := r.run(1)
	r.serves()
	_ = syscall.Kill(pid(l), syscall.SIGKILL)
	r.run(3)
	r.install("good")
	_ = r.cmd.Process.Signal(Upgrade)
	testutil.Eventually(t, "the new program runs", func() bool {
		runs := r.runs()
		return strings.HasPrefix(runs[len(runs)-1], "good")
	})
	r.serves()
	if now, err := r.status(); err != nil || now.Upgrades != 1 || now.Failed != 0 {
		t.Errorf("%+v, %v", now, err)
	}
	r.ends()
}

// A service manager in front of the keeper sees one service: it begins when a daemon serves, and ends with the keeper.
func TestManaged(t *testing.T) {
	path := filepath.Join(t.TempDir(), "notify")
	c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	t.Setenv("NOTIFY_SOCKET", path)
	r := newRig(t, "good")
	r.run(1)
	r.serves()
	r.install("better")
	_ = r.cmd.Process.Signal(Upgrade)
	r.run(2)
	r.serves()
	r.ends()
	var got []string
	_ = c.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
	for b := make([]byte, 100); ; {
		n, err := c.Read(b)
		if err != nil {
			break
		}
		got = append(got, string(b[:n]))
	}
	if want := []string{"READY=1", "READY=1", "STOPPING=1"}; !slices.Equal(got, want) {
		t.Errorf("the service manager got %q, want %q", got, want)
	}
}

// A daemon cannot have somebody signal a process that is not of the owner of the file that it names.
func TestForeignStatus(t *testing.T) {
	s := Status{PID: os.Getpid(), File: statusFile(t.TempDir())}
	if err := s.write(); err != nil {
		t.Fatal(err)
	}
	if now, err := s.Now(); err != nil || now.PID != s.PID {
		t.Fatal(now, err)
	}
	if err := os.Chown(s.File, 65534, 65534); err != nil {
		t.Skip("only root can give a file away:", err)
	}
	if _, err := s.Now(); err == nil {
		t.Error("a file of another user is believed")
	}
}

// A daemon does not outlive its keeper.
func TestKeeperKilled(t *testing.T) {
	r := newRig(t, "good")
	l := r.run(1)
	r.serves()
	_ = r.cmd.Process.Kill()
	<-r.ended
	testutil.Eventually(t, "the daemon ends", func() bool { return syscall.Kill(pid(l), 0) != nil })
	if !strings.Contains(r.journal(), "signal terminated") {
		t.Error("the daemon has not ended in good order")
	}
}

// Messages of other processes are refused: they could take descriptors away.
func TestStranger(t *testing.T) {
	r := newRig(t, "good")
	r.run(1)
	r.serves()
	found, _ := filepath.Glob(filepath.Join(r.dir, "vnicd-keeper-*", "notify"))
	if len(found) != 1 {
		t.Fatal(found)
	}
	if fi, err := os.Stat(filepath.Dir(found[0])); err != nil || fi.Mode().Perm() != 0o700 {
		t.Errorf("the directory has mode %v, %v", fi.Mode(), err)
	}
	// systemd-tmpfiles removes old files in /tmp, unless their directory is locked.
	dir, err := os.Open(filepath.Dir(found[0]))
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if err := syscall.Flock(int(dir.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != syscall.EWOULDBLOCK {
		t.Errorf("the directory is not locked: %v", err)
	}
	c, err := os.OpenFile("/dev/null", os.O_RDONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	t.Setenv("NOTIFY_SOCKET", found[0])
	var s systemd.Store
	for _, do := range []func() error{
		func() error { return s.Forget("hca/pipe") },
		func() error { return s.Keep("hca/null", int(c.Fd())) },
		func() error { return systemd.Notify("FDSTORE=1") },
		func() error { return systemd.Notify(strings.Repeat("x", 5000)) },
	} {
		if err := do(); err != nil {
			t.Fatal(err)
		}
	}
	_ = syscall.Kill(pid(r.run(1)), syscall.SIGKILL)
	r.expect(r.run(2), "good upgrades=0 failed=0 kept=2 <nil>")
	r.serves()
	r.ends()
	if n := strings.Count(r.log.String(), "message of another process refused"); n < 3 {
		t.Errorf("%d messages were refused", n)
	}
}
