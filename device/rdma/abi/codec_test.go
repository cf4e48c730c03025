package abi

import (
	"bytes"
	"encoding/hex"
	"errors"
	"reflect"
	"sort"
	"strings"
	"testing"
)

// record is implemented by every mirrored structure.
type record interface {
	Encode([]byte)
	Decode([]byte) error
}

// TestGolden pins some structures to bytes written out by hand from the header.
func TestGolden(t *testing.T) {
	for _, tc := range []struct {
		name string
		x    record
		hex  string
	}{
		{"req", &Req{Opcode: CmdCreateQP, Length: 0x11223344}, "1000 0000 44332211"},
		{"resp", &Resp{Status: StatusBusy, Length: 8}, "04000000 08000000"},
		{"ring", &Ring{Length: 0x1180, NPages: 2, PageShift: 12, Log2ElemSize: 8, NumElems: 16},
			"8011000000000000 02000000 0c 08 0000 10000000 00000000"},
		{"set_gid", &SetGID{Index: 1, Type: GIDRoCEv2, VLANID: NoVLAN, SMAC: [6]byte{2, 0, 0, 0, 0, 7},
			GID: [16]byte{10: 0xff, 11: 0xff, 12: 10, 15: 7}},
			"0100 02 00 ffff 020000000007 00000000 00000000000000000000ffff0a000007"},
		{"set_mtt", &SetMTT{Handle: 5, Count: 3, First: 0x100000002}, "05000000 03000000 0200000001000000"},
		{"set_mtt, resume", &SetMTT{Handle: 5, Count: 3, Flags: SetMTTResume, First: 2},
			"05000000 0300 0100 0200000000000000"},
		{"clear_mtt", &ClearMTT{Handle: 5, First: 0x100000002, Count: 7},
			"05000000 00000000 0200000001000000 0700000000000000"},
		{"resume_fault", &ResumeFault{Token: 0x11223344, Status: StatusFault}, "44332211 06000000"},
		{"ah", &AH{Valid: 1, PDN: 2, DGID: [16]byte{0xfe, 0x80, 15: 9}, DMAC: [6]byte{2}, SGIDIndex: 3, VLANID: 7,
			TrafficClass: 4, HopLimit: 64, FlowLabel: 0xabcde, SL: 3},
			"01000000 02000000 fe800000000000000000000000000009 020000000000 0300 0700 04 40 debc0a00 03 00000000000000 0000000000000000 0000000000000000"},
		{"reg_wr", &RegWR{IOVA: 0xffff888000001123, Length: 0x2000, PageList: 0x40001000, NPages: 3, Offset: 0x123,
			RKey: 0x107, Access: 7, PageShift: 12},
			"2311000080 88ffff 0020000000000000 0010004000000000 03000000 23010000 07010000 07000000 0c 00000000000000"},
		{"create_mw", &CreateMW{PDN: 3, Type: 2}, "03000000 02000000"},
		{"resolve", &Resolve{DGID: [16]byte{10: 0xff, 11: 0xff, 12: 10, 15: 2}, SGIDIndex: 3},
			"00000000 00000000 0000ffff 0a000002 0300 000000000000"},
		{"resolve_resp", &ResolveResp{MAC: [6]byte{2, 0, 0, 0, 0, 9}}, "020000000009 0000"},
		{"ceqe", &CEQE{CQN: 9}, "09000000 00000000"},
		{"wc", &WC{ID: 0x0102030405060708, Status: WCSuccess, Opcode: WCOpRecv, ByteLen: 48,
			Ex: [4]byte{0xde, 0xad, 0xbe, 0xef}, QPN: 17, SrcQP: 18, Flags: WCFlagGRH | WCFlagWithImm, PortNum: 1},
			"0807060504030201 00000000 80000000 00000000 30000000 deadbeef 11000000 12000000 03000000 0000 0000 00 00 01 00"},
	} {
		want, err := hex.DecodeString(strings.ReplaceAll(tc.hex, " ", ""))
		if err != nil {
			t.Fatal(err)
		}
		got := bytes.Repeat([]byte{0xaa}, len(want))
		tc.x.Encode(got)
		if !bytes.Equal(got, want) {
			t.Errorf("%s: encoded\n%x, want\n%x", tc.name, got, want)
		}
		y := reflect.New(reflect.TypeOf(tc.x).Elem()).Interface().(record)
		if err := y.Decode(want); err != nil || !reflect.DeepEqual(tc.x, y) {
			t.Errorf("%s: decoded %+v, %v, want %+v", tc.name, y, err, tc.x)
		}
	}
}

