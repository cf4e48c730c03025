package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
)

// Rows of programs in VMs that are not perftest.

// addrOf returns an address without its prefix length.
func addrOf(prefix string) string {
	a, _, _ := strings.Cut(prefix, "/")
	return a
}

// guestTCP measures one TCP connection between VMs on two hosts over our virtio-net and tunnel. The anchor is the same
// over QEMU's TAP, the kernel's bridge and its vxlan device.
func guestTCP(ctx context.Context, b *Bench) (m Meter, err error) {
	_, vms, kind, err := b.guests(ctx, 2)
	if err != nil {
		return m, err
	}
	if _, err := vms[1].Run(ctx, "iperf3 -s -D"); err != nil {
		return m, err
	}
	over := func(addr string) func(context.Context, time.Duration) (Sample, error) {
		return func(ctx context.Context, d time.Duration) (Sample, error) {
			return working("KiB", func() (Sample, float64, error) {
				var r iperfResult
				// Shorter ones are all slow start.
				seconds := math.Max(3, math.Ceil(d.Seconds()))
				// The server does not listen for a moment between two clients.
				out, err := vms[0].Run(ctx, fmt.Sprintf("for i in 1 2 3 4 5; do o=$(iperf3 -J -t %g -c %s) && "+
					"{ echo \"$o\"; exit; }; sleep 1; done; echo \"$o\"; exit 1", seconds, addrOf(addr)))
				if err == nil {
					err = json.Unmarshal([]byte(out), &r)
				}
				if err == nil && r.End.Received.Bytes == 0 {
					err = fmt.Errorf("iperf3 to %s: nothing arrived: %s", addr, out)
				}
				s := Sample{Value: r.End.Received.BitsPerSecond / 1e6}
				kind.mark(&s)
				return s, r.End.Received.Bytes / 1024, err
			})
		}
	}
	return Meter{Ours: over(guestAddr(1)), Anchor: over(bridgedAddr(1))}, nil
}

// fioResult is the part of fio's JSON that is used.
type fioResult struct {
	Jobs []struct {
		Error int
		Read  struct {
			IOPS    float64 `json:"iops"`
			IOs     float64 `json:"total_ios"`
			Latency struct {
				Percentile map[string]float64 `json:"percentile"`
			} `json:"clat_ns"`
		} `json:"read"`
	} `json:"jobs"`
}

// guestNVMe measures random reads of 4 KiB by NVMe over RDMA between VMs on two hosts. The anchor is NVMe over TCP to
// the same target over QEMU's TAP and the kernel's bridge. Before the reads of each connection fio writes and verifies.
func guestNVMe(ctx context.Context, b *Bench) (m Meter, err error) {
	_, vms, kind, err := b.guests(ctx, 2)
	if err != nil {
		return m, err
	}
	host, target := vms[0], vms[1]
	ways := []lab.NVMe{{Transport: "rdma", Addr: addrOf(guestAddr(1))}, {Transport: "tcp", Addr: addrOf(bridgedAddr(1))}}
	end, err := lab.ExportNVMe(ctx, target, ways...)
	if err != nil {
		return m, err
	}
	b.Add(func() { _ = end() })
	by := func(n int) func(context.Context, time.Duration) (Sample, error) {
		return func(ctx context.Context, d time.Duration) (s Sample, err error) {
			if _, err := host.Run(ctx, ways[n].Connect(n)); err != nil {
				return s, err
			}
			s, err = readNVMe(ctx, host, ways[n].Transport, d)
			kind.mark(&s)
			_, cerr := host.Run(ctx, ways[n].Disconnect())
			return s, errors.Join(err, cerr)
		}
	}
	return Meter{Ours: by(0), Anchor: by(1)}, nil
}

const fio = "fio --name=x --filename=/dev/nvme0n1 --direct=1 --ioengine=libaio "

// readNVMe lets fio write and verify the connected disk, and then read it for d.
func readNVMe(ctx context.Context, host *qemu.Machine, transport string, d time.Duration) (Sample, error) {
	if _, err := host.Run(ctx, fio+"--rw=randwrite --bs=4k --size=1M --iodepth=8 --verify=crc32c --verify_fatal=1 "+
		"--minimal >/dev/null"); err != nil {
		return Sample{}, err
	}
	return working("read", func() (Sample, float64, error) {
		out, err := host.Run(ctx, fmt.Sprintf("%s --rw=randread --bs=4k --iodepth=16 --time_based --runtime=%g --output-format=json",
			fio, math.Max(2, math.Ceil(d.Seconds()))))
		if err != nil {
			return Sample{}, 0, err
		}
		var r fioResult
		if err := json.Unmarshal([]byte(out), &r); err != nil {
			return Sample{}, 0, fmt.Errorf("fio: %w: %s", err, out)
		}
		if len(r.Jobs) != 1 || r.Jobs[0].Error != 0 || r.Jobs[0].Read.IOs == 0 {
			return Sample{}, 0, fmt.Errorf("fio read nothing: %s", out)
		}
		read := r.Jobs[0].Read
		return Sample{Value: read.IOPS, Extra: map[string]float64{
			transport + ", p50, us": read.Latency.Percentile["50.000000"] / 1e3,
			transport + ", p99, us": read.Latency.Percentile["99.000000"] / 1e3,
		}}, read.IOs, nil
	})
}
