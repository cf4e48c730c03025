package monitoring

import (
	"context"
	"fmt"
	"maps"
	"math"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	dto "github.com/prometheus/client_model/go"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/monitoring/query"
	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/rdma/roce"
	"github.com/vnicd/vnicd/translate"
)

// What OPERATING.md promises, in series of the text format, where a native histogram has three; otherwise it is one.
const (
	seriesOfVM   = 170 // with its port
	seriesOfHost = 180 // all others, of a host with one network, one peer and one neighbour
)

// fleet returns the status of a daemon with many VMs, in which everything has occurred that has series.
func fleet(vms int) *daemon.Status {
	s := filled()
	vm, port := s.VMs[0], s.Networks[0].Ports[0]
	vm.HCA.Drops, port.Drops = map[string]uint64{}, map[string]uint64{}
	for _, r := range hcaDrops.values["reason"] {
		vm.HCA.Drops[r] = 1
	}
	vm.NetOutlives, vm.Outlives = daemon.OutlivesKill, daemon.OutlivesKill
	vm.HCA.QPs = nil
	for state := roce.Reset; state <= roce.Err; state++ {
		for _, typ := range []string{"RC", "UC", "UD", "GSI"} {
			q := filled().VMs[0].HCA.QPs[0]
			q.State, q.Type = state.String(), typ
			vm.HCA.QPs = append(vm.HCA.QPs, q)
		}
	}
	for _, q := range []*[]uint64{&vm.HCA.Faults.Guest.Buckets, &vm.HCA.Faults.Host.Buckets} {
		*q = slices.Repeat([]uint64{1}, translate.HistogramBuckets)
	}
	port.Kind = vswitch.KindVM.String()
	for r := range vswitch.NumReasons {
		if slices.Contains(vswitch.KindVM.Reasons(), r) {
			port.Drops[r.String()] = 1
		}
	}
	s.VMs, s.Networks[0].Ports = nil, nil
	for i := range vms {
		vm.Name, port.Name = fmt.Sprint("vm", i), fmt.Sprint("vm", i)
		s.VMs, s.Networks[0].Ports = append(s.VMs, vm), append(s.Networks[0].Ports, port)
	}
	return s
}

// count returns how many series of the text format are of each VM, by the labels vm and port, and how many of none.
func count(t *testing.T, status *daemon.Status) (vms map[string]int, others int) {
	t.Helper()
	fams, err := registryOf(status).Gather()
	if err != nil {
		t.Fatal(err)
	}
	vms = map[string]int{}
	for _, f := range fams {
		for _, m := range f.Metric {
			n, vm := 1, ""
			if h := m.Histogram; h != nil {
				n = len(h.Bucket) + 3 // +Inf, count, sum
			}
			for _, l := range m.Label {
				if (l.GetName() == "vm" || l.GetName() == "port") && strings.HasPrefix(l.GetValue(), "vm") {
					vm = l.GetValue()
				}
			}
			switch {
			case vm != "":
				vms[vm] += n
			case strings.HasPrefix(f.GetName(), "vnicd_"):
				others += n
			}
		}
	}
	return vms, others
}

// TestSeries: a VM has a bounded number of series, and so has a host with 1,024 of them; operators are told how many.
func TestSeries(t *testing.T) {
	for _, n := range []int{1, 1024} {
		vms, others := count(t, fleet(n))
		most := slices.Max(slices.Collect(maps.Values(vms)))
		if len(vms) != n || most > seriesOfVM {
			t.Errorf("%d VMs have up to %d series each, at most %d are documented", len(vms), most, seriesOfVM)
		}
		if most < seriesOfVM*9/10 {
			t.Errorf("a VM has %d series, %d are documented", most, seriesOfVM)
		}
		if others > seriesOfHost {
			t.Errorf("%d VMs: %d series of none of them, at most %d are documented", n, others, seriesOfHost)
		}
		t.Logf("%d VMs: %d series each, %d others", n, most, others)
	}
	text, err := os.ReadFile("../../OPERATING.md")
	if err != nil {
		t.Fatal(err)
	}
	if want := fmt.Sprintf("at most %d series a VM and %d others", seriesOfVM, seriesOfHost); !strings.Contains(
		strings.Join(strings.Fields(string(text)), " "), want) {
		t.Errorf("OPERATING.md does not say %q", want)
	}
}

