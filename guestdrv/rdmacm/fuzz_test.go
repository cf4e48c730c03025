package rdmacm

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"reflect"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/rdma/cm"
	"github.com/vnicd/vnicd/guestdrv"
)

// The IP header, literally, in both directions (IBTA A11.5.1).
func TestIPHeader(t *testing.T) {
	v4 := make([]byte, headerLen, headerLen+2)
	copy(v4, []byte{0, 0x40, 0xc3, 0x50})
	copy(v4[16:], []byte{10, 0, 0, 1})
	copy(v4[32:], []byte{10, 0, 0, 2})
	v6 := make([]byte, headerLen)
	copy(v6, []byte{0, 0x60, 0x1d, 0x2f, 0xfd, 0, 19: 1, 20: 0xfd, 0, 35: 2})
	for _, tc := range []struct {
		h ipHeader
		b []byte
	}{
		{ipHeader{src: netip.MustParseAddrPort("10.0.0.1:50000"), dst: netip.MustParseAddr("10.0.0.2"), rest: []byte("hi")},
			append(v4, "hi"...)},
		{ipHeader{src: netip.MustParseAddrPort("[fd00::1]:7471"), dst: netip.MustParseAddr("fd00::2"), rest: []byte{}}, v6},
	} {
		if b := tc.h.encode(); !bytes.Equal(b, tc.b) {
			t.Errorf("%v:\n%x, want\n%x", tc.h, b, tc.b)
		}
		if h, err := decodeHeader(tc.b); err != nil || !reflect.DeepEqual(h, tc.h) {
			t.Errorf("%x: %v, %v, want %v", tc.b, h, err, tc.h)
		}
	}
	for name, b := range map[string][]byte{"short": v4[:headerLen-1], "empty": nil,
		"version":    append([]byte{1}, v4[1:headerLen]...),
		"IP version": append([]byte{0, 0x50}, v4[2:headerLen]...)} {
		if h, err := decodeHeader(b); err == nil {
			t.Errorf("%s: %v", name, h)
		}
	}
	if serviceID(7471) != 0x01061d2f {
		t.Errorf("service ID %#x", serviceID(7471))
	}
	for _, id := range []uint64{0x01061d2f, 0x01111d2f, 0x8000000001061d2f} {
		if port, ok := portOf(id); port != 7471 || ok != (id == 0x01061d2f) {
			t.Errorf("service %#x: port %d, %v", id, port, ok)
		}
	}
}

// FuzzMessage gives a machine one datagram: it must not panic, must keep its tables consistent, and must not answer by
// more than was sent.
func FuzzMessage(f *testing.F) {
	a := newHost(1, settings{})
	now := time.Unix(0, 0)
	s, err := a.connect(now, gidOf(2), a.requestTo(2, []byte("x")), nil)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(s.message)
	for _, k := range []cm.Kind{cm.REP, cm.REJ, cm.MRA, cm.RTU, cm.DREQ, cm.DREP, cm.SIDRReq, cm.SIDRRep} {
		b, err := (&cm.Fields{Kind: k, LocalID: 5, RemoteID: 0x02000003, QPN: 7}).Encode()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if h, err := decodeHeader(b); err == nil {
			again, err := decodeHeader(h.encode())
			if err != nil || again.src != h.src || again.dst != h.dst || !bytes.Equal(again.rest, h.rest) {
				// An IPv6 header may have an IPv4-mapped address, which stays IPv6.
				t.Fatalf("%v became %v, %v", h, again, err)
			}
		}
		x := newHost(2, settings{})
		x.serve(t, 2)
		x.services[testPort] = &service{cm.Fields{Kind: cm.SIDRRep, QPN: 7}}
		x.dial(t, now, 1)
		x.out = nil
		x.receive(now, gidOf(1), b)
		if bad := x.invariants(); bad != "" {
			t.Fatal(bad)
		}
		if len(x.out) > 1 || len(x.out) == 1 && len(x.out[0].mad) > len(b) {
			t.Fatalf("%d answers", len(x.out))
		}
	})
}

