package wire

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"hash/crc32"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/vnicd/vnicd/device/frame/header"
)

// unhex converts spaced hexadecimal digits into bytes.
func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.Join(strings.Fields(s), ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// codec is the interface of all fixed headers.
type codec interface {
	Decode([]byte) (int, error)
	Encode([]byte) int
}

// Literal bytes from the header diagrams of the specifications, in both directions.
func TestGoldenHeaders(t *testing.T) {
	for name, c := range map[string]struct {
		bytes string
		want  codec
		empty func() codec
	}{
		"BTH": {"0a f0 8001 c0 123456 80 abcdef",
			&BTH{Opcode: OpRCWriteOnly, Solicited: true, Migrated: true, Pad: 3, PKey: 0x8001, FECN: true, BECN: true,
				DestQP: 0x123456, AckReq: true, PSN: 0xabcdef}, func() codec { return new(BTH) }},
		"BTH, selective": {"0a 40 ffff 00 123456 b5 abcdef",
			&BTH{Opcode: OpRCWriteOnly, Migrated: true, PKey: 0xffff, DestQP: 0x123456, AckReq: true, Selective: true,
				PSN: 0xabcdef}, func() codec { return new(BTH) }},
		"BTH, waits for ever": {"0a 40 ffff 2a 123456 b5 abcdef",
			&BTH{Opcode: OpRCWriteOnly, Migrated: true, PKey: 0xffff, Patience: PatienceForever, DestQP: 0x123456,
				AckReq: true, Selective: true, PSN: 0xabcdef}, func() codec { return new(BTH) }},
		"BTH, gives up": {"0a 40 ffff d5 123456 80 abcdef",
			&BTH{Opcode: OpRCWriteOnly, Migrated: true, PKey: 0xffff, FECN: true, BECN: true, Patience: PatienceEnds,
				DestQP: 0x123456, AckReq: true, PSN: 0xabcdef}, func() codec { return new(BTH) }},
		"arrivals": {"8000000000000002 0000000000000001 0000000000000000 0000000000000100",
			&Arrivals{1<<63 | 2, 1, 0, 256}, func() codec { return new(Arrivals) }},
		"FETH": {"00000012", &FETH{FlushPersistent, FlushRegion}, func() codec { return new(FETH) }},
		"RETH": {"0102030405060708 11121314 21222324", &RETH{0x0102030405060708, 0x11121314, 0x21222324},
			func() codec { return new(RETH) }},
		"AtomicETH": {"0102030405060708 11121314 2122232425262728 3132333435363738",
			&AtomicETH{0x0102030405060708, 0x11121314, 0x2122232425262728, 0x3132333435363738},
			func() codec { return new(AtomicETH) }},
		"AETH": {"62 00abcd", &AETH{NAKRemoteAccess, 0xabcd}, func() codec { return new(AETH) }},
		"DETH": {"80010000 00 000001", &DETH{0x80010000, 1}, func() codec { return new(DETH) }},
	} {
		b := unhex(t, c.bytes)
		got := c.empty()
		n, err := got.Decode(b)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if a, w := deref(got), deref(c.want); a != w {
			t.Errorf("%s: decoded %+v, expected %+v", name, a, w)
		}
		out := make([]byte, n)
		if m := c.want.Encode(out); m != n || !bytes.Equal(out, b[:n]) {
			t.Errorf("%s: encoded %x, expected %x", name, out, b[:n])
		}
		for short := range n { // every truncation is detected
			if _, err := c.empty().Decode(b[:short]); !errors.Is(err, ErrShort) {
				t.Errorf("%s: %d of %d bytes: %v", name, short, n, err)
			}
		}
	}
}

// deref returns a comparable value.
func deref(c codec) any {
	switch h := c.(type) {
	case *BTH:
		return *h
	case *FETH:
		return *h
	case *RETH:
		return *h
	case *AtomicETH:
		return *h
	case *AETH:
		return *h
	case *DETH:
		return *h
	case *Arrivals:
		return *h
	}
	panic("unknown codec")
}

func TestDecodersRefuse(t *testing.T) {
	for name, c := range map[string]struct {
		h     codec
		bytes string
		want  error
	}{
		"BTH version": {new(BTH), "04 01 ffff 00000001 00000001", ErrVersion},
	} {
		if _, err := c.h.Decode(unhex(t, c.bytes)); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, expected %v", name, err, c.want)
		}
	}
}

