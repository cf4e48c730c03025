package guestdrv_test

import (
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/rdma/hca"
	"github.com/vnicd/vnicd/guestdrv"
)

// TestMessageRate: two queue pairs together send no faster than the VM's limit, both make progress, and flushed
// requests are not delayed.
func TestMessageRate(t *testing.T) {
	const rate, n = 500, 64
	r := newRig(t, rigConfig{limits: hca.Limits{Messages: rate}})
	ha, hb := r.hosts[0], r.hosts[1]
	_, smr := ha.region(t, 4096, 0)
	dst, dmr := hb.region(t, 4096, allAccess)
	write := func(e *end, id uint64) {
		t.Helper()
		e.post(t, &request{ID: id, Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled,
			SGL: []guestdrv.SGE{smr.SGE(0, 8)}, RemoteAddr: dst.Addr(), RKey: dmr.RKey()})
	}
	var ends []*end
	for range 2 {
		a, _ := connect(t, ha, hb, qpDefaults(), guestdrv.ConnectOptions{})
		ends = append(ends, a)
	}
	start := time.Now()
	for i := range uint64(n) {
		write(ends[0], i)
		write(ends[1], i)
	}
	for _, e := range ends {
		for i := range uint64(n) {
			expect(t, e.scq, i, guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
		}
	}
	// The first message is sent at once, and the sender may catch up on a delay of 1 ms.
	if d, least := time.Since(start), (2*n-1)*time.Second/rate-time.Millisecond; d < least {
		t.Errorf("%d messages in %v, at %d a second it is %v", 2*n, d, rate, least)
	}

	r = newRig(t, rigConfig{limits: hca.Limits{Messages: 1}})
	a, _ := connect(t, r.hosts[0], r.hosts[1], qpDefaults(), guestdrv.ConnectOptions{})
	for i := range uint64(n) {
		a.post(t, &request{ID: i, Opcode: guestdrv.WRSend})
	}
	if err := a.qp.ToErr(bg); err != nil {
		t.Fatal(err)
	}
	start = time.Now()
	for i := range uint64(n) {
		if wc := await(t, a.scq, 1)[0]; wc.ID != i || wc.Status != guestdrv.WCWRFlushErr {
			t.Fatalf("completion %+v", wc)
		}
	}
	if d := time.Since(start); d > n*time.Second/2 {
		t.Errorf("the flush took %v", d)
	}
}