// FuzzMachine runs a script of calls and messages, with few IDs so that they meet.
func FuzzMachine(f *testing.F) {
	f.Add([]byte("\x00\x00\x00\x00\x10\x01\x01\x01\x20\x00\x00\x00"))
	f.Add([]byte("\x01\x00\x00\x00\x12\x01\x01\x02\x02\x00\x00\x00\x05\x00\x00\x00\x06\x00\x00\x00"))
	f.Add(bytes.Repeat([]byte("\x10\x01\x02\x03\x03\x00\x00\x00\x14\x01\x01\x00\x07\xff\x01\x00"), 4))
	f.Fuzz(func(t *testing.T, script []byte) {
		small := uint32(0)
		h := newHost(2, settings{most: 6, random: func() uint32 { small++; return small & 0xf }})
		h.serve(t, 2)
		now := time.Unix(0, 0)
		var taken []*session
		kinds := []cm.Kind{cm.REQ, cm.REP, cm.RTU, cm.REJ, cm.MRA, cm.DREQ, cm.DREP, cm.SIDRReq, cm.SIDRRep}
		for len(script) >= 4 {
			op, x, y, z := script[0], script[1], script[2], script[3]
			script = script[4:]
			s := &session{state: gone}
			if len(taken) > 0 {
				s = taken[int(x)%len(taken)]
			}
			switch op % 16 {
			case 0:
				q := h.requestTo(1, nil)
				q.QPN = uint32(y & 7)
				if s, err := h.connect(now, gidOf(1+x&1*2), q, nil); err == nil {
					taken = append(taken, s)
				}
			case 1:
				if s := h.take(h.port); s != nil {
					taken = append(taken, s)
				}
			case 2:
				_ = h.accept(now, s, cm.Fields{QPN: uint32(y & 7)}) // fails in other states
			case 3:
				_ = h.reject(now, s, Reason(y), []byte{z}) // likewise
			case 4:
				_ = h.ready(s) // likewise
			case 5:
				h.disconnect(now, s, ErrClosed)
			case 6:
				h.abandon(now, s)
			case 7:
				now = now.Add(time.Duration(binary.BigEndian.Uint16([]byte{x, y})) * time.Millisecond)
				h.tick(now)
			case 9:
				if s, err := h.resolve(now, gidOf(1+x&1*2), datagramID(uint16(y&1)), nil, nil); err == nil {
					taken = append(taken, s)
				}
			case 8:
				h.unlisten(now, h.port)
				h.serve(t, int(x&3))
			default:
				from := byte(1 + z&1*2)
				msg := cm.Fields{Kind: kinds[int(op>>4)%len(kinds)], LocalID: uint32(x & 7), RemoteID: uint32(y & 15),
					QPN: uint32(z >> 1 & 7), Reason: uint16(x), ServiceTimeout: y, Answers: cm.Answered(z >> 6),
					RemoteTimeout: x >> 3, LocalTimeout: y >> 3, MaxRetries: z >> 4}
				if msg.Kind == cm.REQ {
					q := h.requestTo(2, nil)
					hdr := ipHeader{src: netip.AddrPortFrom(addr(from), 1), dst: addr(2)}
					msg.Service, msg.Local, msg.Remote, msg.PathMTU, msg.Private = q.Service, gidOf(from), h.gid,
						uint8(guestdrv.MTU1024), hdr.encode()
				}
				if msg.Kind == cm.SIDRRep {
					msg.Service, msg.Status = datagramID(uint16(y&1)), cm.SIDRStatus(z>>6)
				}
				mad, err := msg.Encode()
				if err != nil {
					t.Fatal(err)
				}
				h.receive(now, gidOf(from), mad)
				if len(h.out) > 2 { // the answer, and a DREQ for a connection that the peer has forgotten
					t.Fatalf("%d messages for one", len(h.out))
				}
			}
			for _, d := range h.out {
				if _, err := cm.Parse(d.mad); err != nil || d.to == h.gid {
					t.Fatalf("sent to %v: %v", d.to, err)
				}
			}
			h.out = nil
			if bad := h.invariants(); bad != "" {
				t.Fatal(bad)
			}
		}
		// Whatever has happened: once the programs have closed everything, time empties the tables.
		h.unlisten(now, h.port)
		for range 40 {
			for _, s := range h.byLocal {
				h.abandon(now, s)
			}
			now = now.Add(time.Minute)
			h.tick(now)
		}
		h.empty(t)
	})
}
