package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/testutil/testlog"
	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/hypervisor/hostdriver"
)

// keptDaemon is `vnicd run --keep` as an installed program.
type keptDaemon struct {
	*testing.T
	dir, program, config string
	keeper               *exec.Cmd
	log                  testlog.Log
}

// newKeptDaemon starts one with two VMs.
func newKeptDaemon(t *testing.T) *keptDaemon {
	return keptDaemonOf(t, `
vms:
  - {name: one, network: blue, mac: "02:00:00:00:00:01"}
  - {name: two, network: blue, mac: "02:00:00:00:00:02"}
`)
}

// keptDaemonOf starts one with a network and what more the configuration says, by the command before, if there is one.
func keptDaemonOf(t *testing.T, more string, before ...string) *keptDaemon {
	k := &keptDaemon{T: t, dir: t.TempDir()}
	k.program, k.config = filepath.Join(k.dir, "vnicd"), filepath.Join(k.dir, "vnicd.yaml")
	k.install(os.Args[0])
	k.configure(more)
	command := append(before, k.program, "-c", k.config, "run", "--keep")
	k.keeper = exec.Command(command[0], command[1:]...)
	k.keeper.Stdout, k.keeper.Stderr = &k.log, &k.log
	k.keeper.Env = append(os.Environ(), asVNICD+"=1")
	if err := k.keeper.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- k.keeper.Wait() }()
	t.Cleanup(func() {
		_ = k.keeper.Process.Signal(syscall.SIGTERM)
		select {
		case err := <-ended:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(time.Minute):
			t.Error("the keeper does not end")
			_ = k.keeper.Process.Kill()
		}
		left, _ := filepath.Glob(k.dir + "/run/*")
		left = slices.DeleteFunc(left, func(path string) bool {
			// An application's directory stays, for its containers, without a socket.
			return filepath.Ext(path) == ".app" && os.Remove(path) == nil
		})
		if len(left) != 0 {
			t.Errorf("left behind: %v", left)
		}
		if t.Failed() {
			t.Log(k.log.String())
		}
	})
	testutil.Eventually(t, "the daemon is ready", func() bool { return strings.Contains(k.log.String(), "ready") })
	return k
}

// configure writes the configuration.
func (k *keptDaemon) configure(more string) {
	k.Helper()
	yaml := fmt.Sprintf("run-dir: %s/run\nshort-path: false\nnetworks: [{name: blue, vni: 100}]\n%s", k.dir, more)
	if err := os.WriteFile(k.config, []byte(yaml), 0o644); err != nil {
		k.Fatal(err)
	}
}

// install replaces the program by a copy of a file.
func (k *keptDaemon) install(file string) {
	k.Helper()
	testutil.InstallProgram(k, file, k.program)
}

func (k *keptDaemon) run(words ...string) (status int, out, err string) {
	var o, e bytes.Buffer
	status = Main("test", append([]string{"-c", k.config}, words...), &o, &e)
	return status, o.String(), e.String()
}

func (k *keptDaemon) status() (s daemon.Status) {
	k.Helper()
	client := daemon.NewClient(k.dir + "/run/vnicd.sock")
	if err := client.Do(k.Context(), "GET", "/v1/status", nil, &s); err != nil {
		k.Fatal(err)
	}
	return s
}

// guest is a VM's driver with memory and a queue pair.
type guest struct {
	dev *guestdrv.Device
	buf *guestdrv.Buffer
	mr  *guestdrv.MR
	cq  *guestdrv.CQ
	qp  *guestdrv.QP
	gid guestdrv.GID
}

func (k *keptDaemon) guest(name, address string) *guest {
	k.Helper()
	ctx := k.Context()
	must := func(err error) {
		k.Helper()
		if err != nil {
			k.Fatal(err)
		}
	}
	g := &guest{gid: guestdrv.IPGID(netip.MustParseAddr(address))}
	var err error
	g.dev, err = guestdrv.Open(ctx, filepath.Join(k.dir, "run", name+".hca"), guestdrv.Config{})
	must(err)
	k.Cleanup(func() { _ = g.dev.Close() })
	must(g.dev.SetGID(ctx, 0, g.gid, guestdrv.GIDOptions{}))
	pd, err := g.dev.AllocPD(ctx)
	must(err)
	g.buf, err = g.dev.Alloc(4096)
	must(err)
	g.mr, err = pd.Register(ctx, g.buf, guestdrv.AccessLocalWrite|guestdrv.AccessRemoteWrite)
	must(err)
	g.cq, err = g.dev.CreateCQ(ctx, 16, guestdrv.CQOptions{})
	must(err)
	g.qp, err = pd.CreateQP(ctx, guestdrv.QPConfig{Type: guestdrv.QPTypeRC, SendCQ: g.cq, RecvCQ: g.cq, MaxSendWR: 8})
	must(err)
	return g
}

