package vhostuser

import (
	"context"
	"sync"
	"time"
)

// Limits of a device's messages to its Keeper: paceBurst at once, which is several times what a front end with
// MaxMemSlots regions needs to begin and to end, then paceRate per second.
const (
	paceBurst = 2048
	paceRate  = 64
)

// pacer makes a front end wait that changes its memory table, or connects, faster than that: the service manager
// handles the messages of all VMs, and of all services, one by one. No message is dropped, since the store would then
// differ from the connection.
type pacer struct {
	to    Keeper
	ctx   context.Context // once it has ended, nothing waits: the server closes
	now   func() time.Time
	sleep func(context.Context, time.Duration)

	mu   sync.Mutex
	free time.Time // when a burst is possible again; a message moves it by 1/paceRate seconds
}

func newPacer(ctx context.Context, to Keeper) *pacer {
	return &pacer{to: to, ctx: ctx, now: time.Now, sleep: func(ctx context.Context, d time.Duration) {
		t := time.NewTimer(d)
		defer t.Stop()
		select {
		case <-t.C:
		case <-ctx.Done():
		}
	}}
}

// Keep implements Keeper.
func (p *pacer) Keep(name string, fd int) error {
	p.wait()
	return p.to.Keep(name, fd)
}

// Forget implements Keeper.
func (p *pacer) Forget(name string) error {
	p.wait()
	return p.to.Forget(name)
}

// Ending implements Keeper.
func (p *pacer) Ending() bool { return p.to.Ending() }

// wait returns when a message may be sent.
func (p *pacer) wait() {
	const each = time.Second / paceRate
	p.mu.Lock()
	now := p.now()
	if p.free.Before(now) {
		p.free = now
	}
	p.free = p.free.Add(each)
	late := p.free.Sub(now) - paceBurst*each
	p.mu.Unlock()
	if late > 0 && p.ctx.Err() == nil {
		p.sleep(p.ctx, late)
	}
}
