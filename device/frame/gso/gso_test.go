package gso

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"testing"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"

	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/header"
)

// shape describes a packet that gopacket builds.
type shape struct {
	tags    int
	v6      bool
	options bool // IPv4 and TCP options
	udp     bool
	payload int
	seq     uint32
}

func (s shape) String() string {
	return fmt.Sprintf("tags %d, v6 %v, options %v, udp %v, payload %d", s.tags, s.v6, s.options, s.udp, s.payload)
}

// build returns the complete packet of segment i, whose payload is part.
func (s shape) build(t testing.TB, i int, at uint32, part []byte, change func(*layers.TCP)) []byte {
	t.Helper()
	eth := &layers.Ethernet{SrcMAC: net.HardwareAddr{2, 0, 0, 0, 0, 1}, DstMAC: net.HardwareAddr{2, 0, 0, 0, 0, 2},
		EthernetType: layers.EthernetTypeIPv4}
	l3 := layers.EthernetTypeIPv4
	if s.v6 {
		l3 = layers.EthernetTypeIPv6
	}
	ls := []gopacket.SerializableLayer{eth}
	eth.EthernetType = l3
	if s.tags > 0 {
		eth.EthernetType = layers.EthernetTypeDot1Q
	}
	for k := range s.tags {
		q := &layers.Dot1Q{VLANIdentifier: uint16(k + 5), Type: layers.EthernetTypeDot1Q}
		if k == s.tags-1 {
			q.Type = l3
		}
		ls = append(ls, q)
	}
	proto := layers.IPProtocolTCP
	if s.udp {
		proto = layers.IPProtocolUDP
	}
	var ip gopacket.NetworkLayer
	if s.v6 {
		h := &layers.IPv6{Version: 6, TrafficClass: 0x2a, FlowLabel: 0x12345, HopLimit: 64, NextHeader: proto,
			SrcIP: net.ParseIP("2001:db8::1"), DstIP: net.ParseIP("2001:db8::2")}
		ip = h
		ls = append(ls, h)
	} else {
		h := &layers.IPv4{Version: 4, IHL: 5, TOS: 2, Id: uint16(0xfffe + i), Flags: layers.IPv4DontFragment, TTL: 64,
			Protocol: proto, SrcIP: net.IP{10, 0, 0, 1}, DstIP: net.IP{10, 0, 0, 2}}
		if s.options {
			h.Options = []layers.IPv4Option{{OptionType: 148, OptionLength: 4, OptionData: []byte{0, 0}}} // router alert
		}
		ip = h
		ls = append(ls, h)
	}
	if s.udp {
		u := &layers.UDP{SrcPort: 1000, DstPort: 2000}
		if err := u.SetNetworkLayerForChecksum(ip); err != nil {
			t.Fatal(err)
		}
		ls = append(ls, u)
	} else {
		h := &layers.TCP{SrcPort: 1000, DstPort: 2000, Seq: s.seq + at, Ack: 77, ACK: true, Window: 500}
		if s.options {
			h.Options = []layers.TCPOption{{OptionType: layers.TCPOptionKindTimestamps, OptionLength: 10,
				OptionData: []byte("timestam")}}
		}
		if change != nil {
			change(h)
		}
		if err := h.SetNetworkLayerForChecksum(ip); err != nil {
			t.Fatal(err)
		}
		ls = append(ls, h)
	}
	buf := gopacket.NewSerializeBuffer()
	if err := gopacket.SerializeLayers(buf, gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true},
		append(ls, gopacket.Payload(part))...); err != nil {
		t.Fatal(err)
	}
	// Without the padding of short frames, which the card adds.
	f := buf.Bytes()
	n := header.EthernetLen + s.tags*header.VLANLen
	if s.v6 {
		n += header.IPv6Len + int(binary.BigEndian.Uint16(f[n+4:]))
	} else {
		n += int(binary.BigEndian.Uint16(f[n+2:]))
	}
	return bytes.Clone(f[:n])
}

