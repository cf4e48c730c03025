package rdmacm

import (
	"container/heap"
	"time"
)

// timers orders sessions by deadline. Those without one are not in it.
type timers []*session

func (t timers) Len() int           { return len(t) }
func (t timers) Less(i, j int) bool { return t[i].deadline.Before(t[j].deadline) }
func (t timers) Swap(i, j int) {
	t[i], t[j] = t[j], t[i]
	t[i].timer, t[j].timer = i+1, j+1
}
func (t *timers) Push(x any) {
	s := x.(*session)
	*t = append(*t, s)
	s.timer = len(*t)
}
func (t *timers) Pop() any {
	old := *t
	s := old[len(old)-1]
	old[len(old)-1] = nil
	*t = old[:len(old)-1]
	s.timer = 0
	return s
}

// set makes s due at d.
func (t *timers) set(s *session, d time.Time) {
	s.deadline = d
	if s.timer > 0 {
		heap.Fix(t, s.timer-1)
		return
	}
	heap.Push(t, s)
}

// stop removes s.
func (t *timers) stop(s *session) {
	if s.timer > 0 {
		heap.Remove(t, s.timer-1)
	}
}

// interval returns the time that a 5-bit code of a message stands for (IBTA 12.7): 4.096 us * 2^code.
func interval(code uint8) time.Duration { return time.Duration(4096) << (code & 31) }
