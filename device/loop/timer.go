package loop

// Timer calls its function once on its loop after the armed deadline. Arm and Stop run only on the loop's thread and do
// not allocate (the heap grows with the maximum number of pending timers).
//
// Re-arming to a later time, which a retransmission timer does on every acknowledgement, only stores the new deadline;
// the heap is updated at the old one.
type Timer struct {
	l     *Loop
	h     handler
	f     func(now int64)
	when  int64 // deadline, 0 = not armed
	key   int64 // deadline that orders it in the heap
	index int   // index in the heap, -1 = not in it
}

// NewTimer makes a timer that is not armed. f runs on the loop with the time of its iteration. NewTimer may be called
// from anywhere.
func (l *Loop) NewTimer(f func(now int64), opts ...Option) *Timer {
	t := &Timer{l: l, f: f, index: -1}
	t.h.init("timer", opts)
	return t
}

// Arm sets the deadline in nanoseconds of the loop's clock, replacing any earlier one. A deadline in the past fires in
// the next iteration.
func (t *Timer) Arm(deadline int64) {
	if deadline <= 0 {
		deadline = 1
	}
	t.when = deadline
	switch h := &t.l.timers; {
	case t.index < 0:
		t.key = deadline
		h.push(t)
	case deadline < t.key:
		t.key = deadline
		h.up(t.index)
	}
}

// Stop disarms the timer; its function does not run until it is armed again. It may be called on a stopped timer.
func (t *Timer) Stop() {
	t.when = 0
	if t.index >= 0 {
		t.l.timers.remove(t.index)
	}
}

// Affordable returns deadline or, where the loop has set an alarm lately and the kernel's timers cost much, a later
// time: by up to 2 ms, or 16 ms where no such timer was of use lately (Used). A timer that only makes something faster,
// and is armed and stopped often, is best armed for that time. Loop thread only.
func (l *Loop) Affordable(deadline int64) int64 { return l.alarm.affordable(deadline, l.now) }

// Used says that a timer with a time from Affordable was of use, or that the next one may be: there is something to
// make faster. Loop thread only.
func (l *Loop) Used() { l.alarm.usedAt = l.now }

// Armed reports whether the timer is armed.
func (t *Timer) Armed() bool { return t.when != 0 }

// Deadline returns the armed deadline, or 0.
func (t *Timer) Deadline() int64 { return t.when }

// timerHeap is a 4-ary min-heap by key: flatter than a binary heap, so fewer cache lines per operation.
type timerHeap []*Timer

func (h *timerHeap) push(t *Timer) {
	*h = append(*h, t)
	t.index = len(*h) - 1
	h.up(t.index)
}

func (h timerHeap) up(i int) {
	t := h[i]
	for i > 0 {
		parent := (i - 1) / 4
		if h[parent].key <= t.key {
			break
		}
		h[i] = h[parent]
		h[i].index = i
		i = parent
	}
	h[i] = t
	t.index = i
}

func (h timerHeap) down(i int) {
	t := h[i]
	for {
		first := 4*i + 1
		if first >= len(h) {
			break
		}
		least := first
		for c := first + 1; c < first+4 && c < len(h); c++ {
			if h[c].key < h[least].key {
				least = c
			}
		}
		if h[least].key >= t.key {
			break
		}
		h[i] = h[least]
		h[i].index = i
		i = least
	}
	h[i] = t
	t.index = i
}

func (h *timerHeap) remove(i int) {
	s := *h
	t, last := s[i], len(s)-1
	moved := s[last]
	s[last] = nil
	*h = s[:last]
	t.index = -1
	if i < last {
		s[i] = moved
		moved.index = i
		h.down(i)
		h.up(moved.index)
	}
}

// due removes and returns a timer that is due, or nil. Timers re-armed to a later time are put back.
func (h *timerHeap) due(now int64) *Timer {
	for len(*h) > 0 {
		t := (*h)[0]
		if t.key > now {
			return nil
		}
		if h.delayed() {
			continue
		}
		h.remove(0)
		t.when = 0
		return t
	}
	return nil
}

// delayed puts the first timer where it belongs, if it was re-armed to a later time.
func (h timerHeap) delayed() bool {
	t := h[0]
	if t.when == t.key {
		return false
	}
	t.key = t.when
	h.down(0)
	return true
}

// next returns the earliest deadline, or 0 if no timer is pending.
func (h timerHeap) next() int64 {
	if len(h) == 0 {
		return 0
	}
	for h.delayed() {
	}
	return h[0].key
}