// Other values of the reserved bits are not taken for SelectiveMark.
func TestSelectiveMark(t *testing.T) {
	for v := range 256 {
		b := unhex(t, "0a 40 ffff 00 123456 00 abcdef")
		b[8] = byte(v)
		var h BTH
		if _, err := h.Decode(b); err != nil || h.Selective != (v&0x7f == 0x35) || h.AckReq != (v >= 0x80) ||
			h.PSN != 0xabcdef {
			t.Errorf("%#x: %+v, %v", v, h, err)
		}
	}
}

// Compare Arrivals with a list of bits.
func TestArrivals(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	for range 2000 {
		var a Arrivals
		var want [2 * ArrivalsSpan]bool
		for range rng.IntN(4) {
			i, n := rng.Uint64N(ArrivalsSpan), rng.Uint64N(150)
			if rng.IntN(10) == 0 {
				i, n = i+ArrivalsSpan, n<<20
			}
			a.Set(i, n)
			for k := i; k < min(i+n, ArrivalsSpan); k++ {
				want[k] = true
			}
		}
		n := rng.Uint64N(ArrivalsSpan + 1)
		if rng.IntN(4) == 0 {
			n = 64 * (n % 5)
		}
		a.Shift(n)
		any := false
		for i := range uint64(ArrivalsSpan) {
			w := i+n < uint64(len(want)) && want[i+n]
			if any = any || w; a.Has(i) != w {
				t.Fatalf("shifted by %d: bit %d of %x", n, i, a)
			}
		}
		if a.Any() != any || a.Has(ArrivalsSpan) || a.Has(1<<63) {
			t.Fatalf("%x", a)
		}
	}
}

// Frames sent by other implementations: our ICRC must equal theirs.
func TestForeignICRC(t *testing.T) {
	for name, c := range map[string]struct{ frame string }{
		// Linux rxe, UC SEND Only, 18 bytes and 2 of pad (from Scapy's test suite).
		"rxe": {`248a07a8fa22 248a07a8fa22 0800  4501 0040 0478 4000 4011 b4d5 c0a80007 c0a80007  c000 12b7 002c aca2
			24 60 ffff 000000d3 00cf1710  4630818be28935d90e9a95505401be885e50 0000  78f353f3`},
		// ConnectX-4 Lx, a congestion notification (likewise).
		"ConnectX-4": {`e41d2dab2bc2 7cfe90643b32 0800 45c2 003c 718c 4000 4011 9161 0a001101 0a001201 0000 12b7 0028 0000
			8100 ffff 40000118 00000000 00000000 00000000 00000000 00000000 82fd002a`},
	} {
		f := unhex(t, c.frame)
		g := bytes.Clone(f)
		clear(g[len(g)-4:])
		if err := SealICRC(g); err != nil || !bytes.Equal(f, g) {
			t.Errorf("%s: %v, ICRC %x, expected %x", name, err, g[len(g)-4:], f[len(f)-4:])
		}
		var p RoCE
		if err := ParseRoCE(f, header.Locate(f), &p); err != nil || !CheckICRC(f, &p) {
			t.Errorf("%s: refused: %v", name, err)
		}
		if name == "ConnectX-4" {
			if p.BTH != (BTH{Opcode: OpCNP, PKey: 0xffff, BECN: true, DestQP: 0x118}) ||
				p.TOS&header.ECNMask != header.ECT0 || len(p.Ext) != CNPLen {
				t.Errorf("%+v", p)
			}
			continue
		}
		if p.BTH != (BTH{Opcode: OpUCSendOnly, Migrated: true, Pad: 2, PKey: 0xffff, DestQP: 211, PSN: 13571856}) ||
			len(p.Payload) != 18 || p.SrcPort != 49152 {
			t.Errorf("%+v", p)
		}
	}
}

