package monitoring

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/ethernet/wireguard"
	"github.com/vnicd/vnicd/translate"
)

// Severities, the worst first.
const (
	severe  = "error"   // something does not work
	warning = "warning" // something works worse than it should
	note    = "note"    // something is missing, perhaps on purpose
)

// Problem is a condition that an operator should know of. OPERATING.md has what to do about each.
type Problem struct {
	Severity string `json:"severity"`
	VM       string `json:"vm,omitempty"`
	Network  string `json:"network,omitempty"`
	What     string `json:"what"`
	// Since is when it was first seen, Last when it was last seen, Unix time.
	Since int64 `json:"since_ms"`
	Last  int64 `json:"last_ms"`
	// Present is true while the condition holds. A problem that has ended stays listed for a while.
	Present bool `json:"present"`

	kind string // with VM and Network, the identity of a problem
}

const (
	// linger is how long a problem stays listed after its end.
	linger = time.Minute
	// maxProblems bounds the list; the worst and newest are kept.
	maxProblems = 200
)

// watch follows problems from first to last sighting.
type watch struct{ known []Problem }

// look records the problems found at now.
func (w *watch) look(now time.Time, found []Problem) {
	at := now.UnixMilli()
	for i := range w.known {
		w.known[i].Present = false
	}
next:
	for _, f := range found {
		f.Present, f.Last = true, at
		for i := range w.known {
			if k := &w.known[i]; k.kind == f.kind && k.VM == f.VM && k.Network == f.Network {
				f.Since = k.Since
				*k = f
				continue next
			}
		}
		f.Since = at
		w.known = append(w.known, f)
	}
	w.known = slices.DeleteFunc(w.known, func(p Problem) bool { return at-p.Last > linger.Milliseconds() })
	slices.SortStableFunc(w.known, func(a, b Problem) int {
		rank := func(p *Problem) int { return slices.Index([]string{severe, warning, note}, p.Severity) }
		gone := func(p *Problem) int {
			if p.Present {
				return 0
			}
			return 1
		}
		return cmp.Or(cmp.Compare(gone(&a), gone(&b)), cmp.Compare(rank(&a), rank(&b)), cmp.Compare(b.Since, a.Since),
			strings.Compare(a.VM, b.VM))
	})
	if len(w.known) > maxProblems {
		w.known = w.known[:maxProblems]
	}
}

func (w *watch) list() []Problem { return append([]Problem{}, w.known...) }

// findings returns the present problems, from two snapshots and the activity between them.
func findings(before, now *daemon.Status, loads []daemon.Load) (out []Problem) {
	seconds := max(now.Uptime-before.Uptime, 0.001)
	put := func(severity, kind, vm, network, what string, args ...any) {
		out = append(out, Problem{Severity: severity, VM: vm, Network: network, What: fmt.Sprintf(what, args...), kind: kind})
	}
	if daemon.Since(before.Buffers.Exhausted, now.Buffers.Exhausted) > 0 {
		put(severe, "buffers", "", "", "no frame buffer was free: %d of %d in use", now.Buffers.InUse, now.Buffers.Count)
	}
	if now.VTEP != nil {
		old := map[string]uint64{}
		if before.VTEP != nil {
			old = before.VTEP.Drops
		}
		if d := daemon.SinceEach(old, now.VTEP.Drops); len(d) > 0 {
			put(warning, "vtep", "", "", "tunnels drop datagrams: %s", perSecond(d, seconds))
		}
	}
	if p := now.Protection; p != nil {
		protectionFindings(before.Protection, p, time.Now(), func(severity, kind, what string, args ...any) {
			put(severity, kind, "", "", what, args...)
		})
	}
	if m, was := now.Memory, before.Memory; m != nil && was != nil && m.Target != 0 && was.Target != 0 {
		put(note, "pressure", "", "", "the host is short of memory (%s): VMs keep less of it resident for their devices", m.Zone)
	}
	if m := now.Memory; m != nil && m.Full != "" {
		put(severe, "full", "", "", "the host is out of memory; operations that need more wait: %s", m.Full)
	}
	for i := range now.Networks {
		if n := &now.Networks[i]; len(n.Flapping) > 0 {
			put(warning, "flapping", "", n.Name, "%d addresses flap between ports", len(n.Flapping))
		}
	}
	old := map[string]*daemon.VMStatus{}
	for i := range before.VMs {
		old[before.VMs[i].Name] = &before.VMs[i]
	}
	for i := range loads {
		l := &loads[i]
		o := old[l.VM.Name]
		if o == nil {
			o = &daemon.VMStatus{}
		}
		vmFindings(o, l, seconds, func(severity, kind, what string, args ...any) {
			put(severity, kind, l.VM.Name, l.VM.Network, what, args...)
		})
	}
	return out
}

// protectionFindings returns the problems of the protected underlay.
func protectionFindings(was, is *wireguard.Status, now time.Time, put func(severity, kind, what string, args ...any)) {
	if is.Problem != "" {
		put(severe, "protection", "nothing passes through the tunnels: %s", is.Problem)
		return
	}
	old := map[netip.Addr]uint64{}
	if was != nil {
		for _, p := range was.Peers {
			old[p.VTEP] = p.OutBytes
		}
	}
	for _, p := range is.Peers {
		if sent := old[p.VTEP]; sent > 0 && p.OutBytes > sent && now.Sub(p.Handshake) > wireguard.SessionLife {
			put(severe, "handshake "+p.VTEP.String(), "the host of VTEP %s does not answer WireGuard at %s: it is down, or keys "+
				"or endpoints do not match, or a firewall drops UDP", p.VTEP, p.Endpoint)
		}
	}
}

