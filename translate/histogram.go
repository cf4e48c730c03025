package translate

import (
	"math/bits"
	"time"
)

// HistogramBuckets is the number of buckets of a Histogram.
const HistogramBuckets = 32

// Histogram counts durations by powers of two: Buckets[0] below 1 us, Buckets[i] in [2^(i-1), 2^i) us, the last one all
// longer ones.
type Histogram struct {
	Buckets [HistogramBuckets]uint64
	Count   uint64
	Sum     time.Duration
	Max     time.Duration
}

// Add counts d; negative durations count as 0.
func (h *Histogram) Add(d time.Duration) {
	d = max(d, 0)
	h.Buckets[min(bits.Len64(uint64(d/time.Microsecond)), HistogramBuckets-1)]++
	h.Count++
	h.Sum += d
	h.Max = max(h.Max, d)
}

// Merge adds the counts of o.
func (h *Histogram) Merge(o *Histogram) {
	for i, n := range o.Buckets {
		h.Buckets[i] += n
	}
	h.Count += o.Count
	h.Sum += o.Sum
	h.Max = max(h.Max, o.Max)
}

// Mean returns the average, 0 if nothing was counted.
func (h *Histogram) Mean() time.Duration {
	if h.Count == 0 {
		return 0
	}
	return h.Sum / time.Duration(h.Count)
}

// Quantile returns an upper bound of the q-quantile (0..1): the end of its bucket, or Max if that is less.
func (h *Histogram) Quantile(q float64) time.Duration {
	need, sum := uint64(q*float64(h.Count)+0.5), uint64(0)
	for i, n := range h.Buckets {
		if sum += n; sum >= need && sum > 0 && i < HistogramBuckets-1 {
			return min(time.Microsecond<<i, h.Max)
		}
	}
	return h.Max
}
