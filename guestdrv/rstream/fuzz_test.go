package rstream

import (
	"encoding/binary"
	"slices"
	"testing"
)

// Private data that decodes has its invariants and survives a round trip, but for what this end does not use.
func FuzzConnData(f *testing.F) {
	f.Add((&connData{credits: 384, sgl: sge{0x7f0011223340, 1, 2}, buffer: sge{0x7f0011200000, 2, 65536}}).encode())
	f.Add((&connData{bigEndian: true, credits: 1, sgl: sge{0, 0, 2}}).encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := decodeConnData(b)
		if err != nil {
			return
		}
		if again, err := decodeConnData(c.encode()); err != nil || again != c {
			t.Fatalf("%+v, %v; %+v", again, err, c)
		}
		if c.credits == 0 || c.sgl.length < sglEntries || c.sgl.addr+uint64(c.sgl.length)*sgeLen-1 < c.sgl.addr ||
			c.iomaps < 0 || c.iomaps > maxIOMaps {
			t.Fatalf("%+v", c)
		}
	})
}

// A peer that says and writes anything: the state stays within its bounds, and every WRITE goes where the peer has
// allowed it. The first bytes are the private data; each further seven are a step.
func FuzzStream(f *testing.F) {
	hello := (&connData{credits: 3, sgl: sge{1 << 30, 1, 2}, buffer: sge{1 << 31, 2, 100}}).encode()
	f.Add(append(hello, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 200, 2, 0, 0, 0, 0, 1, 0, 3, 0, 0, 0, 0, 0, 9))
	f.Add(append(hello, 9, 0, 0, 0, 1, 2, 0, 0, 0xc0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 1, 0, 9))
	f.Add(append(hello, 0, 0xe0, 0, 0, 2, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0x80, 0, 0, 3, 0, 0))
	f.Fuzz(func(t *testing.T, b []byte) {
		const receive, send, queue, requests = 256, 300, 5, 3
		c, err := decodeConnData(b)
		if err != nil {
			return
		}
		h := newHalf(1<<40, receive, queue, send, requests, binary.LittleEndian)
		h.connect(&c)
		for b = b[connDataLen:]; len(b) >= 7; b = b[7:] {
			x, n := binary.BigEndian.Uint32(b[1:]), int(binary.BigEndian.Uint16(b[5:]))
			switch b[0] % 10 {
			case 0:
				if h.receive(message(x)) != nil {
					return // the connection has ended
				}
			case 1:
				before := h.out.target
				k, inline, err := h.out.plan(1 + n)
				if err != nil {
					return
				}
				if k == 0 || !h.out.writable {
					continue
				}
				if before.length == 0 {
					before = h.out.target
				}
				p := h.out.commit(k, inline)
				if k < 0 || uint32(k) > before.length || p.to.Addr != before.addr || p.to.RKey != before.key ||
					k > 1+n || p.msg.data() != uint32(k) {
					t.Fatalf("%d of %d bytes to %+v, target %+v", k, n, p, before)
				}
				h.flying = append(h.flying, flight{post: p})
			case 2:
				_, avail := h.in.readable()
				h.in.consumed(min(avail, uint32(n)))
			case 3:
				if p, ok := h.next(); ok {
					if p.hasEntry && (p.to.Addr < c.sgl.addr || p.to.Addr > c.sgl.addr+uint64(c.sgl.length-1)*sgeLen) {
						t.Fatalf("entry to %+v, SGL %+v", p.to, c.sgl)
					}
					h.flying = append(h.flying, flight{post: p})
				}
			case 4:
				if len(h.flying) > 0 {
					if p := h.flying[0].post; p.msg.op() == opData { // or silent
						h.out.completed(p.held)
					} else {
						h.completed()
					}
					h.flying = h.flying[1:]
				}
			case 5:
				sge{uint64(x) << 32, x, uint32(n)}.encode(h.memory[receive+n%2*sgeLen:], binary.LittleEndian)
			case 6:
				h.closeWrite()
			case 7:
				h.close()
			case 8:
				to, room, ok := h.iomaps.find(uint64(x) << 32)
				if !ok || !h.out.writable {
					continue
				}
				m := h.iomaps.table[slices.IndexFunc(h.iomaps.table, func(m iomap) bool { return m.key == to.RKey })]
				k, inline := h.out.planDirect(int(min(uint32(1+n), room)))
				if k < 0 || to.Addr < m.addr || to.Addr-m.addr+uint64(k) > uint64(m.length) {
					t.Fatalf("%d of %d bytes to %+v, iomap %+v", k, n, to, m)
				}
				if k > 0 {
					h.flying = append(h.flying, flight{post: h.out.direct(to, k, inline)})
				}
			case 9: // the key is the entry's own
				i := n % len(h.iomaps.table)
				iomap{uint64(x) << 32, sge{uint64(x) << 31, uint32(i), uint32(n) << 17}}.encode(
					h.memory[receive+sglEntries*sgeLen+i*iomapLen:], binary.LittleEndian)
			}
			check(t, h.stream)
		}
	})
}

// check checks what holds whatever a peer does.
func check(t *testing.T, s *stream) {
	t.Helper()
	in, out := &s.in, &s.out
	switch {
	case in.unread+in.open+in.freed != in.buffer.length || in.read >= in.buffer.length || in.open > in.buffer.length,
		in.limit-in.seq > in.queue, in.entry >= in.sgl.length, in.announce != 0 && in.announce != in.half:
		t.Fatalf("input %+v", in)
	case out.used < 0 || out.used > out.size || out.head < 0 || out.head >= out.size || out.posted < 0 ||
		out.posted > out.requests || out.limit-out.seq > out.credits:
		t.Fatalf("output %+v", out)
	case s.slots < 0 || s.slots > controlSlots:
		t.Fatalf("%d slots", s.slots)
	}
}
