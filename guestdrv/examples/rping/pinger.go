package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/guestdrv/rdmacm"
)

// infoLen is the length of every message: a place in the client's memory and its size. The server's messages have the
// same length and no meaning but "continue".
const infoLen = 16

func encodeInfo(b []byte, r guestdrv.Remote, size int) {
	binary.BigEndian.PutUint64(b, r.Addr)
	binary.BigEndian.PutUint32(b[8:], r.RKey)
	binary.BigEndian.PutUint32(b[12:], uint32(size))
}

func decodeInfo(b []byte) (r guestdrv.Remote, size int) {
	return guestdrv.Remote{Addr: binary.BigEndian.Uint64(b), RKey: binary.BigEndian.Uint32(b[8:])},
		int(binary.BigEndian.Uint32(b[12:]))
}

// The IDs of work requests.
const (
	sendID = iota
	recvID
	dataID // READ and WRITE
	numIDs
)

// pinger is one end. Its buffer has, one after the other: the message to send, that received, the text, and the place
// for the text that the server returns.
type pinger struct {
	conn *rdmacm.Conn
	buf  *guestdrv.Buffer
	mr   *guestdrv.MR
	size int
	done [numIDs]int // completions that have not been awaited
}

const (
	outOff  = 0
	inOff   = 64
	textOff = 128
)

func newPinger(ctx context.Context, m *rdmacm.Manager, size int) (p *pinger, err error) {
	p = &pinger{size: size}
	if p.buf, err = m.Device().Alloc(textOff + 2*size); err != nil {
		return nil, err
	}
	p.mr, err = m.PD().Register(ctx, p.buf, access|guestdrv.AccessLocalWrite)
	return p, err
}

const access = guestdrv.AccessRemoteRead | guestdrv.AccessRemoteWrite

func (p *pinger) params() rdmacm.Params {
	return rdmacm.Params{QP: guestdrv.QPConfig{MaxSendWR: 4, MaxRecvWR: 2}, Access: access,
		InitiatorDepth: 1, ResponderResources: 1,
		Prepare: func(c *rdmacm.Conn) error { return p.receive(c) }}
}

func (p *pinger) receive(c *rdmacm.Conn) error {
	return c.QP().PostRecv(guestdrv.NewRecv(recvID, p.mr.SGE(inOff, infoLen)))
}

func (p *pinger) post(wr *guestdrv.SendWR) error {
	return p.conn.QP().PostSend(wr.With(guestdrv.SendSignaled))
}

// await waits for a completion; they come in any order.
func (p *pinger) await(ctx context.Context, id uint64) error {
	var wcs [4]guestdrv.Completion
	for p.done[id] == 0 {
		n, err := p.conn.SendCQ().PollWait(ctx, wcs[:]) // also of receives
		if err != nil {
			return err
		}
		for _, wc := range wcs[:n] {
			if err := wc.Err(); err != nil {
				if wc.Status == guestdrv.WCWRFlushErr && p.conn.Err() != nil {
					return p.conn.Err()
				}
				return err
			}
			if wc.ID == recvID && wc.ByteLen != infoLen {
				return fmt.Errorf("a message of %d bytes, expected %d", wc.ByteLen, infoLen)
			}
			p.done[wc.ID]++
		}
	}
	p.done[id]--
	return nil
}

// say sends the message and waits until it has arrived; hear waits for a message. The next one can come only after say.
func (p *pinger) say(ctx context.Context) error {
	if err := p.post(guestdrv.NewSend(sendID, p.mr.SGE(outOff, infoLen))); err != nil {
		return err
	}
	return p.await(ctx, sendID)
}

func (p *pinger) hear(ctx context.Context) (r guestdrv.Remote, size int, err error) {
	if err := p.await(ctx, recvID); err != nil {
		return r, 0, err
	}
	r, size = decodeInfo(p.buf.Bytes()[inOff:][:infoLen])
	return r, size, p.receive(p.conn)
}

// move READs or WRITEs the text.
func (p *pinger) move(ctx context.Context, f func(uint64, guestdrv.Remote, ...guestdrv.SGE) *guestdrv.SendWR,
	r guestdrv.Remote, size int) error {
	if size < 1 || size > p.size {
		return fmt.Errorf("the client has %d bytes, expected 1 to %d (-size)", size, p.size)
	}
	if err := p.post(f(dataID, r, p.mr.SGE(textOff, size))); err != nil {
		return err
	}
	return p.await(ctx, dataID)
}

// server serves rounds until the client disconnects.
func (p *pinger) server(ctx context.Context) error {
	for rounds := 0; ; rounds++ {
		from, size, err := p.hear(ctx)
		if errors.Is(err, rdmacm.ErrPeerDisconnected) {
			fmt.Println(rounds, "rounds")
			return nil
		}
		if err != nil {
			return err
		}
		if err := p.move(ctx, guestdrv.NewRead, from, size); err != nil {
			return err
		}
		if err := p.say(ctx); err != nil {
			return err
		}
		to, size, err := p.hear(ctx)
		if err != nil {
			return err
		}
		if err := p.move(ctx, guestdrv.NewWrite, to, size); err != nil {
			return err
		}
		if err := p.say(ctx); err != nil {
			return err
		}
	}
}

// client makes n rounds.
func (p *pinger) client(ctx context.Context, n int) error {
	b := p.buf.Bytes()
	text, back := b[textOff:][:p.size], b[textOff+p.size:][:p.size]
	for i := range n {
		// Text without NUL but the last byte: rping returns what is before the first one, and it.
		for k := range text {
			text[k] = 'A' + byte((i+k)%58)
		}
		copy(text, fmt.Sprintf("rdma-ping-%d: ", i))
		text[p.size-1] = 0
		clear(back)
		for _, off := range []int{textOff, textOff + p.size} {
			encodeInfo(b[outOff:], p.mr.Remote(off), p.size)
			if err := p.say(ctx); err != nil {
				return err
			}
			if _, _, err := p.hear(ctx); err != nil {
				return err
			}
		}
		if !bytes.Equal(text, back) {
			return fmt.Errorf("round %d: sent %q, got back %q", i, text, back)
		}
	}
	fmt.Println(n, "rounds")
	return p.conn.Disconnect(ctx)
}
