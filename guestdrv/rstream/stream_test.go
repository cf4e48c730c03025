package rstream

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/vnicd/vnicd/guestdrv"
)

// half is one end of a connection without I/O: its state, its memory, and the WRITEs that are on their way to the
// peer.
type half struct {
	*stream
	memory, sendBuf []byte // receive buffer, target SGL and iomaps; send buffer
	mapped, want    []byte // memory that the peer may write to as far as it is mapped; what it has written there
	announced       []bool // the parts of it that are mapped, or are about to be
	order           binary.ByteOrder
	flying          []flight
	peer            *half
	address         uint64
	sent, received  uint64 // bytes; byte i of the stream is pattern(i)
}

// flight is a WRITE and what it carries.
type flight struct {
	post
	data []byte
}

const (
	testKey = 0x1234

	mappedAt = 1 << 30 // from an end's address on
	mapPart  = 300     // bytes of a mapping
	mapStep  = 1000    // from one mapping's offset to the next one's
)

func pattern(i uint64) byte { return byte(i*7 + i>>8) }

func newHalf(address uint64, receive int, queue uint16, send, requests int, order binary.ByteOrder) *half {
	const maps = 3
	sgl := receive + sglEntries*sgeLen
	h := &half{memory: make([]byte, sgl+maps*iomapLen), sendBuf: make([]byte, send), order: order, address: address,
		mapped: make([]byte, maps*mapPart), want: make([]byte, maps*mapPart), announced: make([]bool, maps)}
	h.stream = newStream(sge{addr: address, key: testKey, length: uint32(receive)}, queue, send, requests,
		maps, func(i int) sge {
			b := h.memory[receive+i*sgeLen:][:sgeLen]
			t := decodeSGE(b, h.order)
			clear(b[12:])
			return t
		}, func(i int) iomap { return decodeIOMap(h.memory[sgl+i*iomapLen:], h.order) })
	return h
}

// hello is what the end says, encoded and decoded.
func (h *half) hello(t testing.TB) *connData {
	t.Helper()
	d := h.stream.hello(sge{addr: h.address + uint64(h.in.buffer.length), key: testKey})
	d.bigEndian = h.order == binary.BigEndian
	got, err := decodeConnData(append(d.encode(), make([]byte, 16)...))
	if err != nil || got != *d {
		t.Fatalf("%v: decoded %+v of %+v", err, got, *d)
	}
	return &got
}

func connectHalves(t testing.TB, a, b *half) {
	t.Helper()
	a.peer, b.peer = b, a
	a.connect(b.hello(t))
	b.connect(a.hello(t))
}

// write sends at most n bytes.
func (h *half) write(t testing.TB, n int) int {
	t.Helper()
	if !h.out.writable || h.gone {
		return 0
	}
	k, inline, err := h.out.plan(n)
	if err != nil {
		t.Fatal(err)
	}
	if k == 0 {
		return 0
	}
	data := make([]byte, k)
	if !inline {
		data = h.sendBuf[h.out.head:][:k] // stays until the completion
	}
	for i := range data {
		data[i] = pattern(h.sent + uint64(i))
	}
	h.sent += uint64(k)
	h.flying = append(h.flying, flight{h.out.commit(k, inline), data})
	return k
}

// announceMap maps a part of the memory for the peer, once.
func (h *half) announceMap(i int) {
	if h.announced[i] || !h.out.writable || h.gone || !h.out.ready() {
		return
	}
	h.announced[i] = true
	data := make([]byte, iomapLen)
	iomap{uint64(i * mapStep), sge{h.address + mappedAt + uint64(i*mapPart), testKey, mapPart}}.encode(data, h.peer.order)
	h.flying = append(h.flying, flight{h.announce(i), data})
}

// writeAt writes at most n bytes to what the peer has mapped.
func (h *half) writeAt(t testing.TB, offset, n int) {
	t.Helper()
	if !h.out.writable || h.gone {
		return
	}
	to, room, ok := h.iomaps.find(uint64(offset))
	i, d := offset/mapStep, offset%mapStep
	inside := i < len(h.peer.announced) && d < mapPart
	known := inside && h.iomaps.table[i].length > 0 // its message has arrived
	if ok != known || ok && (!h.peer.announced[i] || room != uint32(mapPart-d)) {
		t.Fatalf("offset %d: %v, %d bytes", offset, ok, room)
	}
	if !ok {
		return
	}
	n, inline := h.out.planDirect(min(n, int(room)))
	if n == 0 {
		return
	}
	data := make([]byte, n)
	if !inline {
		data = h.sendBuf[h.out.head:][:n]
	}
	for k := range data {
		data[k] = pattern(h.sent + uint64(offset+k))
	}
	copy(h.peer.want[i*mapPart+d:], data)
	h.flying = append(h.flying, flight{h.out.direct(to, n, inline), data})
}