func (g *guest) connect(ctx context.Context, peer *guest) error {
	path := guestdrv.Path{GID: peer.gid, MAC: peer.dev.MAC()} // nobody answers for the network card of such a VM
	o := guestdrv.ConnectOptions{Access: guestdrv.AccessRemoteWrite, Timeout: 18}
	return g.qp.Connect(ctx, guestdrv.Peer{QPN: peer.qp.Number(), Path: path}, o)
}

// messages sends messages from a to b, one after the other, and compares each. It returns a function that waits until
// some more have arrived, and one that ends it.
func (k *keptDaemon) messages(ctx context.Context, a, b *guest) (moves func(), end func() error) {
	k.Helper()
	for _, err := range []error{a.connect(ctx, b), b.connect(ctx, a)} {
		if err != nil {
			k.Fatal(err)
		}
	}
	var written atomic.Uint64
	stop, stopped := make(chan struct{}), make(chan error, 1)
	go func() {
		stopped <- func() error {
			wcs := make([]guestdrv.Completion, 1)
			for n := uint64(1); ; n++ {
				select {
				case <-stop:
					return nil
				default:
				}
				text := fmt.Sprintf("message %020d", n)
				copy(a.buf.Bytes(), text)
				wr := guestdrv.NewWrite(n, b.mr.Remote(0), a.mr.SGE(0, len(text))).With(guestdrv.SendSignaled)
				if err := a.qp.PostSend(wr); err != nil {
					return err
				}
				if _, err := a.cq.PollWait(ctx, wcs); err != nil {
					return err
				}
				if err := wcs[0].Err(); err != nil || wcs[0].ID != n {
					return fmt.Errorf("message %d: completion %+v: %w", n, wcs[0], err)
				}
				if got := string(b.buf.Bytes()[:len(text)]); got != text {
					return fmt.Errorf("message %d: %q arrived", n, got)
				}
				written.Store(n)
			}
		}()
	}()
	moves = func() {
		k.Helper()
		before := written.Load()
		testutil.Eventually(k, "messages arrive", func() bool { return written.Load() > before+10 })
	}
	return moves, func() error {
		close(stop)
		return <-stopped
	}
}

