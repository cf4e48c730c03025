package monitoring

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/ethernet/wireguard"
	"github.com/vnicd/vnicd/device/rdma/hca"
	"github.com/vnicd/vnicd/device/virtio/vnet"
	"github.com/vnicd/vnicd/hypervisor/hostdriver"
	"github.com/vnicd/vnicd/translate"
)

// The page's data are those of the status, and the heat maps have every fault.
func TestOverview(t *testing.T) {
	s := newPageStage(t)
	var o overview
	var text string
	for end := time.Now().Add(2 * time.Minute); len(o.Samples) == 0; time.Sleep(50 * time.Millisecond) {
		var status int
		if status, text = s.get("GET", "/v1/overview?vm=one"); status == http.StatusOK {
			if err := json.Unmarshal([]byte(text), &o); err != nil {
				t.Fatal(err)
			}
		} else if status != http.StatusServiceUnavailable || time.Now().After(end) {
			t.Fatalf("%d %s", status, text)
		}
	}
	if strings.Contains(text, ":null") {
		t.Errorf("a list is null, which the page does not expect: %s", text)
	}
	vm := s.d.Status().VMs[0]
	if len(o.VMs) != 1 || o.VMs[0].Name != "one" || o.VMs[0].HCA != "up" || o.VMs[0].Net != "down" || o.VMs[0].QPs != 1 ||
		o.VMs[0].Memory != 16<<20 ||
		o.VMs[0].Faults != [2]uint64{vm.HCA.Stats["guest_faults"], vm.Memory.HostFaults} || o.VMs[0].Budget != 64<<20 {
		t.Errorf("VM: %+v", o.VMs)
	}
	sum := func(n []uint64) (all uint64) {
		for _, x := range n {
			all += x
		}
		return all
	}
	d := o.Detail
	if d == nil || len(d.Areas) != 1 || d.Areas[0].Size != 16<<20 || sum(d.Guest.Cells) != vm.HCA.Faults.Guest.Resumed ||
		sum(d.Host.Cells) != vm.Memory.HostFaults ||
		sum(d.Guest.Cells) == 0 || d.Guest.BasePA > d.Areas[0].GuestPA || sum(d.Host.Buckets) != d.Host.Count ||
		d.Host.Count == 0 {
		t.Errorf("detail: %+v, status %+v", d, vm.HCA.Faults)
	}
	if got := sum(o.VMs[0].Strip); got != sum(d.Guest.Cells)+sum(d.Host.Cells) {
		t.Errorf("the strip has %d faults", got)
	}
	if c := o.Connections; len(c) != 1 || c[0] != (connection{VM: "one", Kind: "vm", To: "one", Count: 1}) &&
		c[0].Kind != "" {
		t.Errorf("connections %+v", c)
	}
	if len(o.Samples[0].VMs["one"]) != len(o.Series) || len(o.Series) != len(series) {
		t.Errorf("samples %+v of %v", o.Samples, o.Series)
	}
	var later overview
	if _, text := s.get("GET", fmt.Sprintf("/v1/overview?since=%d",
		o.Samples[len(o.Samples)-1].Seq+1000)); json.Unmarshal([]byte(text), &later) != nil || len(later.Samples) != 0 ||
		later.Detail != nil {
		t.Errorf("after the last sample: %+v", later)
	}
	if status, _ := s.get("GET", "/v1/overview?since=x"); status != http.StatusBadRequest {
		t.Errorf("since=x: %d", status)
	}
	if status, _ := s.get("POST", "/v1/overview"); status != http.StatusMethodNotAllowed {
		t.Errorf("POST: %d", status)
	}
}

// Without its key, the page is not served.
func TestNoPage(t *testing.T) {
	s := newStage(t, false)
	for _, p := range []string{"/", "/app.js", "/v1/overview"} {
		if status, _ := s.get("GET", p); status != 404 {
			t.Errorf("%s: %d", p, status)
		}
	}
}

// healthyVM is a status with one working VM.
func healthyVM() *daemon.Status {
	v := daemon.VMStatus{Name: "one", Network: "blue", Net: vnet.Status{Connected: true, Pairs: []string{"rx+tx"}},
		HCA:    hca.Status{Connected: true, Up: true, Link: true, Stats: map[string]uint64{}, Drops: map[string]uint64{}},
		Memory: hostdriver.Status{Budget: 64 << 20}}
	return &daemon.Status{Networks: []vswitch.Status{{Name: "blue",
		Ports: []vswitch.PortStatus{{Name: "one", Kind: "vm"}}}}, VMs: []daemon.VMStatus{v}}
}

// Each problem is found once, with its severity; normal states are not reported.
// wireguardPeer gives a status a protected underlay with one peer.
func wireguardPeer(sent uint64, handshake time.Time) func(*daemon.Status, *daemon.VMStatus) {
	return func(s *daemon.Status, _ *daemon.VMStatus) {
		s.Protection = &wireguard.Status{Peers: []wireguard.PeerStatus{{VTEP: netip.MustParseAddr("10.9.0.2"), OutBytes: sent,
			Handshake: handshake}}}
	}
}

