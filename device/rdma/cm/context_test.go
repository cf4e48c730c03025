package cm_test

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/cm"
	"github.com/vnicd/vnicd/device/rdma/cm/cmtest"
	"github.com/vnicd/vnicd/device/rdma/record"
)

func recorded(t *cm.Table, now int64) []byte {
	w := record.Writer()
	var all []cm.Conn
	t.Each(now, func(c *cm.Conn) { all = append(all, *c) })
	record.List(w, &all, 1<<20, "connections", func(c *cm.Conn) { c.Record(w, now) })
	return w.Bytes()
}

func reproduced(b []byte, now int64) (*cm.Table, error) {
	r := record.Reader(b)
	var all []cm.Conn
	record.List(r, &all, 1<<20, "connections", func(c *cm.Conn) { c.Record(r, now) })
	if err := r.End(); err != nil {
		return nil, err
	}
	t := cm.NewTable(0)
	for i := range all {
		if err := t.Add(now, &all[i]); err != nil {
			return nil, err
		}
	}
	return t, nil
}

// A table in another process, with a clock of its own, knows the connections, and refuses what contradicts them (CO-1).
func TestRecorded(t *testing.T) {
	const then, now = 1e9, 5e9
	a, b := newSide(1), newSide(2)
	carry(t, then, a, b, cmtest.Message{Kind: cm.REQ, LocalID: 11, Service: tcp7174, QPN: 0x101, PathMTU: 3, RNRRetry: 7})
	b.table.Bind(0x202, gid(1), 0x101)
	carry(t, then, b, a, cmtest.Message{Kind: cm.REP, LocalID: 22, RemoteID: 11, QPN: 0x202, RNRRetry: 7})
	a.table.Bind(0x101, gid(2), 0x202)
	carry(t, then, a, b, cmtest.Message{Kind: cm.RTU, LocalID: 11, RemoteID: 22})
	carry(t, then, a, b, cmtest.Message{Kind: cm.REQ, LocalID: 12, Service: tcp7174, QPN: 0x103})
	carry(t, then, b, a, cmtest.Message{Kind: cm.SIDRReq, LocalID: 12, Service: tcp7174})
	carry(t, then, a, b, cmtest.Message{Kind: cm.SIDRRep, LocalID: 12, Service: tcp7174, QPN: 0x104})
	carry(t, then, a, b, cmtest.Message{Kind: cm.REQ, LocalID: 13, Service: tcp7174, QPN: 0x105})
	carry(t, then, b, a, cmtest.Message{Kind: cm.REJ, LocalID: 23, RemoteID: 13, Reason: 8})
	if a.table.Len() != 4 || b.table.Len() != 4 {
		t.Fatal(a.table.Len(), b.table.Len())
	}
	for _, s := range []*side{a, b} {
		was := s.table
		context := recorded(was, then+5)
		var err error
		if s.table, err = reproduced(context, now); err != nil {
			t.Fatal(err)
		}
		if x := s.table.Invariants(); x != "" {
			t.Fatal(x)
		}
		// Its queue pair binds one again; then both know the same.
		own, theirs := uint32(0x101), uint32(0x202)
		if s == b {
			own, theirs = theirs, own
		}
		if c := s.table.Bind(own, gid(3-s.n), theirs); c == nil || c.PeerPatience() != was.ByQP(own).PeerPatience() ||
			c.Began != now-5 {
			t.Fatalf("side %d: the queue pair finds %+v", s.n, c)
		}
		if again := recorded(s.table, now); !bytes.Equal(again, context) {
			t.Errorf("side %d: a record of %d bytes became one of %d", s.n, len(context), len(again))
		}
	}
	for what, m := range map[string]cmtest.Message{
		"DREQ for another queue pair": {Kind: cm.DREQ, LocalID: 22, RemoteID: 11, QPN: 0x999},
		"DREQ with another ID":        {Kind: cm.DREQ, LocalID: 23, RemoteID: 11, QPN: 0x101},
	} {
		if _, why := a.table.Watch(now, datagram(false, 2, 1, &m)); why == cm.Pass {
			t.Errorf("%s passes", what)
		}
	}
	x, y := carry(t, now, a, b, cmtest.Message{Kind: cm.DREQ, LocalID: 11, RemoteID: 22, QPN: 0x202})
	if x == nil || y == nil || x.State != cm.DreqSent || y.State != cm.DreqReceived {
		t.Errorf("DREQ: %+v, %+v", x, y)
	}
	// What is half open expires.
	if n := count(a.table, now+int64(cm.HalfOpen)); n != 1 {
		t.Errorf("%d connections remain, want the one with a queue pair", n)
	}
}

// Damaged records are refused, or make a valid table (CO-7).
func FuzzRecorded(f *testing.F) {
	a := newSide(1)
	for i := range uint32(5) {
		m := cmtest.Message{Kind: cm.REQ, LocalID: i, Service: tcp7174, QPN: 0x101 + i, Local: gid(1), Remote: gid(2)}
		a.table.Watch(0, datagram(i%2 == 0, 1+byte(i%2), 2-byte(i%2), &m))
	}
	good := recorded(a.table, 0)
	f.Add(good)
	rng := rand.New(rand.NewPCG(1, 2))
	for range 100 {
		bad := bytes.Clone(good)
		bad[rng.IntN(len(bad))] ^= byte(1 + rng.IntN(255))
		f.Add(bad)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		table, err := reproduced(b, 7)
		if err != nil {
			return
		}
		table.Bind(0x101, gid(2), 0x102)
		table.Release(8, 0x101)
		if x := table.Invariants(); x != "" {
			t.Error(x)
		}
	})
}