// Without systemd, a keeper replaces the daemon while programs in VMs use a connection: they notice nothing, and the
// command says how long their HCAs stood still (CO-1). A program that cannot take over changes nothing.
func TestUpgradeKept(t *testing.T) {
	k := newKeptDaemon(t)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	a, b := k.guest("one", "10.0.0.1"), k.guest("two", "10.0.0.2")
	moves, end := k.messages(ctx, a, b)
	moves()
	first := k.status()
	if first.Keeper == nil || first.Keeper.PID != k.keeper.Process.Pid {
		t.Fatalf("the daemon does not know its keeper: %+v", first.Keeper)
	}
	for i := range 3 {
		status, out, errs := k.run("upgrade")
		if status != 0 || !strings.Contains(out, "HCAs that go on: 2") {
			t.Fatalf("upgrade %d: status %d: %s%s", i, status, out, errs)
		}
		t.Log(out)
		moves()
	}
	was := k.status()
	if was.PID == first.PID {
		t.Error("the daemon was not replaced")
	}
	release, err := lockUpgrade(first.Keeper.File, 0)
	if err != nil {
		t.Fatal(err)
	}
	if status, out, errs := k.run("upgrade"); status != 1 || !strings.Contains(errs, errUpgrading.Error()) {
		t.Errorf("upgrade during another: status %d: %s%s", status, out, errs)
	}
	release()
	if now := k.status(); now.PID != was.PID {
		t.Error("an upgrade was begun during another")
	}
	k.install("/bin/false")
	if status, out, errs := k.run("upgrade"); status != 1 || !strings.Contains(errs, "the daemon runs on") {
		t.Errorf("upgrade to another program: status %d: %s%s", status, out, errs)
	}
	moves()
	if now := k.status(); now.PID != was.PID {
		t.Error("a program that cannot take over has ended the daemon")
	}
	// The configuration is checked before anything is asked for.
	if err := os.WriteFile(k.config, []byte("engines: many\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if status, _, errs := k.run("upgrade"); status != exitUsage || !strings.Contains(errs, "engines") {
		t.Errorf("upgrade with a mistake in the configuration: status %d: %s", status, errs)
	}
	moves()
	if err := end(); err != nil {
		t.Error(err)
	}
	if status, out, errs := k.run("status", "--control", k.dir+"/run/vnicd.sock"); !strings.Contains(out, "keeper pid") {
		t.Errorf("status shows no keeper: %d: %s%s", status, out, errs)
	}
}

// The daemon is killed while programs in VMs use a connection: they notice nothing (CO-2).
func TestKillKept(t *testing.T) {
	k := newKeptDaemon(t)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	a, b := k.guest("one", "10.0.0.1"), k.guest("two", "10.0.0.2")
	moves, end := k.messages(ctx, a, b)
	moves()
	for i := range 5 {
		was := k.status()
		if err := syscall.Kill(was.PID, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		moves()
		var now daemon.Status
		testutil.Eventually(t, "all HCAs are counted", func() bool { // they serve before that
			now = k.status()
			return now.Continued.Pending == 0
		})
		if now.PID == was.PID || now.Continued.Revived != 2 {
			t.Fatalf("kill %d: %+v", i, now.Continued)
		}
		time.Sleep(100 * time.Millisecond)
	}
	if err := end(); err != nil {
		t.Error(err)
	}
}

// TestUpgradeWithoutMemory: an upgrade ends when all devices are resumed but those of VMs that have waited long for
// memory of the host; one that is not resumed for another reason is no success (HF-2).
func TestUpgradeWithoutMemory(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "control")
	ln, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	var answer atomic.Pointer[daemon.Status]
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(answer.Load())
	})}
	defer srv.Close()
	go func() { _ = srv.Serve(ln) }()
	vm := func(short int, since time.Duration) daemon.VMStatus {
		return daemon.VMStatus{NetSocket: "net", Memory: hostdriver.Status{Short: short, ShortFor: since}}
	}
	application := vm(2, time.Hour)
	application.NetSocket = ""
	for _, x := range []struct {
		pending int
		vms     []daemon.VMStatus
		ends    bool
		waiting int
	}{
		{0, []daemon.VMStatus{vm(0, 0)}, true, 0},
		{0, []daemon.VMStatus{vm(1, time.Minute)}, true, 0}, // resumed, and waits now
		{1, []daemon.VMStatus{vm(0, 0)}, false, 0},
		{1, []daemon.VMStatus{vm(3, time.Second), vm(0, 0)}, false, 0},
		{1, []daemon.VMStatus{vm(3, shortLong), vm(0, 0)}, true, 1},
		{2, []daemon.VMStatus{vm(1, shortLong), vm(0, 0)}, false, 0}, // one of its devices waits
		{2, []daemon.VMStatus{vm(3, shortLong), vm(0, 0)}, true, 2},
		{3, []daemon.VMStatus{vm(3, shortLong), vm(0, 0)}, false, 0},
		{3, []daemon.VMStatus{vm(3, shortLong), vm(1, time.Hour)}, true, 3},
		{2, []daemon.VMStatus{application}, false, 0},
	} {
		answer.Store(&daemon.Status{Continued: daemon.ContinuedStatus{Pending: x.pending}, VMs: x.vms})
		client := daemon.NewClient(socket)
		u := &upgrade{client: client, next: client, limit: time.Hour}
		if !x.ends {
			u.limit = 100 * time.Millisecond
		}
		now, silence, err := u.follow(t.Context(), func() (bool, error) { return true, nil })
		if (err == nil) != x.ends {
			t.Errorf("%+v: %v", x, err)
		} else if x.ends {
			if r := result(&daemon.Status{}, now, silence); r.Waiting != x.waiting {
				t.Errorf("%+v: %d devices wait", x, r.Waiting)
			}
		}
	}
}

// The previous program gets the arguments that it had, whatever they are.
func TestUnitCommand(t *testing.T) {
	for line, want := range map[string]string{
		"/usr/bin/vnicd\x00run\x00": `"/p/vnicd" "run"`,
		"vnicd\x00run\x00-c\x00/etc/my \"own\".yaml\x00--log-level=$X 5%\\\x00": `"/p/vnicd" "run" "-c" "/etc/my \"own\".yaml" "--log-level=$$X 5%%\\"`,
	} {
		if got := unitCommand("/p/vnicd", line); got != want {
			t.Errorf("%q: %s, want %s", line, got, want)
		}
	}
}
