package roce

import (
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/translate"
)

// Side is one of the two halves of a QP that wait for faults independently of each
// other (PF-16).
type Side uint8

// Sides.
const (
	Requester Side = iota
	Responder
)

// Adapter is a QP's view of the rest of the device: its rings, its CQs, memory,
// and the network. The transport calls it only from the QP's loop, inside Run,
// Receive, Timer, Resume and Modify, and never after Close. No method may block, and
// none may call back into the QP.
//
// A translate.Miss of kind GuestFault or HostFault means "absent for now"; every
// other kind is an error of the work request or of the peer.
type Adapter interface {
	// FetchSend copies in and validates the send WQE number seq (0, 1, 2, ... since
	// the last Reset). Called in order and, once it returned Ready or Bad, not again
	// for that number. w keeps what the transport needs: the slot is not reread.
	FetchSend(seq uint32, w *WQE) Fetch
	// CompleteSend finishes WQEs strictly in order: it moves the SQ's consumer index
	// past w and writes a CQE if w is signalled or c.Status is not success.
	CompleteSend(w *WQE, c *Completion)
	// FetchRecv takes (consumes) the next receive WQE from the RQ or SRQ.
	//
	// FetchSend and FetchRecv that return FetchFault have raised the fault
	// themselves: FetchSend on the Requester's side, FetchRecv on the Responder's. An
	// invalid address there is fatal to the QP.
	FetchRecv(w *RecvWQE) Fetch
	// CompleteRecv always writes a CQE. Receive WQEs complete in the order taken.
	CompleteRecv(w *RecvWQE, c *Completion)

	// Gather copies len(dst) bytes of w's message, from byte off on, out of w's
	// segments. Only keys and PD are checked: reading needs no access right.
	// Not called for inline WQEs.
	Gather(dst []byte, w *WQE, off uint64) translate.Miss
	// Scatter copies src into the segments, from byte off of the message on; needs
	// LocalWrite. off+len(src) never exceeds the sum of the segments' lengths.
	Scatter(sg []SGE, off uint64, src []byte) translate.Miss

	// CheckRemote checks an R_Key against the QP's PD, its rights and the range.
	CheckRemote(key translate.Key, va translate.VA, n uint64, need translate.Access) translate.Miss
	// FlushRemote is CheckRemote for a FLUSH, and for a region or window as a whole if whole. n may be 0. Stores
	// that Scatter, WriteRemote and AtomicRemote have made everybody sees when they return.
	FlushRemote(key translate.Key, va translate.VA, n uint64, whole bool, need translate.Access) translate.Miss
	// ReadRemote and WriteRemote check and copy (RemoteRead, RemoteWrite), whole or miss.
	ReadRemote(dst []byte, key translate.Key, va translate.VA) translate.Miss
	WriteRemote(key translate.Key, va translate.VA, src []byte) translate.Miss
	// AtomicRemote executes one 8-byte atomic (op.Needs()); va is 8-byte aligned.
	// Operands and result are host-order integers.
	AtomicRemote(key translate.Key, va translate.VA, op AtomicOp, compare, swapAdd uint64) (old uint64, m translate.Miss)
	// InvalidateRemote revokes the key named by a SEND with Invalidate, before the
	// receive completes. Refused if it may not be invalidated. Again: others still use
	// the memory. The adapter has then kept the packet, as by Keep, and receives it again.
	InvalidateRemote(key translate.Key) translate.Outcome
	// Manage executes a memory management request. Requests are handed in one after
	// the other, each until it is Done or Refused: on Again, and after a fault was served,
	// once more.
	Manage(w *WQE) (translate.Outcome, translate.Miss)

	// Fault says that side waits for m, which is one of m.Fault(), to access it with
	// the rights need. m.Len is how many bytes from m.Where on the transport
	// knows to be needed, 1 to 1 MiB, contiguous in what the work request or the peer
	// named (m.VA; m.PA if there was no stage one). The adapter raises the fault, at
	// most one per side at a time, and calls QP.Resume from the QP's loop when it was
	// served. While one waits, another call on the same side does nothing.
	Fault(side Side, m translate.Miss, need translate.Access)
	// Keep is asked when a packet of UC or UD has met an absent page, after the
	// fault was raised. True: the adapter keeps the packet, hands in nothing else
	// for this QP before it, and receives it again after the responder's Resume.
	// False: it is dropped (PF-11).
	Keep() bool
	// Hold is asked for the frame of the packet that is being received, to be kept until its turn comes. It stays as it is
	// until Release. Nil: no more may be kept.
	Hold() *frame.Buf
	Release(b *frame.Buf)
	// InHand says that b, which is kept, is the frame being received from now on; nil: none is.
	InHand(b *frame.Buf)
	// FaultDelay is how long a fault is expected to take now, ns (PF-8); 0: not known.
	FaultDelay() int64

	// Peer returns the QP that this one's frames would reach now and whose frames would
	// reach this one, if it lives on the same loop and nothing wants to see the frames;
	// else nil. It stays so, and memory of both stays mapped, until Run returns. slice is how many bytes this
	// Run may copy before others have their turn, one packet at least.
	Peer() (p *QP, slice uint64)
	// GatherSpan, ScatterSpan and RemoteSpan are Gather, Scatter, and ReadRemote or
	// WriteRemote (need says which), in two steps: they return guest memory from byte off, or va, on: at
	// least one byte and at most n, as far as it is contiguous, until the QP's Run
	// returns. Of all n bytes keys, rights and bounds are checked. n is not 0. Those with
	// Remote in their name and Scatter may be called within the Run of the peer.
	GatherSpan(w *WQE, off, n uint64) ([]byte, translate.Miss)
	ScatterSpan(sg []SGE, off, n uint64) ([]byte, translate.Miss)
	RemoteSpan(key translate.Key, va translate.VA, n uint64, need translate.Access) ([]byte, translate.Miss)

	// GetBuf gives an empty frame buffer, or nil: out of buffers, ask again later.
	GetBuf() *frame.Buf
	// Transmit sends a complete Ethernet frame with ICRC; it takes the reference.
	Transmit(b *frame.Buf)
	// ArmTimer replaces the deadline (ns, same clock as now) of the QP's one timer,
	// upon which the adapter calls QP.Timer. 0 disarms. Early and spurious calls of
	// Timer are harmless.
	ArmTimer(deadline int64)
	// Schedule asks for a call of QP.Run soon, after other QPs had their turn and
	// packets of the current batch were received.
	Schedule()
	// Event raises an asynchronous event of the QP.
	Event(k EventKind)
}
