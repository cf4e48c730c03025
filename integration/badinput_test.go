package integration

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

// vnicd runs the binary as a user would and returns its output and exit status.
func vnicd(t *testing.T, l *lab.Lab, argv ...string) (out string, status int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	b, err := exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput()
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		return string(b), exit.ExitCode()
	case err != nil:
		t.Fatalf("%v: %v\n%s", argv, err, b)
	}
	return string(b), 0
}

// TestBadInput: for every mistake there is a message that names it and what was expected, and an exit status. Nothing
// is left behind.
func TestBadInput(t *testing.T) {
	l, ctx := newLab(t)
	dir := t.TempDir()
	// An unprivileged user must be able to read it.
	check(t, os.Chmod(dir, 0o755))
	check(t, os.Chmod(filepath.Dir(dir), 0o755))
	file := func(text string) string {
		p := filepath.Join(dir, fmt.Sprintf("c%d.yaml", len(text)))
		check(t, os.WriteFile(p, []byte(text), 0o644))
		return p
	}
	good := "run-dir: " + dir +
		"/run\nnetworks:\n  - {name: blue, vni: 100}\nvms:\n  - {name: vm1, network: blue, mac: \"02:00:00:00:00:01\"}\n"

	for _, x := range []struct {
		name string
		argv []string
		want []string
		code int
	}{
		{"unknown key", []string{l.VNICD, "run", "-c", file("colour: red\nnetworks: []\n")},
			[]string{":1:", `unknown key "colour"`, "known: "}, 2},
		{"wrong values", []string{l.VNICD, "check", "-c", file("engines: many\nnetworks:\n  - {name: n, vni: 0}\n")},
			[]string{":1: engines must be a number from 1 to 8", ":3: vni must be a number"}, 2},
		{"duplicate VNI", []string{l.VNICD, "check", "-c", file("networks:\n  - {name: a, vni: 5}\n  - {name: b, vni: 5}\n")},
			[]string{":3: vni 5 is already"}, 2},
		{"duplicate MAC", []string{l.VNICD, "check", "-c",
			file(good + "  - {name: vm2, network: blue, mac: \"02:00:00:00:00:01\"}\n")},
			[]string{":6: mac 02:00:00:00:00:01 is already used"}, 2},
		{"no file", []string{l.VNICD, "run", "-c", dir + "/none.yaml"}, []string{"none.yaml", "no such file"}, 2},
		{"no such VM", []string{l.VNICD, "qemu-args", "vm7", "-c", file(good)}, []string{`no VM "vm7"`, "vm1"}, 2},
		{"unknown flag", []string{l.VNICD, "run", "--fast"}, []string{"unknown flag: --fast", "--help"}, 2},
		{"unknown command", []string{l.VNICD, "fly"}, []string{`unknown command "fly"`}, 2},
		{"not running", []string{l.VNICD, "status", "--control", dir + "/nobody.sock"}, []string{"no vnicd at", "vnicd run"},
			1},
		{"underlay address not of this host", []string{l.VNICD, "run", "-c",
			file("run-dir: " + dir + "/run\nvtep: {local: 198.51.100.9}\n")}, []string{"198.51.100.9"}, 1},
		{"no privilege for a TAP", []string{"setpriv", "--reuid=65534", "--clear-groups", "--bounding-set=-all",
			"--inh-caps=-all", l.VNICD, "run", "-c", file("run-dir: " + filepath.Join(nobodyDir(t), "r") +
				"\nnetworks:\n  - name: blue\n    vni: 100\n    tap: {name: bluetap0}\n")}, []string{"bluetap0", "CAP_NET_ADMIN"},
			1},
		{"no privilege for the run directory", []string{"setpriv", "--reuid=65534", "--clear-groups", l.VNICD, "run", "-c",
			file("run-dir: /run/vnicd-of-root\n" + good[strings.Index(good, "networks"):])},
			[]string{"/run/vnicd-of-root", "run-dir"}, 1},
	} {
		t.Run(x.name, func(t *testing.T) {
			// The unprivileged user must reach the binary too.
			out, code := vnicd(t, l, publicBinary(t, l, x.argv)...)
			if code != x.code {
				t.Errorf("exit status %d, want %d", code, x.code)
			}
			for _, w := range x.want {
				if !strings.Contains(out, w) {
					t.Errorf("printed:\n%s\nwant it to contain %q", out, w)
				}
			}
		})
	}
	t.Run("socket path in use", func(t *testing.T) {
		check(t, os.MkdirAll(dir+"/run", 0o755))
		ln := must[net.Listener](t)(net.Listen("unix", dir+"/run/vm1.net"))
		defer ln.Close()
		out, code := vnicd(t, l, l.VNICD, "run", "-c", file(good))
		if code != 1 || !strings.Contains(out, "vm1.net") || !strings.Contains(out, "in use") {
			t.Errorf("status %d:\n%s", code, out)
		}
	})
	t.Run("QEMU without the device", func(t *testing.T) {
		old := filepath.Join(dir, "qemu-old")
		check(t, os.WriteFile(old, []byte("#!/bin/sh\n'"+l.Images.QEMU+"' \"$@\" | grep -v -e vhost-user-test-device -e ivshmem-doorbell\n"), 0o755))
		out, code := vnicd(t, l, l.VNICD, "qemu-args", "vm1", "-c", file(good), "--qemu", old)
		if code != 1 || !strings.Contains(out, "vhost-user-test-device-pci") ||
			!strings.Contains(out, qemu.HCADeviceRelease) {
			t.Errorf("status %d:\n%s", code, out)
		}
	})
	t.Run("guest", func(t *testing.T) { badGuests(ctx, t, l) })
}

