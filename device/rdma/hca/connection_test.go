package hca

import (
	"slices"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/wire"
)

// A connection is listed from when the QP gets its peer until the QP is destroyed.
func TestConnectionsLife(t *testing.T) {
	w := newWorld(t, 2, 2, Limits{})
	a, b := w.pair()
	for _, x := range []*tqp{a, b} {
		list := x.g.Connections()
		if len(list) != 1 || list[0].State != "direct" || list[0].QPState != "RTS" || list[0].LocalQPN != x.n {
			t.Fatalf("%+v", list)
		}
	}
	if c := a.g.Connections()[0]; c.RemoteQPN != b.n || c.LocalGID != "10.0.0.1" || c.RemoteGID != "10.0.0.2" ||
		c.RemoteMAC != "02:00:00:00:00:02" {
		t.Errorf("%+v", c)
	}
	a.g.Reset()
	if list := a.g.Connections(); len(list) != 0 {
		t.Errorf("after a reset: %+v", list)
	}
}

// Wants accepts exactly the frames that Deliver accepts: the switch learns from no others (MT-6).
func TestWants(t *testing.T) {
	w := newWorld(t, 1, 2, Limits{})
	good := w.frames()
	g := w.guests[1]
	if !w.wants(g, good[0]) {
		t.Fatal("Wants refuses a frame that Deliver accepts")
	}
	for name, x := range map[string]struct {
		why rejectReason
		mod func(f []byte) []byte
	}{
		"cut off":    {rejectHeader, func(f []byte) []byte { return f[:40] }},
		"nothing":    {rejectHeader, func([]byte) []byte { return nil }},
		"source MAC": {rejectSource, func(f []byte) []byte { f[11] ^= 1; return f }},
		"source IP":  {rejectSource, func(f []byte) []byte { f[29] ^= 4; ipSum(f[14:34]); return f }},
		"QP number":  {rejectQPN, func(f []byte) []byte { f[14+20+8+7] ^= 0x40; return f }},
		"a group": {rejectGroup, func(f []byte) []byte {
			f[14+20+8+5], f[14+20+8+6], f[14+20+8+7] = 255, 255, 255
			return f
		}},
		"not for a UD": {rejectQPN, func(f []byte) []byte { f[14+20+8+5], f[14+20+8+6], f[14+20+8+7] = 0, 0, 1; return f }},
	} {
		f := x.mod(slices.Clone(good[0]))
		if len(f) > 50 {
			if err := wire.SealICRC(f); err != nil {
				t.Fatal(err)
			}
		}
		before := g.rejected[x.why].Load()
		if w.wants(g, f) || g.rejected[x.why].Load() != before+1 {
			t.Errorf("%s: wanted, or not counted as %s: %v", name, rejectNames[x.why], g.Drops())
		}
	}
	f := slices.Clone(good[0])
	f[len(f)-1] ^= 1
	if w.wants(g, f) || g.Drops()["icrc"] != 1 {
		t.Errorf("a wrong ICRC: %v", g.Drops())
	}
}
