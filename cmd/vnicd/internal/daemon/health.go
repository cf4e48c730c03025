package daemon

import (
	"context"
	"fmt"
	"strings"
	"sync"
)

// probe checks whether an engine still accepts work. At most one check per engine is pending.
type probe struct {
	mu   sync.Mutex
	last chan struct{} // closed when the engine has answered; nil: never asked
}

// ask returns a channel that is closed when do has returned. While an earlier check is pending, it returns that one's
// channel.
func (p *probe) ask(do func()) <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.last != nil {
		select {
		case <-p.last:
		default:
			return p.last
		}
	}
	done := make(chan struct{})
	p.last = done
	go func() { defer close(done); do() }()
	return done
}

// Healthy returns when every engine has answered. If ctx ends first, the error names the engines that have not.
func (d *Daemon) Healthy(ctx context.Context) error {
	answers := make([]<-chan struct{}, len(d.loops))
	for i, l := range d.loops {
		answers[i] = d.probes[i].ask(func() { l.VisitFor(nil, func() {}) })
	}
	var stuck []string
	for i, l := range d.loops {
		select {
		case <-answers[i]:
			continue
		default:
		}
		select {
		case <-answers[i]:
		case <-ctx.Done():
			stuck = append(stuck, l.String())
		}
	}
	if len(stuck) > 0 {
		return fmt.Errorf("no answer from %s", strings.Join(stuck, "; "))
	}
	return nil
}
