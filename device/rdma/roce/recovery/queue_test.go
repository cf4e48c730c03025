package recovery

import (
	"math/rand/v2"
	"testing"

	"github.com/vnicd/vnicd/device/frame"
)

// TestQueue compares a queue with a map: random PSNs within a window that moves on, as the callers use it.
func TestQueue(t *testing.T) {
	for _, span := range []int{1, 3, 64, 256} {
		rng := rand.New(rand.NewPCG(1, uint64(span)))
		q, model := NewQueue(span), map[uint64]*frame.Buf{}
		una := uint64(1)<<32 - 5 // the low 32 bits wrap during the test
		if q.Span() != uint64(span) {
			t.Fatalf("span %d, want %d", q.Span(), span)
		}
		for step := range 20_000 {
			psn := una + rng.Uint64N(uint64(span))
			switch rng.IntN(4) {
			case 0:
				if model[psn] == nil {
					model[psn] = new(frame.Buf)
					q.Put(psn, model[psn])
				}
			case 1:
				if got := q.Take(psn); got != model[psn] {
					t.Fatalf("span %d, step %d: took %p, want %p", span, step, got, model[psn])
				}
				delete(model, psn)
			case 2:
				if got := q.Peek(psn); got != model[psn] {
					t.Fatalf("span %d, step %d: peeked at %p, want %p", span, step, got, model[psn])
				}
			case 3: // the oldest is done
				if got := q.Take(una); got != model[una] {
					t.Fatalf("span %d, step %d: took %p, want %p", span, step, got, model[una])
				}
				delete(model, una)
				una++
			}
			if q.Len() != len(model) {
				t.Fatalf("span %d, step %d: length %d, want %d", span, step, q.Len(), len(model))
			}
		}
		for psn := una; q.Len() > 0; psn++ {
			if psn == una+uint64(span) {
				t.Fatalf("span %d: %d frames are outside the window", span, q.Len())
			}
			if b := q.Take(psn); b != model[psn] {
				t.Fatalf("span %d: took %p, want %p", span, b, model[psn])
			}
		}
		if b := q.Take(una); b != nil || q.Len() != 0 {
			t.Fatalf("span %d: the empty queue returned %p, length %d", span, b, q.Len())
		}
	}
}

// TestQueueNoStorage: a QP that is not RC has a queue without room, which is always empty.
func TestQueueNoStorage(t *testing.T) {
	var q Queue
	if q.Span() != 0 || q.Len() != 0 || q.Peek(7) != nil || q.Take(7) != nil {
		t.Error("the zero queue is not empty")
	}
}
