package vxlan

import (
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/engine"
	"github.com/vnicd/vnicd/device/lfe"
	"github.com/vnicd/vnicd/device/packet"
)

// txBatch is how many datagrams one socket sends with one call.
const txBatch = 64

// sender is the sending half of one loop.
type sender struct {
	vt    *VTEP
	l     *engine.Loop
	hook  *engine.Hook
	socks []*txSocket
	dirty []*txSocket // those with something to send
	gso   gsoSender

	answering bool // an answer to a frame that was too big is under way
}

// txSocket is one source port and its batch.
type txSocket struct {
	fd     int
	port   uint16
	summed bool // datagrams get checksums (IPv4)

	n     int
	bufs  [txBatch]*packet.Buf // one reference each
	ports [txBatch]*port
	peers [txBatch]*peer // keeps the address that msgs points to
	tos   [txBatch]uint8
	iovs  [txBatch][2]unix.Iovec

	// Messages, each of one datagram or several: message i ends before datagram ends[i].
	msgs  [txBatch]mmsghdr
	ctrls [txBatch]txControl
	ends  [txBatch]int
}

func newSender(vt *VTEP, l *engine.Loop) (*sender, error) {
	s := &sender{vt: vt, l: l}
	for range vt.cfg.SourcePorts {
		fd, port, err := openSender(vt.nl, vt.cfg.Local, vt.cfg.ZeroChecksum6)
		if err != nil {
			for _, k := range s.socks {
				unix.Close(k.fd)
			}
			return nil, err
		}
		s.socks = append(s.socks, &txSocket{fd: fd, port: port})
	}
	s.dirty = make([]*txSocket, 0, len(s.socks))
	s.hook = l.AtFlush(s.flush, engine.Name("vxlan send"))
	return s, nil
}

// socket is the one of a flow.
func (s *sender) socket(fl flow) *txSocket { return s.socks[uint64(fl.hash)*uint64(len(s.socks))>>32] }

// put sends a frame to one peer, now or with its batch.
func (s *sender) put(b *packet.Buf, p *port, x *peer, fl flow) {
	if b.Offload.GSOSize != 0 {
		s.cut(b, p, x, fl)
	} else {
		s.push(b, p, x, fl)
	}
}

// push appends a frame to the batch of its flow's socket.
func (s *sender) push(b *packet.Buf, p *port, x *peer, fl flow) {
	k := s.socket(fl)
	if k.n == 0 {
		s.dirty = append(s.dirty, k)
	}
	i := k.n
	b.Ref()
	k.bufs[i], k.ports[i], k.peers[i], k.tos[i] = b, p, x, outerTOS(fl, s.vt.dscp)
	setIovec(&k.iovs[i][0], p.header[:])
	setIovec(&k.iovs[i][1], b.Bytes())
	if k.n++; k.n == txBatch {
		s.send(k) // stays on the dirty list, empty
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

// run is how many datagrams, from the batch's i-th on, may leave as one message: of one network to one peer, all of one size, but that
// the last may be shorter.
func (k *txSocket) run(i int) int {
	if !k.ports[i].segments.Load() {
		return 1
	}
	size := k.bufs[i].Len()
	limit := min(k.n-i, gsoSegments, gsoBytes/(HeaderLen+size))
	for n := 1; n < limit; n++ {
		j := i + n
		next := k.bufs[j].Len()
		if next > size || k.peers[j] != k.peers[i] || k.ports[j] != k.ports[i] || k.tos[j] != k.tos[i] {
			return n
		}
		if next < size {
			return n + 1
		}
	}
	return max(limit, 1)
}

// messages makes the messages for the batch's datagrams from i on and returns their number; together: as few as may be.
func (k *txSocket) messages(vt *VTEP, i int, together bool) (n int, ok bool) {
	cut := false
	for ; i < k.n; n++ {
		count, size := 1, 0
		if together {
			if count = k.run(i); count > 1 {
				size, cut = HeaderLen+k.bufs[i].Len(), true
			}
		}
		m := &k.msgs[n]
		m.setName(&k.peers[i].raw, k.peers[i].rawLen)
		m.setIov(pairs(k.iovs[i : i+count]))
		m.setControl(k.ctrls[n].put(k.tos[i], vt.v6, size))
		i += count
		k.ends[n] = i
	}
	return n, k.checksums(vt, cut) || !cut
}

// send hands one socket's batch to the kernel and gives up the references, whatever becomes of the frames.
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
			if n == 0 { // cannot be; never loop for ever on it
				s.drop(k, done, k.n, lfe.SendError)
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
			s.drop(k, done, k.n, lfe.QueueFull)
			done = k.n
		default:
			// The error is that of the first message; the others may fare better.
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

// tooBig handles a frame that the kernel found too big for the path to its peer, which it has just learnt from the underlay:
// the network gets its new MTU, and the frame's sender an answer, if we know the MTU by now. The answer waits for the
// loop's next round, because this one is at its end; a sender has one answer under way at most.
func (s *sender) tooBig(b *packet.Buf, p *port, x *peer) {
	s.vt.recompute()
	mtu := (*s.vt.paths.Load())[x.addr]
	limit := mtu + lfe.HeaderLen
	if mtu == 0 || b.Len() <= limit || s.answering {
		return
	}
	b.Ref()
	s.answering = s.l.Post(func() {
		s.answering = false
		p.net.AnswerTooBig(s.l, b.Bytes(), limit)
		b.Free()
	})
	if !s.answering {
		b.Free()
	}
}

// show lets a capture see what was sent.
func (s *sender) show(m Monitor, k *txSocket, from, to int) {
	c := &s.vt.cfg
	for i := from; i < to; i++ {
		f := k.bufs[i].Bytes()
		m.Datagram(s.l, true, netip.AddrPortFrom(c.Local, k.port), netip.AddrPortFrom(k.peers[i].addr, c.Port),
			outerTOS(classify(f), s.vt.dscp), k.ports[i].header[:], f)
	}
}

func sendReason(errno unix.Errno) lfe.Reason {
	switch errno {
	case unix.EMSGSIZE:
		return lfe.UnderlayTooBig
	case unix.ENETUNREACH, unix.EHOSTUNREACH, unix.ENETDOWN, unix.EHOSTDOWN, unix.ECONNREFUSED:
		return lfe.Unreachable
	}
	return lfe.SendError
}

func (s *sender) drop(k *txSocket, from, to int, r lfe.Reason) {
	for i := from; i < to; i++ {
		k.ports[i].drop(s.l, r, 1)
	}
}

// stop sends what is batched and closes the sockets. No Deliver runs any more.
func (s *sender) stop() {
	s.l.Do(s.flush)
	s.hook.Close()
	for _, k := range s.socks {
		unix.Close(k.fd)
	}
}
