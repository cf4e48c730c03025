package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/bits"
	"testing"

	"github.com/vnicd/vnicd/device/frame/header"
)

// slowCRC is CRC-32 bit by bit from its definition (polynomial 0x04c11db7,
// reflected): independent of hash/crc32 and of how icrcAt splits its input.
func slowCRC(b []byte) uint32 {
	crc := ^uint32(0)
	for _, x := range b {
		crc ^= uint32(x)
		for range 8 {
			if crc&1 != 0 {
				crc = crc>>1 ^ 0xedb88320
			} else {
				crc >>= 1
			}
		}
	}
	return ^crc
}

// slowICRC computes the ICRC of an untagged frame as IBTA 7.8.1 and A17 describe it.
func slowICRC(frame []byte) []byte {
	b := bytes.Repeat([]byte{0xff}, 8)
	b = append(b, frame[14:len(frame)-4]...)
	ip := b[8:]
	var l4 []byte
	switch binary.BigEndian.Uint16(frame[12:]) {
	case 0x0800:
		ip[1], ip[8], ip[10], ip[11] = 0xff, 0xff, 0xff, 0xff
		l4 = ip[20:]
	case 0x86dd, 0x8915:
		ip[0], ip[1], ip[2], ip[3], ip[7] = 0x6f, 0xff, 0xff, 0xff, 0xff
		l4 = ip[40:]
	}
	if frame[12] != 0x89 {
		l4[6], l4[7] = 0xff, 0xff
		l4 = l4[8:]
	}
	l4[4] = 0xff
	return binary.LittleEndian.AppendUint32(nil, slowCRC(b))
}

func TestSlowCRC(t *testing.T) {
	if c := slowCRC([]byte("123456789")); c != 0xcbf43926 { // the check value of CRC-32
		t.Fatalf("%#x", c)
	}
	if c := slowCRC(bytes.Repeat([]byte{0xff}, 8)); c != lrhCRC {
		t.Fatalf("%#x", c)
	}
}

func testPath(kind string) Path {
	p := Path{SMAC: header.MAC{2, 0, 0, 0, 0, 1}, DMAC: header.MAC{2, 0, 0, 0, 0, 2}, VLAN: header.NoVLAN,
		SrcIP: header.Mapped4([4]byte{10, 0, 0, 1}), DstIP: header.Mapped4([4]byte{10, 0, 0, 2}),
		TrafficClass: 0x68, HopLimit: 63, FlowLabel: 0xabcde, SrcPort: 0xc123}
	if kind != "v4" {
		p.SrcIP = [16]byte{0xfe, 0x80, 15: 1}
		p.DstIP = [16]byte{0xfe, 0x80, 15: 2}
	}
	p.V1 = kind == "v1"
	return p
}

// build makes a frame from its parts.
func build(t testing.TB, path Path, bth BTH, ext, payload []byte) []byte {
	t.Helper()
	tm, err := path.Template()
	if err != nil {
		t.Fatal(err)
	}
	pad := -len(payload) & 3
	bth.Pad = uint8(pad)
	n := BTHLen + len(ext) + len(payload) + pad + ICRCLen
	f := make([]byte, tm.Len()+n)
	at := tm.Put(f, n)
	at += bth.Encode(f[at:])
	at += copy(f[at:], ext)
	copy(f[at:], payload)
	tm.Seal(f)
	return f
}

func TestBuildParseICRC(t *testing.T) {
	for _, kind := range []string{"v4", "v6", "v1"} {
		for size := range 300 {
			payload := make([]byte, size)
			for i := range payload {
				payload[i] = byte(i * 7)
			}
			var ext [RETHLen + ImmLen]byte
			n := (&RETH{VA: 0x1122334455667788, RKey: 0x99aabbcc, Length: 0xddeeff00}).Encode(ext[:])
			PutImm(ext[n:], [4]byte{1, 2, 3, 4})
			bth := BTH{Opcode: OpRCWriteOnlyImm, Solicited: true, Migrated: true, PKey: DefaultPKey, DestQP: 0x123456,
				AckReq: true, PSN: 0xfedcba}
			f := build(t, testPath(kind), bth, ext[:], payload)
			if want := slowICRC(f); !bytes.Equal(f[len(f)-4:], want) {
				t.Fatalf("%s, %d bytes: ICRC %x, want %x", kind, size, f[len(f)-4:], want)
			}
			sealed := append([]byte(nil), f...)
			clear(sealed[len(f)-4:])
			if err := SealICRC(sealed); err != nil || !bytes.Equal(sealed, f) {
				t.Fatalf("SealICRC differs: %v", err)
			}
			f = append(f, 0, 0, 0) // Ethernet padding
			var p RoCE
			if err := ParseRoCE(f, header.Locate(f), &p); err != nil {
				t.Fatalf("%s, %d bytes: %v", kind, size, err)
			}
			if !CheckICRC(f, &p) {
				t.Fatal("CheckICRC refused a correct ICRC")
			}
			bth.Pad = uint8(-size & 3)
			if p.BTH != bth || !bytes.Equal(p.Payload, payload) || p.Imm() != [4]byte{1, 2, 3, 4} ||
				p.RETH() != (RETH{0x1122334455667788, 0x99aabbcc, 0xddeeff00}) {
				t.Fatalf("parsed %+v", p)
			}
			f[len(f)-8] ^= 1
			if CheckICRC(f, &p) {
				t.Fatal("the corruption was not detected")
			}
		}
	}
}

func TestTemplateAddresses(t *testing.T) {
	p := testPath("v4")
	p.DstIP = [16]byte{0x20, 1}
	if _, err := p.Template(); !errors.Is(err, ErrAddresses) {
		t.Fatal(err)
	}
}

// Patience is outside of the ICRC (A17.3.2, A16.3.2), so one or two wrong bits make no value of another.
func TestPatience(t *testing.T) {
	values := []Patience{PatienceUnknown, PatienceEnds, PatienceForever}
	for i, v := range values {
		f := build(t, testPath("v4"), BTH{Opcode: OpRCSendOnly, PKey: 0xffff, Patience: v}, nil, []byte("data"))
		var p RoCE
		if err := ParseRoCE(f, header.Locate(f), &p); err != nil || p.BTH.Patience != v || p.BTH.FECN || p.BTH.BECN {
			t.Fatalf("%#x: %v, %+v", v, err, p.BTH)
		}
		at := len(f) - ICRCLen - len(p.Payload) - BTHLen + 4
		if f[at] &^= patienceMask; !CheckICRC(f, &p) {
			t.Errorf("%#x is covered by the ICRC", v)
		}
		for _, w := range values[:i] {
			if n := bits.OnesCount8(uint8(v ^ w)); n < 3 {
				t.Errorf("%#x and %#x differ in %d bits", v, w, n)
			}
		}
	}
}