// acceptBytes is Accept for a frame that is not in a buffer; it changes the frame as Accept does.
func acceptBytes(t testing.TB, h, f []byte, allowed frame.Need) (frame.Offload, error) {
	b := load(t, newPool(t), f)
	defer b.Free()
	err := Accept(h, b, allowed)
	copy(f, b.Bytes())
	return b.Offload, err
}

// undo replaces a complete packet's transport checksum by the sum of the pseudo-header, as a sender with checksum
// offload does, and returns the virtio header.
func (s shape) undo(t testing.TB, f []byte, size int) []byte {
	t.Helper()
	x, ok := locate(f, header.Locate(f))
	if !ok {
		t.Fatalf("%v: cannot find the transport header", s)
	}
	n := len(f) - x.l4
	sum := uint32(0)
	proto := uint8(header.ProtoTCP)
	if s.udp {
		proto = header.ProtoUDP
	}
	if s.v6 {
		sum = header.PseudoSum6([16]byte(f[x.l3+8:x.l3+24]), [16]byte(f[x.l3+24:x.l3+40]), proto, uint32(n))
	} else {
		sum = header.PseudoSum4([4]byte(f[x.l3+12:x.l3+16]), [4]byte(f[x.l3+16:x.l3+20]), proto, uint16(n))
	}
	binary.BigEndian.PutUint16(f[x.l4+x.csumOff:], ^header.Checksum(nil, sum))
	h := make([]byte, HeaderLen)
	h[atFlags] = flagNeedsCsum
	binary.LittleEndian.PutUint16(h[atCsumStart:], uint16(x.l4))
	binary.LittleEndian.PutUint16(h[atCsumOffset:], uint16(x.csumOff))
	if size > 0 {
		binary.LittleEndian.PutUint16(h[atGSOSize:], uint16(size))
		h[atType] = map[[2]bool]byte{{false, false}: typeTCPv4, {true, false}: typeTCPv6, {false, true}: typeUDP,
			{true, true}: typeUDP}[[2]bool{s.v6, s.udp}]
	}
	return h
}

