// Side: data

package hca

import (
	"sync"
	"time"

	"github.com/vnicd/vnicd/device/loop"
)

// rateLimit keeps a guest from filling the host's log: burst lines at once, then
// one per interval, which also reports the number of suppressed lines.
type rateLimit struct {
	mu      sync.Mutex
	tokens  int
	last    int64
	dropped int
}

const (
	warnBurst    = 20
	warnInterval = int64(time.Second)
)

// allow takes a token at time now (ns) and returns the number of lines suppressed before.
func (r *rateLimit) allow(now int64) (ok bool, dropped int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.last == 0 {
		r.tokens, r.last = warnBurst, now
	}
	if n := (now - r.last) / warnInterval; n > 0 {
		r.tokens = int(min(int64(r.tokens)+n, warnBurst))
		r.last += n * warnInterval
	}
	if r.tokens == 0 {
		r.dropped++
		return false, 0
	}
	r.tokens--
	dropped, r.dropped = r.dropped, 0
	return true, dropped
}

// warn logs a mistake of the guest. Any thread; it is not for the data path, only
// for events that stop an object or refuse a command.
func (d *dataSide) warn(msg string, args ...any) {
	ok, dropped := d.warned.allow(loop.Monotonic())
	if !ok {
		return
	}
	if dropped > 0 {
		args = append(args, "suppressed", dropped)
	}
	d.log.Warn(msg, args...)
}
