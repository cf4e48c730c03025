package qemu

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// ErrNotBuilt reports that vm-images has not been built, or that its recipes changed since.
var ErrNotBuilt = errors.New("the VM images are not built: run vm-images/build all")

// Images has the paths of the artifacts of vm-images. All paths are absolute.
type Images struct {
	QEMU       string `json:"QEMU"`        // qemu-system-x86_64, or a wrapper that runs it
	QEMUImg    string `json:"QEMU_IMG"`    // may be empty
	Release    string `json:"RELEASE"`     // trixie, bookworm, trixie-backports
	KVer       string `json:"KVER"`        // uname -r of the guest
	Kernel     string `json:"KERNEL"`      // vmlinuz
	Initrd     string `json:"INITRD"`      // small initramfs
	Rootfs     string `json:"ROOTFS"`      // raw ext4 image, never written
	ModuleRoot string `json:"MODULE_ROOT"` // root with compiler and headers; may not exist yet
	Cache      string `json:"CACHE"`       // vnicd's cache directory
}

// Builder runs vm-images/build.
type Builder struct {
	Script string    // path of vm-images/build
	Env    []string  // added to the process's environment: RELEASE=, PACKAGES=
	Log    io.Writer // progress and compiler messages; nil: dropped
	// OwnGroup runs the script in a process group of its own, which is killed when the context ends. An interrupt from the
	// terminal then does not reach the script, so the caller must end the context. Without it only the script itself is
	// killed.
	OwnGroup bool
}

// FindScript looks for vm-images/build in dir and its parents: a test runs in its package's directory.
func FindScript(dir string) (string, error) {
	start, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	for d := start; ; d = filepath.Dir(d) {
		p := filepath.Join(d, "vm-images", "build")
		if st, err := os.Stat(p); err == nil && !st.IsDir() {
			return p, nil
		}
		if d == filepath.Dir(d) {
			return "", fmt.Errorf("qemu: no vm-images/build in %s or above: run this inside the source tree", start)
		}
	}
}

// Find returns the artifacts, or ErrNotBuilt if some are missing.
func (b *Builder) Find(ctx context.Context) (*Images, error) {
	out, err := b.run(ctx, "paths", "-j")
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() == 3 {
		return nil, fmt.Errorf("qemu: %w", ErrNotBuilt)
	}
	if err != nil {
		return nil, err
	}
	img := new(Images)
	if err := json.Unmarshal(out, img); err != nil {
		return nil, fmt.Errorf("qemu: reading the output of %s paths -j: %w", b.Script, err)
	}
	for name, p := range map[string]string{"QEMU": img.QEMU, "KERNEL": img.Kernel, "INITRD": img.Initrd,
		"ROOTFS": img.Rootfs} {
		if _, err := os.Stat(p); err != nil {
			return nil, fmt.Errorf("qemu: %s of %s: %w", name, b.Script, err)
		}
	}
	return img, nil
}

// Build builds missing artifacts (minutes on a fresh machine, nothing afterwards) and returns all.
func (b *Builder) Build(ctx context.Context) (*Images, error) {
	if img, err := b.Find(ctx); !errors.Is(err, ErrNotBuilt) {
		return img, err
	}
	if _, err := b.run(ctx, "all"); err != nil {
		return nil, err
	}
	return b.Find(ctx)
}

// Module compiles the kernel module in src against the guest's headers and puts vnicd.ko into out.
func (b *Builder) Module(ctx context.Context, src, out string) error {
	_, err := b.run(ctx, "module", src, out)
	return err
}

// Programs runs the Makefile in src in the guest's release, which has a compiler and libibverbs; results go to out.
func (b *Builder) Programs(ctx context.Context, src, out string) error {
	_, err := b.run(ctx, "programs", src, out)
	return err
}

// Container builds the root of another Debian release, bookworm or forky, if it is missing, and returns its disk image.
func (b *Builder) Container(ctx context.Context, release string) (string, error) {
	out, err := b.run(ctx, "container", release)
	return strings.TrimSpace(string(out)), err
}

// Host builds the root of a VM host if it is missing, and returns its directory.
func (b *Builder) Host(ctx context.Context) (string, error) {
	out, err := b.run(ctx, "host")
	return strings.TrimSpace(string(out)), err
}

func (b *Builder) run(ctx context.Context, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, b.Script, args...)
	cmd.Env = append(os.Environ(), b.Env...)
	var out bytes.Buffer
	tail := &tailWriter{max: 4096}
	cmd.Stdout = &out
	cmd.Stderr = tail
	if b.Log != nil {
		cmd.Stderr = io.MultiWriter(tail, b.Log)
	}
	if b.OwnGroup {
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
		cmd.WaitDelay = 30 * time.Second
	}
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("qemu: %s %s: %w: %s", b.Script, strings.Join(args, " "), err,
			strings.TrimSpace(tail.String()))
	}
	return out.Bytes(), nil
}

// tailWriter keeps the last max bytes written to it.
type tailWriter struct {
	max int
	buf []byte
}

func (t *tailWriter) Write(p []byte) (int, error) {
	t.buf = append(t.buf, p...)
	if n := len(t.buf) - t.max; n > 0 {
		t.buf = append(t.buf[:0], t.buf[n:]...)
	}
	return len(p), nil
}

func (t *tailWriter) String() string { return string(t.buf) }
