package cli

import (
	"context"
	"os"
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

// What a host has for a VM goes in a file to another host, which does not let the VM leave if that is too little.
func TestDestination(t *testing.T) {
	l := newLab(t)
	if out := l.ok("vm capabilities one"); !strings.HasPrefix(out,
		"one: vni 100 (network blue), mac 02:00:00:00:00:01, ip 10.0.0.1, queues 1\nhca: engines 1, ") {
		t.Errorf("%s", out)
	}
	file := filepath.Join(l.dir, "one.json")
	suits := func(text string) error {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return new(app).suits(context.Background(), daemon.NewClient(filepath.Join(l.dir, "vnicd.sock")), "one", file)
	}
	text := l.ok("vm capabilities one -j")
	waits := strings.Replace(text, `"attached": false`, `"attached": true`, 1)
	if err := suits(waits); err != nil {
		t.Errorf("the same host: %v", err)
	}
	for want, there := range map[string]string{
		"no QEMU waits":             text,
		"has VNI 101":               strings.Replace(waits, `"vni": 100`, `"vni": 101`, 1),
		"not the capabilities":      "{}",
		"capabilities in " + file:   "one: vni 100",
		"cannot unmarshal":          strings.Replace(waits, `"engines": 1`, `"engines": {}`, 1),
		"cannot continue it:\nthey": strings.Replace(waits, `"vm": "one"`, `"vm": "two"`, 1),
	} {
		if err := suits(there); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", want, err)
		}
	}
	status, _, said := l.run("migrate --qmp x --destination " + filepath.Join(l.dir, "none") + " one tcp:x:1")
	if status != 1 || !strings.Contains(said, "not attached") {
		t.Errorf("a VM that is not attached: %d, %s", status, said)
	}
}
