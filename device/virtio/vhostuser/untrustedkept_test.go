package vhostuser_test

import (
	"errors"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
)

const untrustedMemory = 1 << 20

// newUntrusted is newDaemon for front ends that are not trusted.
func newUntrusted(t *testing.T) *daemon {
	t.Helper()
	d := newDaemon(t)
	_ = d.srv.Close()
	d.most = untrustedMemory
	d.start(nil)
	return d
}

// openPlanned opens the device with memory that the back end makes.
func openPlanned(t *testing.T, d *daemon) (*frontend.Device, *frontend.Memory) {
	t.Helper()
	m, err := frontend.PlanMemory(frontend.Range{PA: 0x100000, Size: untrustedMemory})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	return open(t, frontend.Config{Path: d.path, Memory: m, Features: echoFeature}), m
}

// ended waits for the end of a connection, of which nothing is kept, and for the next front end to be served.
func ended(t *testing.T, d *daemon, f *frontend.Device) {
	t.Helper()
	select {
	case <-f.Gone():
	case <-testContext(t).Done():
		t.Fatal("the connection was not closed")
	}
	testutil.Eventually(t, "nothing is kept", func() bool { return len(d.s.Names()) == 0 })
	next, m := openPlanned(t, d)
	roundTrip(t, next, m, 0, "the next front end")
}

