package vhostuser_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/testutil/testlog"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
)

// TestUntrusted: an untrusted front end, any program of the host, may only share sealed memfds, up to its limit, in
// whatever parts. After each attempt, the next front end is served.
func TestUntrusted(t *testing.T) {
	dev, log := newEcho(3), &testlog.Log{}
	path := filepath.Join(t.TempDir(), "s")
	const most = 2 << 20
	s, err := vhostuser.Listen(vhostuser.Config{Path: path, Log: log.Logger(), MaxMemory: most, Sealed: true}, dev, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	memfd := func(seals int) int {
		fd, err := unix.MemfdCreate("app", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
		if err == nil {
			err = unix.Ftruncate(fd, 2*most)
		}
		if err == nil && seals != 0 {
			_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(fd) })
		return fd
	}
	disk := func(dir string) int {
		f, err := os.Create(filepath.Join(dir, "memory"))
		if err == nil {
			err = f.Truncate(2 * most)
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		return int(f.Fd())
	}
	shm, err := os.MkdirTemp("/dev/shm", "vnicd-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(shm) })
	sealed := memfd(unix.F_SEAL_SHRINK)
	region := func(i, n uint64) vhostuser.Region {
		return vhostuser.Region{GuestPA: 1<<30 + i*most, Size: n, UserAddr: 1<<40 + i*most, Offset: 0}
	}
	for _, tc := range []struct {
		name    string
		fd      int
		regions []vhostuser.Region // the last one is refused
		want    string
	}{
		{"a file", disk(t.TempDir()), []vhostuser.Region{region(0, 4096)}, "no memfd that is sealed"},
		{"a file in memory", disk(shm), []vhostuser.Region{region(0, 4096)}, "no memfd that is sealed"},
		{"a memfd that may shrink", memfd(0), []vhostuser.Region{region(0, 4096)}, "no memfd that is sealed"},
		{"a memfd that may not grow", memfd(unix.F_SEAL_GROW), []vhostuser.Region{region(0, 4096)},
			"no memfd that is sealed"},
		{"too much at once", sealed, []vhostuser.Region{region(0, most+4096)}, "may share 2097152"},
		{"too much in parts", sealed, []vhostuser.Region{region(0, most/2), region(1, most/2), region(2, 4096)},
			"may share 2097152"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			dev.clearCalls()
			c, err := frontend.Dial(testContext(t), path)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if _, err := c.GetProtocolFeatures(); err != nil {
				t.Fatal(err)
			}
			if err := c.SetProtocolFeatures(vhostuser.ProtoMQ | vhostuser.ProtoReplyAck |
				vhostuser.ProtoConfigureMemSlots); err != nil {
				t.Fatal(err)
			}
			for i, r := range tc.regions {
				err := c.AddMemReg(r, tc.fd)
				if last := i == len(tc.regions)-1; (err == nil) == last {
					t.Fatalf("region %d: %v", i, err)
				}
			}
			testutil.Eventually(t, "log line", func() bool { return strings.Contains(log.String(), tc.want) })
			_ = c.Close()
			dev.wait(t, "disconnect", func() bool { return len(dev.log) > 0 && dev.log[len(dev.log)-1] == "disconnected" })
		})
	}
	m := memory(t)
	d := open(t, frontend.Config{Path: path, Memory: m})
	roundTrip(t, d, m, 2, "still alive")
}