// A FLUSH of Linux rxe (6.12; 7.3 does the same) has an ICRC that differs from IBTA's: rxe's table does not define
// where a FLUSH's payload begins, so rxe adds BTH and everything behind it to the sum a second time, as payload.
func TestRXEFlush(t *testing.T) {
	f := unhex(t, `020000000001 020000000002 0800  4500 0040 ec92 4000 4011 3a18 0a000002 0a000001  c036 12b7 002c 0000
		1c 00 ffff 00000003 80000002  00000001  00005612cddea840 0000023c 00000800  91324f4b`)
	var p RoCE
	if err := ParseRoCE(f, header.Locate(f), &p); err != nil || p.BTH.Opcode != OpRCFlush ||
		p.FETH() != (FETH{Placement: FlushGlobal}) || p.RETH() != (RETH{0x5612cddea840, 0x23c, 0x800}) {
		t.Fatalf("%v, %+v", err, p)
	}
	if CheckICRC(f, &p) {
		t.Error("accepted")
	}
	g := bytes.Clone(f)
	if err := SealICRC(g); err != nil {
		t.Fatal(err)
	}
	n := len(f) - ICRCLen
	if twice := crc32.Update(binary.LittleEndian.Uint32(g[n:]), crc32.IEEETable,
		f[n-BTHLen-FETHLen-RETHLen:n]); twice != binary.LittleEndian.Uint32(f[n:]) {
		t.Errorf("ICRC %x, expected %08x", f[n:], twice)
	}
}

// Whole frames written by hand: the headers that Template builds from a path.
func TestGoldenFrames(t *testing.T) {
	for kind, want := range map[string]string{
		"v4": `020000000002 020000000001 0800  4568 0038 0000 4000 3f11 274b 0a000001 0a000002  c123 12b7 0024 0000
			64 00 ffff 00000011 80000007  11111111 00000012  deadbeef`,
		"v6": `020000000002 020000000001 86dd  668abcde 0024 11 3f fe800000000000000000000000000001 fe800000000000000000000000000002
			c123 12b7 0024 0000  64 00 ffff 00000011 80000007  11111111 00000012  deadbeef`,
		"v1": `020000000002 020000000001 8915  668abcde 001c 1b 3f fe800000000000000000000000000001 fe800000000000000000000000000002
			64 00 ffff 00000011 80000007  11111111 00000012  deadbeef`,
		"vlan": `020000000002 020000000001 8100 6064 0800  4568 0038 0000 4000 3f11 274b 0a000001 0a000002  c123 12b7 0024 0000
			64 00 ffff 00000011 80000007  11111111 00000012  deadbeef`,
	} {
		path := testPath(strings.Replace(kind, "vlan", "v4", 1))
		if kind == "vlan" {
			path.VLAN, path.PCP = 100, 3
		}
		// UD SEND Only, 12 bytes: "deadbeef" and zeros.
		deth := make([]byte, DETHLen)
		(&DETH{0x11111111, 0x12}).Encode(deth)
		f := build(t, path, BTH{Opcode: OpUDSendOnly, PKey: 0xffff, DestQP: 0x11, AckReq: true, PSN: 7}, deth,
			unhex(t, "deadbeef"))
		w := unhex(t, want)
		if len(f) != len(w)+ICRCLen {
			t.Fatalf("%s: %d bytes, expected %d", kind, len(f), len(w)+ICRCLen)
		}
		if !bytes.Equal(f[:len(w)], w) {
			t.Errorf("%s:\n%x, expected\n%x", kind, f[:len(w)], w)
		}
		var p RoCE
		if err := ParseRoCE(f, header.Locate(f), &p); err != nil || !CheckICRC(f, &p) ||
			p.DETH() != (DETH{0x11111111, 0x12}) || p.V1 != path.V1 ||
			p.VLAN != path.VLAN || p.SrcIP != path.SrcIP || p.DstIP != path.DstIP ||
			p.TOS != 0x68 || p.TTL != 63 {
			t.Errorf("%s: %v, %+v", kind, err, p)
		}
		var grh [GRHLen]byte
		for i := range grh {
			grh[i] = 0xee
		}
		p.GRH(&grh)
		if net := 40 - len(p.Net); !bytes.Equal(grh[net:], p.Net) || !bytes.Equal(grh[:net], make([]byte, net)) {
			t.Errorf("%s: GRH %x", kind, grh)
		}
	}
}
