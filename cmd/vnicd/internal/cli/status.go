package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
	"github.com/vnicd/vnicd/device/ethernet/wireguard"
	"github.com/vnicd/vnicd/device/rdma/hca"
	"github.com/vnicd/vnicd/translate"
)

func (a *app) statusCmd() *cobra.Command {
	c := &cobra.Command{
		Use:   "status [VM]",
		Short: "Show the state of the running vnicd",
		Long: `Without an argument: tunnels, networks with their ports, VMs. With a VM: its two
devices, queue pairs, counters and page faults. -j prints everything as JSON.

"outlives" says what open RDMA connections survive: a restart or upgrade of
vnicd, a kill, or nothing. Of a network device it says the same of its link.

` + whichSocket,
		Args:              args(cobra.MaximumNArgs(1)),
		ValidArgsFunction: a.complete(nil, a.names(vms)),
		RunE: func(cmd *cobra.Command, argv []string) error {
			ctx, cancel := context.WithTimeout(context.Background(), askTime)
			defer cancel()
			client, err := a.client(cmd)
			if err != nil {
				return err
			}
			s, err := client.Status(ctx)
			if err != nil {
				return err
			}
			if len(argv) == 1 {
				vm, err := findVM(s, argv[0])
				if err != nil {
					return err
				}
				if a.json {
					return a.printJSON(vm)
				}
				showVM(a.out, vm)
				return nil
			}
			if a.json {
				return a.printJSON(s)
			}
			showAll(a.out, s)
			return nil
		},
	}
	a.askFlags(c)
	return c
}

