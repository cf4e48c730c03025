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
	n      int
	msgs   [txBatch]mmsghdr
	iovs   [txBatch][2]unix.Iovec
	ctrls  [txBatch]control
	bufs   [txBatch]*packet.Buf // one reference each
	ports  [txBatch]*port
	peers  [txBatch]*peer // keeps the address that msgs points to
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
		k := &txSocket{fd: fd, port: port}
		for i := range k.msgs {
			k.msgs[i].setIov(k.iovs[i][:])
		}
		s.socks = append(s.socks, k)
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
	k.bufs[i], k.ports[i], k.peers[i] = b, p, x
	m := &k.msgs[i]
	m.setName(&x.raw, x.rawLen)
	setIovec(&k.iovs[i][0], p.header[:])
	setIovec(&k.iovs[i][1], b.Bytes())
	tos := outerTOS(fl, s.vt.dscp)
	if tos != 0 {
		k.ctrls[i].putTOS(tos, s.vt.v6)
	}
	m.setControl(&k.ctrls[i], tos != 0)
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

// send hands one socket's batch to the kernel and gives up the references, whatever becomes of the frames.
func (s *sender) send(k *txSocket) {
	if k.n > 0 {
		k.checksums(s.vt, false) // harmless if it fails
	}
	for done := 0; done < k.n; {
		n, errno := sendmmsg(k.fd, k.msgs[done:k.n])
		switch errno {
		case 0:
			for i := done; i < done+n; i++ {
				s.vt.Counters.Out(s.l, k.bufs[i].Len())
			}
			if m := s.vt.monitor.Load(); m != nil {
				s.show(*m, k, done, done+n)
			}
			done += n
			if n == 0 { // cannot be; never loop for ever on it
				s.drop(k, done, k.n, lfe.SendError)
				done = k.n
			}
		case unix.EINTR:
		case unix.EAGAIN, unix.ENOBUFS, unix.ENOMEM:
			s.drop(k, done, k.n, lfe.QueueFull)
			done = k.n
		default:
			// The error is that of the first datagram; the others may fare better.
			if errno == unix.EMSGSIZE {
				s.tooBig(k.bufs[done], k.ports[done], k.peers[done])
			}
			s.drop(k, done, done+1, sendReason(errno))
			done++
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
