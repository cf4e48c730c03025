package qemu

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// ErrNoDevice reports a QEMU that cannot create the HCA device.
var ErrNoDevice = errors.New("QEMU lacks the device " + HCADevice)

// Probe checks that QEMU has the generic vhost-user device; the error for ErrNoDevice names the release that has it.
func Probe(ctx context.Context, qemu string) error {
	has, err := hasDevice(ctx, qemu, HCADevice)
	if err != nil || has {
		return err
	}
	version, _, _ := versionOf(ctx, qemu)
	return fmt.Errorf("qemu: %s: %w, which QEMU has since %s (this one: %s); Debian's trixie-backports has such a QEMU, "+
		"and vm-images/build qemu fetches it", qemu, ErrNoDevice, HCADeviceRelease, version)
}

// ErrNoIvshmem reports a QEMU in which the HCA cannot be behind ivshmem-doorbell.
var ErrNoIvshmem = errors.New("QEMU cannot have the HCA behind ivshmem-doorbell")

// ProbeIvshmem is Probe for an HCA behind ivshmem-doorbell, whose virtio-net needs `reconnect-ms`.
func ProbeIvshmem(ctx context.Context, qemu string) error {
	has, err := hasDevice(ctx, qemu, ivshmemDriver)
	if err != nil {
		return err
	}
	version, major, minor := versionOf(ctx, qemu)
	if !has {
		return fmt.Errorf("qemu: %s: %w: it lacks the device (%s)", qemu, ErrNoIvshmem, version)
	}
	if major < 9 || major == 9 && minor < 2 {
		return fmt.Errorf("qemu: %s: %w: that needs QEMU 9.2 or newer, as Debian 13 has it (this one: %s)", qemu, ErrNoIvshmem,
			version)
	}
	return nil
}

// ProbeEither checks that QEMU can have an HCA. ivshmem: only behind ivshmem-doorbell.
func ProbeEither(ctx context.Context, qemu string) (ivshmem bool, err error) {
	if err = Probe(ctx, qemu); !errors.Is(err, ErrNoDevice) {
		return false, err
	}
	if other := ProbeIvshmem(ctx, qemu); other != nil {
		return false, errors.Join(err, other)
	}
	return true, nil
}

// hasDevice reports whether QEMU can create a device.
func hasDevice(ctx context.Context, qemu, device string) (bool, error) {
	out, err := exec.CommandContext(ctx, qemu, "-device", "help").Output()
	if err != nil {
		return false, fmt.Errorf("qemu: asking %s for its devices: %w", qemu, err)
	}
	return bytes.Contains(out, []byte(`"`+device+`"`)), nil
}

// versionOf returns what QEMU says of its version, and its number, 0 if that is unknown.
func versionOf(ctx context.Context, qemu string) (says string, major, minor int) {
	out, err := exec.CommandContext(ctx, qemu, "--version").Output()
	if err != nil {
		return "its version is unknown", 0, 0
	}
	says, _, _ = strings.Cut(string(out), "\n")
	_, after, _ := strings.Cut(says, "version ")
	_, _ = fmt.Sscanf(after, "%d.%d", &major, &minor)
	return says, major, minor
}

// probeMessage is printed by vm-images/guest/initramfs-init if the kernel command line has vnicd.probe.
const probeMessage = "vnicd: kernel is up"

// kvmProbeTime bounds a kernel's time to reach user space under KVM; it needs about one second where KVM works.
const kvmProbeTime = 8 * time.Second

// ProbeAccel returns the accelerator for guests on this host: KVM if a kernel really boots with it, otherwise TCG. That
// /dev/kvm opens proves nothing (it may be another device, or nested in a way that hangs). The result is cached until
// the host reboots or QEMU or the kernel change. The environment variable VNICD_ACCEL (tcg or kvm) overrides.
func ProbeAccel(ctx context.Context, img *Images) (Accel, error) {
	switch v := os.Getenv("VNICD_ACCEL"); v {
	case "":
	case string(TCG), string(KVM):
		return Accel(v), nil
	default:
		return "", fmt.Errorf("qemu: VNICD_ACCEL=%q: expected %q or %q", v, TCG, KVM)
	}
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return TCG, nil
	}
	f.Close()

	bootID, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("qemu: probing the accelerator: %w", err)
	}
	sum := sha256.Sum256([]byte(string(bootID) + "\x00" + img.QEMU + "\x00" + img.Kernel))
	cached := filepath.Join(img.Cache, "accel-"+hex.EncodeToString(sum[:6]))
	if b, err := os.ReadFile(cached); err == nil {
		switch a := Accel(strings.TrimSpace(string(b))); a {
		case TCG, KVM:
			return a, nil
		}
	}
	answer := TCG
	if err := bootProbe(ctx, img, KVM, kvmProbeTime); err == nil {
		answer = KVM
	} else if ctx.Err() != nil {
		return "", fmt.Errorf("qemu: probing the accelerator: %w", ctx.Err())
	}
	// Written atomically, because several probes may run at once. A missing cache only means another probe.
	tmp := fmt.Sprintf("%s.%d", cached, os.Getpid())
	if err := os.WriteFile(tmp, []byte(answer+"\n"), 0o644); err == nil {
		_ = os.Rename(tmp, cached)
	}
	return answer, nil
}

// bootProbe boots the guest's kernel up to its initramfs.
func bootProbe(ctx context.Context, img *Images, accel Accel, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	args := []string{"-nodefaults", "-no-user-config", "-display", "none", "-M", "q35", "-m", "256M", "-no-reboot",
		"-kernel", img.Kernel, "-initrd", img.Initrd, "-append", "console=ttyS0 quiet panic=-1 vnicd.probe",
		"-chardev", "stdio,id=c", "-serial", "chardev:c"}
	cmd := exec.CommandContext(ctx, img.QEMU, append(args, accel.args()...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = time.Second
	var out []byte
	var err error
	finished := make(chan struct{})
	go func() {
		// The parent-death signal is tied to this thread; see Machine.spawn.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer close(finished)
		out, err = cmd.CombinedOutput()
	}()
	<-finished
	if bytes.Contains(out, []byte(probeMessage)) {
		return nil
	}
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	return fmt.Errorf("no kernel booted with %s: %w: %s", accel, err, tail(string(out), 500))
}
