package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"testing"

	"github.com/vnicd/vnicd/device/frame/header"
)

// TestOpcodes repeats the table of IBTA 9.2.1 and 9.3.
func TestOpcodes(t *testing.T) {
	ext := map[Opcode]int{ // bytes of extension headers
		0x00: 0, 0x01: 0, 0x02: 0, 0x03: 4, 0x04: 0, 0x05: 4, 0x06: 16, 0x07: 0, 0x08: 0, 0x09: 4, 0x0a: 16, 0x0b: 20,
		0x0c: 16, 0x0d: 4, 0x0e: 0, 0x0f: 4, 0x10: 4, 0x11: 4, 0x12: 12, 0x13: 28, 0x14: 28, 0x16: 4, 0x17: 4, 0x1c: 20,
		0x1d: 16,
		0x20: 0, 0x21: 0, 0x22: 0, 0x23: 4, 0x24: 0, 0x25: 4, 0x26: 16, 0x27: 0, 0x28: 0, 0x29: 4, 0x2a: 16, 0x2b: 20,
		0x64: 8, 0x65: 12, 0x81: 16, 0xd1: 36,
	}
	for i := range 256 {
		o := Opcode(i)
		info := o.Info()
		want, ok := ext[o]
		if info.Valid() != ok || ok && int(info.ExtLen) != want {
			t.Errorf("%v: %+v", o, info)
		}
		if !ok {
			if o.String() != fmt.Sprintf("opcode 0x%02x", i) {
				t.Error(o)
			}
			continue
		}
		transport := Transport(o >> 5)
		if o == 0xd1 { // manufacturers' range
			transport = RC
		}
		if info.Transport != transport || info.Name == "" || o.String() != info.Name {
			t.Errorf("%v: %+v", o, info)
		}
		switch info.Op {
		case ReadRequest, Flush, Ack, AtomicAck, CompareSwap, FetchAdd, CNP, SelectiveAck:
			if info.Is(HasPayload) || !info.Is(First|Last) {
				t.Errorf("%v: %+v", o, info)
			}
		default:
			if !info.Is(HasPayload) {
				t.Errorf("%v: %+v", o, info)
			}
		}
		if resp := o >= 0x0d && o <= 0x12 || o == 0xd1; info.Is(Response) != resp {
			t.Errorf("%v: response", o)
		}
	}
}

