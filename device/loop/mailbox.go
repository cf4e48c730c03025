package loop

// mailBatch bounds the values that one mailbox delivers per iteration, so that a busy sender cannot starve the loop's
// own ports.
const mailBatch = 64

// Mailbox passes values, usually frames, from any thread to a loop: bounded, lock-free and without allocation. When it
// is full, Put fails, and the sender drops the value as with a network card's queue.
type Mailbox[T any] struct {
	l       *Loop
	polled  Polled
	q       *ring[T]
	handle  func(T)
	release func(T)
	weigh   func(T) int // nil: all weigh 1
	cur     T
	holding bool
	closed  bool // loop thread only
}

// NewMailbox makes a mailbox of at least capacity values on l. handle runs on l for each value, in the order of Put.
// release runs after handle, also after a memory fault in handle, and for values that remain at Close: it releases the
// value's resources (such as a buffer reference), and accesses no guest memory. release may be nil.
func NewMailbox[T any](l *Loop, capacity int, handle, release func(T), opts ...Option) *Mailbox[T] {
	if release == nil {
		release = func(T) {}
	}
	m := &Mailbox[T]{l: l, q: newRing[T](capacity), handle: handle, release: release}
	var asked handler
	asked.init("mailbox", opts)
	m.polled.l, m.polled.p, m.polled.mail = l, m, m
	l.addPoller(&m.polled, "mailbox", []Option{Name(asked.name), Metered(asked.meter), OnFault(func(f Fault) {
		m.finish()
		if asked.onFault != nil {
			asked.onFault(f)
		}
	})})
	return m
}

// Put appends v; false if the mailbox is full, and v remains the caller's. Callable from any thread.
func (m *Mailbox[T]) Put(v T) bool {
	if !m.q.put(v) {
		return false
	}
	if m.polled.quiet.take() {
		m.polled.rouseFromAny()
	}
	m.l.wake()
	return true
}

// Weigh sets a function that returns how much a value, at least 1, counts towards the values delivered per iteration.
// Call it before the first Put.
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

// Prepare implements Poller. The loop itself checks once more after it has set sleeping.
func (m *Mailbox[T]) Prepare() bool { return !m.q.empty() }

// Resume implements Poller.
func (m *Mailbox[T]) Resume() {}

func (m *Mailbox[T]) pending() bool { return !m.q.empty() }

// Close removes the mailbox from its loop and releases its values. The caller ensures that Put is not called any more:
// later values stay unreleased until Close is called again.
func (m *Mailbox[T]) Close() {
	m.l.arrange(func() {
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
