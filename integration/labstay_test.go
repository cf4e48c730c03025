package integration

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// lab runs `vnicd lab ARGS`, which must end with a status, and returns its output.
func (u *labUser) lab(ctx context.Context, t *testing.T, want int, args string) string {
	t.Helper()
	out, status := u.status(ctx, t, u.start(t, args))
	if status != want {
		t.Fatalf("vnicd lab %s: status %d, want %d", args, status, want)
	}
	return out
}

// stay: two labs stay beside each other, run commands, and leave nothing when they are taken down, also after one was
// killed and a VM of the other one has ended.
func (u *labUser) stay(ctx context.Context, t *testing.T) {
	check(t, os.Mkdir(filepath.Join(u.dir, "sub"), 0o755))
	check(t, os.Chown(filepath.Join(u.dir, "sub"), u.uid, u.uid))
	t.Cleanup(func() {
		if t.Failed() {
			for _, name := range []string{"default", "b"} {
				u.status(ctx, t, u.start(t, "down "+name))
			}
		}
	})
	b := u.start(t, "up --name b --hosts 1")
	out := u.lab(ctx, t, 0, "up --hosts 1 --vms-per-host 2 -e WORD='a  b'")
	if !strings.Contains(out, `"default" stays until `+"`vnicd lab down`; in its VMs: "+u.dir+"\n") {
		t.Error("what stays, and what is mounted, is not said")
	}
	if _, status := u.status(ctx, t, b); status != 0 {
		t.Fatalf("up --name b: status %d", status)
	}
	if out := u.lab(ctx, t, 125, "up"); !strings.Contains(out, `lab "default" exists already`) {
		t.Error("a name was used twice")
	}
	if t.Run("commands", func(t *testing.T) { u.commands(ctx, t) }); t.Failed() {
		return
	}

	// One is killed.
	check(t, syscall.Kill(u.processes(t, "^"+regexp.QuoteMeta(u.vnicd)+" lab serve$")[0], syscall.SIGKILL))
	var ended, up string
	eventually(ctx, t, "the end of one lab", func() bool {
		states := u.states(ctx, t)
		if len(states) != 2 {
			t.Fatalf("labs: %q", states)
		}
		for name, state := range states {
			switch state {
			case "ended":
				ended = name
			case "up":
				up = name
			}
		}
		return ended != "" && up != ended
	})
	if out := u.lab(ctx, t, 125, "exec --name "+ended+" -- true"); !strings.Contains(out, "vnicd lab down "+ended) {
		t.Error("it is not said how to remove what the killed lab has left")
	}
	u.lab(ctx, t, 0, "down "+ended)
	if states := u.states(ctx, t); len(states) != 1 || states[up] != "up" {
		t.Fatalf("labs after the end of %s: %q", ended, states)
	}

	// A VM of the other one ends.
	check(t, syscall.Kill(u.processes(t, "qemu-system")[0], syscall.SIGKILL))
	eventually(ctx, t, "the lab's failure", func() bool { return u.states(ctx, t)[up] == "failed" })
	if out := u.lab(ctx, t, 125, "exec --name "+up+" -- true"); !strings.Contains(out, "VM vm") {
		t.Error("it is not said which VM has ended")
	}
	out = u.lab(ctx, t, 0, "down "+up)
	_, logs, _ := strings.Cut(strings.TrimSpace(out), "logs: ")
	if !exists(filepath.Join(logs, "h1.vnicd.log")) {
		t.Errorf("no logs in %q", logs)
	}
	if strings.HasPrefix(logs, "/tmp/vnicd-lab-") {
		check(t, os.RemoveAll(logs))
	}
	u.nothingLeft(ctx, t)
	u.lab(ctx, t, 125, "down "+up)
}