// pump sends what is due.
func (h *half) pump() {
	for {
		p, ok := h.next()
		if !ok {
			return
		}
		var data []byte
		if p.hasEntry {
			data = make([]byte, sgeLen)
			p.entry.encode(data, h.peer.order)
		}
		h.flying = append(h.flying, flight{p, data})
	}
}

// deliver completes the oldest WRITE, if any.
func (h *half) deliver(t testing.TB) {
	t.Helper()
	if len(h.flying) == 0 {
		return
	}
	f := h.flying[0]
	h.flying = h.flying[1:]
	if len(f.data) > 0 {
		off, memory := f.to.Addr-h.peer.address, h.peer.memory
		if f.silent {
			off, memory = off-mappedAt, h.peer.mapped
		}
		if f.to.RKey != testKey || off+uint64(len(f.data)) > uint64(len(memory)) {
			t.Fatalf("WRITE of %d bytes to %+v: outside of the peer's memory", len(f.data), f.to)
		}
		copy(memory[off:], f.data)
	}
	if !f.silent {
		if err := h.peer.receive(f.msg); err != nil {
			t.Fatalf("%v", err)
		}
	}
	if op := f.msg.op(); op == opData || op == opIOMap {
		h.out.completed(f.held)
	} else {
		h.completed()
	}
}

// read reads at most n bytes.
func (h *half) read(t testing.TB, n int) {
	t.Helper()
	off, k := h.in.readable()
	k = min(k, uint32(n))
	for i, b := range h.memory[off:][:k] {
		if b != pattern(h.received+uint64(i)) {
			t.Fatalf("byte %d is %d, expected %d", h.received+uint64(i), b, pattern(h.received+uint64(i)))
		}
	}
	h.received += uint64(k)
	h.in.consumed(k)
}

// Two ends with random sizes, in either byte order, and random steps: all data arrives, in order, and no WRITE goes
// outside of what the peer has announced. Credit numbers wrap around.
func TestStreams(t *testing.T) {
	for seed := range uint64(60) {
		rng := rand.New(rand.NewPCG(seed, 3))
		make1 := func(address uint64) *half {
			order := []binary.ByteOrder{binary.LittleEndian, binary.BigEndian}[rng.IntN(2)]
			return newHalf(address, 2*(1+rng.IntN(3000)), uint16(1+rng.IntN(40)), 64+rng.IntN(5000), 1+rng.IntN(20), order)
		}
		ends := []*half{make1(1 << 40), make1(1 << 20)}
		connectHalves(t, ends[0], ends[1])
		ends[0].in.seq, ends[0].in.told, ends[0].in.limit = 65500, 65500, 65500+ends[0].in.queue
		ends[1].out.seq, ends[1].out.limit = 65500, 65500+ends[0].in.queue
		for range 20000 {
			h := ends[rng.IntN(2)]
			switch rng.IntN(6) {
			case 0:
				h.write(t, 1+rng.IntN(3000))
			case 1:
				h.read(t, 1+rng.IntN(3000))
			case 2:
				h.deliver(t)
			case 3:
				h.pump()
			case 4:
				h.announceMap(rng.IntN(len(h.announced)))
			case 5:
				h.writeAt(t, rng.IntN((len(h.announced)+1)*mapStep), 1+rng.IntN(2*mapPart))
			}
		}
		for _, h := range ends {
			h.closeWrite()
		}
		for range 100 { // bounded by what the buffers hold
			for _, h := range ends {
				h.pump()
				for len(h.flying) > 0 {
					h.deliver(t)
				}
				h.read(t, 1<<20)
			}
		}
		for i, h := range ends {
			if !bytes.Equal(h.mapped, h.want) || bytes.Equal(h.want, make([]byte, len(h.want))) {
				t.Errorf("seed %d, end %d: mapped memory differs, or nothing was written to it", seed, i)
			}
			if h.received != h.peer.sent || h.sent == 0 || !h.finished || !h.gone && !h.left || !h.idle() {
				t.Errorf("seed %d, end %d: %d of %d bytes, %+v", seed, i, h.received, h.peer.sent, h.stream)
			}
		}
	}
}