// vmFindings returns the problems of one VM.
func vmFindings(o *daemon.VMStatus, l *daemon.Load, seconds float64,
	put func(severity, kind, what string, args ...any)) {
	v := l.VM
	h, m := &v.HCA, &v.Memory
	if v.Going {
		if o.Going {
			put(severe, "going", "it was removed, but its memory is still in use: see the log for the holder")
		}
		return
	}
	switch {
	case v.Net.Broken != "":
		put(severe, "net", "its virtio-net has stopped until the guest resets it: %s", v.Net.Broken)
	case v.Net.Connected != h.Connected:
		put(warning, "half", "only its %s is attached to a QEMU", face(v.Net.Connected))
	case h.Connected && !h.Up && o.HCA.Connected:
		put(note, "driver", "no driver in the guest has brought up the HCA")
	}
	if h.Failed {
		put(severe, "hca", "its HCA has stopped until the guest resets it: guest memory disappeared")
	}
	if h.Up && !h.Link && o.HCA.Up && v.DMA.Attribute != translate.UplinkBlocked {
		put(warning, "link", "the HCA's port is down: in the guest, its virtio-net is missing or down")
	}
	switch v.DMA.Attribute {
	case translate.UplinkReadOnly:
		put(warning, "dma", "it is quarantined: its devices do not write to its memory (dma ro)")
	case translate.UplinkBlocked:
		put(warning, "dma", "it is quarantined: its devices do not access its memory (dma blocked)")
	}
	if h.Busy && o.HCA.Busy {
		put(warning, "busy", "a command of the guest waits for the host's memory")
	}
	if !h.Busy && !o.HCA.Busy {
		if g, was := &h.Faults.Guest, &o.HCA.Faults.Guest; g.Waiting > 0 && was.Waiting > 0 &&
			g.Resumed+g.Failed == was.Resumed+was.Failed {
			put(severe, "guest-stuck", "%d page faults wait, and the guest's driver answers none", g.Waiting)
		}
		if q, was := &h.Faults.Host, &o.HCA.Faults.Host; q.Waiting > 0 && was.Waiting > 0 &&
			q.Resumed+q.Failed == was.Resumed+was.Failed {
			put(severe, "host-stuck", "%d page faults wait for the host's memory, and none is served", q.Waiting)
		}
	}
	if n := daemon.Since(o.Memory.FailedFaults, m.FailedFaults); n > 0 {
		put(severe, "host-failed", "%d page faults of the host level failed: memory has disappeared, or was never there", n)
	}
	if m.Short > 0 && o.Memory.Short > 0 {
		put(severe, "host-short", "%d page faults wait until the host has memory, the oldest for %v: %s", m.Short,
			m.ShortFor.Round(time.Millisecond), m.ShortReason)
	}
	if n := daemon.Since(o.HCA.Stats["faults_failed"], h.Stats["faults_failed"]); n > 0 {
		put(warning, "guest-failed",
			"%d page faults were answered with an error: a program uses an address that it has not mapped", n)
	}
	if l.Timeouts > 0 {
		put(warning, "timeouts", "%s acknowledgements/s timed out, %s packets/s are retransmitted",
			rate(l.Timeouts, seconds), rate(l.Resent, seconds))
	}
	if drops := maps.Clone(l.Drops); len(drops) > 0 {
		if !v.Net.Up() {
			delete(drops, vswitch.NotReady.String()) // broadcasts before the guest is ready
		}
		if len(drops) > 0 {
			put(warning, "drops", "frames are dropped at its port: %s", perSecond(drops, seconds))
		}
	}
	refused := maps.Clone(l.Refused)
	for _, again := range []string{"duplicate", "sequence"} {
		delete(refused, again) // follows from loss and page faults
	}
	if len(refused) > 0 {
		put(warning, "refused", "RoCE packets are refused: %s", perSecond(refused, seconds))
	}
	if m.Unlocked != "" {
		put(warning, "unlocked", "the host may swap memory that its devices use: %s", m.Unlocked)
	}
	// Each second chance is memory that was nearly evicted while still needed.
	evicted, again := daemon.Since(o.Memory.Evictions, m.Evictions), daemon.Since(o.Memory.Refaults, m.Refaults)
	if m.Budget > 0 && float64(min(evicted, again)) > 20*seconds {
		put(warning, "budget", "its memory budget is too small: %s evictions/s and %s refaults/s",
			rate(evicted, seconds), rate(again, seconds))
	}
}

func face(net bool) string {
	if net {
		return "virtio-net"
	}
	return "HCA"
}

func rate(n uint64, seconds float64) string {
	if r := float64(n) / seconds; r < 10 {
		return fmt.Sprintf("%.1f", r)
	}
	return fmt.Sprintf("%.0f", float64(n)/seconds)
}

// perSecond names the three most frequent reasons.
func perSecond(m map[string]uint64, seconds float64) string {
	names := slices.SortedFunc(maps.Keys(m), func(a, b string) int {
		return cmp.Or(cmp.Compare(m[b], m[a]), strings.Compare(a, b))
	})
	var parts []string
	for i, name := range names {
		if i == 3 {
			parts = append(parts, "…")
			break
		}
		parts = append(parts, fmt.Sprintf("%s %s/s", name, rate(m[name], seconds)))
	}
	return strings.Join(parts, ", ")
}
