package daemon

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"go.uber.org/goleak"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/hypervisor/hostdriver"
	"github.com/vnicd/vnicd/hypervisor/pressure"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A monitor may appear after vnicd, end and come back. Connecting, and each event that concerns memory, but no others,
// are followed by a Resync.
func TestWatchMemory(t *testing.T) {
	path := filepath.Join(t.TempDir(), "qmp")
	resyncs := make(chan struct{}, 10)
	stop := watchMemory(path, func() { resyncs <- struct{}{} }, hclog.NewNullLogger())
	defer stop()
	for round := range 2 {
		l, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		_ = l.(*net.UnixListener).SetDeadline(time.Now().Add(30 * time.Second))
		c, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintln(c,
			`{"QMP": {"version": {"qemu": {"micro": 3, "minor": 1, "major": 11}, "package": ""}, "capabilities": []}}`)
		if line, err := bufio.NewReader(c).ReadString('\n'); err != nil || !strings.Contains(line, "qmp_capabilities") {
			t.Fatal(line, err)
		}
		fmt.Fprintln(c, `{"return": {}}`)
		await := func() {
			select {
			case <-resyncs:
			case <-time.After(30 * time.Second):
				t.Fatalf("round %d: no resync", round)
			}
		}
		await() // on connecting
		for _, event := range []string{"RTC_CHANGE", "BALLOON_CHANGE", "RTC_CHANGE", "MEMORY_DEVICE_SIZE_CHANGE"} {
			fmt.Fprintf(c, `{"event": %q, "data": {}, "timestamp": {"seconds": 1, "microseconds": 2}}`+"\n", event)
		}
		await()
		await()
		_ = c.Close()
		_ = l.Close()
	}
	stop()
	if len(resyncs) != 0 {
		t.Errorf("%d resyncs too many", len(resyncs))
	}
}