// TestDecodeRefuses truncates every structure, and sets a bit in each reserved byte.
func TestDecodeRefuses(t *testing.T) {
	for name, mk := range goStructs {
		if mk == nil {
			continue
		}
		size := sizes[name]
		var de *DecodeError
		if err := mk().Decode(make([]byte, size-1)); !errors.Is(err, ErrShort) || !errors.As(err, &de) || de.Struct != name {
			t.Errorf("%s: one byte short: %v", name, err)
		}
		covered := make([]bool, size)
		for _, f := range probeFields(t, mk, size) {
			for i := range f.size {
				covered[f.offset+i] = true
			}
		}
		for i := range size {
			b := make([]byte, size)
			b[i] = 0x10
			err := mk().Decode(b)
			if covered[i] {
				// Nested structures have reserved bytes of their own inside a covered range.
				if err != nil && !errors.Is(err, ErrReserved) {
					t.Errorf("%s byte %d: %v", name, i, err)
				}
			} else if !errors.As(err, &de) || !errors.Is(err, ErrReserved) || de.Offset != i {
				t.Errorf("%s: reserved byte %d set: %v", name, i, err)
			}
		}
	}
}

func TestWQEViews(t *testing.T) {
	b := bytes.Repeat([]byte{0xee}, SizeSendWQE+2*SizeSGE)
	w := SendWQE(b)
	w.SetRequest(1, WRRDMAWriteWithImm, SendSignaled|SendFence)
	w.SetImm([4]byte{1, 2, 3, 4})
	w.SetRDMA(0x1122334455667788, 0x99)
	sgl := []SGE{{Addr: 0x1000, Length: 5, LKey: 7}, {Addr: 0x2000, Length: 6, LKey: 8}}
	w.SetSGEs(sgl)
	if w.ID() != 1 || w.Opcode() != WRRDMAWriteWithImm || w.Flags() != SendSignaled|SendFence ||
		w.Imm() != [4]byte{1, 2, 3, 4} ||
		w.RemoteAddr() != 0x1122334455667788 || w.RKey() != 0x99 || w.NumSGE() != 2 || w.DMALength() != 11 ||
		w.SGE(0) != sgl[0] || w.SGE(1) != sgl[1] {
		t.Errorf("RDMA request reads back wrong: %x", b)
	}
	// Literal bytes at the offsets of rdma_user_rxe.h.
	if b[12] != 1 || !bytes.Equal(b[20:24], []byte{1, 2, 3, 4}) || b[24] != 0x88 || b[32] != 0x99 || b[184] != 11 ||
		b[196] != 2 || b[209] != 0x10 {
		t.Errorf("wrong layout of the RDMA request: %x", b)
	}
	w.SetRequest(2, WRAtomicCmpAndSwp, 0)
	w.SetAtomic(0x10, 0x20, 0x30, 0x40)
	if w.RemoteAddr() != 0x10 || w.AtomicRKey() != 0x20 || w.CompareAdd() != 0x30 || w.Swap() != 0x40 {
		t.Errorf("atomic request reads back wrong: %x", b)
	}
	w.SetRequest(3, WRSendWithInv, SendInline)
	w.SetInvalidateRKey(0x1234)
	w.SetInline([]byte("hello"))
	if w.InvalidateRKey() != 0x1234 || w.DMALength() != 5 || string(w.Inline(5)) != "hello" {
		t.Errorf("inline request reads back wrong: %x", b)
	}
	w.SetRequest(4, WRSend, 0)
	w.SetUD(17, 0x11111111, 3)
	if w.RemoteQPN() != 17 || w.QKey() != 0x11111111 || w.AHNum() != 3 || w.PKeyIndex() != 0 {
		t.Errorf("UD request reads back wrong: %x", b)
	}
	r := RecvWQE(bytes.Repeat([]byte{0xee}, SizeRecvWQE+2*SizeSGE))
	r.Set(77, sgl)
	if r.ID() != 77 || r.NumSGE() != 2 || r.SGE(0) != sgl[0] || r.SGE(1) != sgl[1] || r[16] != 11 {
		t.Errorf("receive request reads back wrong: %x", r)
	}
}

