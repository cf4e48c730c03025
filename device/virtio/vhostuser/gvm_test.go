package vhostuser_test

import (
	"path/filepath"
	"testing"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
	"github.com/vnicd/vnicd/translate"
)

// A connection's memory is bound in the host's table under its GVMI while the connection lasts (PF-1), and the VM's
// attribute applies to it (PF-3), from the beginning if it was set before.
func TestGVMBinding(t *testing.T) {
	const gvmi = 9
	dev, vms := newEcho(1), translate.NewGVMTable(1)
	path := filepath.Join(t.TempDir(), "s")
	var attribute translate.Attribute
	if _, err := attribute.Set(translate.UplinkReadOnly); err != nil {
		t.Fatal(err)
	}
	s, err := vhostuser.Listen(vhostuser.Config{Path: path, VMs: vms, Attribute: &attribute}, dev, gvmi)
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
	bound := vms.Spaces(gvmi)
	if len(bound) != 1 {
		t.Fatalf("%d spaces bound, want 1", len(bound))
	}
	for _, u := range []translate.Uplink{translate.UplinkReadOnly, translate.UplinkBlocked, translate.UplinkReadWrite} {
		if drains, err := attribute.Set(u); err != nil || len(drains) != 1 {
			t.Fatalf("%d releases, %v", len(drains), err)
		}
		_, write := bound[0].Host(0x100000, 8)
		_, read := bound[0].HostRead(0x100000, 8)
		if write.OK() != (u == translate.UplinkReadWrite) || read.OK() == (u == translate.UplinkBlocked) {
			t.Errorf("%v: writes %v, reads %v", u, write.Kind, read.Kind)
		}
	}
	roundTrip(t, d, m, 0, "open")
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	testutil.Eventually(t, "the binding ends with the connection", func() bool { return vms.Spaces(gvmi) == nil })
	if drains, err := attribute.Set(translate.UplinkBlocked); err != nil || len(drains) != 0 {
		t.Errorf("the attribute is still bound: %d releases, %v", len(drains), err)
	}
}