// TestEveryOpcode builds each opcode with its headers and parses it again.
func TestEveryOpcode(t *testing.T) {
	for i := range 256 {
		info := Opcode(i).Info()
		if !info.Valid() {
			continue
		}
		feth, reth, atomic, aeth, deth := FETH{3, 1}, RETH{1 << 60, 2, 3}, AtomicETH{4 << 40, 5, 6, 7},
			AETH{NAKSequence, 8}, DETH{9, 10}
		ext := make([]byte, info.ExtLen)
		n := 0
		if info.Is(HasDETH) {
			n += deth.Encode(ext[n:])
		}
		if info.Is(HasFETH) {
			n += feth.Encode(ext[n:])
		}
		if info.Is(HasRETH) {
			n += reth.Encode(ext[n:])
		}
		if info.Is(HasAtomic) {
			n += atomic.Encode(ext[n:])
		}
		if info.Is(HasAETH) {
			n += aeth.Encode(ext[n:])
		}
		if info.Is(HasAtomicAck) {
			n += PutAtomicAck(ext[n:], 11)
		}
		if info.Is(HasImm) {
			n += PutImm(ext[n:], [4]byte{12, 13, 14, 15})
		}
		if info.Is(HasIETH) {
			n += PutIETH(ext[n:], 16)
		}
		if info.Is(HasReserved) {
			n += CNPLen
		}
		arrivals := Arrivals{12, 1 << 63}
		if info.Is(HasArrivals) {
			n += arrivals.Encode(ext[n:])
		}
		if n != len(ext) {
			t.Fatalf("%s: %d of %d bytes", info.Name, n, len(ext))
		}
		var payload []byte
		if info.Is(HasPayload) {
			payload = []byte("data!")
		}
		f := build(t, testPath("v4"), BTH{Opcode: Opcode(i)}, ext, payload)
		var p RoCE
		if err := ParseRoCE(f, header.Locate(f), &p); err != nil || !CheckICRC(f, &p) {
			t.Fatalf("%s: %v", info.Name, err)
		}
		want := func(f OpFlags, got, value, zero any) {
			t.Helper()
			if !info.Is(f) {
				value = zero
			}
			if got != value {
				t.Errorf("%s: %+v, expected %+v", info.Name, got, value)
			}
		}
		want(HasFETH, p.FETH(), feth, FETH{})
		want(HasRETH, p.RETH(), reth, RETH{})
		want(HasAtomic, p.AtomicETH(), atomic, AtomicETH{})
		want(HasAETH, p.AETH(), aeth, AETH{})
		want(HasDETH, p.DETH(), deth, DETH{})
		want(HasAtomicAck, p.AtomicAck(), uint64(11), uint64(0))
		want(HasImm, p.Imm(), [4]byte{12, 13, 14, 15}, [4]byte{})
		want(HasIETH, p.InvKey(), uint32(16), uint32(0))
		want(HasArrivals, p.Arrivals(), arrivals, Arrivals{})
		if !bytes.Equal(p.Payload, payload) || !bytes.Equal(p.Ext, ext) {
			t.Errorf("%s: payload %q, ext %x", info.Name, p.Payload, p.Ext)
		}
	}
}

