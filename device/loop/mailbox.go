package loop

// mailBatch bounds what one mailbox hands over per iteration, so that a busy neighbour cannot starve the loop's own
// ports.
const mailBatch = 64

// Mailbox carries values, usually frames, from any thread to a loop: bounded, without locks and without allocation.
// When it is full, Put refuses, and the sender drops as a network card's queue would.
type Mailbox[T any] struct {
	l       *Loop
	q       *ring[T]
	handle  func(T)
	release func(T)
	weigh   func(T) int // nil: all weigh 1
	cur     T
	holding bool
	closed  bool // loop's state
}

// NewMailbox makes a mailbox of at least capacity values on l. handle runs on l for each value, in the order in which
// they were put. release runs after handle, also when a memory fault cut handle short, and for values that remain at
// Close: it gives the value's resources back (such as a buffer reference). release may be nil.
func NewMailbox[T any](l *Loop, capacity int, handle, release func(T), opts ...Option) *Mailbox[T] {
	if release == nil {
		release = func(T) {}
	}
	m := &Mailbox[T]{l: l, q: newRing[T](capacity), handle: handle, release: release}
	var asked handler
	asked.init("mailbox", opts)
	l.addPoller(m, m, []Option{Name(asked.name), OnFault(func(f Fault) {
		m.finish()
		if asked.onFault != nil {
			asked.onFault(f)
		}
	})})
	return m
}

// Put hands v over; false when the mailbox is full, and v remains the caller's. Safe from any thread.
func (m *Mailbox[T]) Put(v T) bool {
	if !m.q.put(v) {
		return false
	}
	m.l.wake()
	return true
}

// Weigh has values count as more than one, 1 at least, of what is handed over per iteration. To be called before the
// first Put.
func (m *Mailbox[T]) Weigh(f func(T) int) { m.weigh = f }

// Poll implements Poller.
func (m *Mailbox[T]) Poll(int64) bool {
	n := 0
	for n < mailBatch {
		v, ok := m.q.get()
		if !ok {
			break
		}
		if m.weigh == nil {
			n++
		} else {
			n += m.weigh(v)
		}
		m.cur, m.holding = v, true
		m.handle(v)
		m.finish()
	}
	return n > 0
}

func (m *Mailbox[T]) finish() {
	if m.holding {
		v := m.cur
		var zero T
		m.cur, m.holding = zero, false
		m.release(v)
	}
}

// Prepare implements Poller. The last look happens in the loop itself, after it has declared itself asleep.
func (m *Mailbox[T]) Prepare() bool { return !m.q.empty() }

// Resume implements Poller.
func (m *Mailbox[T]) Resume() {}

func (m *Mailbox[T]) pending() bool { return !m.q.empty() }

// Close takes the mailbox off its loop and releases what is in it. The caller sees to it that nobody puts any more:
// values put later stay inside unreleased until Close is called again.
func (m *Mailbox[T]) Close() {
	m.l.Do(func() {
		if !m.closed {
			m.closed = true
			m.l.removePoller(m)
		}
		for {
			v, ok := m.q.get()
			if !ok {
				return
			}
			m.release(v)
		}
	})
}
