package vxlan

import (
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/loop"
)

const (
	// txBatch is the maximum number of datagrams that one socket sends with one call.
	txBatch = 128
	// maxPad bounds the padding that makes frames equal in size to their neighbours: the first packet of an RDMA WRITE
	// is longer than the others by its RETH.
	maxPad = 16
)

var padding [maxPad]byte

// sender is the sending half of one loop.
type sender struct {
	vt    *VTEP
	l     *loop.Loop
	hook  *loop.Hook
	socks []*txSocket
	dirty []*txSocket // those with something to send
	gso   gsoSender

	answering bool // an answer to a frame that was too big is scheduled
}

// txSocket is one source port and its batch.
type txSocket struct {
	fd     int
	port   uint16
	summed bool // datagrams get checksums (IPv4)

	n     int
	bufs  [txBatch]*frame.Buf // one reference each
	ports [txBatch]*port
	peers [txBatch]*peer // keeps the address that msgs points to
	tos   [txBatch]uint8

	// Messages of one or more datagrams: message i ends before datagram ends[i].
	msgs  [txBatch]mmsghdr
	ctrls [txBatch]txControl
	ends  [txBatch]int
	iovs  [3 * txBatch]unix.Iovec
}

func newSender(vt *VTEP, l *loop.Loop, from *supply) (*sender, error) {
	s := &sender{vt: vt, l: l}
	var err error
	if s.socks, err = from.sockets(); err != nil {
		return nil, err
	}
	s.dirty = make([]*txSocket, 0, len(s.socks))
	s.hook = l.AtFlush(s.flush, loop.Name("vxlan send"))
	return s, nil
}

// socket returns the socket of a flow.
func (s *sender) socket(fl flow) *txSocket { return s.socks[uint64(fl.hash)*uint64(len(s.socks))>>32] }

// put sends a frame to one peer, now or with its batch.
func (s *sender) put(b *frame.Buf, p *port, x *peer, fl flow) {
	if b.Offload.GSOSize != 0 {
		s.cut(b, p, x, fl)
	} else {
		s.push(b, p, x, fl)
	}
}

// push appends a frame to the batch of its flow's socket.
func (s *sender) push(b *frame.Buf, p *port, x *peer, fl flow) {
	k := s.socket(fl)
	if k.n == 0 {
		s.dirty = append(s.dirty, k)
	}
	i := k.n
	b.Ref()
	k.bufs[i], k.ports[i], k.peers[i], k.tos[i] = b, p, x, outerTOS(fl, s.vt.dscp)
	if k.n++; k.n == txBatch {
		s.send(k) // its batch is empty then, but it stays on the dirty list
	}
}

// flush sends all batches; it runs at the end of each iteration of the loop.
func (s *sender) flush() {
	for i, k := range s.dirty {
		s.send(k)
		s.dirty[i] = nil
	}
	s.dirty = s.dirty[:0]
}

// run returns how many datagrams, from the batch's i-th on, may leave as one message: of one network to one peer and of
// one size, except that the last may be shorter. Frames that may be padded count as long as the longest.
func (k *txSocket) run(i int) (n, size int) {
	first := k.bufs[i]
	size = first.Len()
	if !k.ports[i].segments.Load() {
		return 1, size
	}
	least, pad := size, first.Offload.Pad // shortest so far, and padding that all so far allow
	for n = 1; n < min(k.n-i, gsoSegments); n++ {
		j := i + n
		next := k.bufs[j]
		length := next.Len()
		longest := max(size, length)
		switch {
		case k.peers[j] != k.peers[i] || k.ports[j] != k.ports[i] || k.tos[j] != k.tos[i],
			length > size && (!pad || length-least > maxPad),
			(n+1)*(HeaderLen+longest) > gsoBytes:
			return n, size
		case length < size && (!next.Offload.Pad || size-length > maxPad):
			return n + 1, size
		}
		size, least, pad = longest, min(least, length), pad && next.Offload.Pad
	}
	return n, size
}

// messages makes the messages for the batch's datagrams from i on and returns their number; together: as few as
// possible.
func (k *txSocket) messages(vt *VTEP, i int, together bool) (n int, ok bool) {
	cut, iovs := false, k.iovs[:0]
	for ; i < k.n; n++ {
		end, size, first := i+1, 0, len(iovs)
		if together {
			if count, longest := k.run(i); count > 1 {
				end, size, cut = i+count, HeaderLen+longest, true
			}
		}
		m := &k.msgs[n]
		m.setName(&k.peers[i].raw, k.peers[i].rawLen)
		m.setControl(k.ctrls[n].put(k.tos[i], vt.v6, size))
		for ; i < end; i++ {
			pad := 0
			if i < end-1 {
				pad = size - HeaderLen - k.bufs[i].Len()
			}
			iovs = k.datagram(iovs, i, pad)
		}
		m.setIov(iovs[first:])
		k.ends[n] = end
	}
	return n, k.checksums(vt, cut) || !cut
}