// TestCoreNumbers pins numbers of the RDMA core that no uapi header names.
func TestCoreNumbers(t *testing.T) {
	for i, v := range []int{QPReset, QPInit, QPRTR, QPRTS, QPSQD, QPSQE, QPErr} {
		if v != i {
			t.Errorf("QP state %d is %d", i, v)
		}
	}
	if len(wcStatusNames) != WCGeneralErr+1 || WCGeneralErr != 21 || WCRNRRetryExcErr != 13 || WCRemAccessErr != 10 {
		t.Error("completion statuses are out of order")
	}
	for m, n := range map[uint8]int{0: 0, MTU256: 256, MTU512: 512, MTU1024: 1024, MTU2048: 2048, MTU4096: 4096, 6: 0} {
		if MTUBytes(m) != n {
			t.Errorf("MTUBytes(%d) = %d", m, MTUBytes(m))
		}
	}
	for n, m := range map[int]uint8{0: 0, 255: 0, 256: MTU256, 1023: MTU512, 1024: MTU1024, 1 << 20: MTU4096} {
		if MTUFromBytes(n) != m {
			t.Errorf("MTUFromBytes(%d) = %d", n, MTUFromBytes(n))
		}
	}
}

func TestStrings(t *testing.T) {
	for got, want := range map[string]string{
		CmdSetMTT.String(): "SET_MTT", Opcode(99).String(): "command 99", StatusNoMemory.Error(): "limit reached",
		Status(99).Error(): "unknown status 99", StatHostFaults.String(): "host_faults", Stat(-1).String(): "stat -1",
		EventSRQLimit.String(): "SRQ limit reached", EventType(99).String(): "event 99",
		WCStatusString(WCWRFlushErr): "work request flushed", WCStatusString(1 << 31): "unknown completion status",
	} {
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

// FuzzRoundTrip decodes arbitrary bytes as each structure; what decodes must encode to the same bytes.
func FuzzRoundTrip(f *testing.F) {
	var names []string
	for name, mk := range goStructs {
		if mk != nil {
			names = append(names, name)
		}
	}
	sort.Strings(names)
	for i, name := range names {
		f.Add(uint8(i), make([]byte, sizes[name]))
		ones := goStructs[name]()
		setOnes(reflect.ValueOf(ones).Elem())
		b := make([]byte, sizes[name])
		ones.Encode(b)
		f.Add(uint8(i), b)
	}
	f.Fuzz(func(t *testing.T, which uint8, in []byte) {
		if int(which) >= len(names) {
			var w WC
			if w.Decode(in) == nil {
				out := make([]byte, SizeWC)
				w.Encode(out)
				if !bytes.Equal(out[:SizeWC-1], in[:SizeWC-1]) {
					t.Fatalf("ib_uverbs_wc: %x became %x", in[:SizeWC], out)
				}
			}
			return
		}
		name := names[which]
		x := goStructs[name]()
		if err := x.Decode(in); err != nil {
			if !errors.Is(err, ErrShort) && !errors.Is(err, ErrReserved) {
				t.Fatalf("%s: untyped error %v", name, err)
			}
			return
		}
		out := bytes.Repeat([]byte{0xaa}, sizes[name])
		x.Encode(out)
		if !bytes.Equal(out, in[:sizes[name]]) {
			t.Fatalf("%s: %x became %x", name, in[:sizes[name]], out)
		}
	})
}

func TestNoAllocs(t *testing.T) {
	b := make([]byte, 256)
	var ah AH
	var wc WC
	var ce CEQE
	if n := testing.AllocsPerRun(100, func() {
		if ah.Decode(b) != nil || wc.Decode(b) != nil {
			t.Fatal("decode")
		}
		ce.Encode(b)
		wc.Encode(b)
		clear(b)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkWCEncode(b *testing.B) {
	b.ReportAllocs()
	buf := make([]byte, SizeWC)
	w := WC{ID: 1}
	for b.Loop() {
		w.Encode(buf)
	}
}

func BenchmarkAHDecode(b *testing.B) {
	b.ReportAllocs()
	buf := make([]byte, SizeAH)
	var a AH
	for b.Loop() {
		if err := a.Decode(buf); err != nil {
			b.Fatal(err)
		}
	}
}