// The bytes on the wire, as rsocket.c writes them on a little-endian machine.
func TestGolden(t *testing.T) {
	want, _ := hex.DecodeString("01" + "00" + "0180" + "000000" + "00" +
		"00007f0011223340" + "a1a2a3a4" + "00000002" + "00007f0011200000" + "b1b2b3b4" + "00010000")
	c := connData{credits: 384, sgl: sge{0x7f0011223340, 0xa1a2a3a4, 2}, buffer: sge{0x7f0011200000, 0xb1b2b3b4, 65536}}
	if got := c.encode(); !bytes.Equal(got, want) {
		t.Errorf("encoded\n%x\n%x", got, want)
	}
	if got, err := decodeConnData(want); err != nil || got != c {
		t.Errorf("decoded %+v, %v", got, err)
	}
	// With RDMA_IOMAPSIZE 1, as riostream has it.
	want[1], want[7], c.iomaps = 2, 1, 1
	if got := c.encode(); !bytes.Equal(got, want) {
		t.Errorf("encoded\n%x\n%x", got, want)
	}
	for b, n := range map[byte]int{0: 0, 1: 1, 128: 128, 129: maxIOMaps, 255: maxIOMaps} {
		want[7] = b
		if got, err := decodeConnData(want); err != nil || got.iomaps != n {
			t.Errorf("%d decoded as %d iomaps, %v", b, got.iomaps, err)
		}
	}
	for _, tc := range []struct {
		m    message
		want string
	}{
		{newMessage(opData, 65536), "00010000"},
		{newMessage(opSGL, 768), "80000300"},
		{newMessage(opIOMap, 1), "c0000001"},
		{newMessage(opControl, controlShutdown), "e0000002"},
		{newMessage(opControl, controlDisconnect), "e0000000"},
	} {
		if imm := tc.m.imm(); hex.EncodeToString(imm[:]) != tc.want || messageOf(imm) != tc.m {
			t.Errorf("%v %d: %x, want %s", tc.m.op(), tc.m.data(), imm, tc.want)
		}
	}
	var b [sgeLen]byte
	c.buffer.encode(b[:], binary.LittleEndian)
	if got := hex.EncodeToString(b[:]); got != "00002011007f0000"+"b4b3b2b1"+"00000100" {
		t.Errorf("entry %s", got)
	}
	var m [iomapLen]byte
	iomap{0x1020, c.buffer}.encode(m[:], binary.LittleEndian)
	if got := hex.EncodeToString(m[:]); got != "2010000000000000"+hex.EncodeToString(b[:]) {
		t.Errorf("iomap %s", got)
	}
}

// The first half of the receive buffer is part of the private data, the second one is announced at once, to entry 1;
// then they take turns.
func TestAnnouncements(t *testing.T) {
	h := newHalf(0x10000, 4096, 8, 4096, 8, binary.LittleEndian)
	hello := h.stream.hello(sge{addr: 0x11000, key: testKey})
	if hello.buffer != (sge{0x10000, testKey, 2048}) || hello.credits != 8 || hello.sgl.length != 2 {
		t.Errorf("%+v", hello)
	}
	h.connect(&connData{credits: 1, sgl: sge{0x50000, 7, 3}, buffer: sge{0x60000, 8, 100}})
	for i, want := range []uint64{0x50010, 0x50020, 0x50000, 0x50010} { // an SGL of three entries
		p, ok := h.next()
		if !ok || !p.hasEntry || p.to != (guestdrv.Remote{Addr: want, RKey: 7}) || p.msg.op() != opSGL ||
			p.entry != (sge{0x10000 + uint64((i+1)%2)*2048, testKey, 2048}) {
			t.Fatalf("announcement %d: %+v, %v", i, p, ok)
		}
		if _, ok := h.next(); ok {
			t.Fatal("announced twice")
		}
		h.completed()
		for range 2 {
			if err := h.receive(newMessage(opData, 1024)); err != nil {
				t.Fatal(err)
			}
		}
		_, n := h.in.readable()
		h.in.consumed(n)
	}
}

