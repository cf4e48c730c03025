package main

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"time"

	"github.com/vnicd/vnicd/device/hca"
	"github.com/vnicd/vnicd/integration/lab"
)

// guestFaultVM is the mean time of a guest fault whose driver is the kernel module in
// a VM, from raise to RESUME_FAULT, as the device counts it: perftest writes from and to
// fresh on-demand buffers, 4 MiB each. Images and module are built first if need be.
func guestFaultVM(ctx context.Context, b *Bench) (m Meter, err error) {
	l, err := lab.New(context.WithoutCancel(ctx), os.Stderr, true)
	if err != nil {
		return m, err
	}
	b.Add(l.Run)
	h, err := l.Host("bench")
	if err != nil {
		return m, err
	}
	if err := b.daemon(ctx, h, 0, 1, ""); err != nil {
		return m, err
	}
	v := lab.VM{Name: vmName(0), MAC: vmMAC(0), Addr: "10.0.0.1/24", CPUs: 2}
	cfg, err := h.Config(ctx, v)
	if err != nil {
		return m, err
	}
	vms, err := l.Boot(ctx, cfg)
	if err != nil {
		return m, err
	}
	if err := lab.LoadModule(ctx, vms[0]); err != nil {
		return m, err
	}
	m.Ours = func(ctx context.Context, d time.Duration) (Sample, error) {
		end, err := lab.NewEnd(ctx, vms[0], lab.Device, v.Addr)
		if err != nil {
			return Sample{}, err
		}
		n, mean, err := served(ctx, h, func() error {
			for stop := time.Now().Add(d); ; {
				if err := writeOnDemand(ctx, end); err != nil || time.Now().After(stop) {
					return err
				}
			}
		})
		return Sample{mean, map[string]float64{"faults": float64(n)}}, err
	}
	return m, nil
}

func writeOnDemand(ctx context.Context, end lab.End) error {
	_, err := lab.Perftest(ctx, end, end, "ib_write_bw", "--odp", "-s", "4194304", "-n", "5")
	return err
}

// served runs f and returns how many guest faults the VMs' drivers answered meanwhile, at least one, and their mean time from raise to resume, us.
func served(ctx context.Context, h *lab.Host, f func() error) (n uint64, mean float64, err error) {
	n0, sum0, err := guestFaults(ctx, h)
	if err != nil {
		return 0, 0, err
	}
	if err := f(); err != nil {
		return 0, 0, err
	}
	n, sum, err := guestFaults(ctx, h)
	if err != nil {
		return 0, 0, err
	}
	if n -= n0; n == 0 {
		return 0, 0, errors.New("no page fault occurred")
	}
	return n, float64((sum - sum0).Nanoseconds()) / float64(n) / 1e3, nil
}

// guestFaults is how many guest faults the VMs' drivers have answered, and the sum of
// their times from raise to resume.
func guestFaults(ctx context.Context, h *lab.Host) (n uint64, sum time.Duration, err error) {
	out, err := h.CLI(ctx, "status", "-j")
	if err != nil {
		return 0, 0, err
	}
	var s struct {
		VMs []struct{ HCA hca.Status }
	}
	if err := json.Unmarshal([]byte(out), &s); err != nil {
		return 0, 0, err
	}
	for i := range s.VMs {
		f := s.VMs[i].HCA.Faults.Guest
		k := f.Resumed + f.Failed
		n, sum = n+k, sum+f.Mean*time.Duration(k)
	}
	return n, sum, nil
}
