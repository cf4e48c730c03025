package vhostuser_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/testutil/testlog"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
	"github.com/vnicd/vnicd/hypervisor/localsocket"
)

// Users that need not exist.
const owner, stranger = 64401, 64402

// A connection of the previous process is judged as a new one is: by who made it.
func TestOwnerOfKeptConnection(t *testing.T) {
	for who, admitted := range map[int]bool{owner: true, stranger: false} {
		t.Run(fmt.Sprint(who), func(t *testing.T) {
			dir, err := os.MkdirTemp("/tmp", "vnicd-owner-")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = os.RemoveAll(dir) })
			if err := os.Chmod(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			path, s, log := filepath.Join(dir, "s"), testutil.NewKeeper(t), &testlog.Log{}
			start := func(o *localsocket.Owner, kept vhostuser.Kept) (*echo, *vhostuser.Server) {
				dev := newEcho(2)
				srv, err := vhostuser.Listen(vhostuser.Config{Path: path, Mode: 0o666, Owner: o, Keeper: s, KeepAs: "hca/one",
					Kept: kept, Log: log.Logger()}, dev, 9)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = srv.Close() })
				return dev, srv
			}
			_, srv := start(nil, nil)
			m := memory(t, regions...)
			var d *frontend.Device
			testutil.AsUser(t, who, who, nil, func() {
				d, err = frontend.Open(testContext(t), frontend.Config{Path: path, Memory: m, Features: echoFeature})
			})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = d.Close() })
			s.End()
			_ = srv.Close()

			dev, _ := start(&localsocket.Owner{UID: owner, GID: localsocket.None}, s.Pass())
			if admitted {
				dev.wait(t, "the connection", func() bool { return slices.Contains(dev.log, "connected") })
				return
			}
			select {
			case <-d.Gone():
			case <-testContext(t).Done():
				t.Fatal("the connection was not closed")
			}
			testutil.Eventually(t, "nothing is kept", func() bool { return len(s.Names()) == 0 })
			if calls := dev.calls(); len(calls) != 0 {
				t.Errorf("the device saw the stranger: %q", calls)
			}
			want := fmt.Sprintf("uid=%d gid=%[1]d pid=%d expected=\"root or user %d\"", stranger, os.Getpid(), owner)
			if !strings.Contains(log.String(), want) {
				t.Errorf("no %q in the log: %s", want, log.String())
			}
		})
	}
}