// What a peer must not do ends the connection with a reason; its other messages do not.
func TestViolations(t *testing.T) {
	const size = 4096
	data := func(n uint32) message { return newMessage(opData, n) }
	control := func(n uint32) message { return newMessage(opControl, n) }
	for name, tc := range map[string]struct {
		messages []message
		want     string // of the last message's error; empty: none
	}{
		"data":                         {[]message{data(1), data(2047), data(0x800)}, "announced buffer has 0"},
		"more than a half":             {[]message{data(2049)}, "2049 bytes, but the announced buffer has 2048"},
		"all lengths":                  {[]message{data(messageData)}, "announced buffer has 2048"},
		"no data":                      {[]message{data(0)}, "0 bytes"},
		"more messages than credits":   {[]message{data(1), data(1), data(1), data(1), data(1)}, "without credit"},
		"data after SHUTDOWN":          {[]message{control(2), data(1)}, "after SHUTDOWN"},
		"anything after DISCONNECT":    {[]message{data(1), control(0), newMessage(opSGL, 9), data(1)}, ""},
		"SHUTDOWN twice":               {[]message{control(2), control(2)}, ""},
		"keepalive":                    {[]message{control(1), data(1)}, ""},
		"unknown control code":         {[]message{control(3)}, "control code 3"},
		"credits as they were":         {[]message{newMessage(opSGL, 5)}, ""},
		"credits in more than 16 bits": {[]message{newMessage(opSGL, 1<<16+5)}, ""},
		"fewer credits":                {[]message{newMessage(opSGL, 4)}, "expected at most 5 more"},
		"more credits than it has":     {[]message{newMessage(opSGL, 6)}, "expected at most 5 more"},
		"iomap":                        {[]message{newMessage(opIOMap, 2)}, ""},
		"iomap behind the table":       {[]message{newMessage(opIOMap, 3)}, "entry 3, but this end has announced 3 iomaps"},
		"iomaps take credits":          {slices.Repeat([]message{newMessage(opIOMap, 0)}, 5), "without credit"},
		"reserved 1":                   {[]message{newMessage(1, 1)}, "reserved operation 1"},
		"reserved 2":                   {[]message{newMessage(2, 1)}, "reserved operation 2"},
		"reserved 3":                   {[]message{newMessage(3, 1)}, "reserved operation 3"},
		"reserved 5":                   {[]message{newMessage(5, 1)}, "reserved operation 5"},
	} {
		h := newHalf(1<<20, size, 4, size, 8, binary.LittleEndian)
		h.connect(&connData{credits: 5, sgl: sge{1 << 30, 1, 2}, buffer: sge{1 << 31, 2, 2048}})
		for i, m := range tc.messages {
			err := h.receive(m)
			last := i == len(tc.messages)-1
			switch {
			case last && tc.want != "":
				if !errors.Is(err, ErrProtocol) || !strings.Contains(err.Error(), tc.want) {
					t.Errorf("%s: %v, expected %q", name, err, tc.want)
				}
			case err != nil:
				t.Errorf("%s, message %d: %v", name, i, err)
			}
		}
	}
	// Iomaps that exceed the address space, or that of offsets.
	for _, m := range []iomap{{0, sge{^uint64(0) - 1, 1, 3}}, {^uint64(0) - 1, sge{0, 1, 3}}} {
		h := newHalf(1<<20, size, 4, size, 8, binary.LittleEndian)
		m.encode(h.memory[size+sglEntries*sgeLen:], binary.LittleEndian)
		if err := h.receive(newMessage(opIOMap, 0)); !errors.Is(err, ErrProtocol) {
			t.Errorf("iomap %+v: %v", m, err)
		}
	}
	// An entry of the target SGL that exceeds the address space.
	h := newHalf(1<<20, size, 4, size, 8, binary.LittleEndian)
	h.connect(&connData{credits: 5, sgl: sge{1 << 30, 1, 2}, buffer: sge{1 << 31, 2, 1}})
	h.write(t, 1)
	sge{^uint64(0) - 1, 1, 3}.encode(h.memory[size+sgeLen:], binary.LittleEndian)
	if _, _, err := h.out.plan(1); !errors.Is(err, ErrProtocol) {
		t.Errorf("an entry at the end of the address space: %v", err)
	}
}