func TestParseRefuses(t *testing.T) {
	frame := func(kind string, f func(b []byte) []byte) []byte {
		b := build(t, testPath(kind), BTH{Opcode: OpRCSendOnly, PKey: 0xffff}, nil, make([]byte, 64))
		return f(b)
	}
	fix4 := func(b []byte) []byte { // corrects the IPv4 checksum after the change
		b[24], b[25] = 0, 0
		n := min(int(b[14]&0xf)*4, len(b)-14)
		binary.BigEndian.PutUint16(b[24:], header.Checksum(b[14:14+n], 0))
		return b
	}
	for name, c := range map[string]struct {
		frame []byte
		want  error
	}{
		"ARP": {frame("v4", func(b []byte) []byte { b[13] = 6; return b }), ErrType},
		"two tags": {frame("v4", func(b []byte) []byte {
			return append(append(b[:12:12], 0x81, 0, 0, 1, 0x81, 0,
				0, 2), b[12:]...)
		}), ErrType},
		"options":         {frame("v4", func(b []byte) []byte { b[14] = 0x46; return fix4(b) }), ErrOptions},
		"first fragment":  {frame("v4", func(b []byte) []byte { b[20] = 0x20; return fix4(b) }), ErrFragment},
		"later fragment":  {frame("v4", func(b []byte) []byte { b[21] = 1; return fix4(b) }), ErrFragment},
		"header checksum": {frame("v4", func(b []byte) []byte { b[25]++; return b }), ErrChecksum},
		"TCP":             {frame("v4", func(b []byte) []byte { b[23] = 6; return fix4(b) }), ErrType},
		"IP too long":     {frame("v4", func(b []byte) []byte { b[17]++; return fix4(b) }), ErrLength},
		"UDP beyond IP":   {frame("v4", func(b []byte) []byte { b[17] -= 4; return fix4(b) }), ErrLength},
		"UDP short":       {frame("v4", func(b []byte) []byte { b[39] = 23; return b }), ErrShort},
		"UDP odd":         {frame("v4", func(b []byte) []byte { b[39]--; return b }), ErrPad},
		"port":            {frame("v4", func(b []byte) []byte { b[37]++; return b }), ErrType},
		"v6 extension":    {frame("v6", func(b []byte) []byte { b[20] = 0; return b }), ErrType},
		"v6 length":       {frame("v6", func(b []byte) []byte { b[19]++; return b }), ErrLength},
		"v6 version":      {frame("v6", func(b []byte) []byte { b[14] = 0x50; return b }), ErrVersion},
		"GRH next header": {frame("v1", func(b []byte) []byte { b[20] = 17; return b }), ErrType},
		"GRH short":       {frame("v1", func(b []byte) []byte { b[19] = 12; return b }), ErrShort},
		"BTH version":     {frame("v1", func(b []byte) []byte { b[55] |= 1; return b }), ErrVersion},
		"opcode":          {frame("v1", func(b []byte) []byte { b[54] = 0x40; return b }), ErrOpcode},
		"pad > payload":   {build(t, testPath("v4"), BTH{Opcode: OpRCSendOnly}, nil, nil), nil},
	} {
		var p RoCE
		if name == "pad > payload" {
			c.frame[43] |= 0x10
			c.want = ErrLength
		}
		if err := ParseRoCE(c.frame, header.Locate(c.frame), &p); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, expected %v", name, err, c.want)
		}
	}
	var p RoCE
	ack := build(t, testPath("v4"), BTH{Opcode: OpRCAck}, make([]byte, AETHLen+4), nil) // an ACK with data
	if err := ParseRoCE(ack, header.Locate(ack), &p); !errors.Is(err, ErrLength) {
		t.Error(err)
	}
	ext := build(t, testPath("v4"), BTH{Opcode: OpRCCompareSwap}, make([]byte, AtomicLen-4), nil)
	if err := ParseRoCE(ext, header.Locate(ext), &p); !errors.Is(err, ErrShort) {
		t.Error(err)
	}
	for _, kind := range []string{"v4", "v6", "v1"} {
		f := frame(kind, func(b []byte) []byte { return b })
		for n := range f {
			if ParseRoCE(f[:n:n], header.Locate(f[:n:n]), &p) == nil {
				t.Errorf("%s: %d of %d bytes accepted", kind, n, len(f))
			}
			if SealICRC(f[:n:n]) == nil {
				t.Errorf("%s: %d of %d bytes sealed", kind, n, len(f))
			}
		}
	}
}

// The ICRC ignores exactly the fields that may change on the way.
func TestICRCCoverage(t *testing.T) {
	for kind, free := range map[string]map[int]byte{ // byte in the frame -> bits that may change
		"v4": {15: 0xff, 22: 0xff, 24: 0xff, 25: 0xff, 40: 0xff, 41: 0xff, 46: 0xff},
		"v6": {14: 0x0f, 15: 0xff, 16: 0xff, 17: 0xff, 21: 0xff, 60: 0xff, 61: 0xff, 66: 0xff},
		"v1": {14: 0x0f, 15: 0xff, 16: 0xff, 17: 0xff, 21: 0xff, 58: 0xff},
	} {
		path := testPath(kind)
		for size := range 120 {
			f := build(t, path, BTH{Opcode: OpRCSendOnly, PKey: 0xffff, DestQP: 7, PSN: 9}, nil, make([]byte, size))
			var p RoCE
			if err := ParseRoCE(f, header.Locate(f), &p); err != nil {
				t.Fatal(err)
			}
			if size%40 != 0 && size > 3 {
				continue // bits are flipped for some sizes only
			}
			for i := header.EthernetLen; i < len(f); i++ {
				for bit := range 8 {
					f[i] ^= 1 << bit
					if got, want := CheckICRC(f, &p), free[i]>>bit&1 != 0; got != want {
						t.Errorf("%s, %d bytes: byte %d bit %d changed: %v", kind, size, i, bit, got)
					}
					f[i] ^= 1 << bit
				}
			}
		}
	}
}

