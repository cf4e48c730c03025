package integration

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
)

// TestProtectedUnderlay runs the tests that need WireGuard in a VM, because the machine's own kernel may have none: two
// hosts that exchange RDMA WRITEs through an encrypted underlay, and an attacker on the path (TR-4).
func TestProtectedUnderlay(t *testing.T) {
	l, ctx := newLabWithoutModule(t)
	h := must[*lab.Host](t)(l.Host("h1"))
	check(t, h.Run(ctx, "networks:\n  - {name: blue, vni: 100}\nvms:\n  - {name: vm1, network: blue, mac: \""+vmA.MAC+
		"\"}\n"))
	l.Share = t.TempDir()
	for name, p := range map[string]string{"wireguard": "./device/ethernet/wireguard",
		"daemon": "./cmd/vnicd/internal/daemon"} {
		c := exec.CommandContext(ctx, "go", "test", "-c", "-o", filepath.Join(l.Share, name+".test"), p)
		c.Dir, c.Env = l.Root, append(c.Environ(), "CGO_ENABLED=0")
		if out, err := c.CombinedOutput(); err != nil {
			t.Fatalf("building the test: %v\n%s", err, out)
		}
	}
	v := vmA
	v.NoHCA, v.CPUs = true, 2
	var ms []*qemu.Machine
	dumpOnFailure(t, []*lab.Host{h}, &ms)
	var err error
	ms, err = l.Boot(ctx, must[qemu.Config](t)(h.Config(ctx, v)))
	check(t, err)
	run(ctx, t, ms[0], "modprobe veth") // the kernel loads WireGuard's module itself
	start := time.Now()
	for name, tests := range map[string]string{"wireguard": "TestKernel", "daemon": "TestProtectedHosts"} {
		out := run(ctx, t, ms[0], "cd /tmp && /host/"+name+".test -test.v -test.run '^"+tests+"$' 2>&1")
		if strings.Contains(out, "no WireGuard") || strings.Count("\n"+out, "\n--- PASS") != 1 {
			t.Errorf("in the VM:\n%s", out)
		}
		t.Logf("%s", out)
	}
	t.Logf("%v in the VM", time.Since(start).Round(time.Second))
	quietKernels(ctx, t, ms...)
}
