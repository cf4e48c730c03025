package gso

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/rdma/wire"
)

// rocePacket returns a packet with n bytes of payload.
func rocePacket(t testing.TB, v6 bool, vlan uint16, op wire.Opcode, qpn, psn uint32, n int) []byte {
	t.Helper()
	p := wire.Path{SMAC: header.MAC{2, 5: 1}, DMAC: header.MAC{2, 5: 2}, VLAN: vlan,
		SrcIP: header.Mapped4([4]byte{10, 0, 0, 1}), DstIP: header.Mapped4([4]byte{10, 0, 0, 2}), SrcPort: 0xc123}
	if v6 {
		p.SrcIP, p.DstIP = [16]byte{0xfe, 0x80, 15: 1}, [16]byte{0xfe, 0x80, 15: 2}
	}
	tm, err := p.Template()
	if err != nil {
		t.Fatal(err)
	}
	f := make([]byte, tm.Len()+wire.BTHLen+n+wire.ICRCLen)
	at := tm.Put(f, len(f)-tm.Len())
	b := wire.BTH{Opcode: op, PKey: wire.DefaultPKey, DestQP: qpn, PSN: psn}
	at += b.Encode(f[at:])
	copy(f[at:], pattern(n))
	tm.Seal(f)
	return f
}

// trains passes frames through a Train as a receiver does and returns the result, split again.
func trains(t testing.TB, pool *frame.Pool, in [][]byte) (out [][]byte, coupled int) {
	t.Helper()
	var tr Train
	finish := func() {
		if tr.Packets() == 0 {
			return
		}
		first, n := tr.First(), tr.Packets()
		b := tr.Take()
		if b == nil {
			out = append(out, first)
			return
		}
		parts := cutAll(b)
		if len(parts) != n || b.Segments() != n || b.Offload.Need != frame.NeedTrain {
			t.Fatalf("%d packets become %d, %+v", n, len(parts), b.Offload)
		}
		out = append(out, parts...)
		b.Free()
		coupled += n
	}
	for _, f := range in {
		if tr.Packets() > 0 && tr.Continues(f) && tr.Add(pool, f) {
			continue
		}
		finish()
		if ok, _ := tr.Start(f, header.Locate(f)); !ok {
			out = append(out, f)
		}
	}
	finish()
	return out, coupled
}

func checkTrains(t testing.TB, pool *frame.Pool, in [][]byte) (coupled int) {
	t.Helper()
	out, coupled := trains(t, pool, in)
	if len(out) != len(in) {
		t.Fatalf("%d packets become %d", len(in), len(out))
	}
	for i := range in {
		if !bytes.Equal(in[i], out[i]) {
			t.Fatalf("packet %d of %d:\n%x becomes\n%x", i, len(in), in[i], out[i])
		}
	}
	if n := pool.InUse(); n != 0 {
		t.Fatalf("%d buffers leaked", n)
	}
	return coupled
}

// Packets of one queue pair and of one size are coupled, as many as fit, and are restored unchanged.
func TestTrain(t *testing.T) {
	pool := newPool(t)
	for _, v6 := range []bool{false, true} {
		for _, vlan := range []uint16{header.NoVLAN, 7} {
			var in [][]byte
			for psn := range uint32(200) {
				in = append(in, rocePacket(t, v6, vlan, wire.OpRCWriteMiddle, 17, psn, 1024))
			}
			if n := checkTrains(t, pool, in); n != 200 {
				t.Errorf("v6 %v, VLAN %#x: %d of 200 were coupled", v6, vlan, n)
			}
			if out, _ := trains(t, pool, in[:maxTrain/2]); len(out) != maxTrain/2 {
				t.Error("not cut")
			}
		}
	}
	if n := checkTrains(t, pool, [][]byte{rocePacket(t, false, header.NoVLAN, wire.OpRCWriteOnly, 17, 1, 64)}); n != 0 {
		t.Error("a packet was coupled with itself")
	}
}

