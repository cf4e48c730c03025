package recovery

import (
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/translate"
)

// Queue is a reorder queue: a ring of frames by PSN that arrived out of order. It does not own the frames: the caller
// releases those that it returns.
type Queue struct {
	frames []*frame.Buf // made with the first frame: most connections never need it
	span   uint64
	n      int
}

// NewQueue returns a queue for frames at most span PSNs apart.
func NewQueue(span int) Queue { return Queue{span: uint64(span)} }

// QueueFootprint bounds the bytes that a queue of that span occupies.
func QueueFootprint(span int) uint64 { return translate.AllocatedFor[*frame.Buf](span) }

// Span returns how many PSNs the queue has room for.
func (q *Queue) Span() uint64 { return q.span }

// Len returns how many frames are queued.
func (q *Queue) Len() int { return q.n }

// Put queues b, the frame with PSN psn. The place must be empty.
func (q *Queue) Put(psn uint64, b *frame.Buf) {
	if q.frames == nil {
		q.frames = make([]*frame.Buf, q.span)
	}
	q.frames[psn%q.span] = b
	q.n++
}

// Peek returns the frame with PSN psn and leaves it queued; nil: there is none.
func (q *Queue) Peek(psn uint64) *frame.Buf {
	if q.n == 0 {
		return nil
	}
	return q.frames[psn%q.span]
}

// Take removes and returns the frame with PSN psn; nil: there is none.
func (q *Queue) Take(psn uint64) *frame.Buf {
	if q.n == 0 {
		return nil
	}
	f := &q.frames[psn%q.span]
	b := *f
	if *f = nil; b != nil {
		q.n--
	}
	return b
}
