package hca

import (
	"sync"
	"testing"
	"time"

	"github.com/vnicd/vnicd/translate"
)

// A command that waits for the host's swap device keeps nobody else waiting: who
// tells the port of another MTU holds the tunnels' lock, and who asks for the status
// asks for that of all VMs.
func TestSlowCommand(t *testing.T) {
	w := newWorld(t, 1, 1, Limits{})
	g := w.guests[0]
	g.pd()
	inside, goOn := make(chan struct{}), make(chan struct{})
	var once sync.Once
	g.hold = func(translate.PA, uint64) {
		once.Do(func() { close(inside) })
		<-goOn
	}
	var wg sync.WaitGroup
	wg.Go(func() { g.cq(16) })
	<-inside
	others := make(chan Status)
	go func() {
		g.PortChanged()
		others <- g.Describe()
	}()
	select {
	case s := <-others:
		if g.notes != 1 || !s.Busy || !s.Connected || s.PDs != 0 || s.Stats["rx_packets"] != 0 || len(s.GIDs) != 1 {
			t.Errorf("%d notices, status %+v", g.notes, s)
		}
	case <-time.After(patienceHere):
		t.Error("a change of the port, or a status, waits for a command")
		defer func() { <-others }()
	}
	close(goOn)
	wg.Wait()
	if s := g.Describe(); s.Busy || s.PDs != 1 || s.CQs != 1 {
		t.Errorf("status after the command: %+v", s)
	}
}
