package harness

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/vnicd/vnicd/hypervisor/qemu"
)

// BootTimeout bounds the time from a guest's start to its first command. Under emulation it is 6 s on an idle machine
// and grows with the machine's load.
const BootTimeout = 10 * time.Minute

// Env holds what booting VMs needs: artifacts, accelerator and a scratch directory.
type Env struct {
	Root    string // source tree; "" if Open was called without one
	Builder *qemu.Builder
	Images  *qemu.Images
	Accel   qemu.Accel
	Dir     string // short path under the system's temporary directory, holds sockets and logs
}

// Prepare is Open with the recipes of the source tree that has the current directory. Progress goes to log (may be
// nil).
func Prepare(ctx context.Context, log io.Writer) (*Env, error) {
	script, err := qemu.FindScript(".")
	if err != nil {
		return nil, err
	}
	e, err := Open(ctx, &qemu.Builder{Script: script, Log: log})
	if err == nil {
		e.Root = filepath.Dir(filepath.Dir(script))
	}
	return e, err
}

// Open finds the images, builds missing ones, and probes the accelerator. The scratch directory is in $TMPDIR.
func Open(ctx context.Context, b *qemu.Builder) (*Env, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("harness: VMs with network namespaces need root: run this with vm-images/rootless --net")
	}
	e := &Env{Builder: b}
	var err error
	if e.Images, err = e.Builder.Build(ctx); err != nil {
		return nil, err
	}
	if _, err := qemu.ProbeEither(ctx, e.Images.QEMU); err != nil {
		return nil, err
	}
	if e.Accel, err = qemu.ProbeAccel(ctx, e.Images); err != nil {
		return nil, err
	}
	if e.Dir, err = os.MkdirTemp("", "vnicd-"); err != nil {
		return nil, err
	}
	return e, nil
}

// Close removes the scratch directory, logs included.
func (e *Env) Close() error { return os.RemoveAll(e.Dir) }

// Module compiles guestdrv/linux for the guest's kernel and returns the directory that holds vnicd.ko. In a VM with
// this directory as HostShare the module is /host/vnicd.ko.
func (e *Env) Module(ctx context.Context) (string, error) {
	out := filepath.Join(e.Dir, "module")
	if err := e.Builder.Module(ctx, filepath.Join(e.Root, "guestdrv", "linux"), out); err != nil {
		return "", err
	}
	return out, nil
}

// Programs compiles the guest programs (integration/guest) for the guest's release and puts them into dir.
func (e *Env) Programs(ctx context.Context, dir string) error {
	return e.Builder.Programs(ctx, filepath.Join(e.Root, "integration", "guest"), dir)
}

// Boot starts a VM and waits until it runs commands. Images, accelerator and a directory Dir/NAME are filled in unless
// given. On error no process is left.
func (e *Env) Boot(ctx context.Context, cfg qemu.Config) (*qemu.Machine, error) {
	if cfg.Images == nil {
		cfg.Images = e.Images
	}
	if cfg.Accel == "" {
		cfg.Accel = e.Accel
	}
	if cfg.Dir == "" {
		cfg.Dir = filepath.Join(e.Dir, cfg.Name)
		if err := os.MkdirAll(cfg.Dir, 0o755); err != nil {
			return nil, err
		}
	}
	m, err := qemu.Boot(ctx, cfg)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, Patience(BootTimeout))
	defer cancel()
	if err := m.WaitReady(ctx); err != nil {
		m.Kill()
		return nil, err
	}
	return m, nil
}

// BootAll boots several VMs at once; all or none.
func (e *Env) BootAll(ctx context.Context, cfgs ...qemu.Config) ([]*qemu.Machine, error) {
	ms := make([]*qemu.Machine, len(cfgs))
	errs := make([]error, len(cfgs))
	var wg sync.WaitGroup
	for i := range cfgs {
		wg.Add(1)
		go func() {
			defer wg.Done()
			ms[i], errs[i] = e.Boot(ctx, cfgs[i])
		}()
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		for _, m := range ms {
			if m != nil {
				m.Kill()
			}
		}
		return nil, err
	}
	return ms, nil
}

// LoadModule loads a kernel module file in the guest after the RDMA modules it needs. The guest has no udev, so the
// user-space interfaces (uverbs, rdma_cm, umad) are loaded here too.
func LoadModule(ctx context.Context, m *qemu.Machine, file string, params ...string) error {
	_, err := m.Run(ctx, "modprobe -a ib_uverbs rdma_ucm ib_umad && insmod "+file+" "+strings.Join(params, " "))
	return err
}

// AddRXE creates a Linux SoftRoCE device on a guest's interface.
func AddRXE(ctx context.Context, m *qemu.Machine, name, ifname string) error {
	_, err := m.Run(ctx,
		fmt.Sprintf("modprobe -a ib_uverbs rdma_ucm ib_umad rdma_rxe && rdma link add %s type rxe netdev %s", name, ifname))
	return err
}

// WaitGuest waits until a shell condition holds in the guest. The loop runs in the guest, so polling costs no round
// trips.
func WaitGuest(ctx context.Context, m *qemu.Machine, cond string) error {
	if _, err := m.Run(ctx, "until { "+cond+" ; } >/dev/null 2>&1; do sleep 0.05; done"); err != nil {
		return fmt.Errorf("waiting for %q: %w", cond, err)
	}
	return nil
}