func (a *app) printJSON(v any) error {
	e := json.NewEncoder(a.out)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

func findVM(s *daemon.Status, name string) (*daemon.VMStatus, error) {
	var names []string
	for i := range s.VMs {
		if s.VMs[i].Name == name {
			return &s.VMs[i], nil
		}
		names = append(names, s.VMs[i].Name)
	}
	return nil, fmt.Errorf("no VM %q; there are: %s", name, strings.Join(names, ", "))
}

func table(w io.Writer) *tabwriter.Writer { return tabwriter.NewWriter(w, 0, 8, 2, ' ', 0) }

func showAll(w io.Writer, s *daemon.Status) {
	fmt.Fprintf(w, "vnicd %s on %s, pid %d, up %s, %d engine(s)\n", s.Version, s.Host, s.PID,
		time.Duration(s.Uptime*float64(time.Second)).Round(time.Second), len(s.Engines))
	if k := s.Keeper; k != nil {
		fmt.Fprintf(w, "keeper pid %d upgrades %d failed %d\n", k.PID, k.Upgrades, k.Failed)
		if k.Failure != "" {
			fmt.Fprintf(w, "  this is the previous program: %s\n", k.Failure)
		}
	}
	if s.WorkersEnded {
		fmt.Fprintln(w, "BGP and monitoring have ended with the process that starts theirs: restart vnicd")
	}
	if c := s.Continued; c.HCAs > 0 {
		fmt.Fprintf(w, "continued %d HCAs, which stood still for at most %v\n", c.HCAs,
			time.Duration(c.Silence*float64(time.Second)).Round(time.Millisecond))
	}
	if n := s.Continued.Revived; n > 0 {
		fmt.Fprintf(w, "continued %d HCAs after the previous vnicd was killed\n", n)
	}
	if n := s.Continued.Lost; n > 0 {
		fmt.Fprintf(w, "%d HCAs did not go on; the log says why\n", n)
	}
	if v := s.VTEP; v != nil {
		fmt.Fprintf(w, "vtep %s port %d dev %s mtu %d rx %d tx %d%s\n", v.Local, v.Port, v.Device, v.MTU, v.InFrames,
			v.OutFrames, drops(v.Drops))
		p := v.ShortPath
		fmt.Fprintf(w, "  short path %s", p.State)
		if p.State == "on" {
			fmt.Fprintf(w, ": %d entries, %d frames", p.Entries, p.Frames)
		}
		fmt.Fprintln(w)
		if s.Protection != nil {
			showProtection(w, s.Protection, time.Now())
		}
		for _, n := range v.Networks {
			for _, p := range n.Peers {
				how := "static"
				if p.Learnt {
					how = "learnt"
				}
				fmt.Fprintf(w, "    vni %d peer %s %s\n", n.VNI, p.Addr, how)
			}
		}
	}
	if s.VTEP != nil {
		for _, r := range s.VTEP.Refused {
			fmt.Fprintf(w, "    refused from %s vni %d: %s %d, last %v ago\n", r.From, r.VNI, r.Reason, r.Count,
				r.Ago.Round(time.Second))
		}
	}
	if s.Memory != nil {
		showHost(w, s.Memory)
	}
	for _, n := range s.Networks {
		fmt.Fprintf(w, "network %s vni %d mtu %d, %d addresses%s\n", n.Name, n.VNI, n.MTU, n.Entries, drops(n.Drops))
		t := table(w)
		for _, p := range n.Ports {
			fmt.Fprintf(t, "    %s\t%s\trx %d (%d B)\ttx %d (%d B)%s\n", p.Kind, p.Name, p.InFrames, p.InBytes, p.OutFrames,
				p.OutBytes, drops(p.Drops))
		}
		t.Flush()
	}
	t := table(w)
	for _, v := range s.VMs {
		fmt.Fprintf(t, "%s %s\tnetwork %s\tmac %s\tnet %s\thca %s\t%d QPs\t%d MRs%s%s%s\n", what(&v), v.Name, v.Network,
			v.MAC, netState(&v), hcaState(&v.HCA), len(v.HCA.QPs), v.HCA.MRs, outlives(v.Outlives), dmaState(&v), going(&v))
	}
	t.Flush()
}

// showProtection shows what encrypts the underlay.
func showProtection(w io.Writer, p *wireguard.Status, now time.Time) {
	fmt.Fprintf(w, "  protected by wireguard %s port %d mtu %d key %s, %d not accepted, %d not sent\n", p.Interface,
		p.ListenPort, p.MTU, p.PublicKey, p.InErrors, p.OutErrors)
	if p.Problem != "" {
		fmt.Fprintf(w, "    nothing is sent or received: %s\n", p.Problem)
	}
	for _, x := range p.Peers {
		handshake := "no handshake yet"
		if !x.Handshake.IsZero() {
			handshake = fmt.Sprintf("handshake %v ago", now.Sub(x.Handshake).Round(time.Second))
		}
		fmt.Fprintf(w, "    vtep %s at %s %s rx %d B tx %d B\n", x.VTEP, x.Endpoint, handshake, x.InBytes, x.OutBytes)
	}
}

func going(v *daemon.VMStatus) string {
	if v.Going {
		return " (being removed: its memory is still in use)"
	}
	return ""
}

// outlives tells which ends of vnicd a connection outlives; "" without a connection.
func outlives(o daemon.Outlives) string {
	switch o {
	case daemon.OutlivesKill:
		return " outlives restart, kill"
	case "":
		return ""
	}
	return " outlives " + string(o)
}

// dmaState is "" unless the VM's devices are restricted.
func dmaState(v *daemon.VMStatus) string {
	if v.DMA.Attribute == translate.UplinkReadWrite {
		return ""
	}
	return " dma " + v.DMA.Attribute.String()
}

// hcaSockets names those of the VM's HCA.
func hcaSockets(v *daemon.VMStatus) string {
	return strings.TrimSpace(v.HCASocket + " " + v.IvshmemSocket)
}

// device names QEMU's device, if one is attached.
func device(v *daemon.VMStatus) string {
	if v.HCADevice == "" {
		return ""
	}
	return " device " + v.HCADevice
}

func showVM(w io.Writer, v *daemon.VMStatus) {
	fmt.Fprintf(w, "%s %s network %s mac %s%s\n", what(v), v.Name, v.Network, v.MAC, going(v))
	if !v.IsApplication() {
		fmt.Fprintf(w, "net %s socket %s%s\n", netState(v), v.NetSocket, outlives(v.NetOutlives))
	}
	fmt.Fprintf(w, "hca %s socket %s path mtu %d%s%s\n", hcaState(&v.HCA), hcaSockets(v), v.HCA.PortMTU, device(v),
		outlives(v.Outlives))
	if r := v.DMA.Refused; v.DMA.Attribute != translate.UplinkReadWrite || r != (translate.Denied{}) {
		fmt.Fprintf(w, "dma %v, refused %d reads, %d writes\n", v.DMA.Attribute, r.Reads, r.Writes)
	}
	if v.HCA.Busy {
		fmt.Fprintln(w, "    busy: a command waits for the host's memory; objects and faults are unknown")
	} else {
		fmt.Fprintf(w, "    %d PDs, %d CQs, %d SRQs, %d MRs with %d pages, %d QPs\n", v.HCA.PDs, v.HCA.CQs, v.HCA.SRQs,
			v.HCA.MRs, v.HCA.MTTs, len(v.HCA.QPs))
	}
	showHostMemory(w, &v.HCA.HostMemory)
	showTime(w, v)
	for _, g := range v.HCA.GIDs {
		fmt.Fprintf(w, "    gid %s\n", g)
	}
	t := table(w)
	for _, q := range v.HCA.QPs {
		fmt.Fprintf(t, "    qp %#06x\t%s\t%s\tengine %d", q.QPN, q.Type, q.State, q.Engine)
		if q.Path != "" {
			fmt.Fprintf(t, "\tto %#06x at %s", q.Dest, q.Path)
		}
		for _, w := range append(undone(&q), q.Waits...) {
			fmt.Fprintf(t, "\n        %s", w)
		}
		fmt.Fprintln(t)
	}
	if d := drops(v.HCA.Drops); d != "" {
		t.Flush()
		fmt.Fprintf(t, "    not accepted%s\n", strings.TrimPrefix(d, ", dropped"))
		t.Flush()
	}
	for _, k := range slices.Sorted(maps.Keys(v.HCA.Stats)) {
		fmt.Fprintf(t, "    %s\t%d\n", k, v.HCA.Stats[k])
	}
	t.Flush()
	showFaults(w, v)
	showMemory(w, &v.Memory)
}

// undone describes, in a line, what a queue pair has begun; none if that is nothing.
func undone(q *hca.QPStatus) []string {
	var what []string
	add := func(n uint64, of string) {
		if n > 0 {
			what = append(what, fmt.Sprint(n, " ", of))
		}
	}
	add(uint64(q.Requests), "requests in progress")
	add(q.Unacked, "packets unacknowledged")
	add(uint64(q.Responses), "READs or atomics to answer")
	add(uint64(q.Unposted), "completions to post")
	if q.NotReady {
		what = append(what, "the peer is not ready to receive")
	}
	if q.Refused {
		what = append(what, "requests of the peer were refused")
	}
	if len(what) == 0 {
		return nil
	}
	return []string{fmt.Sprintf("psn %#06x, expected %#06x: %s", q.SQPSN, q.RQPSN, strings.Join(what, ", "))}
}

// showHostMemory shows what the VM's objects occupy in the daemon, the largest kinds first.
func showHostMemory(w io.Writer, a *translate.AccountStatus) {
	fmt.Fprintf(w, "    host memory %s of %s, most %s", mib(a.Used), mib(a.Limit), mib(a.Most))
	if a.Refused > 0 {
		fmt.Fprintf(w, ", refused %d times", a.Refused)
	}
	if a.Miscounted > 0 {
		fmt.Fprintf(w, ", miscounted %d times (a bug)", a.Miscounted)
	}
	kinds := slices.SortedFunc(maps.Keys(a.By), func(x, y string) int {
		return cmp.Or(cmp.Compare(a.By[y], a.By[x]), cmp.Compare(x, y))
	})
	for i, k := range kinds {
		before := ","
		if i == 0 {
			before = ":"
		}
		fmt.Fprintf(w, "%s %s %s", before, k, mib(a.By[k]))
	}
	fmt.Fprintln(w)
}

// showTime shows the processor time that the VM causes.
func showTime(w io.Writer, v *daemon.VMStatus) {
	fmt.Fprint(w, "    processor time")
	if !v.IsApplication() {
		fmt.Fprintf(w, " net %s,", short(v.Net.EngineTime))
	}
	fmt.Fprintf(w, " hca %s on engines;", short(v.HCA.EngineTime))
	c := &v.Control
	fmt.Fprintf(w, " commands %s, messages %s, paging %s, commands may use %d%%", short(c.Commands), short(c.Messages),
		short(c.Paging), c.Percent)
	if c.Delayed > 0 {
		fmt.Fprintf(w, ", %d delayed", c.Delayed)
	}
	fmt.Fprintln(w)
}

// showFaults shows absent pages, the queue pairs that wait for them, and fault times.
func showFaults(w io.Writer, v *daemon.VMStatus) {
	f := &v.HCA.Faults
	fmt.Fprintf(w, "faults %d parked now, %d RNR sent, %d packets dropped\n", f.Parked, v.HCA.Stats["tx_rnr"],
		v.HCA.Stats["fault_drops"])
	t := table(w)
	for _, q := range []struct {
		name string
		q    *hca.FaultQueue
	}{{"guest", &f.Guest}, {"host", &f.Host}} {
		fmt.Fprintf(t, "    %s\t%d raised\t%d resumed\t%d failed\t%d waiting", q.name, q.q.Raised, q.q.Resumed, q.q.Failed,
			q.q.Waiting)
		if len(q.q.Buckets) > 0 {
			fmt.Fprintf(t, "\tmean %s\tmedian %s\t99%% %s\tmax %s", short(q.q.Mean), short(q.q.Median), short(q.q.P99),
				short(q.q.Max))
		}
		fmt.Fprintln(t)
	}
	t.Flush()
	showTimes(w, f)
	fmt.Fprintf(w, "releases %d invalidations, %d epochs flipped, %d drained, longest %s\n", f.Invalidations,
		f.EpochsFlipped, f.Drains, short(f.LongestDrain))
}

// showTimes shows the distribution of fault times.
func showTimes(w io.Writer, f *hca.FaultStatus) {
	at := func(b []uint64, i int) uint64 {
		if i < len(b) {
			return b[i]
		}
		return 0
	}
	n := max(len(f.Guest.Buckets), len(f.Host.Buckets))
	t := table(w)
	for i, seen := 0, false; i < n; i++ {
		g, h := at(f.Guest.Buckets, i), at(f.Host.Buckets, i)
		if seen = seen || g+h > 0; seen {
			fmt.Fprintf(t, "    below %s\t%d guest\t%d host\n", time.Microsecond<<i, g, h)
		}
	}
	t.Flush()
}

// short gives three digits of a duration.
func short(d time.Duration) time.Duration {
	unit := time.Nanosecond
	for d/unit >= 1000 {
		unit *= 10
	}
	return d.Round(unit)
}

func what(v *daemon.VMStatus) string {
	if v.IsApplication() {
		return "application"
	}
	return "vm"
}

func netState(v *daemon.VMStatus) string {
	if v.IsApplication() {
		return "none"
	}
	return state(v.Net.Connected, v.Net.Up())
}

func hcaState(h *hca.Status) string {
	if h.Paused {
		return "paused"
	}
	return state(h.Connected, h.Up)
}

func state(connected, up bool) string {
	switch {
	case up:
		return "up"
	case connected:
		return "attached"
	}
	return "down"
}

func drops(m map[string]uint64) string {
	var parts []string
	for _, k := range slices.Sorted(maps.Keys(m)) {
		if m[k] > 0 {
			parts = append(parts, fmt.Sprintf("%s %d", k, m[k]))
		}
	}
	if len(parts) == 0 {
		return ""
	}
	return ", dropped: " + strings.Join(parts, ", ")
}