// Packets that may not be coupled, each for its own reason.
func TestTrainRefuses(t *testing.T) {
	pool := newPool(t)
	const l3, l4, bth = 14, 34, 42
	for _, c := range []struct {
		name   string
		roce   bool // it is still a RoCE packet
		change func(f []byte) []byte
	}{
		{"another queue pair", true, func(f []byte) []byte { f[bth+7]++; return f }},
		{"UD", true, func(f []byte) []byte { f[bth] = byte(wire.OpUDSendOnly); return f }},
		{"CNP", true, func(f []byte) []byte { f[bth] = byte(wire.OpCNP); return f }},
		{"shorter", true, func(f []byte) []byte {
			return rocePacket(t, false, header.NoVLAN, wire.OpRCWriteMiddle, 17, 5, 1020)
		}},
		{"IP length", true, func(f []byte) []byte { f[l3+3]--; return f }},
		{"IP ID", true, func(f []byte) []byte { f[l3+5]++; return f }},
		{"CE mark", true, func(f []byte) []byte { f[l3+1] |= 3; return f }},
		{"IP options", true, func(f []byte) []byte {
			g := append(append(bytes.Clone(f[:l4]), 1, 1, 1, 1), f[l4:]...)
			g[l3] = 0x46
			binary.BigEndian.PutUint16(g[l3+2:], uint16(len(g)-l3))
			return g
		}},
		{"UDP length", true, func(f []byte) []byte { f[l4+5]--; return f }},
		{"source port", true, func(f []byte) []byte { f[l4+1]++; return f }},
		{"destination port", false, func(f []byte) []byte { f[l4+3]++; return f }},
		{"source MAC", true, func(f []byte) []byte { f[11]++; return f }},
		{"fragment", false, func(f []byte) []byte { f[l3+6] |= 0x20; return f }},
		{"RoCE v1", false, func(f []byte) []byte { f[12], f[13] = 0x89, 0x15; return f }},
		{"cut off", true, func(f []byte) []byte { return f[:bth+wire.BTHLen+3] }},
		{"no UDP", false, func(f []byte) []byte { return f[:l4+7] }},
	} {
		var in [][]byte
		for psn := range uint32(3) {
			in = append(in, rocePacket(t, false, header.NoVLAN, wire.OpRCWriteMiddle, 17, psn, 1024))
		}
		in[1] = c.change(in[1])
		if n := checkTrains(t, pool, in); n != 0 {
			t.Errorf("%s: %d were coupled", c.name, n)
		}
		var tr Train
		if _, roce := tr.Start(in[1], header.Locate(in[1])); roce != c.roce {
			t.Errorf("%s: RoCE: %v", c.name, roce)
		}
	}
}

// Padding is removed, however much each packet has; the result is the packets without it.
func TestTrainPadding(t *testing.T) {
	pool := newPool(t)
	for _, v6 := range []bool{false, true} {
		var in, want [][]byte
		for psn := range uint32(40) {
			f := rocePacket(t, v6, 7, wire.OpRCWriteMiddle, 17, psn, 1024)
			in, want = append(in, append(bytes.Clone(f), make([]byte, psn%5*4)...)), append(want, f)
		}
		for _, n := range []int{1, 2, len(in)} {
			for from := range 5 {
				out, coupled := trains(t, pool, in[from:min(from+n, len(in))])
				if !slices.EqualFunc(out, want[from:min(from+n, len(in))], bytes.Equal) || n > 1 && coupled != len(out) {
					t.Fatalf("v6 %v: %d packets from %d on become %d, %d of them coupled", v6, n, from, len(out), coupled)
				}
			}
		}
	}
}

// For any changes of packets and their order, splitting restores the packets that were coupled.
func TestTrainModel(t *testing.T) {
	pool := newPool(t)
	rng := rand.New(rand.NewPCG(1, 2))
	coupled := 0
	for range 3000 {
		v6, size := rng.IntN(2) == 0, rng.IntN(1200)
		var in [][]byte
		for psn := range uint32(1 + rng.IntN(20)) {
			in = append(in, rocePacket(t, v6, header.NoVLAN, wire.OpRCWriteMiddle, uint32(rng.IntN(2)), psn, size))
		}
		for range rng.IntN(4) {
			f := in[rng.IntN(len(in))]
			switch rng.IntN(3) {
			case 0:
				f[rng.IntN(len(f))] ^= 1 << rng.IntN(8)
			case 1:
				f[rng.IntN(min(len(f), 80))] = byte(rng.Uint32())
			default:
				i := rng.IntN(len(in))
				in[i] = in[i][:rng.IntN(len(in[i])+1)]
			}
		}
		coupled += checkTrains(t, pool, in)
	}
	if coupled < 3000 {
		t.Errorf("only %d packets were coupled", coupled)
	}
}

// Making a train does not allocate.
func TestTrainAllocates(t *testing.T) {
	pool := newPool(t)
	var in [][]byte
	for psn := range uint32(20) {
		in = append(in, rocePacket(t, false, header.NoVLAN, wire.OpRCWriteMiddle, 0x123, psn, 1024))
	}
	var tr Train
	n := testing.AllocsPerRun(100, func() {
		tr.Start(in[0], header.Locate(in[0]))
		for _, f := range in[1:] {
			if !tr.Continues(f) || !tr.Add(pool, f) {
				t.Fatal("no train")
			}
		}
		b := tr.Take()
		if b == nil {
			t.Fatal("no frame")
		}
		b.Free()
	})
	if n != 0 {
		t.Errorf("%v allocations", n)
	}
}