func newPool(t testing.TB) *frame.Pool {
	t.Helper()
	p, err := frame.NewPool(frame.Config{Count: 2, Capacity: 10000, Big: 2})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func load(t testing.TB, p *frame.Pool, f []byte) *frame.Buf {
	t.Helper()
	b := p.GetFor(len(f))
	if b == nil || !b.Append(f) {
		t.Fatalf("no buffer for %d bytes", len(f))
	}
	return b
}

func pattern(n int) []byte {
	p := make([]byte, n)
	for i := range p {
		p[i] = byte(i*7 + i>>8)
	}
	return p
}

var shapes = func() (all []shape) {
	for _, tags := range []int{0, 1, 2} {
		for _, v6 := range []bool{false, true} {
			for _, options := range []bool{false, true} {
				for _, udp := range []bool{false, true} {
					for _, n := range []int{1, 2, 17, 1001, 9000} {
						all = append(all, shape{tags: tags, v6: v6, options: options, udp: udp, payload: n, seq: 0xfffffff0})
					}
				}
			}
		}
	}
	return all
}()

// Segments equal, byte by byte, those that gopacket builds: lengths, numbers, flags and checksums.
func TestSegmentsAgainstGopacket(t *testing.T) {
	pool := newPool(t)
	for _, s := range shapes {
		for _, size := range []int{1, 100, 333, 1400, 65535} {
			if n := (s.payload + size - 1) / size; n > MaxSegments || s.udp && n > MaxDatagrams {
				continue
			}
			data := pattern(s.payload)
			first, last := func(h *layers.TCP) { h.CWR = true }, func(h *layers.TCP) { h.PSH, h.FIN = true, true }
			f := s.build(t, 0, 0, data, func(h *layers.TCP) { first(h); last(h) })
			o, err := acceptBytes(t, s.undo(t, f, size), f, frame.NeedAll)
			if err != nil {
				t.Fatalf("%v, size %d: %v", s, size, err)
			}
			b := load(t, pool, f)
			b.Offload = o
			var seg Segmenter
			seg.Start(b)
			total := seg.Left()
			dst := make([]byte, 70000)
			for i := 0; seg.Left() > 0; i++ {
				part := data[min(i*size, len(data)):min((i+1)*size, len(data))]
				want := s.build(t, i, uint32(i*size), part, func(h *layers.TCP) {
					if i == 0 {
						first(h)
					}
					if i == total-1 {
						last(h)
					}
				})
				if seg.Left() != total-i {
					t.Fatalf("%v, size %d: %d segments left of %d after %d", s, size, seg.Left(), total, i)
				}
				n := seg.Next(dst)
				if !bytes.Equal(dst[:n], want) {
					t.Fatalf("%v, size %d, segment %d:\n%x, want\n%x", s, size, i, dst[:n], want)
				}
			}
			if want := (s.payload + size - 1) / size; total != want {
				t.Errorf("%v, size %d: %d segments, want %d", s, size, total, want)
			}
			b.Free()
		}
	}
}

// A completed checksum equals gopacket's.
func TestCompleteAgainstGopacket(t *testing.T) {
	pool := newPool(t)
	for _, s := range shapes {
		want := s.build(t, 0, 0, pattern(s.payload), nil)
		f := bytes.Clone(want)
		o, err := acceptBytes(t, s.undo(t, f, 0), f, frame.NeedCsum)
		if err != nil {
			t.Fatal(s, err)
		}
		if o.Need != frame.NeedCsum || bytes.Equal(f, want) {
			t.Fatalf("%v: %+v", s, o)
		}
		b := load(t, pool, f)
		b.Offload = o
		Complete(b)
		if !bytes.Equal(b.Bytes(), want) {
			t.Fatalf("%v:\n%x, want\n%x", s, b.Bytes(), want)
		}
		if b.Offload != (frame.Offload{Valid: true}) {
			t.Errorf("%v: left %+v", s, b.Offload)
		}
		b.Free()
	}
}

// A sum of zero is sent as 0xffff, because zero means "none" in UDP.
func TestZeroSum(t *testing.T) {
	s := shape{udp: true}
	for v := range 1 << 16 {
		f := s.build(t, 0, 0, []byte{byte(v >> 8), byte(v)}, nil)
		if binary.BigEndian.Uint16(f[40:]) != 0xffff && binary.BigEndian.Uint16(f[40:]) != 0 {
			continue
		}
		for _, size := range []int{0, 1000} {
			o, err := acceptBytes(t, s.undo(t, f, size), f, frame.NeedAll)
			if err != nil {
				t.Fatal(err)
			}
			b := load(t, newPool(t), f)
			b.Offload = o
			out := make([]byte, 100)
			if size == 0 {
				Complete(b)
				out = b.Bytes()
			} else {
				var seg Segmenter
				seg.Start(b)
				out = out[:seg.Next(out)]
			}
			if binary.BigEndian.Uint16(out[40:]) != 0xffff {
				t.Errorf("size %d: checksum %x", size, out[40:42])
			}
		}
		return
	}
	t.Fatal("found no such payload")
}

// A checksum at another place than a known protocol's is computed at once, before the switch examines the frame.
func TestForeignChecksum(t *testing.T) {
	s := shape{payload: 100}
	f := s.build(t, 0, 0, pattern(100), nil)
	h := s.undo(t, f, 0)
	// The place of the source MAC: completed later, the frame would change its source after the switch's check.
	binary.LittleEndian.PutUint16(h[atCsumStart:], 6)
	binary.LittleEndian.PutUint16(h[atCsumOffset:], 0)
	want := bytes.Clone(f)
	binary.BigEndian.PutUint16(want[6:], header.Checksum(f[6:], 0))
	o, err := acceptBytes(t, h, f, frame.NeedAll)
	if err != nil || o != (frame.Offload{}) || !bytes.Equal(f, want) {
		t.Errorf("%+v %v\n%x\n%x", o, err, f, want)
	}
}

// A checksum that is completed inside a header changes what the frame is; the layout does not outlive it.
func TestForeignChecksumInHeader(t *testing.T) {
	s := shape{payload: 100, udp: true}
	f := s.build(t, 0, 0, pattern(100), nil)
	b := load(t, newPool(t), f)
	defer b.Free()
	h := s.undo(t, b.Bytes(), 0)
	const port = 36 // UDP destination port
	binary.LittleEndian.PutUint16(h[atCsumStart:], uint16(b.Len()-2))
	binary.LittleEndian.PutUint16(h[atCsumOffset:], 0)
	if b.Layout().Is(header.IsRoCE) {
		t.Fatal("RoCE to begin with")
	}
	// The last word is such that its sum, put into the port, makes RoCE of the frame.
	binary.LittleEndian.PutUint16(h[atCsumStart:], port)
	sum := uint32(^header.Checksum(b.Bytes()[port:b.Len()-2], 0))
	last := uint16((uint32(^uint16(header.PortRoCE)) + 0xffff - sum) % 0xffff)
	binary.BigEndian.PutUint16(b.Bytes()[b.Len()-2:], last)
	if err := Accept(h, b, frame.NeedAll); err != nil {
		t.Fatal(err)
	}
	if got := binary.BigEndian.Uint16(b.Bytes()[port:]); got != header.PortRoCE || !b.Layout().Is(header.IsRoCE) {
		t.Errorf("port %d, %+v", got, b.Layout())
	}
}

// Each error of a header is detected and has its own error value.
func TestHostileHeaders(t *testing.T) {
	tcp := shape{payload: 3000}
	v6 := shape{payload: 3000, v6: true}
	udp := shape{payload: 3000, udp: true}
	put := func(h []byte, at int, v uint16) { binary.LittleEndian.PutUint16(h[at:], v) }
	for _, tc := range []struct {
		name    string
		s       shape
		allowed frame.Need
		spoil   func(h, f []byte) []byte
		want    error
	}{
		{"fine", tcp, frame.NeedAll, func(h, f []byte) []byte { return f }, nil},
		{"fine with ECN", tcp, frame.NeedAll, func(h, f []byte) []byte { h[atType] |= typeECN; return f }, nil},
		{"unknown flags are ignored", tcp, frame.NeedAll, func(h, f []byte) []byte { h[atFlags] |= 0xf6; return f }, nil},
		{"wild hdr_len is ignored", tcp, frame.NeedAll, func(h, f []byte) []byte { put(h, atHdrLen, 0xffff); return f }, nil},
		{"no checksum", tcp, frame.NeedAll, func(h, f []byte) []byte { h[atFlags] = 0; return f }, ErrType},
		{"no offloads at all", tcp, 0, func(h, f []byte) []byte { return f }, ErrNotNegotiated},
		{"no TSO", tcp, frame.NeedCsum, func(h, f []byte) []byte { return f }, ErrNotNegotiated},
		{"no TSO6", v6, frame.NeedAll &^ frame.NeedTSO6, func(h, f []byte) []byte { return f }, ErrNotNegotiated},
		{"no USO4", udp, frame.NeedAll &^ frame.NeedUSO4, func(h, f []byte) []byte { return f }, ErrNotNegotiated},
		{"no ECN", tcp, frame.NeedAll &^ frame.NeedECN, func(h, f []byte) []byte { h[atType] |= typeECN; return f },
			ErrNotNegotiated},
		{"ECN with UDP", udp, frame.NeedAll, func(h, f []byte) []byte { h[atType] |= typeECN; return f }, ErrType},
		{"ECN alone", tcp, frame.NeedAll, func(h, f []byte) []byte { h[atType] = typeECN; return f }, ErrType},
		{"UFO", udp, frame.NeedAll, func(h, f []byte) []byte { h[atType] = 3; return f }, ErrType},
		{"wrong IP version", v6, frame.NeedAll, func(h, f []byte) []byte { h[atType] = typeTCPv4; return f }, ErrType},
		{"wrong protocol", tcp, frame.NeedAll, func(h, f []byte) []byte { h[atType] = typeUDP; return f }, ErrType},
		{"start beyond the end", tcp, frame.NeedAll, func(h, f []byte) []byte { put(h, atCsumStart, 0xffff); return f },
			ErrChecksum},
		{"offset beyond the end", tcp, frame.NeedAll, func(h, f []byte) []byte {
			put(h, atCsumOffset, uint16(len(f)-34-1))
			return f
		}, ErrChecksum},
		{"both wrap around", tcp, frame.NeedAll, func(h, f []byte) []byte {
			put(h, atCsumStart, 0xffff)
			put(h, atCsumOffset, 0xffff)
			return f
		}, ErrChecksum},
		{"start in the options", tcp, frame.NeedAll, func(h, f []byte) []byte { put(h, atCsumStart, 35); return f },
			ErrHeaders},
		{"offset of the ports", tcp, frame.NeedAll, func(h, f []byte) []byte { put(h, atCsumOffset, 0); return f },
			ErrHeaders},
		{"no segment size", tcp, frame.NeedAll, func(h, f []byte) []byte { put(h, atGSOSize, 0); return f }, ErrSize},
		{"too many segments", tcp, frame.NeedAll, func(h, f []byte) []byte { put(h, atGSOSize, 1); return f }, ErrSize},
		{"too many datagrams", udp, frame.NeedAll, func(h, f []byte) []byte { put(h, atGSOSize, 23); return f }, ErrSize},
		{"TCP header of 16 bytes", tcp, frame.NeedAll, func(h, f []byte) []byte { f[14+20+12] = 4 << 4; return f },
			ErrHeaders},
		{"TCP header beyond the end", tcp, frame.NeedAll, func(h, f []byte) []byte {
			f[14+20+12] = 15 << 4
			binary.BigEndian.PutUint16(f[16:], 50)
			return f[:14+50]
		}, ErrHeaders},
		{"no payload", tcp, frame.NeedAll, func(h, f []byte) []byte {
			binary.BigEndian.PutUint16(f[16:], 40)
			return f[:14+40]
		}, ErrHeaders},
		{"IP length differs", tcp, frame.NeedAll, func(h, f []byte) []byte { f[17]++; return f }, ErrHeaders},
		{"IPv6 length differs", v6, frame.NeedAll, func(h, f []byte) []byte { f[19]++; return f }, ErrHeaders},
		{"IPv6 extension header", v6, frame.NeedAll, func(h, f []byte) []byte { f[20] = 0; return f }, ErrHeaders},
		{"fragment", tcp, frame.NeedAll, func(h, f []byte) []byte { f[20] = 0x20; return f }, ErrHeaders},
		{"IP header of 16 bytes", tcp, frame.NeedAll, func(h, f []byte) []byte { f[14] = 0x44; return f }, ErrHeaders},
		{"IP version 5", tcp, frame.NeedAll, func(h, f []byte) []byte { f[14] = 0x55; return f }, ErrHeaders},
		{"three tags", tcp, frame.NeedAll, func(h, f []byte) []byte {
			put(h, atCsumStart, 34+12)
			return append(append(bytes.Clone(f[:12]), 0x81, 0, 0, 1, 0x81, 0, 0, 1, 0x81, 0, 0, 1), f[12:]...)
		}, ErrHeaders},
		{"cut Ethernet header", tcp, frame.NeedAll, func(h, f []byte) []byte {
			put(h, atCsumStart, 0)
			put(h, atCsumOffset, 0)
			return f[:13]
		}, ErrHeaders},
	} {
		f := tc.s.build(t, 0, 0, pattern(tc.s.payload), nil)
		h := tc.s.undo(t, f, 1000)
		f = tc.spoil(h, f)
		if _, err := acceptBytes(t, h, f, tc.allowed); !errors.Is(err, tc.want) {
			t.Errorf("%s: %v, want %v", tc.name, err, tc.want)
		}
	}
}

// PutHeader writes headers that Accept reads.
func TestHeaderRoundTrip(t *testing.T) {
	for _, s := range shapes {
		for _, size := range []int{0, 1000} {
			f := s.build(t, 0, 0, pattern(s.payload), nil)
			want, err := acceptBytes(t, s.undo(t, f, size), f, frame.NeedAll)
			if err != nil {
				t.Fatal(err)
			}
			var h [HeaderLen]byte
			b := load(t, newPool(t), f)
			b.Offload = want
			PutHeader(&h, b, true, 3)
			b.Free()
			got, err := acceptBytes(t, h[:], f, frame.NeedAll)
			if err != nil || got != want || h[atNumBuffers] != 3 {
				t.Errorf("%v: %+v %v, want %+v", s, got, err, want)
			}
		}
	}
	var h [HeaderLen]byte
	b := load(t, newPool(t), nil)
	b.Offload.Valid = true
	PutHeader(&h, b, true, 1)
	if !DataValid(h[:]) {
		t.Error("a valid checksum is not said to be so")
	}
	PutHeader(&h, b, false, 1)
	if h != [HeaderLen]byte{atNumBuffers: 1} {
		t.Errorf("%x for a receiver without checksum offload", h)
	}
}

// For any header, nothing is read or written outside the frame, and frames that Accept admits are segmented into parts
// of the right size with right checksums whose payloads are the frame's.
func FuzzAccept(f *testing.F) {
	for _, s := range shapes {
		for _, size := range []int{0, 900} {
			fr := s.build(f, 0, 0, pattern(s.payload), nil)
			f.Add(s.undo(f, fr, size), fr)
		}
	}
	pool := newPool(f)
	dst := make([]byte, 70000)
	f.Fuzz(func(t *testing.T, h, fr []byte) {
		if len(h) < HeaderLen || len(fr) > 65000 {
			return
		}
		b := load(t, pool, fr)
		defer b.Free()
		if Accept(h, b, frame.NeedAll) != nil || b.Offload.Need == 0 {
			return
		}
		o := b.Offload
		fr = bytes.Clone(b.Bytes())
		if o.GSOSize == 0 {
			Complete(b)
			at := int(b.Layout().L4) + int(o.CsumOff)
			if got := b.Bytes(); !bytes.Equal(got[:at], fr[:at]) || !bytes.Equal(got[at+2:], fr[at+2:]) {
				t.Fatal("more than the checksum has changed")
			}
			return
		}
		var seg Segmenter
		seg.Start(b)
		total, got := seg.Left(), []byte(nil)
		if total < 1 || total > MaxSegments {
			t.Fatalf("%d segments", total)
		}
		for i := range total {
			n := seg.Next(dst)
			if n > int(o.Payload)+int(o.GSOSize) || n <= int(o.Payload) || i < total-1 && n != int(o.Payload)+int(o.GSOSize) {
				t.Fatalf("segment %d of %d has %d bytes; %+v", i, total, n, o)
			}
			x, ok := locate(dst[:n], header.Locate(dst[:n]))
			if p, whole := x.payload(dst[:n]); !ok || !whole || p != int(o.Payload) {
				t.Fatalf("segment %d: %x", i, dst[:n])
			}
			proto := uint8(header.ProtoUDP)
			if x.tcp {
				proto = header.ProtoTCP
			}
			sum := uint32(0)
			if ip := dst[x.l3:]; x.v6 {
				sum = header.PseudoSum6([16]byte(ip[8:24]), [16]byte(ip[24:40]), proto, uint32(n-x.l4))
			} else {
				sum = header.PseudoSum4([4]byte(ip[12:16]), [4]byte(ip[16:20]), proto, uint16(n-x.l4))
				if header.Checksum(dst[x.l3:x.l4], 0) != 0 {
					t.Fatalf("segment %d: IP checksum", i)
				}
			}
			if header.Checksum(dst[x.l4:n], sum) != 0 {
				t.Fatalf("segment %d: checksum of %x", i, dst[:n])
			}
			got = append(got, dst[x.l4:n][int(o.Payload)-x.l4:]...)
		}
		if seg.Left() != 0 || !bytes.Equal(got, fr[o.Payload:]) {
			t.Fatal("payload differs")
		}
	})
}

func BenchmarkSegments(b *testing.B) {
	for _, s := range []shape{{payload: 64000}, {payload: 64000, v6: true, options: true}} {
		b.Run(fmt.Sprintf("v6=%v", s.v6), func(b *testing.B) {
			f := s.build(b, 0, 0, pattern(s.payload), nil)
			buf := load(b, newPool(b), f)
			if err := Accept(s.undo(b, buf.Bytes(), 1400), buf, frame.NeedAll); err != nil {
				b.Fatal(err)
			}
			dst := make([]byte, 2000)
			b.SetBytes(int64(s.payload))
			b.ReportAllocs()
			for b.Loop() {
				var seg Segmenter
				seg.Start(buf)
				for seg.Left() > 0 {
					seg.Next(dst)
				}
			}
		})
	}
}

// A kernel's pending work is detected, and completing it gives the frame that the kernel would have sent; a complete
// frame is left alone.
func TestUnfinished(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		for _, n := range []int{0, 1, 1000, 20000} {
			l3, l4 := 14, 34
			f := append(make([]byte, 12, 100), 8, 0, 0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2)
			binary.BigEndian.PutUint16(f[16:], uint16(40+n))
			if v6 {
				l4 = 54
				f = append(make([]byte, 12, 100), 0x86, 0xdd, 0x60, 0, 0, 0, 0, 0, 6, 64)
				binary.BigEndian.PutUint16(f[18:], uint16(20+n))
				for i := range 32 {
					f = append(f, byte(i+7))
				}
			}
			f = append(f, 1, 2, 3, 4, 0, 0, 0, 1, 0, 0, 0, 2, 0x50, 0x10, 1, 1, 0, 0, 0, 0)
			for i := range n {
				f = append(f, byte(i*i))
			}
			tr := transport{l3: l3, l4: l4, csumOff: 16, v6: v6, tcp: true}
			binary.BigEndian.PutUint16(f[l4+16:], ^header.Checksum(nil, tr.pseudo(f, 20+n)))
			const limit = 14 + 1450
			o, ok := Unfinished(f, header.Locate(f), limit)
			if !ok || o.Need&frame.NeedCsum == 0 || (o.GSOSize != 0) != (n > 1400) {
				t.Fatalf("v6 %v, %d bytes: %+v, %v", v6, n, o, ok)
			}
			if n > 1400 && (int(o.GSOSize)+int(o.Payload) != limit || int(o.Payload) != l4+20) {
				t.Errorf("v6 %v: segments of %d behind %d", v6, o.GSOSize, o.Payload)
			}
			if f[len(f)-1]++; n > 1400 {
				short := f[:len(f)-1]
				if _, ok := Unfinished(short, header.Locate(short), limit); ok {
					t.Error("a large frame that is cut off is taken")
				}
			}
			complete(f, l4, 16)
			if n > 0 && header.Checksum(f[l4:], tr.pseudo(f, 20+n)) != 0 {
				t.Fatal("not finished")
			}
			if o, ok := Unfinished(f, header.Locate(f), limit); ok {
				t.Errorf("v6 %v, %d bytes, finished: %+v", v6, n, o)
			}
		}
	}
}
