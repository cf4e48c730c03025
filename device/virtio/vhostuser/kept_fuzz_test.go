package vhostuser_test

import (
	"bytes"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/testutil/testlog"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
)

// FuzzKept continues a connection with an arbitrary state file, beside descriptors of a process that was killed and
// others that ended in good order. A state without a sum is accepted, as from old versions. Whatever it says, no bug is
// met, the device can be taken down, and a front end that comes later is served (CO-7).
func FuzzKept(f *testing.F) {
	m, path := memory(f, regions...), filepath.Join(f.TempDir(), "s")
	listen := func(t testing.TB, s *testutil.Keeper, kept vhostuser.Kept, log *testlog.Log, c *vhostuser.Continuity,
		dev *lasting) *vhostuser.Server {
		srv, err := vhostuser.Listen(vhostuser.Config{Path: path, KeepAs: "hca/one", Keeper: s, Kept: kept, Continuity: c,
			Log: log.Logger(), MaxMemory: 1 << 30}, dev, 9)
		if err != nil {
			t.Fatal(err)
		}
		return srv
	}
	s := testutil.NewKeeper(f)
	srv := listen(f, s, nil, &testlog.Log{}, &vhostuser.Continuity{}, newLasting())
	d, err := frontend.Open(testContext(f), frontend.Config{Path: path, Memory: m, Features: echoFeature})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { _ = d.Close() })
	state := func(s *testutil.Keeper) []byte {
		b := make([]byte, vhostuser.MarkOff)
		if _, err := unix.Pread(s.FD("hca/one/state"), b, 0); err != nil {
			f.Fatal(err)
		}
		b, _, _ = bytes.Cut(b, []byte{0})
		_, rest, _ := bytes.Cut(b, []byte(`",`)) // without the sum
		return append([]byte("{"), rest...)
	}
	killed := s.Copy(f)
	f.Add(false, state(killed))
	s.End()
	_ = srv.Close()
	ended := s.Copy(f)
	empty(s) // so that the front end can end
	f.Add(true, state(ended))
	f.Add(false, state(ended))
	f.Fuzz(func(t *testing.T, orderly bool, state []byte) {
		from := killed
		if orderly {
			from = ended
		}
		s, log, c, dev := from.Copy(t), &testlog.Log{}, &vhostuser.Continuity{}, newLasting()
		defer empty(s)
		fd := s.FD("hca/one/state")
		b := make([]byte, 2*(vhostuser.MarkOff+1))
		copy(b[:vhostuser.MarkOff], state)
		if _, err := unix.Pwrite(fd, b, 0); err != nil {
			t.Fatal(err)
		}
		srv := listen(t, s, s.Pass(), log, c, dev)
		testutil.Eventually(t, "the connection is resumed or refused", func() bool { return c.Status().Pending == 0 })
		s.End()
		_ = srv.Close()
		if strings.Contains(log.String(), "bug in vnicd") {
			t.Error(log.String())
		}
		if calls := dev.calls(); calls[len(calls)-1] != "disconnected" {
			t.Errorf("calls %q", calls)
		}
	})
}
