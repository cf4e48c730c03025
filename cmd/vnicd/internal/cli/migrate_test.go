package cli

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
)

// A VM that QEMU would not move, or not with its connections, is refused with advice; TestHCAMigrates moves others.
func TestMigratable(t *testing.T) {
	for _, x := range []struct {
		net, hca bool
		device   string
		want     string
	}{
		{false, false, "", "not attached"},
		{true, true, config.VhostUser, "--migratable vm1"},
		{false, true, config.Ivshmem, "virtio-net"},
		{true, true, config.Ivshmem, ""},
		{true, false, "", ""},
	} {
		vm := &daemon.VMStatus{Name: "vm1", HCADevice: x.device}
		vm.Net.Connected, vm.HCA.Connected = x.net, x.hca
		if err := migratable(vm); (err == nil) != (x.want == "") || err != nil && !strings.Contains(err.Error(), x.want) {
			t.Errorf("%+v: %v", x, err)
		}
	}
	var out, errText strings.Builder
	status := Main("test", []string{"migrate", "--control", filepath.Join(t.TempDir(), "none"), "--qmp", "x", "vm1", "y"},
		&out, &errText)
	if status == 0 || !strings.Contains(errText.String(), "vnicd must run") {
		t.Errorf("without a daemon: status %d, %s", status, errText.String())
	}
}