// commands: of labs that are up.
func (u *labUser) commands(ctx context.Context, t *testing.T) {
	for _, dir := range u.placesOfLabs(t) {
		if mode := must[os.FileInfo](t)(os.Stat(dir)).Mode().Perm(); mode != 0o700 {
			t.Errorf("%s has mode %#o, want 0700", dir, mode)
		}
	}
	u.lab(ctx, t, 0, "exec --each -- sh -c 'ibv_devinfo -d vnic0 | grep PORT_ACTIVE'")
	u.write(t, "input", "some input\n")
	out := u.lab(ctx, t, 7, `exec -e X=1 -- sh -c 'cat; echo "$X,$WORD,$PWD"; echo problem >&2; exit 7' <input 2>errors`)
	if want := "some input\n1,a  b," + u.dir + "\n"; out != want || u.read(t, "errors") != "problem\n" {
		t.Errorf("stdout %q, want %q; stderr %q", out, want, u.read(t, "errors"))
	}
	out, status := u.status(ctx, t, u.startLine(t, fmt.Sprintf(
		`cd sub && exec '%s' lab exec --each -- sh -c 'echo "$VNICD_LAB_RANK in $PWD"'`, u.vnicd)))
	for _, want := range []string{"vm1: 0 in " + u.dir + "/sub\n", "vm2: 1 in " + u.dir + "/sub\n"} {
		if status != 0 || !strings.Contains(out, want) {
			t.Errorf("status %d, want 0 and %q", status, want)
		}
	}
	if out := u.lab(ctx, t, 0, "exec --name b -- printenv VNICD_LAB_HOSTS"); out != "vm1\n" {
		t.Errorf("VMs of b: %q", out)
	}
	u.write(t, "lines", "hostname\nexit 4\n")
	if out := u.lab(ctx, t, 4, "shell --name default --vm vm2 <lines"); !strings.Contains(out, "vm2\r\n") {
		t.Error("the shell is not on vm2")
	}

	// An interrupt ends the command in the VM, and it alone.
	p := u.start(t, "exec --vm vm2 -- sh -c 'touch begun; sleep 12345'")
	begun := filepath.Join(u.dir, "begun")
	eventually(ctx, t, "the command's start", func() bool { return running(t, p) && exists(begun) })
	u.lab(ctx, t, 0, "exec --vm vm2 -- sh -c 'until pgrep -fx \"sleep 12345\"; do sleep 0.1; done'")
	check(t, p.Signal(syscall.SIGINT))
	if _, status := u.status(ctx, t, p); status != 128+2 {
		t.Errorf("interrupted: status %d, want 130", status)
	}
	u.lab(ctx, t, 1, "exec --vm vm2 -- pgrep -fx 'sleep 12345'")
}

// interruptedUp: nothing stays of an `up` that a signal ends; if it cannot handle the signal, `down` removes the rest.
func (u *labUser) interruptedUp(ctx context.Context, t *testing.T) {
	for s, want := range map[syscall.Signal]int{syscall.SIGINT: 128 + 2, syscall.SIGTERM: 128 + 15, syscall.SIGKILL: -1} {
		p := u.start(t, "up --name c")
		eventually(ctx, t, "a VM's start", func() bool { return running(t, p) && len(u.processes(t, "qemu-system")) > 0 })
		check(t, p.Signal(s))
		if _, status := u.status(ctx, t, p); status != want {
			t.Errorf("%v: status %d, want %d", s, status, want)
		}
		if want == -1 {
			eventually(ctx, t, "the lab's end", func() bool { return u.states(ctx, t)["c"] == "ended" })
			u.lab(ctx, t, 0, "down c")
		}
		u.nothingLeft(ctx, t)
	}
}

// states returns the states of the user's labs by name.
func (u *labUser) states(ctx context.Context, t *testing.T) map[string]string {
	t.Helper()
	states := map[string]string{}
	for i, l := range strings.Split(strings.TrimSpace(u.lab(ctx, t, 0, "list")), "\n") {
		if f := strings.Fields(l); i > 0 {
			states[f[0]] = f[1]
		}
	}
	return states
}

// processes returns the user's processes whose command line matches.
func (u *labUser) processes(t *testing.T, pattern string) (pids []int) {
	t.Helper()
	is := regexp.MustCompile(pattern)
	for _, l := range u.traces(t) {
		f := strings.SplitN(l, " ", 3)
		if f[0] == "process" && is.MatchString(f[2]) {
			pids = append(pids, must[int](t)(strconv.Atoi(f[1])))
		}
	}
	return pids
}

// placesOfLabs returns the directory of the user's labs that stay.
func (u *labUser) placesOfLabs(t *testing.T) []string {
	t.Helper()
	dirs := slices.DeleteFunc(u.traces(t), func(l string) bool {
		return !strings.Contains(l, "/vnicd-lab") ||
			!strings.HasPrefix(l, "/")
	})
	if len(dirs) == 0 {
		t.Fatal("no directory of labs")
	}
	return dirs
}

// nothingLeft waits for the end of all that the user's labs have made.
func (u *labUser) nothingLeft(ctx context.Context, t *testing.T) {
	t.Helper()
	var left []string
	defer func() { t.Logf("left: %q", left) }()
	eventually(ctx, t, "the end of all that the labs have made", func() bool {
		left = u.traces(t)
		return len(left) == 0
	})
}
