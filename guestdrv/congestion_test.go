package guestdrv_test

import (
	"bytes"
	"testing"

	"github.com/vnicd/vnicd/device/testutil/ways"
	"github.com/vnicd/vnicd/guestdrv"
)

// TestSharedUnderlay: eight flows over an underlay of 40 Mbit/s with a short queue all end, and at most half of the
// packets are sent again. If the underlay marks packets, the outer header's mark reaches the inner one (RFC 6040), the
// far HCA reports it, and the near one responds.
func TestSharedUnderlay(t *testing.T) {
	const flows, size = 8, 512 << 10
	for _, marks := range []bool{true, false} {
		r := newRig(t, rigConfig{vxlan: true})
		from, to := r.hosts[0], r.hosts[1]
		from.site.ns.MustExec("tc", "qdisc", "add", "dev", "underlay", "root", "tbf", "rate", "40mbit", "burst", "10k",
			"limit", "100k")
		if marks {
			to.site.ns.MustExec("nft", `table ip marks {
				chain in { type filter hook prerouting priority -300; udp dport 4789 ip ecn ect0 numgen inc mod 16 0 ip ecn set ce; }
			}`)
		}
		src, smr := from.region(t, size, guestdrv.AccessLocalWrite)
		dst, dmr := to.region(t, flows*size, allAccess)
		fill(src.Bytes(), 1)
		var ends []*end
		for i := range flows {
			a, _ := connect(t, from, to, qpDefaults(), guestdrv.ConnectOptions{})
			a.post(t, &request{ID: uint64(i), Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled,
				SGL: []guestdrv.SGE{smr.SGE(0, size)}, RemoteAddr: dst.Addr() + uint64(i*size), RKey: dmr.RKey()})
			ends = append(ends, a)
		}
		for i, e := range ends {
			expect(t, e.scq, uint64(i), guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
			if !bytes.Equal(src.Bytes(), dst.Bytes()[i*size:][:size]) {
				t.Errorf("flow %d: data differ", i)
			}
		}
		st, err := from.Stats(bg)
		if err != nil {
			t.Fatal(err)
		}
		again := st[guestdrv.StatRetransmits]
		near, far := from.hca.Describe().Stats, to.hca.Describe().Stats
		t.Logf("marks %v: %d packets marked, %d CNPs sent, %d heeded; of %d packets %d again, %d timeouts", marks,
			far["np_ecn_marked_roce_packets"], far["np_cnp_sent"], near["rp_cnp_handled"], st[guestdrv.StatTxPackets], again,
			st[guestdrv.StatTimeouts])
		if all := st[guestdrv.StatTxPackets]; again > all/2 {
			t.Errorf("of %d packets %d were sent again", all, again)
		}
		for _, n := range []uint64{far["np_ecn_marked_roce_packets"], far["np_cnp_sent"], near["rp_cnp_handled"]} {
			if (n > 0) != (marks && ways.ECN()) {
				t.Errorf("a counter of marks or notifications is %d", n)
			}
		}
	}
}