func TestFindings(t *testing.T) {
	drops := func(s *daemon.Status, reason vswitch.Reason) {
		s.Networks[0].Ports[0].Drops = map[string]uint64{reason.String(): 5}
	}
	for _, x := range []struct {
		name, want string
		was, is    func(s *daemon.Status, v *daemon.VMStatus)
	}{
		{name: "well"},
		{name: "traffic, faults, resent", is: func(_ *daemon.Status, v *daemon.VMStatus) {
			v.HCA.Stats["retransmits"], v.HCA.Stats["guest_faults"], v.HCA.Drops["duplicate"], v.HCA.Drops["sequence"] = 9, 9, 9,
				9
		}},
		{name: "broken net", want: "error net", is: func(_ *daemon.Status, v *daemon.VMStatus) { v.Net.Broken = "a ring" }},
		{name: "broken HCA", want: "error hca", is: func(_ *daemon.Status, v *daemon.VMStatus) { v.HCA.Failed = true }},
		{name: "half", want: "warning half", is: func(_ *daemon.Status, v *daemon.VMStatus) { v.Net.Connected = false }},
		{name: "no driver", want: "note driver", is: func(_ *daemon.Status, v *daemon.VMStatus) { v.HCA.Up = false }},
		{name: "no link", want: "warning link", is: func(_ *daemon.Status, v *daemon.VMStatus) { v.HCA.Link = false }},
		{name: "read-only", want: "warning dma", is: func(_ *daemon.Status, v *daemon.VMStatus) {
			v.DMA.Attribute = translate.UplinkReadOnly
		}},
		{name: "blocked", want: "warning dma", is: func(_ *daemon.Status, v *daemon.VMStatus) {
			v.DMA.Attribute, v.HCA.Link = translate.UplinkBlocked, false
		}},
		{name: "stuck in the guest", want: "error guest-stuck",
			was: func(_ *daemon.Status, v *daemon.VMStatus) { v.HCA.Faults.Guest.Waiting = 1 },
			is:  func(_ *daemon.Status, v *daemon.VMStatus) { v.HCA.Faults.Guest.Waiting = 2 }},
		{name: "served in the guest", was: func(_ *daemon.Status, v *daemon.VMStatus) { v.HCA.Faults.Guest.Waiting = 1 },
			is: func(_ *daemon.Status, v *daemon.VMStatus) {
				v.HCA.Faults.Guest.Waiting, v.HCA.Faults.Guest.Resumed = 2, 7
			}},
		{name: "stuck on the host", want: "error host-stuck",
			was: func(_ *daemon.Status, v *daemon.VMStatus) { v.HCA.Faults.Host.Waiting = 1 },
			is:  func(_ *daemon.Status, v *daemon.VMStatus) { v.HCA.Faults.Host.Waiting = 1 }},
		{name: "memory failed", want: "error host-failed",
			is: func(_ *daemon.Status, v *daemon.VMStatus) { v.Memory.FailedFaults = 1 }},
		{name: "memory short", want: "error host-short",
			was: func(_ *daemon.Status, v *daemon.VMStatus) { v.Memory.Short = 1 },
			is:  func(_ *daemon.Status, v *daemon.VMStatus) { v.Memory.Short, v.Memory.ShortReason = 2, "full" }},
		{name: "memory short for a moment", is: func(_ *daemon.Status, v *daemon.VMStatus) { v.Memory.Short = 1 }},
		{name: "pressure", want: "note pressure",
			was: func(s *daemon.Status, _ *daemon.VMStatus) { s.Memory = &hostdriver.HostStatus{Target: 1} },
			is:  func(s *daemon.Status, _ *daemon.VMStatus) { s.Memory = &hostdriver.HostStatus{Target: 1} }},
		{name: "full", want: "error full",
			is: func(s *daemon.Status, _ *daemon.VMStatus) { s.Memory = &hostdriver.HostStatus{Full: "no swap"} }},
		{name: "wrong addresses", want: "warning guest-failed",
			is: func(_ *daemon.Status, v *daemon.VMStatus) { v.HCA.Stats["faults_failed"] = 1 }},
		{name: "timeouts", want: "warning timeouts", is: func(_ *daemon.Status, v *daemon.VMStatus) {
			v.HCA.Stats["timeouts"] = 1
		}},
		{name: "drops", want: "warning drops", is: func(s *daemon.Status, _ *daemon.VMStatus) { drops(s, vswitch.Spoofed) }},
		{name: "flooded while down", want: "", is: func(s *daemon.Status, v *daemon.VMStatus) {
			v.Net.Connected, v.HCA.Connected, v.Net.Pairs, v.HCA.Up = false, false, nil, false
			drops(s, vswitch.NotReady)
		}},
		{name: "refused", want: "warning refused", is: func(_ *daemon.Status, v *daemon.VMStatus) {
			v.HCA.Drops["icrc"] = 3
		}},
		{name: "swappable", want: "warning unlocked", is: func(_ *daemon.Status, v *daemon.VMStatus) {
			v.Memory.Unlocked = "limit"
		}},
		{name: "small budget", want: "warning budget", is: func(_ *daemon.Status, v *daemon.VMStatus) {
			v.Memory.Evictions, v.Memory.Refaults = 500, 400
		}},
		{name: "the interface of WireGuard has gone", want: "error protection",
			is: func(s *daemon.Status, _ *daemon.VMStatus) { s.Protection = &wireguard.Status{Problem: "gone"} }},
		{name: "no answer to WireGuard", want: "error handshake 10.9.0.2", was: wireguardPeer(100, time.Time{}),
			is: wireguardPeer(200, time.Time{})},
		{name: "no answer since the last session", want: "error handshake 10.9.0.2", was: wireguardPeer(100, time.Unix(1, 0)),
			is: wireguardPeer(200, time.Unix(1, 0))},
		{name: "a session of WireGuard", was: wireguardPeer(100, time.Now()), is: wireguardPeer(200, time.Now())},
		{name: "the first handshake", was: wireguardPeer(0, time.Time{}), is: wireguardPeer(148, time.Time{})},
		{name: "an idle peer", was: wireguardPeer(100, time.Unix(1, 0)), is: wireguardPeer(100, time.Unix(1, 0))},
		{name: "flapping", want: "warning flapping", is: func(s *daemon.Status, _ *daemon.VMStatus) {
			s.Networks[0].Flapping = make([]vswitch.Flapping, 2)
		}},
		{name: "buffers", want: "error buffers", is: func(s *daemon.Status, _ *daemon.VMStatus) { s.Buffers.Exhausted = 1 }},
	} {
		before, now := healthyVM(), healthyVM()
		if now.Uptime = 2; x.was != nil {
			x.was(before, &before.VMs[0])
		}
		if x.is != nil {
			x.is(now, &now.VMs[0])
		}
		var got []string
		for _, p := range findings(before, now, daemon.Loads(before, now)) {
			got = append(got, p.Severity+" "+p.kind)
			if p.What == "" || strings.Contains(p.What, "%!") {
				t.Errorf("%s: %q", x.name, p.What)
			}
		}
		if strings.Join(got, ", ") != x.want {
			t.Errorf("%s: found %q, want %q", x.name, got, x.want)
		}
	}
}

