package integration

import (
	"context"
	"flag"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/lab"
)

var upgradeFrom = flag.String("upgrade.from", "", "program of another vnicd, with which TestUpgradeFrom begins")

// TestUpgradeFrom: VMs at work outlive the upgrade of two hosts, one after the other, from another vnicd to this one,
// and then kills and upgrades of that (CO-1, CO-6). In between, vnicds of both kinds are peers.
func TestUpgradeFrom(t *testing.T) {
	if *upgradeFrom == "" {
		t.Fatal("no -upgrade.from; `make test-upgrade FROM=REVISION` builds that vnicd and runs this test")
	}
	var old, next, installed string
	begin := func(ctx context.Context, t *testing.T, l *lab.Lab) *stand {
		next, installed = l.VNICD, filepath.Join(t.TempDir(), "vnicd")
		testutil.InstallProgram(t, *upgradeFrom, installed)
		l.VNICD = installed
		s := onTwoHosts(ctx, t, l)
		old = versionOf(ctx, t, s.hosts[0])
		return s
	}
	replace := func(ctx context.Context, t *testing.T, s *stand, n int) {
		if n == 0 {
			testutil.InstallProgram(t, next, installed)
		}
		upgrade(ctx, t, s, n)
		h, _ := s.victim(n)
		// Version "x" of `vnicd version x`.
		want := strings.TrimPrefix(strings.TrimSpace(must[string](t)(h.CLI(ctx, "--version"))), "vnicd version ")
		if v := versionOf(ctx, t, h); v != want || v == old {
			t.Errorf("%s runs %s, want %s; before it was %s", h.Name, v, want, old)
		}
		t.Logf("%s: %s has followed %s", h.Name, want, old)
	}
	hosts, more := 2, 4
	// The other vnicd may be of before network cards were kept.
	outlive(t, begin, *chosen, event{name: "upgrade from another vnicd", run: replace, times: &hosts, flaps: true},
		event{name: "kill", run: kill, times: &more}, event{name: "upgrade", run: upgrade, times: &more})
}

func versionOf(ctx context.Context, t *testing.T, h *lab.Host) string {
	t.Helper()
	v, _ := must[map[string]any](t)(h.Status(ctx))["version"].(string)
	return v
}
