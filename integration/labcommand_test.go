package integration

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/lab/harness"
)

// labUser is somebody with the installed program, without the source tree.
type labUser struct {
	dir   string // the current directory
	vnicd string
	uid   int
	// argv returns the command that runs a line of a shell in dir. The shell's process id is that of the command.
	argv func(line string) []string
}

// TestLabCommand: `vnicd lab run` and the labs of `vnicd lab up` outside of the source tree, by root, and by an
// unprivileged user whose images it first builds from what the binary has embedded.
func TestLabCommand(t *testing.T) {
	for name, user := range map[string]func(t *testing.T) *labUser{"root": labRoot, "ordinary user": labSomebody} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(context.Background(), 2*testTimeout()) // includes building images
			defer cancel()
			u := user(t)
			t.Run("two at once", func(t *testing.T) { u.twoLabs(ctx, t) })
			t.Run("a failure", func(t *testing.T) { u.failure(ctx, t) })
			t.Run("an interrupt", func(t *testing.T) { u.interrupt(ctx, t, syscall.SIGINT, 128+2) })
			t.Run("a kill", func(t *testing.T) { u.interrupt(ctx, t, syscall.SIGKILL, -1) })
			t.Run("an interrupt of up", func(t *testing.T) { u.interruptedUp(ctx, t) })
			if u.uid != 0 { // the same code, and half the time
				t.Run("up", func(t *testing.T) { u.stay(ctx, t) })
			}
		})
	}
}

// labRoot is root, who uses the images of the other tests.
func labRoot(t *testing.T) *labUser {
	u := &labUser{dir: filepath.Join(t.TempDir(), "it's here")}
	check(t, os.Mkdir(u.dir, 0o755))
	u.install(t, filepath.Dir(u.dir))
	u.argv = func(line string) []string {
		return []string{"/bin/sh", "-c", `cd "$0" && eval "$1"`, u.dir, line}
	}
	return u
}

// labSomebody is a temporary unprivileged user without images.
func labSomebody(t *testing.T) *labUser {
	s := newSomebody(t)
	u := &labUser{dir: s.dir, uid: somebodysID}
	u.install(t, s.dir)
	check(t, os.Chown(s.dir, somebodysID, somebodysID))
	check(t, os.Chmod(s.dir, 0o755))
	u.argv = func(line string) []string { return s.argv("", line) }
	return u
}

// install copies the program into a directory.
func (u *labUser) install(t *testing.T, dir string) {
	t.Helper()
	u.vnicd = filepath.Join(dir, "vnicd")
	testutil.InstallProgram(t, "../build/vnicd", u.vnicd)
}

// start starts `vnicd lab ARGS`.
func (u *labUser) start(t *testing.T, args string) *harness.Process {
	t.Helper()
	return u.startLine(t, fmt.Sprintf("exec '%s' lab %s", u.vnicd, args))
}

// startLine starts a line of the user's shell.
func (u *labUser) startLine(t *testing.T, line string) *harness.Process {
	t.Helper()
	p := must[*harness.Process](t)((&harness.Namespace{}).Start(filepath.Join(t.TempDir(), "log"), nil,
		u.argv(line)...))
	t.Cleanup(p.Kill)
	return p
}

// status waits for a process and returns its output and exit status; -1: a signal ended it.
func (u *labUser) status(ctx context.Context, t *testing.T, p *harness.Process) (string, int) {
	t.Helper()
	status := 0
	if err := p.Wait(ctx); err != nil {
		var exit *exec.ExitError
		if !errors.As(err, &exit) {
			t.Fatal(err)
		}
		status = exit.ExitCode()
	}
	out := string(must[[]byte](t)(os.ReadFile(p.Log)))
	t.Logf("status %d\n%s", status, tail(out, 3000))
	return out, status
}

// write writes a file of the user.
func (u *labUser) write(t *testing.T, name, text string) {
	t.Helper()
	path := filepath.Join(u.dir, name)
	check(t, os.WriteFile(path, []byte(text), 0o644))
	check(t, os.Chown(path, u.uid, u.uid))
}

// read returns a file in the user's directory. It must be the user's own.
func (u *labUser) read(t *testing.T, name string) string {
	t.Helper()
	path := filepath.Join(u.dir, name)
	info := must[os.FileInfo](t)(os.Stat(path))
	if owner := int(info.Sys().(*syscall.Stat_t).Uid); owner != u.uid {
		t.Errorf("%s belongs to user %d, want %d", name, owner, u.uid)
	}
	return string(must[[]byte](t)(os.ReadFile(path)))
}

