package vhostuser_test

import (
	"path/filepath"
	"testing"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
	"github.com/vnicd/vnicd/translate"
)

// A connection's memory is bound in the host's table under its GVMI while the connection lasts (PF-1), so the GVMI's
// uplink attribute applies to it (PF-3): a blocked VM's rings are not served.
func TestGVMBinding(t *testing.T) {
	const gvmi = 9
	dev, vms := newEcho(1), translate.NewGVMTable(1)
	path := filepath.Join(t.TempDir(), "s")
	s, err := vhostuser.Listen(vhostuser.Config{Path: path, VMs: vms}, dev, gvmi)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	if vms.Spaces(gvmi) != nil {
		t.Fatal("bound before a front end connected")
	}
	m := memory(t, frontend.Range{PA: 0x100000, Size: 1 << 20})
	d, err := frontend.Open(testContext(t), frontend.Config{Path: path, Memory: m, Features: echoFeature})
	if err != nil {
		t.Fatal(err)
	}
	roundTrip(t, d, m, 0, "open")
	bound := vms.Spaces(gvmi)
	if len(bound) != 1 {
		t.Fatalf("%d spaces bound, want 1", len(bound))
	}
	if err := vms.SetUplink(gvmi, translate.UplinkBlocked); err != nil {
		t.Fatal(err)
	}
	if _, miss := bound[0].Host(0x100000, 8); miss.Kind != translate.Blocked {
		t.Errorf("a blocked VM's memory: %v", miss.Kind)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	testutil.Eventually(t, "the binding ends with the connection", func() bool { return vms.Spaces(gvmi) == nil })
}
