package vnet

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
)

// serve starts a server that keeps the connection of a device.
func (v *vm) serve(k *testutil.Keeper, kept vhostuser.Kept) (die func()) {
	v.h.t.Helper()
	s, err := vhostuser.Listen(vhostuser.Config{Path: v.path, Keeper: k, KeepAs: "net/one", Kept: kept, Reconnects: true,
		Blameless: true},
		v.dev, 1)
	if err != nil {
		v.h.t.Fatal(err)
	}
	v.h.t.Cleanup(func() { _ = s.Close() })
	return func() {
		k.End()
		_ = s.Close()
	}
}

// A device goes on with another process (CO-1), and nothing is kept of a front end that has gone.
func TestKept(t *testing.T) {
	bothRings(t, 1, func(t *testing.T, h *host) {
		k := testutil.NewKeeper(t)
		a, b := h.vm(1, 1), h.vm(2, 1).boot(0, 2048, 8)
		a.path = filepath.Join(t.TempDir(), "kept")
		die := a.serve(k, nil)
		a.boot(0, 2048, 8)
		exchange := func(n byte) {
			t.Helper()
			b.send(0, buildFrame(a.mac, b.mac, 100, n))
			a.send(0, buildFrame(b.mac, a.mac, 100, n))
			for _, v := range []*vm{a, b} {
				if f := v.recv(0); f[14] != n {
					t.Fatalf("frame %x, want number %d", f[:20], n)
				}
			}
		}
		for i := range byte(5) {
			exchange(2 * i)
			if i < 4 {
				die()
				die = a.serve(k, k.Pass())
				testutil.Eventually(t, "the device goes on", func() bool { d := a.dev.Describe(); return d.Up() })
			}
			exchange(2*i + 1)
		}
		names := k.Names()
		if !slices.Contains(names, "net/one") || !slices.ContainsFunc(names, func(n string) bool {
			return strings.HasPrefix(n, "net/one/journal/")
		}) {
			t.Errorf("kept: %q", names)
		}
		if err := a.fe.Close(); err != nil {
			t.Error(err)
		}
		testutil.Eventually(t, "nothing is kept of a gone front end", func() bool { return len(k.Names()) == 0 })
	})
}

// kill ends a process as a kill does: what it stores at its end is undone.
func (v *vm) kill(k *testutil.Keeper, die func()) (next func()) {
	t := v.h.t
	t.Helper()
	testutil.Eventually(t, "the connection is kept", func() bool { return slices.Contains(k.Names(), "net/one") })
	fd, state := k.FD("net/one/state"), make([]byte, 1<<16)
	n, err := unix.Pread(fd, state, 0)
	if err != nil {
		t.Fatal(err)
	}
	die()
	if _, err := unix.Pwrite(k.FD("net/one/state"), state[:n], 0); err != nil {
		t.Fatal(err)
	}
	return v.serve(k, k.Pass())
}

// QEMU exchanges call eventfds when it masks interrupts, and when the VM is paused; processes are killed in between.
// Nothing is left over.
func TestKeptCalls(t *testing.T) {
	h := newHost(t, 1, true)
	k := testutil.NewKeeper(t)
	a := h.vm(1, 1)
	a.path = filepath.Join(t.TempDir(), "kept")
	die := a.serve(k, nil)
	a.boot(0, 2048, 8)
	fd := func() int {
		fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Close(fd) })
		return fd
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	c := a.fe.Client()
	masked := []int{fd(), fd()}
	for round := range 3 {
		for i, m := range masked {
			must(c.SetVringCall(i, m))
			must(c.SetVringCall(i, fd()))
			must(c.SetVringCall(i, m))
		}
		die = a.kill(k, die)
		for i, m := range masked {
			must(c.SetVringCall(i, m))
			_, err := c.GetVringBase(i)
			must(err)
		}
		if round != 1 {
			die = a.kill(k, die)
		}
		for i, m := range masked {
			must(c.SetVringCall(i, m))
			must(a.fe.StartQueue(i))
			must(c.SetVringCall(i, fd()))
		}
	}
	must(a.fe.Close())
	testutil.Eventually(t, "nothing is kept of a gone front end", func() bool { return len(k.Names()) == 0 })
}
