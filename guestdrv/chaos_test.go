package guestdrv_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/hca"
	"github.com/vnicd/vnicd/guestdrv"
)

// TestChaos runs mixed traffic between all pairs of three HCAs at once, over a bad network, while objects are created
// and destroyed on the same devices.
func TestChaos(t *testing.T) {
	r := newRig(t, rigConfig{hosts: 3, driver: guestdrv.Config{Memory: 64 << 20}})
	for i, h := range r.hosts {
		r.impair(h, impairment{drop: 3, double: 5, corrupt: 3, delay: 10}, uint64(i))
	}
	t.Run("group", func(t *testing.T) {
		for i, ha := range r.hosts {
			for k, hb := range r.hosts {
				a, b := connect(t, ha, hb, qpDefaults(), guestdrv.ConnectOptions{Timeout: 14})
				t.Run(fmt.Sprint(i, k), func(t *testing.T) {
					t.Parallel()
					mixedTraffic(t, a, b, 100, uint64(10*i+k))
				})
			}
			t.Run(fmt.Sprint("churn", i), func(t *testing.T) {
				t.Parallel()
				churn(t, ha, r.hosts[(i+1)%3], 25)
			})
		}
	})
}

// churn makes connections and breaks them during their work and in every order. It requires that nothing is written
// after a region's deregistration has returned (EP-3), and that every object can be destroyed.
func churn(t *testing.T, ha, hb *host, rounds int) {
	rng := rand.New(rand.NewPCG(uint64(ha.mac[5]), 7))
	src, smr := ha.region(t, 100000, 0)
	fill(src.Bytes(), 1)
	dst, err := hb.Alloc(100000)
	if err != nil {
		t.Fatal(err)
	}
	for range rounds {
		dmr, err := hb.pd.Register(bg, dst, allAccess)
		if err != nil {
			t.Fatal(err)
		}
		a, b := connect(t, ha, hb, qpDefaults(), guestdrv.ConnectOptions{Timeout: 8, RetryCnt: 3})
		const n = 10
		for i := range n {
			a.post(t, &request{ID: uint64(i), Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled,
				SGL: []guestdrv.SGE{smr.SGE(0, 100000)}, RemoteAddr: dst.Addr(), RKey: dmr.RKey()})
		}
		if rng.IntN(2) == 0 {
			await(t, a.scq, 1+rng.IntN(3))
		}
		dead := false
		kill := func() {
			if !dead {
				dead = true
				if err := b.qp.Close(); err != nil {
					t.Fatal(err)
				}
			}
		}
		if rng.IntN(2) == 0 {
			kill()
		}
		if err := dmr.Close(); err != nil {
			t.Fatal(err)
		}
		clear(dst.Bytes())
		if rng.IntN(2) == 0 {
			// Every request ends with success or an error; the queue is then empty.
			for a.qp.Outstanding() > 0 {
				if wc := await(t, a.scq, 1)[0]; wc.Status != guestdrv.WCSuccess && wc.Status != guestdrv.WCRemAccessErr &&
					wc.Status != guestdrv.WCRetryExcErr && wc.Status != guestdrv.WCWRFlushErr {
					t.Fatalf("completion %+v (%s)", wc, wc.Status)
				}
			}
		}
		if err := a.qp.Close(); err != nil {
			t.Fatal(err)
		}
		kill()
		for _, cq := range []*guestdrv.CQ{a.scq, a.rcq, b.scq, b.rcq} {
			if err := cq.Close(); err != nil {
				t.Fatal(err)
			}
		}
		if !allZero(dst.Bytes()) {
			t.Fatal("memory was written to after its deregistration")
		}
	}
}

// TestLimits fills every table of a VM and checks that freed entries can be reused.
func TestLimits(t *testing.T) {
	r := newRig(t, rigConfig{hosts: 1, limits: hca.Limits{PDs: 3, CQs: 3, QPs: 3, MRs: 3, SRQs: 3}})
	h := r.hosts[0] // has one PD
	cq := h.cq(t, 4)
	buf, err := h.Alloc(4096)
	if err != nil {
		t.Fatal(err)
	}
	type destroyer func() error
	for _, tc := range []struct {
		name string
		make func() (destroyer, error)
	}{
		{"PD", func() (destroyer, error) {
			x, err := h.AllocPD(bg)
			if err != nil {
				return nil, err
			}
			return x.Close, nil
		}},
		{"CQ", func() (destroyer, error) {
			x, err := h.CreateCQ(bg, 1, guestdrv.CQOptions{})
			if err != nil {
				return nil, err
			}
			return x.Close, nil
		}},
		{"QP", func() (destroyer, error) {
			x, err := h.pd.CreateQP(bg, guestdrv.QPConfig{Type: guestdrv.QPTypeRC, SendCQ: cq, RecvCQ: cq})
			if err != nil {
				return nil, err
			}
			return x.Close, nil
		}},
		{"MR", func() (destroyer, error) {
			x, err := h.pd.Register(bg, buf, 0)
			if err != nil {
				return nil, err
			}
			return x.Close, nil
		}},
		{"SRQ", func() (destroyer, error) {
			x, err := h.pd.CreateSRQ(bg, guestdrv.SRQConfig{MaxWR: 1})
			if err != nil {
				return nil, err
			}
			return x.Close, nil
		}},
	} {
		var all []destroyer
		for range 4 {
			d, err := tc.make()
			if err != nil {
				if !errors.Is(err, guestdrv.StatusNoMemory) {
					t.Errorf("%s beyond the limit: %v", tc.name, err)
				}
				break
			}
			all = append(all, d)
		}
		if len(all) == 0 || len(all) > 3 {
			t.Errorf("%s: %d were made, limit 3", tc.name, len(all))
			continue
		}
		for range 5 {
			if err := all[0](); err != nil {
				t.Fatalf("%s: %v", tc.name, err)
			}
			d, err := tc.make()
			if err != nil {
				t.Fatalf("%s: after one was destroyed: %v", tc.name, err)
			}
			all[0] = d
		}
		for _, d := range all {
			if err := d(); err != nil {
				t.Errorf("%s: %v", tc.name, err)
			}
		}
	}
}
