package cli

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// fakeQEMU makes a program that answers as a QEMU of that version with these devices.
func fakeQEMU(t *testing.T, dir, version string, devices ...string) string {
	t.Helper()
	path := filepath.Join(dir, "qemu-system-x86_64")
	text := fmt.Sprintf("#!/bin/sh\n[ \"$1\" = --version ] && echo 'QEMU emulator version %s' && exit\n", version)
	for _, d := range devices {
		text += fmt.Sprintf("echo 'name \"%s\", bus PCI'\n", d)
	}
	if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

// Which device is printed depends on the VM's `hca` and on what QEMU has: the one that was named, else that in PATH.
func TestWhichDevice(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "vnicd.yaml")
	text := "run-dir: " + dir + "\nnetworks: [{name: blue, vni: 100}]\nvms:\n"
	for i, hca := range []string{"auto", "vhost-user", "ivshmem"} {
		text += fmt.Sprintf("  - {name: %s, network: blue, mac: \"02:00:00:00:00:0%d\", hca: %[1]s}\n", hca, i)
	}
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	const generic, doorbell = "vhost-user-test-device-pci", "ivshmem-doorbell"
	qemus := map[string]string{
		"both": fakeQEMU(t, t.TempDir(), "11.1.3", generic, doorbell),
		"ten":  fakeQEMU(t, t.TempDir(), "10.0.2", doorbell),
		"old":  fakeQEMU(t, t.TempDir(), "7.2.22", doorbell),
		"":     "",
	}
	for _, x := range []struct{ vm, path, named, want, wrong string }{
		{"auto", "", "", "path=DIR/auto.hca|" + generic, ""},
		{"auto", "both", "", "path=DIR/auto.hca|" + generic, ""},
		{"auto", "ten", "", "path=DIR/auto.ivshmem|" + doorbell, ""},
		{"auto", "old", "", "path=DIR/auto.hca|" + generic, ""},
		{"auto", "both", "ten", "path=DIR/auto.ivshmem|" + doorbell, ""},
		{"auto", "ten", "both", "path=DIR/auto.hca|" + generic, ""},
		{"auto", "", "old", "", "since 10.2|9.2 or newer"},
		{"vhost-user", "ten", "", "path=DIR/vhost-user.hca|" + generic, ""},
		{"vhost-user", "", "both", "path=DIR/vhost-user.hca|" + generic, ""},
		{"vhost-user", "", "ten", "", "since 10.2"},
		{"ivshmem", "both", "", "path=DIR/ivshmem.ivshmem|" + doorbell, ""},
		{"ivshmem", "", "both", "path=DIR/ivshmem.ivshmem|" + doorbell, ""},
		{"ivshmem", "", "old", "", "9.2 or newer"},
		{"auto --migratable", "both", "", "path=DIR/auto.ivshmem|" + doorbell, ""},
		{"auto --migratable", "", "both", "path=DIR/auto.ivshmem|" + doorbell, ""},
		{"auto --migratable", "", "old", "", "9.2 or newer"},
		{"ivshmem --migratable", "", "", "path=DIR/ivshmem.ivshmem|" + doorbell, ""},
		{"vhost-user --migratable", "both", "", "", "set hca to auto or ivshmem"},
	} {
		for _, command := range []string{"qemu-args", "libvirt-xml"} {
			t.Run(strings.Join([]string{command, x.vm, x.path, x.named}, " "), func(t *testing.T) {
				t.Setenv("PATH", filepath.Dir(qemus[x.path]))
				if x.path == "" {
					t.Setenv("PATH", "/nonexistent")
				}
				line := append([]string{command, "-c", file}, strings.Fields(x.vm)...)
				if x.named != "" {
					line = append(line, "--qemu", qemus[x.named])
				}
				var out, errText strings.Builder
				status := Main("test", line, &out, &errText)
				got, want := out.String(), x.want
				if x.wrong != "" {
					got, want = errText.String(), x.wrong
				}
				for _, w := range strings.Split(strings.ReplaceAll(want, "DIR", dir), "|") {
					if !strings.Contains(got, w) || (status == 0) != (x.wrong == "") {
						t.Errorf("status %d, no %q: %s%s", status, w, out.String(), errText.String())
					}
				}
			})
		}
	}
}
