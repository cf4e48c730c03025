//go:build ignore

// The tests of an RDMA binding (verbs.go): compiled on the machine, run in a VM. They need Go, a C compiler and
// libibverbs-dev on the machine, whose C library must not be newer than that of the guests.
//
//	go test -c -o verbs.test verbs.go verbs_test.go && vnicd lab run --hosts 1 -- ./verbs.test -test.v
//
// prints: PASS
package verbs

import "testing"

func open(t *testing.T) *Device {
	t.Helper()
	d, err := Open()
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestOpen(t *testing.T) {
	d := open(t)
	if d.Name() == "" {
		t.Error("the device has no name")
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}

func TestAllocate(t *testing.T) {
	d := open(t)
	keys := map[uint32]bool{}
	for _, n := range []int{1, 4096, 1 << 20} {
		m, err := d.Allocate(n)
		if err != nil {
			t.Fatal(err)
		}
		if m.Len() != n {
			t.Errorf("%d bytes are registered, want %d", m.Len(), n)
		}
		if keys[m.LKey()] {
			t.Errorf("two regions have the key %#x", m.LKey())
		}
		keys[m.LKey()] = true
		defer func() {
			if err := m.Free(); err != nil {
				t.Error(err)
			}
		}()
	}
	if err := d.Close(); err == nil {
		t.Fatal("a device with registered memory was closed")
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
}
