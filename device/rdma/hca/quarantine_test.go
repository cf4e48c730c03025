package hca

import (
	"testing"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/translate"
)

// restrict sets a guest's attribute, as the daemon does.
func (g *guest) restrict(a *translate.Attribute, u translate.Uplink) {
	g.tb.Helper()
	drains, err := a.Set(u)
	if err != nil {
		g.tb.Fatal(err)
	}
	g.Quarantine(u == translate.UplinkBlocked)
	for _, d := range drains {
		g.w.until("the releases", d.Done)
	}
}

// An operation that waits for a page absent on the host while the VM is restricted ends when the page is there,
// without an access to it: a READ and a SEND of the VM, a WRITE to it, and a datagram that was kept for it (PF-3).
func TestQuarantineHostFaults(t *testing.T) {
	for _, u := range []translate.Uplink{translate.UplinkReadOnly, translate.UplinkBlocked} {
		for _, op := range []string{"READ", "SEND", "WRITE", "datagram"} {
			t.Run(u.String()+"/"+op, func(t *testing.T) {
				w := newWorld(t, 1, 2, Limits{})
				ga, gb := w.guests[0], w.guests[1] // gb is restricted
				var attribute translate.Attribute
				attribute.Bind(gb.space)
				pa, pb := ga.pd(), gb.pd()
				theirs, own := ga.alloc(4096), gb.alloc(4096)
				ka, kb := ga.mr(pa, theirs, 4096, demandAccess), gb.mr(pb, own, 4096, demandAccess)
				fill(ga.at(theirs, 4096), 5)
				used := w.pool.InUse()
				spec := qpSpec{pd: pa}
				if op == "datagram" {
					spec.typ = abi.QPTypeUD
				}
				a := ga.qp(spec)
				spec.pd = pb
				b := gb.qp(spec)
				if op == "datagram" {
					table := ga.ahTable()
					a.connectUD(0x1234)
					b.connectUD(0x1234)
					table.set(5, to(gb, pa))
				} else {
					a.connectRC(b)
					b.connectRC(a)
				}
				local := abi.SGE{Addr: uint64(own), Length: 64, LKey: kb}
				gb.takeAway(own, 4096)
				requester := b
				switch op {
				case "READ":
					b.request(abi.WRRDMARead, local, uint64(theirs), ka)
				case "SEND":
					a.recv(3, abi.SGE{Addr: uint64(theirs), Length: 4096, LKey: ka})
					b.request(abi.WRSend, local, 0, 0)
				case "WRITE":
					requester = a
					a.request(abi.WRRDMAWrite, abi.SGE{Addr: uint64(theirs), Length: 64, LKey: ka}, uint64(own), kb)
				case "datagram":
					requester = a
					b.recv(3, abi.SGE{Addr: uint64(own), Length: 4096, LKey: kb})
					a.sendUD(1, b.n, 5, abi.SGE{Addr: uint64(theirs), Length: 64, LKey: ka})
				}
				w.until("the fault", func() bool { return gb.space.Faults().Stats().Waiting > 0 })
				gb.restrict(&attribute, u)
				before := append([]byte(nil), gb.at(own, 4096)...)
				var status []uint32
				w.until("the end", func() bool {
					gb.hostServe()
					for _, wc := range requester.scq.poll() {
						status = append(status, wc.Status)
					}
					return len(status) > 0 && gb.space.Faults().Stats().Waiting == 0 && w.pool.InUse() == used
				})
				want := map[string][2]uint32{
					"READ":     {abi.WCLocProtErr, abi.WCWRFlushErr},
					"SEND":     {abi.WCSuccess, abi.WCWRFlushErr},
					"WRITE":    {abi.WCRemAccessErr, abi.WCRetryExcErr},
					"datagram": {abi.WCSuccess, abi.WCSuccess},
				}[op][u-translate.UplinkReadOnly]
				if status[0] != want {
					t.Errorf("status %d, want %d", status[0], want)
				}
				if string(before) != string(gb.at(own, 4096)) {
					t.Error("its memory was written")
				}
				if op == "datagram" {
					if got := b.rcq.poll(); len(got) != 0 || b.state() != abi.QPRTS {
						t.Errorf("received %+v, state %v", got, b.state())
					}
				}
			})
		}
	}
}
