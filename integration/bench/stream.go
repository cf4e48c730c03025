package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/lab"
)

// checkedStream is a stream of WRITEs whose data is compared after each sample. Message i goes from slot i to slot i of
// as many slots as messages may be in flight.
type checkedStream struct {
	*end
	wr           *guestdrv.SendWR
	smr, dmr     *guestdrv.MR
	src, dst     *guestdrv.Buffer
	size, window int
	every        int    // one in so many WRITEs is signalled
	salt         uint64 // of the last sample's data
	posted       int    // messages of the last sample
}

// newCheckedStream connects x with y by a QP whose driver sleeps until there are completions.
func newCheckedStream(x, y *node, size, window, every int) (s *checkedStream, err error) {
	s = &checkedStream{size: size, window: window, every: every}
	if s.end, _, err = connect(x, y); err != nil {
		return nil, err
	}
	s.events = true
	if s.src, s.smr, err = x.region(window * size); err != nil {
		return nil, err
	}
	if s.dst, s.dmr, err = y.region(window * size); err != nil {
		return nil, err
	}
	s.wr = guestdrv.NewWrite(0, s.dmr.Remote(0), s.smr.SGE(0, size))
	return s, nil
}

// sample streams for d, compares the data and returns the messages per second.
func (s *checkedStream) sample(ctx context.Context, d time.Duration) (float64, error) {
	s.prepare()
	rate, err := s.stream(ctx, d, s.window, s.every, s.wr, s.aim)
	if err != nil {
		return 0, err
	}
	return rate, s.compare()
}

// gigabits is sample in Gbit/s, with the processor time of the daemons of hosts for each KiB.
func (s *checkedStream) gigabits(ctx context.Context, hosts []*lab.Host, d time.Duration) (Sample, error) {
	return costing(hosts, "KiB", func() (Sample, float64, error) {
		rate, err := s.sample(ctx, d)
		return Sample{Value: rate * float64(s.size) * 8 / giga}, s.moved(), err
	})
}

// prepare gives the next messages other data than before.
func (s *checkedStream) prepare() {
	s.salt++
	s.posted = 0
	fill(s.src.Bytes(), s.salt)
	clear(s.dst.Bytes())
}

// aim prepares message i.
func (s *checkedStream) aim(i int) {
	at := i % s.window * s.size
	s.wr.SGL[0], s.wr.Remote = s.smr.SGE(at, s.size), s.dmr.Remote(at)
	s.posted = i + 1
}

// compare compares the data of the messages since prepare.
func (s *checkedStream) compare() error {
	return compareData(s.dst.Bytes()[:min(s.posted, s.window)*s.size], s.salt)
}

// until streams until stop is set and all messages have completed; it adds the bytes that complete to done.
func (s *checkedStream) until(ctx context.Context, stop *atomic.Bool, done *atomic.Uint64) error {
	s.prepare()
	for completed := 0; ; {
		for !stop.Load() && s.posted-completed < s.window {
			s.aim(s.posted)
			s.wr.Flags |= guestdrv.SendSignaled
			if err := s.qp.PostSend(s.wr); err != nil {
				return err
			}
		}
		if completed == s.posted {
			return nil
		}
		n, err := s.next(ctx)
		if err != nil {
			return err
		}
		completed += n
		done.Add(uint64(n * s.size))
	}
}

// moved returns the KiB of the last sample.
func (s *checkedStream) moved() float64 { return float64(s.posted) * float64(s.size) / 1024 }

// fill writes data that differ at each place and by salt.
func fill(b []byte, salt uint64) {
	for i := 0; i+8 <= len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], word(i, salt))
	}
}

func word(i int, salt uint64) uint64 { return (uint64(i) + 1) * 0x9e3779b97f4a7c15 * (2*salt + 1) }

// compareData compares b with what fill wrote.
func compareData(b []byte, salt uint64) error {
	for i := 0; i+8 <= len(b); i += 8 {
		if got := binary.LittleEndian.Uint64(b[i:]); got != word(i, salt) {
			return fmt.Errorf("data differ: at %d arrived %#x, sent was %#x", i, got, word(i, salt))
		}
	}
	return nil
}