// labScript runs on the first of two VMs: RDMA with the other one, started by ssh, with data in the directory that both
// share with the host.
const labScript = `set -e
echo "$VNICD_LAB_HOSTS $VNICD_LAB_ADDRESSES $VNICD_LAB_RANK of $VNICD_LAB_SIZE, $WORD, $(cat from-host)"
ssh vm2 'cd "$VNICD_LAB_DIR" && echo $VNICD_LAB_RANK >rank && ibv_rc_pingpong -d vnic0 -g 1 -c -n 200 >server' &
until ssh vm2 'ss -ltnH | grep -q :18515'; do sleep 0.2; done
ibv_rc_pingpong -d vnic0 -g 1 -c -n 200 vm2
wait $!
`

// twoLabs runs two labs at the same time: RDMA between the VMs of two hosts, and a command on each VM of one host.
func (u *labUser) twoLabs(ctx context.Context, t *testing.T) {
	u.write(t, "from-host", "hello")
	u.write(t, "script", labScript)
	// The images are built once, by the first.
	if out, status := u.status(ctx, t, u.start(t, "run --hosts 1 -- uname -r")); status != 0 || !strings.Contains(out,
		"-amd64\n") {
		t.Fatalf("status %d", status)
	}
	each := u.start(t, `run --hosts 1 --vms-per-host 2 --each -- sh -c 'echo number $VNICD_LAB_RANK on $(hostname)'`)
	out, status := u.status(ctx, t, u.start(t, `run -e WORD="a  b" -- sh script`))
	for _, want := range []string{"vm1,vm2 10.77.0.1,10.77.0.2 0 of 2, a  b, hello\n", "200 iters in"} {
		if status != 0 || !strings.Contains(out, want) {
			t.Errorf("status %d, want 0 and %q", status, want)
		}
	}
	if server := u.read(t, "server"); !strings.Contains(server, "200 iters in") || strings.Contains(server,
		"invalid data in page") || u.read(t, "rank") != "1\n" {
		t.Errorf("on vm2: rank %s, %s", u.read(t, "rank"), server)
	}
	out, status = u.status(ctx, t, each)
	for _, want := range []string{"vm1: number 0 on vm1\n", "vm2: number 1 on vm2\n"} {
		if status != 0 || !strings.Contains(out, want) {
			t.Errorf("status %d, want 0 and %q", status, want)
		}
	}
}

// labsScript runs on the VM of one of several labs that share a directory.
const labsScript = `set -e
ibv_rc_pingpong -d vnic0 -g 1 -c -n 200 >server-$WORD &
until ss -ltnH | grep -q :18515; do sleep 0.2; done
ibv_rc_pingpong -d vnic0 -g 1 -c -n 200 vm1
wait $!
`

// TestTwentyLabs: twenty labs of a VM, which all have the same names and addresses inside, two of them at any time.
// Each has RDMA, and nothing is left in the end.
func TestTwentyLabs(t *testing.T) {
	const labs, beside = 20, 2
	u := labRoot(t)
	u.write(t, "script", labsScript)
	var now, most atomic.Int32
	t.Run("beside each other", func(t *testing.T) {
		for first := range beside {
			t.Run(fmt.Sprint("from ", first), func(t *testing.T) {
				t.Parallel()
				for i := first; i < labs; i += beside {
					ctx, cancel := context.WithTimeout(context.Background(), testTimeout())
					most.Store(max(now.Add(1), most.Load()))
					out, status := u.status(ctx, t, u.start(t, fmt.Sprintf("run --hosts 1 -e WORD=%d -- sh script", i)))
					now.Add(-1)
					cancel()
					server := u.read(t, fmt.Sprint("server-", i))
					for _, x := range []string{out, server} {
						if status != 0 || !strings.Contains(x, "200 iters in") || strings.Contains(x, "invalid data in page") {
							t.Fatalf("lab %d: status %d: %s", i, status, tail(x, 500))
						}
					}
				}
			})
		}
	})
	if n := most.Load(); n != beside && !t.Failed() {
		t.Errorf("%d labs at most ran at once, want %d", n, beside)
	}
	eventually(t.Context(), t, "the end of all that the labs have made", func() bool { return len(u.traces(t)) == 0 })
}

var (
	pingCount = regexp.MustCompile(`(\d+) packets transmitted, (\d+) received`)
	pingLeast = regexp.MustCompile(`rtt min/avg/max/mdev = ([\d.]+)/`)
)

