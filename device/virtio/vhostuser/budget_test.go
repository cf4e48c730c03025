package vhostuser_test

import (
	"errors"
	"path/filepath"
	"testing"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
	"github.com/vnicd/vnicd/hypervisor/hostdriver"
	"github.com/vnicd/vnicd/translate"
)

// Rings of running queues are held; all other memory is paged within the VM's budget (PF-15), and none stays resident
// after the front end has disconnected.
func TestRingsAreHeld(t *testing.T) {
	dev, budget := newEcho(2), hostdriver.NewBudget(hostdriver.MinBudget)
	path := filepath.Join(t.TempDir(), "s")
	s, err := vhostuser.Listen(vhostuser.Config{Path: path, Budget: budget}, dev, 9)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	const size = 4 * hostdriver.MinBudget
	m := memory(t, frontend.Range{PA: 0x100000, Size: size})
	d, err := frontend.Open(testContext(t), frontend.Config{Path: path, Memory: m, Features: echoFeature})
	if err != nil {
		t.Fatal(err)
	}
	held := budget.Status().Held
	if held == 0 {
		t.Fatal("rings run, but no memory is held")
	}
	ctx, conn := testContext(t), dev.conn
	for round := range 2 {
		for pa := translate.PA(0x100000); pa < 0x100000+size; pa += 0x10000 {
			if err := conn.Space().Fetch(ctx, translate.Miss{Kind: translate.HostFault, Where: translate.Where{PA: pa}, Len: 1},
				true); err != nil {
				t.Fatal(err)
			}
		}
		desc, avail, used := d.Queue(1).Rings()
		for _, pa := range []translate.PA{desc, avail, used} {
			if _, miss := conn.Space().Host(pa, 1); !miss.OK() {
				t.Errorf("round %d: ring memory: %v", round, miss.Err())
			}
		}
		roundTrip(t, d, m, round, "through memory that was evicted")
	}
	if st := conn.Memory(); st.Evictions == 0 || st.Resident > hostdriver.MinBudget || st.Held != held {
		t.Errorf("%+v", st)
	}
	release, err := conn.Hold(ctx, []translate.Range{{PA: 0x100000 + size - 8, N: 8}})
	if err != nil || budget.Status().Held <= held {
		t.Error(err, budget.Status())
	}
	if _, err := conn.Hold(ctx, []translate.Range{{PA: 0x100000, N: size}}); !errors.Is(err, hostdriver.ErrBudget) {
		t.Errorf("holding more than half of the budget: %v", err)
	}
	if err := d.StopQueue(0); err != nil {
		t.Fatal(err)
	}
	if err := d.StopQueue(1); err != nil {
		t.Fatal(err)
	}
	release()
	if st := budget.Status(); st.Held != 0 {
		t.Errorf("memory is held after the rings stopped: %+v", st)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	testutil.Eventually(t, "nothing is resident", func() bool { return budget.Status().Resident == 0 })
}