// A problem has one beginning, stays listed for a while after its end, and may begin again. Present and severe
// problems come first.
func TestWatch(t *testing.T) {
	var w watch
	at := time.UnixMilli(1e12)
	a, b := Problem{Severity: warning, VM: "a", kind: "x"}, Problem{Severity: severe, VM: "b", kind: "x"}
	look := func(after time.Duration, found ...Problem) []Problem {
		at = at.Add(after)
		w.look(at, found)
		return w.list()
	}
	began := at.UnixMilli()
	look(0, a)
	got := look(10*time.Second, a, b)
	if len(got) != 2 || got[0].VM != "b" || got[1].Since != began || got[1].Last != at.UnixMilli() || !got[1].Present {
		t.Errorf("both: %+v", got)
	}
	got = look(linger, a)
	if len(got) != 2 || got[0].VM != "a" || got[1].Present {
		t.Errorf("one has ended: %+v", got)
	}
	if got = look(time.Second, a); len(got) != 1 {
		t.Errorf("one is forgotten: %+v", got)
	}
	if got = look(time.Second, a, b); got[0].VM != "b" || got[0].Since != at.UnixMilli() {
		t.Errorf("it has come back: %+v", got)
	}
	var many []Problem
	for i := range 3 * maxProblems {
		many = append(many, Problem{Severity: note, VM: fmt.Sprint(i), kind: "y"})
	}
	if got = look(0, append(many, b)...); len(got) != maxProblems || got[0].VM != "b" {
		t.Errorf("%d problems", len(got))
	}
}

// The strip has the faults inside the VM's memory, however the memory is divided into areas.
func TestStrip(t *testing.T) {
	m := &daemon.VMStatus{}
	m.Memory.Areas = []hostdriver.Area{{GuestPA: 0, Size: 1 << 30}, {GuestPA: 4 << 30, Size: 1 << 30}}
	if s := strip(m); len(s) != stripCells || slices.Max(s) != 0 {
		t.Errorf("nothing: %v", s)
	}
	m.Memory.Heat.Add(0)
	m.Memory.Heat.Add(4 << 30)
	m.HCA.Faults.GuestHeat.Add(5<<30 - 1)
	if s := strip(m); s[0] != 1 || s[stripCells/2] != 1 || s[stripCells-1] != 1 {
		t.Errorf("both levels: %v", s)
	}
	m.Memory.Areas = m.Memory.Areas[:1]
	if s := strip(m); s[0] != 1 || slices.Max(s[1:]) != 0 {
		t.Errorf("memory that was unplugged: %v", s)
	}
}
