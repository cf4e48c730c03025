package gso

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"github.com/gopacket/gopacket/layers"

	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/header"
)

// cutAll returns b's segments, or b itself.
func cutAll(b *frame.Buf) (out [][]byte) {
	if b.Offload.GSOSize == 0 {
		return [][]byte{bytes.Clone(b.Bytes())}
	}
	var s Segmenter
	dst := make([]byte, 1<<16)
	for s.Start(b); s.Left() > 0; {
		out = append(out, bytes.Clone(dst[:s.Next(dst)]))
	}
	return out
}

// parts returns the segments of a large frame.
func (s shape) parts(t testing.TB, pool *frame.Pool, size int) [][]byte {
	f := s.build(t, 0, 0, pattern(s.payload), func(h *layers.TCP) { h.PSH = true })
	o, err := acceptBytes(t, s.undo(t, f, size), f, frame.NeedAll)
	if err != nil {
		t.Fatalf("%v: %v", s, err)
	}
	b := load(t, pool, f)
	defer b.Free()
	b.Offload = o
	return cutAll(b)
}

// Merging the segments of a frame restores it, with its Offload.
func TestMergeUndoesCutting(t *testing.T) {
	pool := newPool(t)
	for _, s := range shapes {
		for _, size := range []int{333, 1400} {
			parts := s.parts(t, pool, size)
			var m Merger
			for i, f := range parts {
				p, ok := Parse(f, header.Locate(f))
				if want := s.v6 || !s.options; ok != want {
					t.Fatalf("%v: Parse says %v", s, ok)
				}
				if !ok {
					break
				}
				if i == 0 {
					m.Start(f, p)
				} else if !m.Add(pool, f, p) {
					t.Fatalf("%v, size %d: part %d of %d is not taken", s, size, i, len(parts))
				}
			}
			if m.Parts() == 0 {
				continue
			}
			b := m.Take()
			if (b == nil) != (len(parts) == 1) || m.Parts() != 0 {
				t.Fatalf("%v, size %d: %d parts become %v", s, size, len(parts), b)
			}
			if b == nil {
				continue
			}
			f := s.build(t, 0, 0, pattern(s.payload), func(h *layers.TCP) { h.PSH = true })
			o, err := acceptBytes(t, s.undo(t, f, size), f, frame.NeedAll)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(b.Bytes(), f) || b.Offload != o {
				t.Errorf("%v, size %d:\n%x %+v, want\n%x %+v", s, size, b.Bytes(), b.Offload, f, o)
			}
			b.Free()
		}
	}
	if n := pool.InUse(); n != 0 {
		t.Errorf("%d buffers leaked", n)
	}
}

// mergeAll passes frames through a Merger as a receiver does and returns the result, segmented again.
func mergeAll(pool *frame.Pool, in [][]byte) (out [][]byte, merged int) {
	var m Merger
	var first []byte
	finish := func() {
		if m.Parts() == 0 {
			return
		}
		if b := m.Take(); b != nil {
			out = append(out, cutAll(b)...)
			b.Free()
			merged++
		} else {
			out = append(out, first)
		}
	}
	for _, f := range in {
		p, ok := Parse(f, header.Locate(f))
		if m.Parts() > 0 {
			if ok && m.Add(pool, f, p) {
				if m.Full() {
					finish()
				}
				continue
			}
			finish()
		}
		if !ok || p.Last() {
			out = append(out, f)
			continue
		}
		m.Start(f, p)
		first = f
	}
	finish()
	return out, merged
}

// plain returns a normal form of a frame: the ID of an IPv4 packet with DF has no meaning (RFC 6864), and a sum of 0
// has two representations.
func plain(f []byte) []byte {
	f = bytes.Clone(f)
	t, ok := locate(f, header.Locate(f))
	if !ok {
		return f
	}
	if !t.v6 && binary.BigEndian.Uint16(f[t.l3+6:])&dontFragment != 0 {
		copy(f[t.l3+4:], []byte{0, 0})
		copy(f[t.l3+10:], []byte{0, 0})
	}
	for _, at := range []int{t.l3 + 10, t.l4 + t.csumOff} {
		if (t.v6 && at == t.l3+10) || binary.BigEndian.Uint16(f[at:]) != 0xffff {
			continue
		}
		copy(f[at:], []byte{0, 0})
	}
	return f
}