// A VM's fault times are native histograms, whose bounds are 4.6 % less than those of the status; the text format has
// their count and sum.
func TestNativeHistogram(t *testing.T) {
	s := filled()
	h := map[string]*dto.Histogram{}
	for _, m := range gather(t, s)[faultTime.name] {
		h[labelMap(m)["level"]] = m.Histogram
	}
	g := h["guest"]
	// Indices -20, -19 and -18: bounds of 0.95, 1.9 and 3.8 us, for those of 1, 2 and 4 us.
	if g.GetSampleCount() != 7 || g.GetSchema() != 0 || len(g.Bucket) != 0 || g.CreatedTimestamp != nil ||
		len(g.PositiveSpan) != 1 || g.PositiveSpan[0].GetOffset() != -20 || g.PositiveSpan[0].GetLength() != 3 ||
		!slices.Equal(g.PositiveDelta, []int64{1, 1, 2}) || g.GetSampleSum() != s.VMs[0].HCA.Faults.Guest.Sum.Seconds() {
		t.Errorf("guest: %v", g)
	}
	for i := range translate.HistogramBuckets - 1 {
		ours, native := (time.Microsecond << i).Seconds(), math.Ldexp(1, i-nativeShift)
		if ours < native || ours > 1.05*native {
			t.Errorf("bucket %d ends at %v, its native one at %v", i, ours, native)
		}
	}
	if p := h["host"].PositiveSpan; len(p) != 1 || p[0].GetOffset() != 11 || p[0].GetLength() != 1 {
		t.Errorf("host: %v", h["host"])
	}
	if e := gather(t, &daemon.Status{VMs: []daemon.VMStatus{{Name: "new"}}})[faultTime.name][`level="host",vm="new"`]; e.
		GetHistogram().GetSchema() != 0 || len(e.GetHistogram().GetPositiveSpan()) == 0 {
		t.Errorf("without faults it is not native: %v", e)
	}
}

// The sum of all VMs' fault times never becomes less: not when a VM leaves, begins anew or is busy, nor by a status
// that is older than another one.
func TestFaultTimes(t *testing.T) {
	s := filled()
	f := &faultTimes{}
	vm := &s.VMs[0]
	want := func(what string, guest ...uint64) {
		t.Helper()
		if got := f.total[0].buckets[:len(guest)]; !slices.Equal(got, guest) {
			t.Errorf("%s: %v, want %v", what, got, guest)
		}
	}
	set := func(buckets ...uint64) { vm.HCA.Faults.Guest.Buckets = buckets }
	f.add(f.begin(), s)
	want("at first", 1, 2, 4)
	f.add(f.begin(), s)
	want("the same", 1, 2, 4)
	set(1, 3, 4)
	early := f.begin()
	f.add(f.begin(), s)
	want("one more", 1, 3, 4)
	set(9, 9, 9)
	f.add(early, s)
	want("made while another one was", 1, 3, 4)
	set()
	vm.HCA.Busy = true
	f.add(f.begin(), s)
	want("busy", 1, 3, 4)
	vm.HCA.Busy = false
	set(1, 3, 5)
	f.add(f.begin(), s)
	want("busy no more", 1, 3, 5)
	set(0, 1)
	f.add(f.begin(), s)
	want("a new QEMU", 1, 4, 5)
	f.add(f.begin(), &daemon.Status{})
	want("the VM has left", 1, 4, 5)
	if len(f.last) != 0 {
		t.Errorf("it remembers VMs that have left: %v", f.last)
	}
	set(2)
	f.add(f.begin(), s)
	want("and has come back", 3, 4, 5)
}

// The classic buckets of all VMs are cumulative, and +Inf has those beyond the last.
func TestAllFaults(t *testing.T) {
	all := gather(t, filled())[allFaultTime.name]
	g, h := all[`level="guest"`].GetHistogram(), all[`level="host"`].GetHistogram()
	if g.GetSampleCount() != 7 || len(g.Bucket) != 13 || g.Bucket[1].GetUpperBound() != 4e-6 ||
		g.Bucket[0].GetCumulativeCount() != 1 || g.Bucket[1].GetCumulativeCount() != 7 ||
		g.Bucket[12].GetUpperBound() != 16.777216 {
		t.Errorf("guest: %v", g)
	}
	if h.GetSampleCount() != 5 || h.Bucket[12].GetCumulativeCount() != 0 {
		t.Errorf("host: %v", h)
	}
}

// BenchmarkScrape is a scrape of 1,024 VMs, without the daemon's snapshot and HTTP.
func BenchmarkScrape(b *testing.B) {
	for name, protobuf := range map[string]bool{"text": false, "protobuf": true} {
		b.Run(name, func(b *testing.B) {
			s := fleet(1024)
			a := newAnswers([]query.Kind{query.Metrics}, &busy{status: s}, nil, (*ruleFile)(nil).certificateEnd,
				hclog.NewNullLogger())
			sink := &sink{}
			for b.Loop() {
				w := query.NewWriter(sink, time.Minute)
				if err := w.Close(a.writeMetrics(context.Background(), &query.Query{Kind: query.Metrics, Protobuf: protobuf},
					w)); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(sink.n)/float64(b.N), "B/scrape")
		})
	}
}

// sink is a connection to nowhere.
type sink struct {
	net.Conn
	n int
}

func (s *sink) Write(p []byte) (int, error) { s.n += len(p); return len(p), nil }

func (s *sink) SetWriteDeadline(time.Time) error { return nil }

// TestHostLabels: no metric names its host or daemon. Prometheus does, by the labels instance and job, which a label of
// ours would rename or contradict.
func TestHostLabels(t *testing.T) {
	for _, m := range families {
		for _, l := range []string{"host", "hostname", "node", "instance", "job"} {
			if slices.Contains(m.labels, l) {
				t.Errorf("%s has the label %s", m.name, l)
			}
		}
	}
}
