package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/vnicd/vnicd/device/abi"
	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/integration/harness"
)

// cpuTime is what a process's threads have run, from the scheduler's account.
func cpuTime(p *harness.Process) (sum time.Duration, err error) {
	threads, err := threadTimes(p.PID())
	for _, t := range threads {
		sum += t
	}
	return sum, err
}

// threadTimes is what each thread of a process has run, by thread.
func threadTimes(pid int) (map[int]time.Duration, error) {
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	if err != nil || len(files) == 0 {
		return nil, fmt.Errorf("process %d has no threads: %w", pid, err)
	}
	times := map[int]time.Duration{}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			continue // a thread that has ended
		}
		tid, err := strconv.Atoi(filepath.Base(filepath.Dir(f)))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", f, err)
		}
		ns, _, _ := strings.Cut(string(b), " ")
		n, err := strconv.ParseInt(ns, 10, 64)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", f, err)
		}
		times[tid] = time.Duration(n)
	}
	return times, nil
}

// privateMemory is a process's anonymous resident memory in bytes: not its guests'.
func privateMemory(p *harness.Process) (float64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.PID()))
	if err != nil {
		return 0, err
	}
	for l := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(l, "RssAnon:"); ok {
			kb, err := strconv.ParseFloat(strings.TrimSuffix(strings.TrimSpace(v), " kB"), 64)
			return kb * 1024, err
		}
	}
	return 0, fmt.Errorf("process %d: no RssAnon", p.PID())
}

// idle has 8 VMs attached, each with a connection to the next, and nobody doing
// anything; the anchor is a daemon to which nobody is attached.
func idle(ctx context.Context, b *Bench) (m Meter, err error) {
	full, nodes, err := b.local(ctx, 8, 16<<20)
	if err != nil {
		return m, err
	}
	for i := range nodes {
		x, _, err := connect(nodes[i], nodes[(i+1)%len(nodes)])
		if err != nil {
			return m, err
		}
		_, mr, err := nodes[i].region(4096)
		if err != nil {
			return m, err
		}
		// Something to have been busy with.
		if err := x.qp.PostSend(&guestdrv.SendWR{Opcode: abi.WRRDMAWrite, Flags: abi.SendSignaled, SGL: []abi.SGE{mr.SGE(0, 0)}, RKey: mr.RKey()}); err != nil {
			return m, err
		}
		if err := x.spin(ctx, 1); err != nil {
			return m, err
		}
	}
	empty, err := b.host()
	if err != nil {
		return m, err
	}
	if err := b.daemon(ctx, empty, 0, 8, ""); err != nil {
		return m, err
	}
	share := func(p *harness.Process) func(context.Context, time.Duration) (Sample, error) {
		return func(ctx context.Context, d time.Duration) (Sample, error) {
			before, err := cpuTime(p)
			if err != nil {
				return Sample{}, err
			}
			start := time.Now()
			select {
			case <-ctx.Done():
				return Sample{}, ctx.Err()
			case <-time.After(2 * d):
			}
			after, err := cpuTime(p)
			return Sample{Value: 100 * float64(after-before) / float64(time.Since(start))}, err
		}
	}
	return Meter{Ours: share(full.Proc), Anchor: share(empty.Proc)}, nil
}

// growth is what the daemon's private memory grows by per object, when n are made.
func growth(n int, memory uint64, make func(nodes []*node, n int) (undo func() error, err error)) func(context.Context, *Bench) (Meter, error) {
	return func(ctx context.Context, b *Bench) (m Meter, err error) {
		h, nodes, err := b.local(ctx, 2, memory)
		if err != nil {
			return m, err
		}
		m.Ours = func(context.Context, time.Duration) (Sample, error) {
			before, err := privateMemory(h.Proc)
			if err != nil {
				return Sample{}, err
			}
			undo, err := make(nodes, n)
			if err != nil {
				return Sample{}, err
			}
			after, err := privateMemory(h.Proc)
			if err != nil {
				return Sample{}, err
			}
			return Sample{Value: (after - before) / float64(n) / 1024}, undo()
		}
		return m, nil
	}
}

func makeQPs(nodes []*node, n int) (func() error, error) {
	var ends []*end
	for range n {
		x, y, err := connect(nodes[0], nodes[1])
		if err != nil {
			return nil, err
		}
		ends = append(ends, x, y)
	}
	return func() error {
		for _, e := range ends {
			if err := errors.Join(e.qp.Destroy(), e.cq.Destroy()); err != nil {
				return err
			}
		}
		return nil
	}, nil
}

func makeMRs(nodes []*node, n int) (func() error, error) {
	buf, err := nodes[0].Alloc(1 << 20)
	if err != nil {
		return nil, err
	}
	var mrs []*guestdrv.MR
	for range n {
		mr, err := nodes[0].pd.Register(buf, allAccess)
		if err != nil {
			return nil, err
		}
		mrs = append(mrs, mr)
	}
	return func() error {
		for _, mr := range mrs {
			if err := mr.Deregister(); err != nil {
				return err
			}
		}
		buf.Free()
		return nil
	}, nil
}