// Private data that is no rs_conn_data.
func TestConnData(t *testing.T) {
	good := connData{credits: 16, sgl: sge{0x1000, 1, 2}, buffer: sge{0x2000, 2, 4096}}
	ones := slices.Repeat([]byte{0xff}, 8)
	for name, tc := range map[string]struct {
		change func(b []byte) []byte
		want   string
	}{
		"short":             {func(b []byte) []byte { return b[:39] }, "39 bytes, expected 40"},
		"version":           {func(b []byte) []byte { b[0] = 2; return b }, "version 2, expected 1"},
		"zeros":             {func([]byte) []byte { return make([]byte, 56) }, "version 0"},
		"no credits":        {func(b []byte) []byte { b[2], b[3] = 0, 0; return b }, "0 credits"},
		"SGL of one":        {func(b []byte) []byte { b[23] = 1; return b }, "SGL of 1 entries"},
		"SGL too long":      {func(b []byte) []byte { copy(b[8:], ones); return b }, "address space"},
		"iomaps too long":   {func(b []byte) []byte { b[1], b[7] = 2, 128; copy(b[8:], ones[:7]); return b }, "space"},
		"buffer at the end": {func(b []byte) []byte { copy(b[24:], ones); return b }, "address space"},
	} {
		if _, err := decodeConnData(tc.change(good.encode())); !errors.Is(err, ErrProtocol) ||
			!strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, expected %q", name, err, tc.want)
		}
	}
}

// The order of the control messages, and the ends of both directions.
func TestShutdown(t *testing.T) {
	type step func(a, b *half)
	settle := func(a, b *half) {
		for range 10 {
			for _, h := range []*half{a, b} {
				h.pump()
				h.deliver(t)
			}
		}
	}
	closeWrite := func(a, _ *half) { a.closeWrite() }
	other := func(s step) step { return func(a, b *half) { s(b, a) } }
	closeBoth := func(a, _ *half) { a.close() }
	type state struct{ over, finished, writable bool }
	for name, tc := range map[string]struct {
		steps []step
		a, b  state
	}{
		"one direction":   {[]step{closeWrite, settle}, state{}, state{finished: true, writable: true}},
		"the same, twice": {[]step{closeWrite, closeWrite, settle}, state{}, state{finished: true, writable: true}},
		"both, one by one": {[]step{closeWrite, settle, other(closeWrite), settle},
			state{over: true, finished: true}, state{over: true, finished: true}},
		"both at once": {[]step{closeWrite, other(closeWrite), settle},
			state{over: true, finished: true}, state{over: true, finished: true}},
		"close":                {[]step{closeBoth, settle}, state{over: true}, state{true, true, true}},
		"close after shutdown": {[]step{closeWrite, settle, closeBoth, settle}, state{over: true}, state{true, true, true}},
	} {
		a, b := newHalf(1<<20, 4096, 8, 4096, 8, binary.LittleEndian), newHalf(1<<30, 4096, 8, 4096, 8, binary.LittleEndian)
		connectHalves(t, a, b)
		settle(a, b)
		for _, s := range tc.steps {
			s(a, b)
		}
		at := func(h *half) state { return state{h.over(), h.finished, h.out.writable} }
		if at(a) != tc.a || at(b) != tc.b || !a.idle() || !b.idle() {
			t.Errorf("%s:\n%+v\n%+v", name, a.stream, b.stream)
		}
	}
}

// A message ends at the end of the send buffer, however little that is, and the next one begins at its beginning.
func TestSendBufferEnd(t *testing.T) {
	const size = 5000
	a := newHalf(1<<20, 16384, 100, size, 100, binary.LittleEndian)
	b := newHalf(1<<30, 16384, 100, size, 100, binary.LittleEndian)
	connectHalves(t, a, b)
	for _, x := range []struct{ n, want int }{{size - 16, size - 16}, {1000, 16}, {1000, 1000}} {
		if got := a.write(t, x.n); got != x.want {
			t.Fatalf("%d bytes of %d, expected %d", got, x.n, x.want)
		}
		a.deliver(t)
		b.read(t, size)
	}
	if a.out.head != 1000 {
		t.Errorf("offset %d, expected 1000", a.out.head)
	}
}

// Control messages wait for slots; DISCONNECT is the last message.
func TestSlots(t *testing.T) {
	h := newHalf(1<<20, 4096, 2, 4096, 8, binary.LittleEndian)
	h.connect(&connData{credits: 5, sgl: sge{1 << 30, 1, 2}, buffer: sge{1 << 31, 2, 2048}})
	for range controlSlots {
		if _, ok := h.next(); !ok {
			t.Fatal("no update")
		}
		if err := h.receive(newMessage(opData, 1)); err != nil {
			t.Fatal(err)
		}
	}
	h.closeWrite()
	if p, ok := h.next(); ok {
		t.Fatalf("without a slot: %+v", p)
	}
	h.close()
	h.completed()
	if p, ok := h.next(); !ok || p.msg != newMessage(opControl, controlDisconnect) {
		t.Fatalf("%+v, %v", p, ok)
	}
	h.completed()
	if p, ok := h.next(); ok {
		t.Fatalf("after DISCONNECT: %+v", p)
	}
}