// TestReloadMemory: the file changes the memory-budget and memory-weight of attached VMs. What their devices have
// touched follows, a budget below what a VM's rings need changes nothing, and a new one applies to what attaches later.
func TestReloadMemory(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "vnicd.yaml")
	load := func(level, a, b string) *config.Config {
		t.Helper()
		text := fmt.Sprintf(`
run-dir: %s
log-level: %s
memory-pressure: {watch: false}
networks: [{name: n, vni: 1, mtu: 1500}]
applications:
  - {name: a, network: n, mac: "02:00:00:00:00:0a"%s}
  - {name: b, network: n, mac: "02:00:00:00:00:0b"%s}
`, dir, level, a, b)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return must[*config.Config](t)(config.Load(path))
	}
	d := must[*Daemon](t)(Start(load("info", "", ""), "v0.0.0", hclog.NewNullLogger()))
	t.Cleanup(func() { _ = d.Close() })
	h := must[*hostdriver.Host](t)(hostdriver.NewHost(hostdriver.HostOptions{Read: shortOfMemory, Limit: 0.1,
		Log: hclog.NewNullLogger()}))
	end := sync.OnceFunc(h.Close)
	t.Cleanup(end)
	d.memory = h
	for _, v := range d.vms {
		v.share(h)
	}
	reload := func(want ...string) {
		t.Helper()
		got, err := d.Reload()
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%q, %v; want %q", got, err, want)
		}
	}
	memory := func(name string) hostdriver.Status { return d.application(t, name).Memory }

	const size = 10 << 20
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	a, b := open(t, d, "a", "10.0.0.10"), open(t, d, "b", "10.0.0.11")
	if err := errors.Join(a.to(ctx, b), b.to(ctx, a)); err != nil {
		t.Fatal(err)
	}
	regions := map[*client]*guestdrv.MR{}
	for _, c := range []*client{a, b} {
		buf := must[*guestdrv.Buffer](t)(c.Alloc(size))
		regions[c] = must[*guestdrv.MR](t)(c.pd.Register(ctx, buf, guestdrv.AccessLocalWrite|guestdrv.AccessRemoteWrite))
	}
	touch := func(c, by *client) { // each granule, by WRITEs of the peer
		t.Helper()
		wcs := make([]guestdrv.Completion, 1)
		for at := 0; at < size; at += 64 << 10 {
			wr := guestdrv.NewWrite(7, regions[c].Remote(at), by.mr.SGE(0, 8)).With(guestdrv.SendSignaled)
			if err := by.qp.PostSend(wr); err != nil {
				t.Fatal(err)
			}
			if n, err := by.cq.PollWait(ctx, wcs); n != 1 || err != nil || wcs[0].Status != guestdrv.WCSuccess {
				t.Fatal(n, err, wcs[0].Status)
			}
		}
	}
	both := func() { t.Helper(); touch(a, b); touch(b, a) }
	both()
	if m := memory("a"); m.Budget != 0 {
		t.Errorf("without a budget: %+v", m)
	}
	// The host's memory suffices for 16 MiB, which the two divide by weight.
	for a, b := memory("a"), memory("b"); a.Target == 0 || a.Target != b.Target; a, b = memory("a"), memory("b") {
		if ctx.Err() != nil {
			t.Fatalf("targets of %d and %d bytes", a.Target, b.Target)
		}
		time.Sleep(10 * time.Millisecond)
	}
	load("info", ", memory-weight: 10000", "")
	reload("VM a memory-weight 10000")
	if a, b := memory("a"), memory("b"); a.Target < b.Target+2<<20 {
		t.Errorf("with a weight of 10000 and of 100 targets of %d and %d bytes", a.Target, b.Target)
	}
	end() // targets stay as they are
	for _, v := range d.vms {
		h.Remove(v.budget)
	}

	both()
	load("info", ", memory-budget: 5MiB, memory-weight: 10000", ", memory-budget: 6144KiB, memory-weight: 7")
	reload("VM a memory-budget 5MiB", "VM b memory-budget 6MiB, memory-weight 7")
	for name, budget := range map[string]uint64{"a": 5 << 20, "b": 6 << 20} {
		if m := memory(name); m.Budget != budget || m.Resident > budget || m.Evictions == 0 {
			t.Errorf("%s: %+v", name, m)
		}
	}
	both()
	if m := memory("a"); m.Resident > 5<<20 || m.Resident < 4<<20 {
		t.Errorf("%+v", m)
	}
	load("info", ", memory-budget: 9MiB, memory-weight: 10000", ", memory-budget: 6MiB, memory-weight: 7")
	reload("VM a memory-budget 9MiB")
	both()
	if m := memory("a"); m.Resident <= 6<<20 || m.Resident > 9<<20 {
		t.Errorf("with a higher budget: %+v", m)
	}
	load("info", ", memory-weight: 10000", ", memory-budget: 6MiB, memory-weight: 7")
	reload("VM a memory-budget none")
	both()
	if m := memory("a"); m.Budget != 0 || m.Resident < size {
		t.Errorf("with no budget again: %+v", m)
	}

	// A CQ's ring of 2 MiB is held: a budget of less than twice that is refused, with all else.
	must[*guestdrv.CQ](t)(a.CreateCQ(ctx, 32767, guestdrv.CQOptions{}))
	held := memory("a").Held
	if held <= 2<<20 {
		t.Fatalf("%d bytes are held", held)
	}
	load("warn", ", memory-budget: 4MiB, memory-weight: 1", ", memory-budget: 8MiB")
	want := fmt.Sprintf(`%s:7: application "a": memory-budget 4MiB: want at least %s`, path, sizeText(2*held))
	if done, err := d.Reload(); len(done) != 0 || err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("a budget below what is held: %q, %v; want %q", done, err, want)
	}
	if a, b := memory("a"), memory("b"); a.Budget != 0 || b.Budget != 6<<20 || d.cfg.LogLevel != "info" {
		t.Errorf("a refused plan changed something: %+v, %+v, log level %s", a, b, d.cfg.LogLevel)
	}
	// Without a program it holds nothing.
	_ = a.Device.Close()
	for d.vms["a"].attached() {
		time.Sleep(time.Millisecond)
	}
	reload("log level warn", "VM a memory-budget 4MiB, memory-weight 1", "VM b memory-budget 8MiB, memory-weight 100")
	open(t, d, "a", "10.0.0.10")
	if m := memory("a"); m.Budget != 4<<20 {
		t.Errorf("attached after the reload: %+v", m)
	}
	reload()
}

// shortOfMemory is a host of 64 MiB without PSI of which nothing is free: VMs may keep a quarter.
func shortOfMemory() ([]pressure.Zone, error) {
	return []pressure.Zone{{Name: pressure.Host, Total: 64 << 20, Reserve: 64 << 20, Swap: 64 << 20, Stall: -1}}, nil
}

// must returns the value of a call that must not fail.
func must[T any](t *testing.T) func(T, error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}
