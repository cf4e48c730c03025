package roce

import (
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/translate"
)

// Side is one of the two halves of a QP. They wait for faults independently of each other (PF-16).
type Side uint8

// Sides.
const (
	Requester Side = iota
	Responder
)

// Adapter is everything that a QP needs of the device around it. One value implements it per QP; a QP keeps the four
// parts apart.
//
// The QP calls an adapter only from its own loop, inside Run, Receive, Timer, Resume, Modify and Moved, and never after
// Close. No method may block, and none may call back into the QP. Slices and pointers that are passed in are borrowed
// for the call, except frames, whose ownership each method states.
//
// A translate.Miss of kind GuestFault or HostFault means that the page is absent at present. Every other kind is an
// error of the work request or of the peer.
type Adapter interface {
	Queues
	Memory
	Link
	Scheduler
}

// Queues are the work queues and completion queues of a QP. The requester calls FetchSend and CompleteSend, the
// responder FetchRecv and CompleteRecv. WQEs are storage of the QP: the adapter fills them in and keeps no reference to
// them.
//
// FetchSend and FetchRecv raise the fault themselves before they return FetchFault: FetchSend on the Requester's side,
// FetchRecv on the Responder's. An invalid address there is fatal to the QP.
type Queues interface {
	// FetchSend copies in and validates the send WQE number seq (0, 1, 2, ... since the last Reset). It is called
	// in order, and once it has returned FetchReady or FetchBad not again for that number. w holds all that the
	// transport needs: the slot is not read again.
	FetchSend(seq uint32, w *WQE) Fetch
	// CompleteSend finishes WQEs strictly in order: it moves the SQ's consumer index past w, and writes a CQE if w
	// is signalled or c.Status is not success.
	CompleteSend(w *WQE, c *Completion)
	// FetchRecv consumes the next receive WQE of the RQ or SRQ.
	FetchRecv(w *RecvWQE) Fetch
	// CompleteRecv always writes a CQE. Receive WQEs complete in the order in which they were fetched.
	CompleteRecv(w *RecvWQE, c *Completion)
}

// Memory is guest memory as seen by a QP: by its own segments (the requester's and the receive WQEs') and by R_Keys
// (the peer's requests). Every call checks keys, rights, PD and range again, so memory may be deregistered between any
// two.
//
// The local path calls the methods with Remote in their name, and ScatterSpan, within the Run of the peer.
type Memory interface {
	// Gather copies len(dst) bytes of w's message, from byte off on, out of w's segments. Only keys and PD are
	// checked: reading needs no access right. It is not called for inline WQEs.
	Gather(dst []byte, w *WQE, off uint64) translate.Miss
	// Scatter copies src into the segments, from byte off of the message on. It needs LocalWrite. off+len(src)
	// never exceeds the sum of the segments' lengths.
	Scatter(sg []SGE, off uint64, src []byte) translate.Miss

	// CheckRemote checks an R_Key against the QP's PD, its rights and the range.
	CheckRemote(key translate.Key, va translate.VA, n uint64, need translate.Access) translate.Miss
	// FlushRemote is CheckRemote for a FLUSH; if whole, for the region or window as a whole. n may be 0. When it
	// returns, the stores of Scatter, WriteRemote and AtomicRemote are visible to all observers.
	FlushRemote(key translate.Key, va translate.VA, n uint64, whole bool, need translate.Access) translate.Miss
	// ReadRemote and WriteRemote check (RemoteRead, RemoteWrite) and copy all bytes, or miss.
	ReadRemote(dst []byte, key translate.Key, va translate.VA) translate.Miss
	WriteRemote(key translate.Key, va translate.VA, src []byte) translate.Miss
	// Stored says that all data of WRITEs with PSNs before psn is in memory; those are extended to 64 bits, see
	// QP.Expected. A process that continues this one does not store it again (QP.Revived): a program that polls memory
	// may have overwritten it.
	Stored(psn uint64)
	// AtomicRemote executes one 8-byte atomic, which needs the right op.Needs(). va is 8-byte aligned. Operands and
	// result are host-order integers.
	AtomicRemote(key translate.Key, va translate.VA, op AtomicOp, compare, swapAdd uint64) (old uint64, m translate.Miss)
	// InvalidateRemote revokes the key that a SEND with Invalidate names, before the receive completes. Refused:
	// the key may not be invalidated. Again: others still use the memory; the adapter has kept the packet, as
	// Link.Keep does, and receives it again.
	InvalidateRemote(key translate.Key) translate.Outcome
	// Manage executes a memory management request. Requests are passed one after the other, each until it is Done
	// or Refused: the same request again after Again, and after a fault has been served.
	Manage(w *WQE) (translate.Outcome, translate.Miss)

	// GatherSpan, ScatterSpan and RemoteSpan are Gather, Scatter, and ReadRemote or WriteRemote (need says which),
	// in two steps. They return guest memory from byte off, or va, on: at least one byte and at most n, as far as
	// it is contiguous. It stays valid until the QP's Run returns. Keys, rights and bounds are checked for all n
	// bytes. n is not 0.
	GatherSpan(w *WQE, off, n uint64) ([]byte, translate.Miss)
	ScatterSpan(sg []SGE, off, n uint64) ([]byte, translate.Miss)
	RemoteSpan(key translate.Key, va translate.VA, n uint64, need translate.Access) ([]byte, translate.Miss)
}