// TestUntrustedKept: the connection of a front end that is not trusted outlives kills and restarts, in memory that the
// back end has made for it and from which nobody can take pages (CO-1, CO-2).
func TestUntrustedKept(t *testing.T) {
	d := newUntrusted(t)
	f, m := openPlanned(t, d)
	for n, stop := range []func(){d.kill, d.kill, d.end, d.kill, d.end, d.end, d.kill} {
		note(t, f, strconv.Itoa(n))
		roundTrip(t, f, m, n&1, "before")
		solid(t, "memory", m.FD(), 4096)
		if got := d.s.Names(); len(got) != countRuns {
			t.Fatalf("kept: %q", got)
		}
		stop()
		d.next()
		for i := range f.NumQueues() {
			roundTrip(t, f, m, i, "after")
		}
		noted(t, f, strconv.Itoa(n))
		untold(t, f)
		if s := d.c.Status(); s.Revived+s.Continued != 1 {
			t.Errorf("counted: %+v", s)
		}
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	testutil.Eventually(t, "nothing is kept of a gone front end", func() bool { return len(d.s.Names()) == 0 })
}

// TestUntrustedOwnMemory: a connection with a memory file of the front end's own ends with the process, as no other can
// map it: also if it has been kept before.
func TestUntrustedOwnMemory(t *testing.T) {
	for name, first := range map[string]bool{"alone": false, "beside the back end's": true} {
		t.Run(name, func(t *testing.T) {
			d := newUntrusted(t)
			_ = d.srv.Close()
			d.most, d.mute = 2*untrustedMemory, !first // a connection that is not kept needs no journal
			d.start(nil)
			var f *frontend.Device
			var m *frontend.Memory
			if first {
				f, m = openPlanned(t, d)
				roundTrip(t, f, m, 0, "kept")
				own := memory(t)
				if err := f.Client().AddMemReg(vhostuser.Region{GuestPA: 1 << 32, Size: 1 << 20, UserAddr: 1 << 40},
					own.FD()); err != nil {
					t.Fatal(err)
				}
				solid(t, "own memory", own.FD(), 4096)
			} else {
				m = memory(t)
				f = open(t, frontend.Config{Path: d.path, Memory: m, Features: echoFeature})
			}
			roundTrip(t, f, m, 0, "served")
			if got := d.s.Names(); len(got) != 0 {
				t.Errorf("kept: %q", got)
			}
			d.end()
			d.mute = false
			d.next()
			ended(t, d, f)
		})
	}
}

// TestUntrustedNotContinued: a connection whose device cannot go on is ended, since the drivers of such front ends do
// not begin anew on it, and what the previous process kept is checked as if the front end sent it now (CO-7).
func TestUntrustedNotContinued(t *testing.T) {
	drop := func(d *daemon, prefix string) string {
		names := d.s.Names()
		name := names[slices.IndexFunc(names, func(n string) bool { return strings.HasPrefix(n, "hca/one/"+prefix) })]
		d.s.Drop(name)
		return name
	}
	for name, x := range map[string]struct {
		damage func(t *testing.T, d *daemon)
		want   string // in the log
	}{
		"no journal": {func(_ *testing.T, d *daemon) { drop(d, "journal") }, "cannot be continued"},
		"no rings": {func(_ *testing.T, d *daemon) {
			d.edit(func(s map[string]any) { delete(s, "running") })
		}, "cannot be continued"},
		"lower limit": {func(_ *testing.T, d *daemon) { d.most = untrustedMemory / 2 }, "this front end may share"},
		"suspected twice": {func(t *testing.T, d *daemon) {
			if _, err := unix.Pwrite(d.s.FD("hca/one/state"), []byte{alone}, vhostuser.MarkOff); err != nil {
				t.Fatal(err)
			}
		}, "cannot be continued"},
		"memory that may get holes": {func(t *testing.T, d *daemon) {
			other := memory(t)
			name := drop(d, "memory")
			if err := d.s.Keep(name, other.FD()); err != nil {
				t.Fatal(err)
			}
		}, "pages can be taken out of its file"},
	} {
		t.Run(name, func(t *testing.T) {
			d := newUntrusted(t)
			f, m := openPlanned(t, d)
			roundTrip(t, f, m, 0, "before")
			d.kill()
			x.damage(t, d)
			d.next()
			testutil.Eventually(t, "the log has the reason", func() bool { return strings.Contains(d.log.String(), x.want) })
			testutil.Eventually(t, "the connection is counted", func() bool { return d.c.Status().Lost == 1 })
			d.most = untrustedMemory
			if name == "lower limit" {
				_ = d.srv.Close()
				d.start(nil)
			}
			ended(t, d, f)
		})
	}
}

// TestUntrustedEndsMeanwhile: a front end that has ended while no process served it leaves nothing behind.
func TestUntrustedEndsMeanwhile(t *testing.T) {
	d := newUntrusted(t)
	f, m := openPlanned(t, d)
	roundTrip(t, f, m, 0, "before")
	d.kill()
	closed := make(chan error, 1)
	go func() { closed <- f.Close() }() // waits until nobody accesses its memory
	testutil.Eventually(t, "the front end has said that it ends", func() bool { return halfClosed(t, d.s.FD("hca/one")) })
	d.next()
	if err := <-closed; err != nil {
		t.Error(err)
	}
	testutil.Eventually(t, "nothing is kept", func() bool { return len(d.s.Names()) == 0 })
	if !d.called("disconnected") {
		t.Errorf("calls %q", d.dev.calls())
	}
}

// halfClosed reports whether a socket's peer sends nothing more.
func halfClosed(t *testing.T, fd int) bool {
	t.Helper()
	p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
	if _, err := unix.Poll(p, 0); err != nil && !errors.Is(err, unix.EINTR) {
		t.Fatal(err)
	}
	return p[0].Revents&unix.POLLRDHUP != 0
}

// TestGetMemory: a front end that is not trusted gets one memory file within its limit, after it has negotiated that.
func TestGetMemory(t *testing.T) {
	d := newUntrusted(t)
	dial := func(proto uint64) *frontend.Client {
		c, err := frontend.Dial(testContext(t), d.path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		if err := c.SetProtocolFeatures(proto); err != nil {
			t.Fatal(err)
		}
		return c
	}
	c := dial(vhostuser.ProtoMemory)
	for _, size := range []uint64{0, untrustedMemory + 1, 1 << 63, ^uint64(0)} {
		var refused *frontend.RefusedError
		if fd, err := c.GetMemory(size); !errors.As(err, &refused) || fd >= 0 {
			t.Errorf("%d bytes: %d, %v", size, fd, err)
		}
	}
	fd, err := c.GetMemory(untrustedMemory)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	solid(t, "the file", fd, 4096)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Size != untrustedMemory || st.Blocks != 0 {
		t.Errorf("%d bytes, %d blocks, %v", st.Size, st.Blocks, err)
	}
	if fd, err := c.GetMemory(4096); err == nil {
		_ = unix.Close(fd)
		t.Error("a second file")
	}
	_ = c.Close()
	c = dial(vhostuser.ProtoReplyAck)
	if fd, err := c.GetMemory(4096); !errors.Is(err, frontend.ErrClosed) {
		t.Errorf("without the feature: %d, %v", fd, err)
	}
	_ = c.Close()
	// Trusted front ends, and those whose connections are not kept, are not offered any.
	for _, keep := range []bool{true, false} {
		_ = d.srv.Close()
		if d.most = 0; !keep {
			d.most, d.via = untrustedMemory, nil
		}
		d.start(nil)
		c, err := frontend.Dial(testContext(t), d.path)
		if err != nil {
			t.Fatal(err)
		}
		if p, err := c.GetProtocolFeatures(); err != nil || p&vhostuser.ProtoMemory != 0 {
			t.Errorf("offers %#x, %v", p, err)
		}
		_ = c.Close()
	}
}
