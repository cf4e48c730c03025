package qemu

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func script(t *testing.T, body string) string {
	t.Helper()
	p := filepath.Join(t.TempDir(), "script")
	if err := os.WriteFile(p, []byte("#!/bin/sh\n"+body+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return p
}

func TestProbe(t *testing.T) {
	ctx := testCtx(t)
	if err := Probe(ctx, script(t, `echo 'name "vhost-user-test-device-pci", bus PCI'`)); err != nil {
		t.Error(err)
	}
	old := script(t, `[ "$1" = --version ] && echo QEMU emulator version 7.2.0 || echo 'name "virtio-net-pci", bus PCI'`)
	err := Probe(ctx, old)
	if !errors.Is(err, ErrNoDevice) {
		t.Fatalf("got %v", err)
	}
	for _, want := range []string{"since 10.2", "version 7.2.0", "trixie-backports"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("no %q in %q", want, err)
		}
	}
	if err := Probe(ctx, "/nonexistent"); err == nil || errors.Is(err, ErrNoDevice) {
		t.Errorf("no QEMU: %v", err)
	}
}

func TestProbeIvshmem(t *testing.T) {
	ctx := testCtx(t)
	for version, want := range map[string]string{"11.1.3 (Debian 1:11.1.3)": "", "9.2.0": "", "9.1.2": "9.2 or newer",
		"7.2.22": "version 7.2.22", "": "9.2 or newer"} {
		err := ProbeIvshmem(ctx, script(t, `[ "$1" = --version ] && echo QEMU emulator version `+"'"+version+`' ||
echo 'name "ivshmem-doorbell", bus PCI'`))
		if want == "" && err != nil || want != "" && (!errors.Is(err, ErrNoIvshmem) || !strings.Contains(err.Error(), want)) {
			t.Errorf("version %q: %v", version, err)
		}
	}
	err := ProbeIvshmem(ctx, script(t, `echo 'name "virtio-net-pci", bus PCI'`))
	if !errors.Is(err, ErrNoIvshmem) || !strings.Contains(err.Error(), "lacks the device") {
		t.Errorf("without the device: %v", err)
	}
	if err := ProbeIvshmem(ctx, "/nonexistent"); err == nil || errors.Is(err, ErrNoIvshmem) {
		t.Errorf("no QEMU: %v", err)
	}
}

func TestAccelOverride(t *testing.T) {
	for _, a := range []Accel{TCG, KVM} {
		t.Setenv("VNICD_ACCEL", string(a))
		if got, err := ProbeAccel(testCtx(t), testImages()); err != nil || got != a {
			t.Errorf("%s: %s, %v", a, got, err)
		}
	}
	t.Setenv("VNICD_ACCEL", "warp")
	if _, err := ProbeAccel(testCtx(t), testImages()); err == nil {
		t.Error("no error for an unknown accelerator")
	}
}

func TestBootProbe(t *testing.T) {
	img := testImages()
	img.QEMU = script(t, "echo; echo '"+probeMessage+"'")
	if err := bootProbe(testCtx(t), img, KVM, time.Minute); err != nil {
		t.Error(err)
	}
	img.QEMU = script(t, "echo 'ASSERT: x86'; exit 134")
	if err := bootProbe(testCtx(t), img, KVM, time.Minute); err == nil || !strings.Contains(err.Error(), "ASSERT") {
		t.Errorf("crash: %v", err)
	}
	img.QEMU = script(t, "exec sleep 1000")
	if err := bootProbe(testCtx(t), img, KVM, 50*time.Millisecond); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("hang: %v", err)
	}
}

func TestBuilder(t *testing.T) {
	ctx := testCtx(t)
	dir := t.TempDir()
	file := filepath.Join(dir, "f")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	json := `{"QEMU": "` + file + `", "KERNEL": "` + file + `", "INITRD": "` + file + `", "ROOTFS": "` + file +
		`", "KVER": "6.12"}`
	b := &Builder{Script: script(t, "echo '"+json+"'")}
	if img, err := b.Find(ctx); err != nil || img.KVer != "6.12" || img.Rootfs != file {
		t.Errorf("find: %+v, %v", img, err)
	}

	// Missing at first, present after a build.
	var log bytes.Buffer
	b = &Builder{Env: []string{"MARK=" + dir + "/built"}, Log: &log, Script: script(t, `case $1 in
		paths) [ -e "$MARK" ] || exit 3; echo '`+json+`' ;;
		all) echo building >&2; touch "$MARK" ;;
		module) echo "$2: error: x" >&2; exit 1 ;;
		esac`)}
	if _, err := b.Find(ctx); !errors.Is(err, ErrNotBuilt) {
		t.Errorf("not built: %v", err)
	}
	if img, err := b.Build(ctx); err != nil || img.KVer != "6.12" || !strings.Contains(log.String(), "building") {
		t.Errorf("build: %+v, %v, log %q", img, err, log.String())
	}
	if err := b.Module(ctx, "src", "out"); err == nil || !strings.Contains(err.Error(), "src: error: x") {
		t.Errorf("module: %v", err)
	}

	b = &Builder{Script: script(t, `echo '{"QEMU": "/gone", "KERNEL": "/gone", "INITRD": "/gone", "ROOTFS": "/gone"}'`)}
	if _, err := b.Find(ctx); err == nil {
		t.Error("no error for missing files")
	}
}

func TestFindScript(t *testing.T) {
	got, err := FindScript(".")
	if err != nil || !strings.HasSuffix(got, "vm-images/build") {
		t.Errorf("%s, %v", got, err)
	}
	if _, err := FindScript("/"); err == nil {
		t.Error("found a script in /")
	}
}

func TestTailWriter(t *testing.T) {
	w := &tailWriter{max: 5}
	for _, s := range []string{"ab", "cdef", "", "gh"} {
		if n, err := w.Write([]byte(s)); n != len(s) || err != nil {
			t.Fatal(n, err)
		}
	}
	if w.String() != "defgh" {
		t.Errorf("kept %q", w.String())
	}
}