// datagram appends the pieces of datagram i: one piece if the frame is not shared, because each piece costs the kernel
// as much as copying some 200 bytes.
func (k *txSocket) datagram(iovs []unix.Iovec, i, pad int) []unix.Iovec {
	b, header := k.bufs[i], &k.ports[i].header
	if !b.Shared() {
		if d := b.Around(HeaderLen, pad); d != nil {
			copy(d, header[:])
			clear(d[len(d)-pad:])
			return append(iovs, iovec(d))
		}
	}
	iovs = append(iovs, iovec(header[:]), iovec(b.Bytes()))
	if pad > 0 {
		iovs = append(iovs, iovec(padding[:pad]))
	}
	return iovs
}

// send passes one socket's batch to the kernel and drops the references, whether frames were sent or not.
func (s *sender) send(k *txSocket) {
	together := true
	for done := 0; done < k.n; {
		n, ok := k.messages(s.vt, done, together)
		if !ok {
			together = false
			continue
		}
		n, errno := sendmmsg(k.fd, k.msgs[:n])
		switch errno {
		case 0:
			if n == 0 { // cannot happen; do not loop forever on it
				s.drop(k, done, k.n, vswitch.SendError)
				done = k.n
				break
			}
			end := k.ends[n-1]
			for i := done; i < end; i++ {
				s.vt.Counters.Out(s.l, 1, k.bufs[i].Len())
			}
			if m := s.vt.monitor.Load(); m != nil {
				s.show(*m, k, done, end)
			}
			done = end
		case unix.EINTR:
		case unix.EAGAIN, unix.ENOBUFS, unix.ENOMEM:
			s.drop(k, done, k.n, vswitch.QueueFull)
			done = k.n
		default:
			// The error is that of the first message; the others may succeed.
			end := k.ends[0]
			if end > done+1 && cannotCut(errno) {
				k.ports[done].oneByOne()
				together = false
				break
			}
			if errno == unix.EMSGSIZE {
				s.tooBig(k.bufs[done], k.ports[done], k.peers[done])
			}
			s.drop(k, done, end, sendReason(errno))
			done = end
		}
	}
	for i := range k.n {
		k.bufs[i].Free()
		k.bufs[i], k.ports[i], k.peers[i] = nil, nil, nil
	}
	k.n = 0
}

// tooBig handles a frame that the kernel found too big for the path to its peer, which it has just learnt from the
// underlay: the network gets its new MTU, and the frame's sender an answer, if the MTU is known by now. The answer
// waits for the loop's next round, because this one is at its end; each sender has at most one answer scheduled.
func (s *sender) tooBig(b *frame.Buf, p *port, x *peer) {
	s.vt.recompute()
	mtu := (*s.vt.paths.Load())[x.addr]
	limit := mtu + vswitch.HeaderLen
	if mtu == 0 || b.Len() <= limit || s.answering {
		return
	}
	b.Ref()
	// For nobody's pollers: otherwise a guest that sends large frames would end the rest of all others' in each pass.
	s.answering = s.l.PostFor(nil, func() {
		s.answering = false
		p.net.AnswerTooBig(s.l, b.Bytes(), limit)
		b.Free()
	})
	if !s.answering {
		b.Free()
	}
}

// show passes the sent datagrams to a capture.
func (s *sender) show(m Monitor, k *txSocket, from, to int) {
	c := &s.vt.cfg
	for i := from; i < to; i++ {
		f := k.bufs[i].Bytes()
		m.Datagram(s.l, true, netip.AddrPortFrom(c.Local, k.port), netip.AddrPortFrom(k.peers[i].addr, c.Port),
			outerTOS(classify(f, k.bufs[i].Layout()), s.vt.dscp), k.ports[i].header[:], f)
	}
}

func sendReason(errno unix.Errno) vswitch.Reason {
	switch errno {
	case unix.EMSGSIZE:
		return vswitch.UnderlayTooBig
	case unix.ENETUNREACH, unix.EHOSTUNREACH, unix.ENETDOWN, unix.EHOSTDOWN, unix.ECONNREFUSED,
		unix.ENODEV, unix.ENXIO, unix.ENOKEY, unix.EDESTADDRREQ: // a protection without that interface, peer or endpoint
		return vswitch.Unreachable
	}
	return vswitch.SendError
}

func (s *sender) drop(k *txSocket, from, to int, r vswitch.Reason) {
	for i := from; i < to; i++ {
		k.ports[i].drop(s.l, r, 1)
	}
}

// stop sends the pending batches and closes the sockets. No Deliver may be running.
func (s *sender) stop() {
	s.l.Visit(s.flush)
	s.hook.Close()
	for _, k := range s.socks {
		unix.Close(k.fd)
	}
}
