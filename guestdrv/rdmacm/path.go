package rdmacm

import (
	"context"
	"time"

	"github.com/vnicd/vnicd/guestdrv"
)

// Paths to peers: bounded, refreshed while they are in use. A message to a peer without a known path waits for its
// resolution, which is bounded in number and time, because anybody can send a REQ from any address.

const (
	maxPaths      = 256
	maxResolving  = 16 // resolutions at once
	maxAwaiting   = 8  // messages that wait for one resolution
	resolveFor    = 3 * time.Second
	refreshPathAt = 30 * time.Second
)

// ah is a path with its address handle.
type ah struct {
	path   guestdrv.Path
	handle *guestdrv.AH
	since  time.Time // resolved
	used   time.Time
	using  int  // send requests in progress
	gone   bool // replaced or dropped
}

// paths are the known paths by GID.
type paths struct {
	known    map[guestdrv.GID]*ah
	awaiting map[guestdrv.GID][]datagram // being resolved
}

func (p *paths) init() {
	p.known, p.awaiting = map[guestdrv.GID]*ah{}, map[guestdrv.GID][]datagram{}
}

// get returns the path to a peer, nil if it is unknown.
func (p *paths) get(now time.Time, to guestdrv.GID) *ah {
	a := p.known[to]
	if a != nil {
		a.used = now
	}
	return a
}

// await keeps a message until the path to its peer is resolved; false: there is no room.
func (p *paths) await(d datagram) bool {
	q, resolving := p.awaiting[d.to]
	if !resolving && len(p.awaiting) >= maxResolving || len(q) >= maxAwaiting {
		return false
	}
	p.awaiting[d.to] = append(q, d)
	return true
}

// release ends the use of a by a send request.
func (p *paths) release(a *ah) {
	if a.using--; a.using == 0 && a.gone {
		_ = a.handle.Close() // never fails
	}
}

// drop removes a.
func (p *paths) drop(a *ah) {
	delete(p.known, a.path.GID)
	a.gone = true
	if a.using == 0 {
		_ = a.handle.Close() // never fails
	}
}

// close drops all paths. No send request is in progress.
func (p *paths) close() {
	for _, a := range p.known {
		a.using = 0
		p.drop(a)
	}
}

// add makes a path known, in place of an earlier one.
func (p *paths) add(now time.Time, pd *guestdrv.PD, path guestdrv.Path) {
	if old := p.known[path.GID]; old != nil {
		if old.path == path {
			old.since = now
			return
		}
		p.drop(old)
	}
	for len(p.known) >= maxPaths {
		p.drop(p.oldest())
	}
	h, err := pd.CreateAH(path)
	if err != nil && len(p.known) > 0 { // the program uses the device's address handles, too
		p.drop(p.oldest())
		h, err = pd.CreateAH(path)
	}
	if err == nil {
		p.known[path.GID] = &ah{path: path, handle: h, since: now, used: now}
	}
}

// oldest returns the path that has not been used for the longest time.
func (p *paths) oldest() (a *ah) {
	for _, x := range p.known {
		if a == nil || x.used.Before(a.used) {
			a = x
		}
	}
	return a
}

// resolve starts a resolution if messages wait for one that has not been started, or if the path is old. The caller
// holds m.mu.
func (m *Manager) resolve(now time.Time, to guestdrv.GID) {
	p := &m.gsi.paths
	a, q := p.known[to], p.awaiting[to]
	switch {
	case m.closing || m.err != nil:
		return
	case a == nil && len(q) != 1: // no message waits, or an earlier one has started it
		return
	case a != nil && (now.Sub(a.since) < refreshPathAt || q != nil || len(p.awaiting) >= maxResolving):
		return
	case a != nil:
		p.awaiting[to] = []datagram{}
	}
	m.wg.Go(func() {
		ctx, cancel := context.WithTimeout(m.ctx, resolveFor)
		defer cancel()
		path, err := m.dev.Resolve(ctx, to, m.cfg.GIDIndex)
		m.mu.Lock()
		defer m.mu.Unlock()
		waiting := p.awaiting[to]
		delete(p.awaiting, to)
		if err != nil {
			m.machine.counters.Unsent += uint64(len(waiting))
			return
		}
		if p.add(time.Now(), m.gsi.pd, path); p.known[to] == nil { // no address handle is free
			m.machine.counters.Unsent += uint64(len(waiting))
			return
		}
		m.machine.out = append(m.machine.out, waiting...)
		m.flush()
	})
}

// path returns the path to a peer, for a queue pair.
func (m *Manager) path(ctx context.Context, to guestdrv.GID) (guestdrv.Path, error) {
	path, err := m.dev.Resolve(ctx, to, m.cfg.GIDIndex)
	if err != nil {
		return path, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.err == nil && !m.closing {
		m.gsi.paths.add(time.Now(), m.gsi.pd, path)
	}
	return path, nil
}
