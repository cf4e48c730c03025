package rdmacm

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/rdma/cm"
	"github.com/vnicd/vnicd/guestdrv"
)

// linux returns a message with the values that Linux's rdma_cm uses (cm.c and cma.c of 6.12).
func linux(tb testing.TB, f cm.Fields) []byte {
	tb.Helper()
	f.GUID, f.Transaction = 0x0200_00ff_fe00_0001, 0x1234<<32|uint64(f.LocalID)
	if f.Kind == cm.REQ {
		h := ipHeader{src: netip.MustParseAddrPort("10.0.0.1:40000"), dst: addr(2)}
		f.Service, f.RemoteTimeout, f.LocalTimeout, f.MaxRetries = serviceID(testPort), 20, 20, 15
		f.PKey, f.PathMTU, f.LocalLID, f.RemoteLID = 0xffff, uint8(guestdrv.MTU1024), 0xffff, 0xffff
		f.Local, f.Remote, f.HopLimit, f.LocalACKTimeout = gidOf(1), gidOf(2), 64, 18
		f.RetryCount, f.RNRRetry, f.Private = 7, 7, h.encode()
	}
	b, err := f.Encode()
	if err != nil {
		tb.Fatal(err)
	}
	return b
}

// Linux as the active end: the REQ is repeated after 4.3 s, a program that gives up rejects with the IDs of its state.
func TestLinuxDials(t *testing.T) {
	h := newHost(2, settings{})
	h.serve(t, 4)
	now := time.Unix(0, 0)
	req := linux(t, cm.Fields{Kind: cm.REQ, LocalID: 0xd15ea5e, QPN: 0x11, PSN: 0x123456})
	h.receive(now, gidOf(1), req)
	s := h.take(h.port)
	if s == nil || s.request.PSN != 0x123456 || s.header.src != netip.MustParseAddrPort("10.0.0.1:40000") {
		t.Fatalf("%v", s)
	}
	if d := s.deadline.Sub(now); d < 68*time.Second || d > 70*time.Second {
		t.Errorf("waits for %v, Linux for 69 s", d)
	}
	if err := h.accept(now, s, cm.Fields{QPN: 0x22}); err != nil {
		t.Fatal(err)
	}
	if s.wait < 4*time.Second || s.wait > 5*time.Second || s.retries != 15 {
		t.Errorf("the REP is repeated %d times after %v, want 15 times after 4.3 s", s.retries, s.wait)
	}
	// On receiving the REP, rdma_cm may send an MRA of 69 s.
	h.receive(now, gidOf(1), linux(t, cm.Fields{Kind: cm.MRA, LocalID: 0xd15ea5e, RemoteID: s.localID,
		Answers: cm.AnswersREP, ServiceTimeout: 24}))
	if d := s.deadline.Sub(now); d < 69*time.Second || d > 80*time.Second {
		t.Errorf("after the MRA the REP is repeated after %v", d)
	}
	h.receive(now, gidOf(1), linux(t, cm.Fields{Kind: cm.RTU, LocalID: 0xd15ea5e, RemoteID: s.localID}))
	check(t, s, established, nil)
	h.receive(now, gidOf(1), linux(t, cm.Fields{Kind: cm.DREQ, LocalID: 0xd15ea5e, RemoteID: s.localID, QPN: 0x22}))
	check(t, s, timeWait, ErrPeerDisconnected)

	// rdma_destroy_id before the answer: a REJ that names only the sender's ID, and its GUID.
	h.receive(now, gidOf(1), linux(t, cm.Fields{Kind: cm.REQ, LocalID: 0xd15ea5f, QPN: 0x12}))
	s = h.take(h.port)
	h.receive(now, gidOf(1), linux(t, cm.Fields{Kind: cm.REJ, LocalID: 0xd15ea5f, Answers: cm.AnswersOther,
		Reason: uint16(RejectTimeout), Info: []byte{2, 0, 0, 0xff, 0xfe, 0, 0, 1}}))
	check(t, s, gone, RejectTimeout)
}

// Linux as the passive end: an MRA while its program decides, a REJ without an ID before it has sent one.
func TestLinuxListens(t *testing.T) {
	h := newHost(2, settings{})
	now := time.Unix(0, 0)
	s := h.dial(t, now, 1)
	h.receive(now, gidOf(1), linux(t, cm.Fields{Kind: cm.MRA, LocalID: 0xabc, RemoteID: s.localID, ServiceTimeout: 24}))
	if d := s.deadline.Sub(now); d < 69*time.Second || d > 80*time.Second {
		t.Errorf("after the MRA the REQ is repeated after %v", d)
	}
	h.receive(now, gidOf(1), linux(t, cm.Fields{Kind: cm.REP, LocalID: 0xabc, RemoteID: s.localID, QPN: 0x11,
		PSN: 0x654321, ResponderResources: 1, InitiatorDepth: 2, RNRRetry: 7}))
	check(t, s, repReceived, nil)
	if s.reply.PSN != 0x654321 || s.reply.ResponderResources != 1 || s.reply.InitiatorDepth != 2 {
		t.Errorf("%+v", s.reply)
	}
	if err := h.ready(s); err != nil {
		t.Fatal(err)
	}
	s = h.dial(t, now, 1)
	h.receive(now, gidOf(1), linux(t, cm.Fields{Kind: cm.REJ, RemoteID: s.localID, Answers: cm.AnswersREQ,
		Reason: uint16(RejectConsumer), Private: []byte("no")}))
	var e *RejectError
	if s.state != gone || !errors.As(s.err, &e) || string(e.PrivateData[:3]) != "no\x00" {
		t.Errorf("%v", s)
	}
}
