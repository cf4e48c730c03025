package vhostuser_test

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/testutil/testlog"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
	"github.com/vnicd/vnicd/hypervisor/hostdriver"
)

// mark reads the mark of a kept connection, and sets it if set is not negative.
func (f *fleet) mark(name string, set int) byte {
	var b [1]byte
	fd := f.s.FD(name + "/state")
	if _, err := unix.Pread(fd, b[:], vhostuser.MarkOff); err != nil {
		f.t.Fatal(err)
	}
	if set >= 0 {
		if _, err := unix.Pwrite(fd, []byte{byte(set)}, vhostuser.MarkOff); err != nil {
			f.t.Fatal(err)
		}
	}
	return b[0]
}

// Marks, as in the files.
const (
	served = iota
	together
	alone
)

// fleet is a daemon with VMs of one front end each.
type fleet struct {
	t     *testing.T
	s     *testutil.Keeper
	dir   string
	names []string
	log   *testlog.Log
	devs  map[string]*echo
	dies  []func()
}

func (f *fleet) path(name string) string { return filepath.Join(f.dir, name) }

func (f *fleet) start() {
	f.t.Helper()
	f.log, f.devs, f.dies = &testlog.Log{}, map[string]*echo{}, nil
	kept := f.s.Pass()
	for _, n := range f.names {
		dev, die := processOf(f.t, f.s, kept, vhostuser.Config{Path: f.path(n), KeepAs: "hca/" + n, Log: f.log.Logger()})
		f.devs[n] = dev
		f.dies = append(f.dies, die)
	}
}

// crash ends the daemon without a chance to clear marks.
func (f *fleet) crash() {
	f.t.Helper()
	marks := map[string]byte{}
	for _, n := range f.names {
		if f.kept(n) {
			marks[n] = f.mark("hca/"+n, -1)
		}
	}
	f.end()
	for n, m := range marks {
		f.mark("hca/"+n, int(m))
	}
}

func (f *fleet) end() {
	f.s.End()
	for _, die := range f.dies {
		die()
	}
}

func (f *fleet) kept(name string) bool {
	for _, n := range f.s.Names() {
		if n == "hca/"+name {
			return true
		}
	}
	return false
}

func (f *fleet) await(name string, m byte) {
	f.t.Helper()
	testutil.Eventually(f.t, name+"'s mark", func() bool { return f.mark("hca/"+name, -1) == m })
}

func (f *fleet) resumed(name string) bool { return len(f.devs[name].calls()) > 0 }

// TestGuiltyStateIsDropped: one VM's kept state ends each process that resumes it. After two crashes it is dropped,
// with a log line, and the other VMs keep their devices.
func TestGuiltyStateIsDropped(t *testing.T) {
	t.Cleanup(vhostuser.SetTrial(time.Hour, time.Second)) // a turn is long enough to be seen
	f := &fleet{t: t, s: testutil.NewKeeper(t), dir: t.TempDir(), names: []string{"a", "bad", "c"}}
	f.start()
	ds := map[string]*frontend.Device{}
	for _, n := range f.names {
		ds[n] = open(t, frontend.Config{Path: f.path(n), Memory: memory(t), Features: echoFeature})
	}
	f.crash() // a crash of other causes: nobody is under suspicion yet

	f.start()
	for _, n := range f.names {
		f.await(n, together)
	}
	f.crash() // the first, while all were being resumed

	f.start()
	testutil.Eventually(t, "the guilty one's turn", func() bool {
		several := func() bool {
			n := 0
			for _, x := range f.names {
				if f.mark("hca/"+x, -1) == alone {
					n++
				}
			}
			return n > 1
		}
		if several() {
			if several() { // the turn had not passed between two readings
				t.Error("two suspects are resumed at once")
			}
		}
		return f.mark("hca/bad", -1) == alone
	})
	f.crash() // the second

	f.start()
	for _, n := range []string{"a", "c"} {
		testutil.Eventually(t, n+" is resumed", func() bool { return f.resumed(n) })
	}
	testutil.Eventually(t, "the state is dropped", func() bool { return !f.kept("bad") })
	select {
	case <-ds["bad"].Gone():
	case <-testContext(t).Done():
		t.Fatal("the front end does not notice")
	}
	if f.resumed("bad") || !strings.Contains(f.log.String(), "connection of the previous vnicd dropped") {
		t.Errorf("log:\n%s", f.log)
	}
	for _, n := range []string{"a", "c"} {
		select {
		case <-ds[n].Gone():
			t.Errorf("%s has lost its device", n)
		default:
		}
	}
	// It can be attached again.
	m := memory(t)
	roundTrip(t, open(t, frontend.Config{Path: f.path("bad"), Memory: m}), m, 0, "again")
}

