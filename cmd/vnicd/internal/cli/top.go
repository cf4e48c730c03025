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
		Long: `Shows each VM's queue pairs, RDMA and Ethernet rates, page faults, retransmissions
and drops, until an interrupt. The busiest VM comes first. Rates are per second, over
the time since the previous view.

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
	c.Flags().IntVarP(&rounds, "count", "n", 0,
		"end after this number of `views`, and do not clear the screen between them (default: no end)")
	return c
}

// clearScreen moves to the upper left corner and erases the screen below.
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

// loads compares two views, the busiest VM first.
func loads(before, now *daemon.Status) []daemon.Load {
	out := daemon.Loads(before, now)
	slices.SortStableFunc(out, func(a, b daemon.Load) int { return cmp.Compare(traffic(&b), traffic(&a)) })
	return out
}

func traffic(l *daemon.Load) uint64 {
	return l.RDMAInBytes + l.RDMAOutBytes + l.EthInBytes + l.EthOutBytes
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
	fmt.Fprintln(t,
		"VM\tNET\tHCA\tQPs\tRDMA in B/s\tout B/s\tETH in B/s\tout B/s\tFAULTS/s\tparked\tAGAIN/s\tDROPS/s\tRESIDENT")
	for _, l := range loads(before, now) {
		v := l.VM
		fmt.Fprintf(t, "%s\t%s\t%s\t%d\t%s\t%s\t%s\t%s\t%s\t%d\t%s\t%s\t%s\n", v.Name, state(v.Net.Connected, v.Net.Up()),
			hcaState(&v.HCA), len(v.HCA.QPs), rate(l.RDMAInBytes), rate(l.RDMAOutBytes), rate(l.EthInBytes),
			rate(l.EthOutBytes), rate(l.GuestFaults+l.HostFaults), v.HCA.Faults.Parked, rate(l.Resent), rate(l.Dropped()),
			mib(v.Memory.Resident))
	}
	t.Flush()
}

// amount formats a number with three digits and a unit of 1000.
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