func TestSourcePort(t *testing.T) {
	seen := map[uint16]bool{}
	for qp := range uint32(1000) {
		p := SourcePort(qp, 17)
		if p < 0xc000 || p != SourcePort(qp|0xff000000, 17) {
			t.Fatalf("%#x", p)
		}
		seen[p] = true
	}
	if len(seen) < 900 {
		t.Errorf("%d ports for 1000 QPs", len(seen))
	}
}

func TestHopLimitZero(t *testing.T) {
	for _, kind := range []string{"v4", "v6"} {
		path := testPath(kind)
		path.HopLimit = 0
		f := build(t, path, BTH{Opcode: OpRCSendOnly}, nil, nil)
		var p RoCE
		if err := ParseRoCE(f, header.Locate(f), &p); err != nil || p.TTL != 64 {
			t.Error(err, p.TTL)
		}
	}
}

func TestNoAllocations(t *testing.T) {
	tm, err := ptr(testPath("v4")).Template()
	if err != nil {
		t.Fatal(err)
	}
	f := build(t, testPath("v4"), BTH{Opcode: OpRCSendOnly}, nil, make([]byte, 1024))
	var p RoCE
	if n := testing.AllocsPerRun(100, func() {
		tm.Put(f, len(f)-tm.Len())
		tm.Seal(f)
		if SealICRC(f) != nil || ParseRoCE(f, header.Locate(f), &p) != nil || !CheckICRC(f, &p) {
			t.Fatal("broken")
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func ptr[T any](v T) *T { return &v }

// FuzzRoCE: every frame that parses can be built again from the parsed fields.
func FuzzRoCE(f *testing.F) {
	for _, kind := range []string{"v4", "v6", "v1"} {
		for _, o := range []Opcode{OpRCSendOnly, OpRCWriteOnlyImm, OpRCAtomicAck, OpUDSendOnlyImm, OpRCCompareSwap,
			OpRCSendOnlyInv, OpRCSelectiveAck} {
			path := testPath(kind)
			var payload []byte
			if o.Info().Is(HasPayload) {
				payload = []byte("seven b")
				path.VLAN = 7
			}
			f.Add(build(f, path, BTH{Opcode: o}, make([]byte, o.Info().ExtLen), payload))
		}
	}
	f.Fuzz(func(t *testing.T, frame []byte) {
		before := bytes.Clone(frame)
		var p RoCE
		if err := ParseRoCE(frame, header.Locate(frame), &p); err != nil {
			_ = SealICRC(bytes.Clone(frame))
			return
		}
		CheckICRC(frame, &p)
		if !bytes.Equal(frame, before) {
			t.Fatal("parsing changed the frame")
		}
		path := Path{SMAC: p.SMAC, DMAC: p.DMAC, VLAN: p.VLAN, PCP: p.PCP, V1: p.V1, SrcIP: p.SrcIP, DstIP: p.DstIP,
			TrafficClass: p.TOS, HopLimit: p.TTL, FlowLabel: p.FlowLabel, SrcPort: p.SrcPort}
		tm, err := path.Template()
		if err != nil || tm.v4 == p.IsV6 {
			return // IPv4-mapped addresses in an IPv6 header: legal to receive, not sent
		}
		again := make([]byte, tm.Len()+BTHLen+len(p.Ext)+len(p.Payload)+int(p.BTH.Pad)+ICRCLen)
		n := tm.Put(again, len(again)-tm.Len())
		n += p.BTH.Encode(again[n:])
		n += copy(again[n:], p.Ext)
		copy(again[n:], p.Payload)
		tm.Seal(again)
		var q RoCE
		if err := ParseRoCE(again, header.Locate(again), &q); err != nil {
			t.Fatalf("building it again: %v", err)
		}
		if !CheckICRC(again, &q) {
			t.Fatal("wrong ICRC in the frame built again")
		}
		if path.HopLimit == 0 {
			p.TTL = q.TTL
		}
		if p.BTH != q.BTH || !bytes.Equal(p.Ext, q.Ext) || !bytes.Equal(p.Payload, q.Payload) || p.SrcIP != q.SrcIP ||
			p.DstIP != q.DstIP ||
			p.VLAN != q.VLAN || p.PCP != q.PCP || p.V1 != q.V1 || p.TOS != q.TOS || p.TTL != q.TTL ||
			p.FlowLabel != q.FlowLabel || p.SrcPort != q.SrcPort ||
			p.FETH() != q.FETH() || p.RETH() != q.RETH() || p.AETH() != q.AETH() || p.DETH() != q.DETH() ||
			p.AtomicETH() != q.AtomicETH() || p.AtomicAck() != q.AtomicAck() || p.Imm() != q.Imm() ||
			p.InvKey() != q.InvKey() || p.Arrivals() != q.Arrivals() {
			t.Fatalf("%+v\n%+v", p, q)
		}
	})
}

// FuzzHeaders decodes, encodes, decodes again and compares, for each header.
func FuzzHeaders(f *testing.F) {
	f.Add(unhex(f, "0a f0 8001 c0 123456 80 abcdef"))
	f.Add(make([]byte, 64))
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, pair := range [][2]codec{
			{new(BTH), new(BTH)}, {new(FETH), new(FETH)}, {new(RETH), new(RETH)}, {new(AtomicETH), new(AtomicETH)},
			{new(AETH), new(AETH)}, {new(DETH), new(DETH)}, {new(Arrivals), new(Arrivals)},
		} {
			n, err := pair[0].Decode(b)
			if err != nil {
				continue
			}
			if n > len(b) {
				t.Fatalf("%T: %d of %d bytes", pair[0], n, len(b))
			}
			out := bytes.Clone(b)
			pair[0].Encode(out)
			if _, err := pair[1].Decode(out); err != nil {
				t.Fatalf("%T: again: %v", pair[0], err)
			}
			if deref(pair[0]) != deref(pair[1]) {
				t.Fatalf("%+v, then %+v", pair[0], pair[1])
			}
		}
	})
}

func BenchmarkParse(b *testing.B) {
	for _, kind := range []string{"v4", "v6", "v1"} {
		b.Run(kind, func(b *testing.B) {
			f := build(b, testPath(kind), BTH{Opcode: OpRCWriteOnly}, make([]byte, RETHLen), make([]byte, 64))
			var p RoCE
			b.ReportAllocs()
			for range b.N {
				if err := ParseRoCE(f, header.Locate(f), &p); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkICRC(b *testing.B) {
	for _, size := range []int{0, 64, 256, 1024, 4096} {
		for _, kind := range []string{"v4", "v6"} {
			b.Run(fmt.Sprintf("%s/%d", kind, size), func(b *testing.B) {
				f := build(b, testPath(kind), BTH{Opcode: OpRCSendOnly}, nil, make([]byte, size))
				var p RoCE
				if err := ParseRoCE(f, header.Locate(f), &p); err != nil {
					b.Fatal(err)
				}
				b.SetBytes(int64(len(f)))
				b.ReportAllocs()
				for range b.N {
					if !CheckICRC(f, &p) {
						b.Fatal("wrong")
					}
				}
			})
		}
	}
}

func BenchmarkBuild(b *testing.B) {
	tm, err := ptr(testPath("v4")).Template()
	if err != nil {
		b.Fatal(err)
	}
	f := make([]byte, tm.Len()+BTHLen+RETHLen+1024+ICRCLen)
	b.ReportAllocs()
	for i := range b.N {
		n := tm.Put(f, len(f)-tm.Len())
		n += (&BTH{Opcode: OpRCWriteOnly, PKey: 0xffff, PSN: uint32(i)}).Encode(f[n:])
		(&RETH{VA: uint64(i), Length: 1024}).Encode(f[n:])
		tm.Seal(f)
	}
}