func checkMerge(t *testing.T, pool *frame.Pool, in [][]byte) (merged int) {
	t.Helper()
	out, merged := mergeAll(pool, in)
	if len(out) != len(in) {
		t.Fatalf("%d frames become %d", len(in), len(out))
	}
	for i := range in {
		if !bytes.Equal(plain(in[i]), plain(out[i])) {
			t.Fatalf("frame %d of %d:\n%x becomes\n%x", i, len(in), in[i], out[i])
		}
	}
	if n := pool.InUse(); n != 0 {
		t.Fatalf("%d buffers leaked", n)
	}
	return merged
}

// For any changes of a flow's frames (bytes changed with and without corrected sums, frames lost, duplicated and
// reordered), segmenting the merged frames restores the frames in their order.
func TestMergeLosesNothing(t *testing.T) {
	pool := newPool(t)
	rng := rand.New(rand.NewPCG(1, 2))
	merged := 0
	for range 1500 {
		s := shapes[rng.IntN(len(shapes))]
		s.payload = 1 + rng.IntN(6000)
		in := s.parts(t, pool, 50+rng.IntN(1400))
		for range rng.IntN(4) {
			i, j := rng.IntN(len(in)), rng.IntN(len(in))
			switch rng.IntN(4) {
			case 0:
				in[i], in[j] = in[j], in[i]
			case 1:
				in = append(in[:i], in[i+1:]...)
			case 2:
				in = append(in, in[i])
			default:
				f := bytes.Clone(in[i])
				f[rng.IntN(min(len(f), 90))] ^= 1 << rng.IntN(8)
				if rng.IntN(3) > 0 {
					repair(f)
				}
				in[i] = f
			}
			if len(in) == 0 {
				break
			}
		}
		merged += checkMerge(t, pool, in)
	}
	if merged < 500 {
		t.Errorf("only %d large frames were made", merged)
	}
}

// repair corrects a frame's checksums.
func repair(f []byte) {
	t, ok := locate(f, header.Locate(f))
	if !ok {
		return
	}
	if !t.v6 {
		copy(f[t.l3+10:], []byte{0, 0})
		complete(f[:t.l4], t.l3, 10)
	}
	binary.BigEndian.PutUint16(f[t.l4+t.csumOff:], 0)
	sum := t.pseudo(f, len(f)-t.l4)
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	binary.BigEndian.PutUint16(f[t.l4+t.csumOff:], uint16(sum))
	complete(f, t.l4, t.csumOff)
}

// Frames that are not merged, each for its own reason; the flow is merged again after them.
func TestMergeRefuses(t *testing.T) {
	pool := newPool(t)
	tcp4, udp4, tcp6 := shape{payload: 3000, seq: 1}, shape{udp: true, payload: 3000},
		shape{v6: true, payload: 3000, seq: 1}
	const l3, tcp = 14, 34
	for _, c := range []struct {
		name   string
		s      shape
		change func(f []byte) // of the second of three parts
		keep   bool           // the sums are wrong
	}{
		{"URG", tcp4, func(f []byte) { f[tcp+13] |= 0x20 }, false},
		{"SYN", tcp4, func(f []byte) { f[tcp+13] |= 2 }, false},
		{"RST", tcp4, func(f []byte) { f[tcp+13] |= 4 }, false},
		{"CWR", tcp4, func(f []byte) { f[tcp+13] |= 0x80 }, false},
		{"ECE", tcp4, func(f []byte) { f[tcp+13] |= 0x40 }, false},
		{"no ACK", tcp4, func(f []byte) { f[tcp+13] &^= 0x10 }, false},
		{"sequence", tcp4, func(f []byte) { f[tcp+7]++ }, false},
		{"acknowledgement", tcp4, func(f []byte) { f[tcp+11]++ }, false},
		{"window", tcp4, func(f []byte) { f[tcp+15]++ }, false},
		{"port", tcp4, func(f []byte) { f[tcp+1]++ }, false},
		{"sum", tcp4, func(f []byte) { f[len(f)-1]++ }, true},
		{"IP sum", tcp4, func(f []byte) { f[l3+11]++ }, true},
		{"CE mark", tcp4, func(f []byte) { f[l3+1] |= 3 }, false},
		{"TTL", tcp4, func(f []byte) { f[l3+8]-- }, false},
		{"more fragments", tcp4, func(f []byte) { f[l3+6] |= 0x20 }, false},
		{"source MAC", tcp4, func(f []byte) { f[11]++ }, false},
		{"no DF, same ID", udp4, func(f []byte) { f[l3+6] = 0 }, false},
		{"UDP sum of zero", udp4, func(f []byte) { f[tcp+6], f[tcp+7] = 0, 0 }, true},
		{"UDP length", udp4, func(f []byte) { f[tcp+5]-- }, false},
		{"RoCE", udp4, func(f []byte) { binary.BigEndian.PutUint16(f[tcp+2:], header.PortRoCE) }, false},
		{"flow label", tcp6, func(f []byte) { f[l3+3]++ }, false},
		{"IPv6 length", tcp6, func(f []byte) { f[l3+5]-- }, false},
	} {
		in := c.s.parts(t, pool, 1000)
		c.change(in[1])
		if !c.keep {
			repair(in[1])
		}
		if n := checkMerge(t, pool, in); n != 0 {
			t.Errorf("%s: %d large frames", c.name, n)
		}
	}
}

