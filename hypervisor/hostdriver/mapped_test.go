package hostdriver

import (
	"errors"
	"strings"
	"testing"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/translate"
)

// TestMappedTotal: all VMs together map no more than the process has room for (TR-2), by bytes and by number; what is
// refused or removed is not counted, and memory that two sockets of a VM share is counted once.
func TestMappedTotal(t *testing.T) {
	const mib = 1 << 20
	total := &mappedTotal{bytes: 8*mib + mib/2, mappings: 3}
	vm := func() (*Budget, *Driver) {
		b := NewBudget(0)
		b.space = total
		d, _ := newDriver(t, Options{Budget: b})
		return b, d
	}
	b1, d1 := vm()
	_, d2 := vm()
	fd := memfd(t, "vnicd-test-total", 16*mib, 0, unix.F_SEAL_SHRINK)
	add := func(d *Driver, at, n uint64) error {
		return d.AddSlot(Slot{GuestPA: at, Size: n, UserAddr: 1<<40 + at, FD: fd, Offset: at})
	}
	expect := func(what string, used uint64, count int) {
		t.Helper()
		if total.used != used || total.usedCount != count {
			t.Errorf("%s: %d bytes in %d mappings, want %d in %d", what, total.used, total.usedCount, used, count)
		}
	}
	if err := errors.Join(add(d1, 0, 4*mib), add(d2, 0, 3*mib)); err != nil {
		t.Fatal(err)
	}
	expect("two VMs", 7*mib, 2)
	err := add(d2, 4*mib, 2*mib)
	if !errors.Is(err, ErrMapped) || !strings.Contains(err.Error(), "2097152 bytes beside the 7340032 of all VMs") {
		t.Errorf("beyond the total: %v", err)
	}
	expect("after a refusal", 7*mib, 2)
	if err := add(d1, 4*mib, 1*mib); err != nil {
		t.Error(err)
	}
	// There is room for its bytes.
	if err := add(d2, 4*mib, 4096); !errors.Is(err, ErrMapped) || !strings.Contains(err.Error(), "have 3 memory slots") {
		t.Errorf("a fourth mapping: %v", err)
	}
	expect("after a refusal by number", 8*mib, 3)
	second := New(translate.NewSpace(1), hclog.NewNullLogger(), Options{Budget: b1})
	if err := add(second, 0, 4*mib); err != nil {
		t.Errorf("memory that another socket of the VM has: %v", err)
	}
	expect("a second socket", 8*mib, 3)
	d1.Close()
	expect("the first socket is closed", 7*mib, 2)
	second.Close()
	d2.Close()
	expect("all are closed", 0, 0)

	if n := DefaultShared(); n < minShared || n > maxMapped {
		t.Errorf("by default a VM may share %d bytes", n)
	}
}