// publicBinary replaces the daemon's path with that of a copy that every user may run.
func publicBinary(t *testing.T, l *lab.Lab, argv []string) []string {
	t.Helper()
	if argv[0] == l.VNICD {
		return argv
	}
	p := filepath.Join(nobodyDir(t), "vnicd")
	testutil.InstallProgram(t, l.VNICD, p)
	out := append([]string(nil), argv...)
	for i := range out {
		if out[i] == l.VNICD {
			out[i] = p
		}
	}
	return out
}

// nobodyDir returns a directory owned by the user nobody.
func nobodyDir(t *testing.T) string {
	t.Helper()
	d, err := os.MkdirTemp("/tmp", "vnicd-nobody-")
	check(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(d) })
	check(t, os.Chmod(d, 0o755))
	check(t, os.Chown(d, 65534, 65534))
	return d
}

// badGuests boots a guest whose memory is not shared, and loads a module with another ABI version.
func badGuests(ctx context.Context, t *testing.T, l *lab.Lab) {
	h := must[*lab.Host](t)(l.Host("bad"))
	check(t, h.Run(ctx,
		"networks:\n  - {name: blue, vni: 100}\nvms:\n  - {name: vm1, network: blue, mac: \"02:00:00:00:00:01\"}\n  - {name: vm2, network: blue, mac: \"02:00:00:00:00:02\"}\n"))

	// Build the module with another ABI version: the same source with two numbers changed.
	src := filepath.Join(l.Dir, "other-abi")
	_, err := (&harness.Namespace{}).Shell(ctx, fmt.Sprintf(
		"cp -r '%s/guestdrv/linux' '%s' && sed -i 's/^#define VNICD_ABI_\\(VERSION\\|OLDEST\\).*/#define VNICD_ABI_\\1 99/' '%s/vnicd_abi.h'", l.Env.Root, src, src))
	check(t, err)
	check(t, l.Builder.Module(ctx, src, filepath.Join(l.Share, "other-abi")))

	private := must[qemu.Config](t)(h.Config(ctx, lab.VM{Name: "vm2", MAC: "02:00:00:00:00:02"}))
	private.ExtraArgs = append(private.ExtraArgs, "-object", "memory-backend-ram,id=private,size=768M", "-machine",
		"memory-backend=private")
	ms, err := l.Boot(ctx, must[qemu.Config](t)(h.Config(ctx, lab.VM{Name: "vm1", MAC: "02:00:00:00:00:01"})))
	check(t, err)
	dumpOnFailure(t, []*lab.Host{h}, &ms)

	r := must[qemu.Result](t)(ms[0].Shell(ctx,
		"modprobe -a ib_uverbs; insmod /host/other-abi/vnicd.ko; dmesg | grep -i vnicd; ls /sys/class/infiniband"))
	if !strings.Contains(r.Stdout, "99") || !strings.Contains(r.Stdout, "ABI") || strings.Contains(r.Stdout, "vnic0") {
		t.Errorf("a module with ABI 99: %s%s", r.Stdout, r.Stderr)
	}
	run(ctx, t, ms[0], "rmmod vnicd")
	check(t, harness.LoadModule(ctx, ms[0], "/host/vnicd.ko")) // the right one still works
	quietKernels(ctx, t, ms...)

	// The guest does not come up without its network; do not wait for it.
	boot, cancel := context.WithCancel(ctx)
	defer cancel()
	booted := make(chan error, 1)
	go func() {
		_, err := l.Boot(boot, private)
		booted <- err
	}()
	eventually(ctx, t, "vnicd's message that memory must be shared",
		func() bool { return strings.Contains(h.Log(), "share=on") })
	cancel()
	<-booted
}
