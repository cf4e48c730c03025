package web

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/monitoring/query"
)

// daemon asks the daemon.
type daemon struct {
	slots []net.Conn
	// questions has a channel for each kind, from which a goroutine per slot takes one at a time.
	questions map[query.Kind]chan *question
	of        map[query.Kind]int // slots

	quit    chan struct{}
	running sync.WaitGroup

	once   sync.Once
	broken chan struct{} // closed when a slot has broken
	why    error         // before broken is closed
}

// question is a question on a slot.
type question struct {
	text  []byte
	began chan *query.Answer // has the answer once its head has arrived
	done  chan struct{}      // closed when the answer is not read any more; the slot discards the rest
}

func newDaemon(kinds []query.Kind, slots []net.Conn) (*daemon, error) {
	if len(slots) != len(kinds) {
		return nil, fmt.Errorf("%d connections with the daemon, want %d", len(slots), len(kinds))
	}
	d := &daemon{slots: slots, questions: map[query.Kind]chan *question{}, of: map[query.Kind]int{},
		quit: make(chan struct{}), broken: make(chan struct{})}
	for i, k := range kinds {
		if d.questions[k] == nil {
			d.questions[k] = make(chan *question)
		}
		d.of[k]++
		questions, slot := d.questions[k], slots[i]
		d.running.Go(func() {
			if err := d.run(questions, slot); err != nil {
				d.fail(fmt.Errorf("connection with the daemon, for %v: %w", k, err))
			}
		})
	}
	return d, nil
}

// close closes all slots, and returns when no goroutine uses them any more.
func (d *daemon) close() {
	close(d.quit)
	for _, c := range d.slots {
		_ = c.Close()
	}
	d.running.Wait()
}

func (d *daemon) fail(err error) {
	d.once.Do(func() {
		d.why = err
		close(d.broken)
	})
}

// run asks questions on a slot, until it breaks or close.
func (d *daemon) run(questions <-chan *question, slot net.Conn) error {
	for {
		var q *question
		select {
		case q = <-questions:
		case <-d.quit:
			return nil
		}
		if _, err := slot.Write(q.text); err != nil {
			return err
		}
		a, err := query.ReadAnswer(slot)
		if err != nil {
			return err
		}
		q.began <- a
		select {
		case <-q.done:
		case <-d.quit:
			return nil
		}
		if err := a.Drain(); err != nil {
			return err
		}
	}
}

// answer is an answer of the daemon. Close gives its slot back, which any other question may use then.
type answer struct {
	*query.Answer
	of *question
}

func (a *answer) Close() { close(a.of.done) }

var errBroken = errors.New("no connection with the daemon")

// ask asks the daemon. It waits up to slotTime for a slot, and then up to within for the beginning of the answer.
func (d *daemon) ask(ctx context.Context, what *query.Query, within time.Duration) (*answer, error) {
	q := &question{text: what.Append(nil), began: make(chan *query.Answer, 1), done: make(chan struct{})}
	timer := time.NewTimer(slotTime)
	defer timer.Stop()
	select {
	case d.questions[what.Kind] <- q:
	case <-timer.C:
		return nil, fmt.Errorf("%d requests for %v are in progress, the limit: try again later", d.of[what.Kind], what.Kind)
	case <-d.broken:
		return nil, errBroken
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	timer.Reset(within)
	var err error
	select {
	case a := <-q.began:
		return &answer{a, q}, nil
	case <-timer.C:
		err = fmt.Errorf("no answer from the daemon in %v", within)
	case <-d.broken:
		err = errBroken
	case <-ctx.Done():
		err = ctx.Err()
	}
	close(q.done)
	return nil, err
}