// Link carries a QP's frames: requester and responder send on it, and keep received frames for later.
type Link interface {
	// GetBuf returns an empty frame buffer, which the QP owns; nil: out of buffers, ask again later.
	GetBuf() *frame.Buf
	// Transmit sends a complete Ethernet frame with ICRC. It takes the reference to b.
	Transmit(b *frame.Buf)

	// Peer returns the QP that this one's frames would reach now and whose frames would reach this one, if it lives
	// on the same loop and nothing needs to see the frames; else nil. It stays valid, and memory of both QPs stays
	// mapped, until Run returns. slice is how many bytes this Run may copy before other QPs run, one packet at
	// least.
	Peer() (p *QP, slice uint64)
	// Journaled reports whether the state of QPs is kept so that they survive the process (CO-2). The adapter calls
	// Committed then, and commits a peer on the local path before the QP whose requests it has executed.
	Journaled() bool

	// Keep is called when a packet of UC or UD has met an absent page, after the fault was raised. True: the
	// adapter keeps the packet, passes no other packet to this QP before it, and receives it again after the
	// responder's Resume. False: the packet is dropped (PF-11).
	Keep() bool
	// Hold returns the frame of the packet that is being received, for a reorder queue, and a reference to it. The
	// frame does not change until Release. Nil: no more frames may be held. absent: the packet is a request that has met
	// an absent page, or is behind such a request, so its memory's owner decides how long it is held.
	Hold(absent bool) *frame.Buf
	Release(b *frame.Buf)
	// InHand tells the adapter that the held frame b is being received from now on; nil: no held frame is.
	InHand(b *frame.Buf)

	// PeerPatience returns what connection management shows about the peer: whether it retries RNR NAKs for ever
	// (rnr_retry 7). It is called when a request cannot be executed yet and its packet does not say so.
	PeerPatience() wire.Patience
}

// Scheduler runs a QP on its loop: it raises the faults that a QP waits for, and calls Run, Timer and Resume.
type Scheduler interface {
	// Schedule asks for a call of QP.Run soon, after other QPs have run and the packets of the current batch were
	// received.
	Schedule()
	// ArmTimer replaces the deadline (ns, same clock as now) of the QP's one timer, at which QP.Timer is called. 0
	// disarms it. Early and spurious calls of Timer are harmless.
	ArmTimer(deadline int64)
	// Affordable returns deadline or, if the loop has set alarms lately and they cost much on this machine, the earliest
	// later time for which another one is worth its cost. For timers that only make something faster.
	Affordable(deadline int64) int64
	// Used says that a timer with a time from Affordable was of use, or that packets are lost, and the next one may be.
	// For a while such times are earlier then.
	Used()
	// Fault says that side waits for m, which is one of m.Fault(), to access it with the rights need. m.Len is how
	// many bytes from m.Where on are known to be needed, 1 to 1 MiB, contiguous in what the work request or the
	// peer named (m.VA; m.PA if there was no stage one). The scheduler raises the fault, at most one per side and
	// kind at a time, and calls QP.Resume from the QP's loop when it was served. While one is outstanding, another
	// call of the same kind on the same side does nothing. What the side waits for is recorded in the QP: see
	// QP.Waits.
	Fault(side Side, m translate.Miss, need translate.Access)
	// FaultDelay returns how long a fault is expected to take, ns (PF-8); 0: not known.
	FaultDelay() int64
	// Event raises an asynchronous event of the QP.
	Event(k EventKind)
}