// Large frames stay within the limits of IP and Linux, and without buffers none are made.
func TestMergeBounds(t *testing.T) {
	pool := newPool(t)
	s := shape{payload: 60000, seq: 1}
	in := s.parts(t, pool, 1000)
	p, _ := Parse(in[0], header.Locate(in[0]))
	in[59][tcpFlags+p.l4] &^= flagPSH
	repair(in[59])
	s.seq += 60000
	in = append(in, s.parts(t, pool, 1000)...)
	if n := checkMerge(t, pool, in); n != 2 {
		t.Errorf("%d large frames of 120000 bytes", n)
	}
	s = shape{udp: true, payload: 6400}
	in = append(s.parts(t, pool, 50), s.parts(t, pool, 50)...)
	for _, f := range in { // their numbers are those of two runs
		if p, _ := Parse(f, header.Locate(f)); f[p.l3+6]&0x40 == 0 {
			t.Fatal("the test wants packets with DF")
		}
	}
	if n := checkMerge(t, pool, in); n != 4 {
		t.Errorf("%d large frames of 256 datagrams, want 4 of 64", n)
	}
	a, b := pool.GetFor(frame.BigCapacity), pool.GetFor(frame.BigCapacity)
	out, merged := mergeAll(pool, in)
	if merged != 0 || len(out) != len(in) {
		t.Errorf("%d large frames without buffers, %d frames of %d", merged, len(out), len(in))
	}
	a.Free()
	b.Free()
}

// Frames of any content: segmenting merged frames restores them.
func FuzzMerge(f *testing.F) {
	pool := newPool(f)
	for _, s := range []shape{{payload: 300}, {udp: true, payload: 300},
		{v6: true, tags: 1, options: true, payload: 300}} {
		var seed []byte
		for _, p := range s.parts(f, pool, 100) {
			seed = append(binary.BigEndian.AppendUint16(seed, uint16(len(p))), p...)
		}
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var in [][]byte
		for len(data) >= 2 && len(in) < 16 {
			n := min(int(binary.BigEndian.Uint16(data)), len(data)-2, 2000)
			frame := bytes.Clone(data[2 : 2+n])
			data = data[2+n:]
			if n > 0 && frame[n-1]&1 == 0 {
				repair(frame)
			}
			in = append(in, frame)
		}
		checkMerge(t, pool, in)
	})
}

func BenchmarkMerge(b *testing.B) {
	pool := newPool(b)
	for _, c := range []struct {
		name string
		s    shape
		size int
	}{{"TCP 1400", shape{payload: 60000}, 1400}, {"UDP 64", shape{udp: true, payload: 64 * 64}, 64}} {
		parts := c.s.parts(b, pool, c.size)
		b.Run(c.name, func(b *testing.B) {
			b.SetBytes(int64(c.s.payload))
			b.ReportAllocs()
			var m Merger
			for b.Loop() {
				for i, f := range parts {
					p, _ := Parse(f, header.Locate(f))
					if i == 0 {
						m.Start(f, p)
					} else if !m.Add(pool, f, p) {
						b.Fatal("not taken")
					}
				}
				m.Take().Free()
			}
		})
	}
}
