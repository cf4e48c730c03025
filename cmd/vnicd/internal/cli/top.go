package cli

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os/signal"
	"slices"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
)

func (a *app) topCmd() *cobra.Command {
	var every time.Duration
	var rounds int
	c := &cobra.Command{
		Use:   "top",
		Short: "Show live rates of VMs and ports",
		Long: `Shows, again and again until an interrupt, what each VM does: queue pairs, RDMA and
Ethernet rates, page faults, what was sent again and what was dropped. The busiest VM
comes first. Rates are per second, since the line before.

` + whichSocket,
		Args: args(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error {
			if every < 100*time.Millisecond || every > time.Hour {
				return usageError{fmt.Errorf("--delay must be 100ms to 1h, found %v", every)}
			}
			client, err := a.client(c)
			if err != nil {
				return err
			}
			ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			return a.top(ctx, client, every, rounds)
		},
	}
	c.Flags().StringVar(&a.control, "control", "", "control socket `path`")
	c.Flags().DurationVarP(&every, "delay", "d", 2*time.Second, "time between two views")
	c.Flags().IntVarP(&rounds, "count", "n", 0, "end after so many `views`, and do not clear the screen between them (default: no end)")
	return c
}

// clearScreen moves to the upper left corner and erases what follows.
const clearScreen = "\x1b[H\x1b[J"

func (a *app) top(ctx context.Context, client *daemon.Client, every time.Duration, rounds int) error {
	before, err := client.Status(ctx)
	if err != nil {
		return err
	}
	t := time.NewTicker(every)
	defer t.Stop()
	for n := 0; rounds == 0 || n < rounds; n++ {
		select {
		case <-t.C:
		case <-ctx.Done():
			return nil
		}
		now, err := client.Status(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		if rounds == 0 {
			fmt.Fprint(a.out, clearScreen)
		}
		showTop(a.out, before, now)
		before = now
	}
	return nil
}

// load is what one VM did between two views.
type load struct {
	vm                    *daemon.VMStatus
	rdmaIn, rdmaOut       uint64 // bytes, copies between VMs of this host included
	ethIn, ethOut         uint64 // bytes at its port, from the VM's point of view
	faults, again, missed uint64
}

// loads compares two views; a VM that is new, or whose counters began anew, counts from 0.
func loads(before, now *daemon.Status) []load {
	ports := func(s *daemon.Status) map[string][3]uint64 {
		m := map[string][3]uint64{}
		for _, n := range s.Networks {
			for _, p := range n.Ports {
				if p.Kind != "vm" {
					continue
				}
				var drops uint64
				for _, d := range p.Drops {
					drops += d
				}
				m[p.Name] = [3]uint64{p.InBytes, p.OutBytes, drops}
			}
		}
		return m
	}
	since := func(a, b uint64) uint64 {
		if b < a {
			return b
		}
		return b - a
	}
	old := map[string]*daemon.VMStatus{}
	for i := range before.VMs {
		old[before.VMs[i].Name] = &before.VMs[i]
	}
	was, is := ports(before), ports(now)
	var out []load
	for i := range now.VMs {
		v := &now.VMs[i]
		o := old[v.Name]
		if o == nil {
			o = &daemon.VMStatus{}
		}
		stat := func(names ...string) (n uint64) {
			for _, name := range names {
				n += since(o.HCA.Stats[name], v.HCA.Stats[name])
			}
			return n
		}
		var refused uint64
		for reason, n := range v.HCA.Drops {
			refused += since(o.HCA.Drops[reason], n)
		}
		p, q := was[v.Name], is[v.Name]
		out = append(out, load{
			vm: v, rdmaIn: stat("rx_bytes"), rdmaOut: stat("tx_bytes", "local_bytes"),
			ethIn: since(p[1], q[1]), ethOut: since(p[0], q[0]),
			faults: stat("guest_faults") + since(o.Memory.HostFaults, v.Memory.HostFaults),
			again:  stat("retransmits"), missed: since(p[2], q[2]) + refused,
		})
	}
	slices.SortStableFunc(out, func(a, b load) int {
		return cmp.Compare(b.rdmaIn+b.rdmaOut+b.ethIn+b.ethOut, a.rdmaIn+a.rdmaOut+a.ethIn+a.ethOut)
	})
	return out
}

func showTop(w io.Writer, before, now *daemon.Status) {
	seconds := now.Uptime - before.Uptime
	if seconds <= 0 {
		seconds = 1 // vnicd was restarted meanwhile
	}
	rate := func(n uint64) string { return amount(float64(n) / seconds) }
	fmt.Fprintf(w, "vnicd %s on %s, up %v; %d VMs, %d of %d buffers in use\n", now.Version, now.Host,
		time.Duration(now.Uptime*float64(time.Second)).Round(time.Second), len(now.VMs), now.Buffers.InUse, now.Buffers.Count)
	t := table(w)
	fmt.Fprintln(t, "VM\tNET\tHCA\tQPs\tRDMA in B/s\tout B/s\tETH in B/s\tout B/s\tFAULTS/s\tparked\tAGAIN/s\tDROPS/s\tRESIDENT")
	for _, l := range loads(before, now) {
		v := l.vm
		fmt.Fprintf(t, "%s\t%s\t%s\t%d\t%s\t%s\t%s\t%s\t%s\t%d\t%s\t%s\t%s\n", v.Name, state(v.Net.Connected, v.Net.Up()), state(v.HCA.Connected, v.HCA.Up),
			len(v.HCA.QPs), rate(l.rdmaIn), rate(l.rdmaOut), rate(l.ethIn), rate(l.ethOut), rate(l.faults), v.HCA.Faults.Parked,
			rate(l.again), rate(l.missed), mib(v.Memory.Resident))
	}
	t.Flush()
}

// amount writes a number with three digits and a unit of 1000.
func amount(v float64) string {
	for _, unit := range []string{"", "k", "M", "G"} {
		if v < 999.5 {
			if v < 10 && v != float64(int(v)) {
				return fmt.Sprintf("%.1f%s", v, unit)
			}
			return fmt.Sprintf("%.0f%s", v, unit)
		}
		v /= 1000
	}
	return fmt.Sprintf("%.0fT", v)
}
