package translate

import (
	"bytes"
	"context"
	"testing"
)

func TestTwoStages(t *testing.T) {
	s := NewSpace(7)
	mem := hostMem(t, 4<<20)
	mustMap(t, s, 0x100000, mem)
	vm := NewVM(s, Limits{})
	r, err := vm.CreateRegion(RegionSpec{PD: 3, Access: LocalWrite | RemoteWrite | RemoteRead, PageShift: 12, IOVA: 0x7f0000000123, Length: 8192, Offset: 0x123, NPages: 3})
	if err != nil {
		t.Fatal(err)
	}
	if m := vm.Write(r.RKey(), 3, 0x7f0000000123, []byte("x"), RemoteWrite); m.Kind != GuestFault {
		t.Fatalf("absent page: %v", m.Err())
	}
	if err := vm.SetPages(r.Handle(), 0, []PA{0x105000, 0x102000, 0x103000}); err != nil {
		t.Fatal(err)
	}
	src := bytes.Repeat([]byte("0123456789abcdef"), 512)
	if m := vm.Write(r.RKey(), 3, 0x7f0000000123, src, RemoteWrite); !m.OK() {
		t.Fatal(m.Err())
	}
	dst := make([]byte, len(src))
	if m := vm.Read(dst, r.LKey(), 3, 0x7f0000000123, 0); !m.OK() || !bytes.Equal(src, dst) {
		t.Fatal("read back", m.Err())
	}
	if !bytes.Equal(mem[0x5123:0x6000], src[:0xedd]) || !bytes.Equal(mem[0x2000:0x3123], src[0xedd:]) {
		t.Fatal("bytes are not where the tables say")
	}
	if err := vm.DestroyRegion(context.Background(), r.Handle()); err != nil {
		t.Fatal(err)
	}
	if m := vm.Check(r.RKey(), 3, 0x7f0000000123, 1, 0); m.Kind != BadKey {
		t.Fatalf("revoked key: %v", m.Err())
	}
}
