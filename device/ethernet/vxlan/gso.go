package vxlan

import (
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/gso"
)

// Segmentation on the underlay. The segments of a large frame are datagrams of equal size to one peer; the kernel takes
// them as one message (UDP_SEGMENT, Linux 4.18) and segments it where its card cannot. We write each segment's headers;
// the payload is sent from the frame's buffer. Linux requires UDP checksums for such datagrams.

const (
	// gsoSegments bounds the segments of one message: the kernel's UDP_MAX_SEGMENTS before Linux 6.9.
	gsoSegments = 64
	// gsoBytes bounds the message, which must fit into one UDP datagram.
	gsoBytes = 65535 - 40 - 8
)

// gsoSender holds one loop's buffers for one message. They are free between messages.
type gsoSender struct {
	seg     gso.Segmenter
	headers [gsoSegments][HeaderLen + gso.MaxHeaders]byte
	iovs    [2 * gsoSegments]unix.Iovec
	msg     [1]mmsghdr
	ctrl    txControl
}

// canSegment reports whether the kernel knows UDP_SEGMENT.
func canSegment(fd int) bool {
	_, err := unix.GetsockoptInt(fd, unix.SOL_UDP, unix.UDP_SEGMENT)
	return err == nil
}

// cannotCut reports whether an error may be specific to segmented messages: the path has become narrower, or its card
// cannot segment.
func cannotCut(errno unix.Errno) bool {
	return errno == unix.EINVAL || errno == unix.EIO || errno == unix.EMSGSIZE || errno == unix.EOPNOTSUPP
}

// together turns segmented messages on for the port, if the VTEP supports them.
func (p *port) together() {
	if p.vt.segments {
		p.segments.Store(true)
		p.att.SetOffloads(frame.NeedGSO | frame.NeedECN)
	}
}

// oneByOne turns them off after the kernel has refused one; refreshLocked tries again once a minute.
func (p *port) oneByOne() {
	p.segments.Store(false)
	p.att.SetOffloads(0)
}

// cut sends a frame with pending segmentation to one peer, after its flow's earlier frames. If the kernel refuses, the
// switch segments it; also during a capture, which must see each datagram.
func (s *sender) cut(b *frame.Buf, p *port, x *peer, fl flow) {
	k := s.socket(fl)
	if k.n > 0 {
		s.send(k) // its batch is empty then, but it stays on the dirty list
	}
	if s.vt.monitor.Load() != nil || !k.checksums(s.vt, true) {
		p.att.Cut(s.l, b, vswitch.Destination{Remote: x.id})
		return
	}
	g := &s.gso
	size := HeaderLen + b.WireLen()
	limit := min(gsoSegments, gsoBytes/size)
	for g.seg.Start(b); g.seg.Left() > 0; {
		n, bytes := 0, 0
		for ; n < limit && g.seg.Left() > 0; n++ {
			h := g.headers[n][:]
			copy(h, p.header[:])
			hn, payload := g.seg.Header(h[HeaderLen:])
			setIovec(&g.iovs[2*n], h[:HeaderLen+hn])
			setIovec(&g.iovs[2*n+1], payload)
			bytes += hn + len(payload)
		}
		m := &g.msg[0]
		m.setName(&x.raw, x.rawLen)
		m.setIov(g.iovs[:2*n])
		m.setControl(g.ctrl.put(outerTOS(fl, s.vt.dscp), s.vt.v6, size))
		switch errno := sendOne(k.fd, &g.msg); errno {
		case 0:
			s.vt.Counters.Out(s.l, n, bytes)
		case unix.EAGAIN, unix.ENOBUFS, unix.ENOMEM:
			p.drop(s.l, vswitch.QueueFull, n+g.seg.Left())
			return
		default:
			if cannotCut(errno) {
				// Single datagrams will show the cause. Those already sent are sent twice.
				p.oneByOne()
				p.att.Cut(s.l, b, vswitch.Destination{Remote: x.id})
				return
			}
			p.drop(s.l, sendReason(errno), n+g.seg.Left())
			return
		}
	}
}

// sendOne sends one message, and retries after a signal.
func sendOne(fd int, m *[1]mmsghdr) unix.Errno {
	for range 16 {
		if _, errno := sendmmsg(fd, m[:]); errno != unix.EINTR {
			return errno
		}
	}
	return unix.EAGAIN
}

// checksums turns outer checksums on for the socket, or back to the VTEP's default (none over IPv4; see Config for
// IPv6). False: the kernel refuses.
func (k *txSocket) checksums(vt *VTEP, on bool) bool {
	if vt.v6 && !vt.cfg.ZeroChecksum6 || k.summed == on {
		return true
	}
	level, opt, off := unix.SOL_SOCKET, unix.SO_NO_CHECK, 1
	if vt.v6 {
		level, opt = unix.SOL_UDP, unix.UDP_NO_CHECK6_TX
	}
	if on {
		off = 0
	}
	if unix.SetsockoptInt(k.fd, level, opt, off) != nil {
		return false
	}
	k.summed = on
	return true
}