// TestSuspicionEnds: a connection that is served for a while, or whose process ends in good order, is no suspect.
func TestSuspicionEnds(t *testing.T) {
	restore := vhostuser.SetTrial(time.Hour, 10*time.Millisecond)
	defer func() { restore() }()
	f := &fleet{t: t, s: testutil.NewKeeper(t), dir: t.TempDir(), names: []string{"a", "b"}}
	f.start()
	for _, n := range f.names {
		open(t, frontend.Config{Path: f.path(n), Memory: memory(t), Features: echoFeature})
	}
	f.end()
	f.start()
	f.await("a", together)
	f.await("b", together)
	f.end()
	if f.mark("hca/a", -1) != served || f.mark("hca/b", -1) != served {
		t.Error("suspected after an orderly end")
	}
	restore()
	restore = vhostuser.SetTrial(10*time.Millisecond, 10*time.Millisecond)
	f.mark("hca/a", together) // as after a crash: waits, is alone, then beside others, then above suspicion
	f.start()
	f.await("a", served)
	f.await("b", served)
	if !f.resumed("a") || !f.resumed("b") {
		t.Error("not resumed")
	}
	if !strings.Contains(f.log.String(), "resumed when no other is") {
		t.Errorf("log:\n%s", f.log)
	}
}

// TestAdoptedMemoryIsBounded: what the previous process kept is checked as if a front end had sent it. Sparse files
// of many TiB, which a daemon without a limit may have accepted, end that connection alone.
func TestAdoptedMemoryIsBounded(t *testing.T) {
	const tib = 1 << 40
	s, path := testutil.NewKeeper(t), filepath.Join(t.TempDir(), "s")
	_, die := process(t, s, nil, path)
	m := memory(t)
	d := open(t, frontend.Config{Path: path, Memory: m, Features: echoFeature})
	fd := sparse(t, 4*tib)
	if err := d.Client().AddMemReg(vhostuser.Region{GuestPA: 1 << 44, Size: 4 * tib, UserAddr: 1 << 45}, fd); err != nil {
		t.Fatal(err)
	}
	die()
	b, log := hostdriver.NewBudget(0), &testlog.Log{}
	b.SetShared(1 * tib)
	processOf(t, s, s.Pass(), vhostuser.Config{Path: path, KeepAs: "hca/one", Budget: b, Log: log.Logger()})
	select {
	case <-d.Gone():
	case <-testContext(t).Done():
		t.Fatal("the connection was not closed")
	}
	testutil.Eventually(t, "nothing is kept", func() bool { return len(s.Names()) == 0 })
	testutil.Eventually(t, "log line", func() bool {
		out := log.String()
		return strings.Contains(out, "4398046511104 bytes") && strings.Contains(out, "may share 1099511627776")
	})
	roundTrip(t, open(t, frontend.Config{Path: path, Memory: m}), m, 0, "again")
}

// Processes that somebody else has killed cast no suspicion, but not without end.
func TestSparedKills(t *testing.T) {
	t.Cleanup(vhostuser.SetTrial(time.Hour, time.Hour)) // after the servers have ended; a turn is seen
	s, path := testutil.NewKeeper(t), filepath.Join(t.TempDir(), "s")
	_, die := process(t, s, nil, path)
	m := memory(t, regions...)
	open(t, frontend.Config{Path: path, Memory: m, Features: echoFeature})
	testutil.Eventually(t, "the connection is kept", func() bool { return len(s.Names()) >= 4 })
	mark := func() byte {
		var b [1]byte
		if _, err := unix.Pread(s.FD("hca/one/state"), b[:], vhostuser.MarkOff); err != nil {
			t.Fatal(err)
		}
		return b[0]
	}
	const served, together, alone, spared, last = 0, 1, 2, 16, 16 + vhostuser.MaxSpared - 1
	for _, x := range [][2]byte{
		{served, together}, {together, spared}, {spared, spared + 1}, {last - 1, last}, {last, alone},
	} {
		die()
		if _, err := unix.Pwrite(s.FD("hca/one/state"), x[:1], vhostuser.MarkOff); err != nil { // as a kill leaves it
			t.Fatal(err)
		}
		_, die = processOf(t, s, s.Pass(), vhostuser.Config{Path: path, KeepAs: "hca/one", Blameless: true})
		testutil.Eventually(t, fmt.Sprintf("mark %d after %d", x[1], x[0]), func() bool { return mark() == x[1] })
	}
}
