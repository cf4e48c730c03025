package monitoring

import (
	"context"
	"sync"
	"time"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
)

// One goroutine gathers the page's data, so the cost does not depend on the number of readers, and a newly opened page
// has the last minutes at once.

const (
	samplePeriod = 2 * time.Second
	// Where a snapshot takes long (many VMs, a busy host), snapshots are less frequent: they take at most one part in
	// sampleShare of the time, but there is one every maxPeriod.
	sampleShare = 50
	maxPeriod   = 10 * time.Second
	// historyLen samples are kept, ten minutes at the usual period.
	historyLen = 300
	// answerCells bounds the samples times VMs of one answer.
	answerCells = 60_000
)

// series are the values per VM, per second.
var series = []struct {
	name string
	of   func(*daemon.Load) uint64
}{
	{"rdma_in_bytes", func(l *daemon.Load) uint64 { return l.RDMAInBytes }},
	{"rdma_out_bytes", func(l *daemon.Load) uint64 { return l.RDMAOutBytes }},
	{"rdma_in_packets", func(l *daemon.Load) uint64 { return l.RDMAInPackets }},
	{"rdma_out_packets", func(l *daemon.Load) uint64 { return l.RDMAOutPackets }},
	{"local_messages", func(l *daemon.Load) uint64 { return l.Messages }},
	{"eth_in_bytes", func(l *daemon.Load) uint64 { return l.EthInBytes }},
	{"eth_out_bytes", func(l *daemon.Load) uint64 { return l.EthOutBytes }},
	{"eth_in_frames", func(l *daemon.Load) uint64 { return l.EthInFrames }},
	{"eth_out_frames", func(l *daemon.Load) uint64 { return l.EthOutFrames }},
	{"guest_faults", func(l *daemon.Load) uint64 { return l.GuestFaults }},
	{"host_faults", func(l *daemon.Load) uint64 { return l.HostFaults }},
	{"resent", func(l *daemon.Load) uint64 { return l.Resent }},
	{"dropped", (*daemon.Load).Dropped},
}

// sample is the activity between two snapshots.
type sample struct {
	Seq     uint64               `json:"seq"`
	At      int64                `json:"at_ms"` // when it ended, Unix time
	Seconds float64              `json:"seconds"`
	VMs     map[string][]float32 `json:"vms"` // per second, in the order of series
}

// view is the latest data.
type view struct {
	at          time.Time
	status      *daemon.Status
	connections []connection
	problems    []Problem
	history     []sample // oldest first
}

// sampler makes views until close.
type sampler struct {
	src    Source
	now    func() time.Time
	cancel context.CancelFunc
	done   chan struct{}

	watch watch // used by the goroutine only
	seq   uint64

	mu   sync.Mutex
	last *view // replaced, never changed
}

func startSampler(src Source) *sampler {
	ctx, cancel := context.WithCancel(context.Background())
	s := &sampler{src: src, now: time.Now, cancel: cancel, done: make(chan struct{})}
	go s.run(ctx)
	return s
}

// close ends the goroutine, after the snapshot in progress.
func (s *sampler) close() {
	s.cancel()
	<-s.done
}

func (s *sampler) run(ctx context.Context) {
	defer close(s.done)
	for {
		began := s.now()
		s.take()
		t := time.NewTimer(min(max(samplePeriod, sampleShare*s.now().Sub(began)), maxPeriod))
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return
		}
	}
}

// take adds a sample.
func (s *sampler) take() {
	status := s.src.Status()
	all, _ := s.src.Connections("")
	v := &view{at: s.now(), status: status, connections: group(all)}
	if before := s.view(); before != nil {
		v.history = before.history
		seconds := v.at.Sub(before.at).Seconds()
		if seconds <= 0 {
			return
		}
		loads := daemon.Loads(before.status, status)
		s.seq++
		n := sample{Seq: s.seq, At: v.at.UnixMilli(), Seconds: seconds, VMs: make(map[string][]float32, len(loads))}
		for i := range loads {
			rates := make([]float32, len(series))
			for j := range series {
				rates[j] = float32(float64(series[j].of(&loads[i])) / seconds)
			}
			n.VMs[loads[i].VM.Name] = rates
		}
		// A new array, because readers use the old one.
		v.history = append(append(make([]sample, 0, historyLen), v.history[max(0, len(v.history)-historyLen+1):]...), n)
		s.watch.look(v.at, findings(before.status, status, loads))
	}
	v.problems = s.watch.list()
	s.mu.Lock()
	s.last = v
	s.mu.Unlock()
}

// view returns the latest view, nil before the first.
func (s *sampler) view() *view {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.last
}
