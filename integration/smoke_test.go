package integration

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab/harness"
)

// TestGuestSmoke boots one guest without an HCA and checks the images, the command channel, reboot and shutdown.
func TestGuestSmoke(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Minute)
	defer cancel()
	env, err := harness.Prepare(ctx, os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { env.Close() })

	share := t.TempDir()
	if err := os.WriteFile(share+"/hello", []byte("from the host\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	m, err := env.Boot(ctx, qemu.Config{Name: "smoke", HostShare: share})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Kill)
	t.Logf("boot to first command: %.1f s with %s", time.Since(start).Seconds(), env.Accel)

	expect := func(line, want string) {
		t.Helper()
		out, err := m.Run(ctx, line)
		if err != nil {
			t.Error(err)
		} else if !strings.Contains(out, want) {
			t.Errorf("%s: printed %q, expected %q", line, out, want)
		}
	}
	expect("uname -r", env.Images.KVer)
	expect("hostname", "smoke")
	expect("modinfo -F description rdma_rxe", "Soft RDMA")
	expect("cat /host/hello", "from the host")
	expect("touch /host/x 2>&1 || true", "Read-only file system")
	// There is no device yet, which the program reports.
	expect("ibv_devinfo 2>&1 || true", "No IB devices found")

	if err := m.Reboot(ctx); err != nil {
		t.Fatal(err)
	}
	expect("hostname", "smoke")
	if bad, err := harness.KernelComplaints(ctx, m); err != nil || len(bad) > 0 {
		t.Errorf("kernel log: %q, %v", bad, err)
	}
	if err := m.Shutdown(ctx); err != nil {
		t.Error(err)
	}
	if err := m.Wait(ctx); err != nil {
		t.Error(err)
	}
}
