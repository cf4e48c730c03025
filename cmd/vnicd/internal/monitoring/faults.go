package monitoring

import (
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
	"github.com/vnicd/vnicd/device/rdma/hca"
	"github.com/vnicd/vnicd/translate"
)

// Times of page faults. A VM's are native histograms, which are one series each however many buckets they have; with
// classic ones the times would be most of a host's series. The sum of all VMs has a few classic buckets besides, for
// alerts that work with any Prometheus.

// A native histogram of schema 0 has upper bounds of powers of two of a second, translate.Histogram of powers of two of
// a microsecond. Its bucket i, up to 2^i us, is that of index i - nativeShift, whose bound is 2^(i-20) s: 4.6 % less.
const (
	nativeSchema = 0
	nativeShift  = 20
)

// faults puts the times of a VM's faults of one level.
func (e emitter) faults(q *hca.FaultQueue, vm, level string) {
	n, buckets := uint64(0), make(map[int]int64, len(q.Buckets))
	for i, k := range q.Buckets {
		if k > 0 {
			buckets[i-nativeShift] = int64(k)
			n += k
		}
	}
	e <- uncreated{prometheus.MustNewConstNativeHistogram(faultTime.desc, n, q.Sum.Seconds(), buckets, nil, 0,
		nativeSchema, 0, time.Time{}, vm, level)}
}

// uncreated is a histogram that does not say when it began: nobody knows when a VM's QEMU has connected.
type uncreated struct{ prometheus.Metric }

// Write implements prometheus.Metric.
func (u uncreated) Write(out *dto.Metric) error {
	err := u.Metric.Write(out)
	if out.Histogram != nil {
		out.Histogram.CreatedTimestamp = nil
	}
	return err
}

// The classic buckets: those of translate.Histogram, of which every classicStep-th is a bound, up to the one of index
// classicLast (16.8 s).
const (
	classicStep = 2
	classicLast = 24
)

// levels are the levels of faults, in the order of faultTimes.
var levels = [...]string{"guest", "host"}

// times are the times of faults of one level.
type times struct {
	buckets [translate.HistogramBuckets]uint64
	sum     time.Duration
}

// faultTimes adds up the faults of all VMs. It remembers what each VM had at the last scrape, because sums over the
// present VMs would become less with every VM that leaves. The faults of a VM, or of a QEMU, between the last scrape
// and its end are not counted. The zero value is ready.
type faultTimes struct {
	mu    sync.Mutex
	epoch uint64 // statuses that were added
	total [len(levels)]times
	last  map[string]*[len(levels)]times // by VM
}

// begin returns the epoch in which a status is being made.
func (f *faultTimes) begin() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.epoch
}

// add adds what is new in a status, which has been made since begin returned epoch. If another one was added meanwhile,
// it is not known which of them is newer, and this one is left out.
func (f *faultTimes) add(epoch uint64, s *daemon.Status) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if epoch != f.epoch {
		return
	}
	f.epoch++
	last := make(map[string]*[len(levels)]times, len(s.VMs))
	for i := range s.VMs {
		v := &s.VMs[i]
		old := f.last[v.Name]
		if old == nil {
			old = &[len(levels)]times{}
		}
		if v.HCA.Busy {
			last[v.Name] = old
			continue
		}
		now := &[len(levels)]times{}
		for l, q := range [...]*hca.FaultQueue{&v.HCA.Faults.Guest, &v.HCA.Faults.Host} {
			copy(now[l].buckets[:], q.Buckets)
			now[l].sum = q.Sum
			f.total[l].add(&now[l], &old[l])
		}
		last[v.Name] = now
	}
	f.last = last
}

// add adds what now has more than old, or all of it if it has less of anything: it has begun anew.
func (t *times) add(now, old *times) {
	for i, n := range now.buckets {
		if n < old.buckets[i] || now.sum < old.sum {
			old = &times{}
			break
		}
	}
	for i, n := range now.buckets {
		t.buckets[i] += n - old.buckets[i]
	}
	t.sum += now.sum - old.sum
}

// allFaults puts the times of all VMs' faults.
func (e emitter) allFaults(f *faultTimes) {
	f.mu.Lock()
	total := f.total
	f.mu.Unlock()
	for l, level := range levels {
		n, buckets := uint64(0), map[float64]uint64{}
		for i, k := range total[l].buckets {
			if n += k; i%classicStep == 0 && i <= classicLast {
				buckets[(time.Microsecond << i).Seconds()] = n
			}
		}
		e <- prometheus.MustNewConstHistogram(allFaultTime.desc, n, total[l].sum.Seconds(), buckets, level)
	}
}