// failure: the status of a command is passed on, logs and captures are kept, and the underlay has been slow and lossy.
func (u *labUser) failure(ctx context.Context, t *testing.T) {
	_, status := u.status(ctx, t, u.start(t, "run --loss 10% --delay 5ms --logs logs -- "+
		"sh -c 'ping -i 0.02 -c 300 vm2 >ping; exit 3'"))
	if status != 3 {
		t.Errorf("status %d, want 3", status)
	}
	ping := u.read(t, "ping")
	count, least := pingCount.FindStringSubmatch(ping), pingLeast.FindStringSubmatch(ping)
	if count == nil || count[1] != "300" || count[2] == "300" || count[2] == "0" || least == nil {
		t.Fatalf("want some of 300 packets lost:\n%s", tail(ping, 500))
	}
	if ms, err := strconv.ParseFloat(least[1], 64); err != nil || ms < 10 {
		t.Errorf("the fastest answer took %v ms, want at least twice 5 ms (%v)", ms, err)
	}
	for name, want := range map[string]string{"h1.vnicd.log": "vnicd", "h2.vnicd.yaml": "vni: 100",
		"h2.status.json": `"vm2"`, "vm1.dmesg": "Linux version", "vm2.dmesg": "vnic0"} {
		if text := u.read(t, "logs/"+name); !strings.Contains(text, want) {
			t.Errorf("logs/%s has no %q:\n%s", name, want, tail(text, 500))
		}
	}
	for _, name := range []string{"vm1.console.log", "vm2.qemu.log"} {
		u.read(t, "logs/"+name)
	}
	packets := must[string](t)((&harness.Namespace{}).Run(ctx, "tshark", "-r", filepath.Join(u.dir,
		"logs/h1.underlay.pcapng"), "-Y", "vxlan && icmp"))
	if n := strings.Count(packets, "Echo"); n < 100 {
		t.Errorf("%d ICMP packets in the capture, want at least 100", n)
	}
}

// running fails the test if the process has ended.
func running(t *testing.T, p *harness.Process) bool {
	t.Helper()
	select {
	case <-p.Done():
		t.Fatalf("the lab has ended: %s", p.LogTail())
	default:
	}
	return true
}

// interrupt: a signal to the program, even one that it cannot handle, removes everything.
func (u *labUser) interrupt(ctx context.Context, t *testing.T, s syscall.Signal, want int) {
	before := u.traces(t)
	if len(before) != 0 {
		t.Fatalf("before: %q", before)
	}
	started := filepath.Join(u.dir, "started-"+s.String())
	p := u.start(t, fmt.Sprintf("run -- sh -c 'touch \"started-%v\"; sleep 100000'", s))
	eventually(ctx, t, "the command's start", func() bool { return running(t, p) && exists(started) })
	if len(u.traces(t)) < 4 {
		t.Errorf("two VMs and two daemons run, but there is only %q", u.traces(t))
	}
	check(t, p.Signal(s))
	if _, status := u.status(ctx, t, p); status != want {
		t.Errorf("status %d, want %d", status, want)
	}
	var left []string
	eventually(ctx, t, "the end of all that the lab has made", func() bool {
		left = u.traces(t)
		return len(left) == 0
	})
}

// traces returns what exists of the user's labs: processes, mounts, namespaces, scratch and log directories.
func (u *labUser) traces(t *testing.T) (found []string) {
	t.Helper()
	// QEMU names the shared directory, vnicd and its helpers the program.
	for _, l := range lines("process", "ps -ww -eo pid=,args=") {
		if (strings.Contains(l, u.vnicd) || strings.Contains(l, "path="+u.dir+",")) && !strings.Contains(l, "<defunct>") {
			found = append(found, l)
		}
	}
	for _, l := range strings.Split(string(must[[]byte](t)(os.ReadFile("/proc/self/mountinfo"))), "\n") {
		if strings.Contains(l, u.dir) {
			found = append(found, "mount "+l)
		}
	}
	// A lab is the first process of its own PID namespace, so its names would end like this.
	found = append(found, lines("namespace", "ip netns list | cut -d' ' -f1 | grep -E -e '-1-[0-9]+$' || true")...)
	for _, pattern := range []string{"/tmp/vnicd-lab-*", "/run/vnicd-*", "/tmp/vnicd-module-*", "/tmp/vnicd-labs-*",
		"/run/user/*/vnicd-lab", os.Getenv("XDG_RUNTIME_DIR") + "/vnicd-lab"} {
		for _, path := range must[[]string](t)(filepath.Glob(pattern)) {
			if info, err := os.Stat(path); err == nil && int(info.Sys().(*syscall.Stat_t).Uid) == u.uid {
				found = append(found, path)
			}
		}
	}
	return slices.Compact(found)
}
