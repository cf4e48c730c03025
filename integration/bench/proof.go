package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/vnicd/vnicd/lab/harness"
)

// piece is memory of a sender and the receiver's memory to which it is written.
type piece struct{ src, dst []byte }

// slots returns the pieces of two buffers that are used in turn, in messages of size bytes.
func slots(src, dst []byte, size int) (all []piece) {
	for at := 0; at+size <= len(src); at += size {
		all = append(all, piece{src[at:][:size], dst[at:][:size]})
	}
	return all
}

// proof shows that a measurement has transferred its data: prepare, the measurement, verify. Pieces may share the
// sender's memory.
type proof struct {
	pieces []piece
	turn   int
}

func proofOf(pieces ...piece) *proof { return &proof{pieces: pieces} }

// noise has a prime number of bytes, so that slots of a round size differ from each other.
var noise = sync.OnceValue(func() []byte { return randomBytes(1_048_573) })

// prepare writes new data to the senders' memory and its complement to the receivers', so that each byte that does not
// arrive shows.
func (p *proof) prepare() {
	from := noise()
	p.turn++
	at := p.turn * 7919 % len(from)
	for _, x := range p.pieces {
		for b := x.src; len(b) > 0; {
			n := copy(b, from[at:])
			b, at = b[n:], (at+n)%len(from)
		}
	}
	for _, x := range p.pieces {
		invert(x.dst, x.src)
	}
}

func invert(dst, src []byte) {
	for i, b := range src {
		dst[i] = ^b
	}
}

// verify compares after that many messages, each to another piece until all were used.
func (p *proof) verify(messages int) error {
	var untouched []byte
	arrived := 0
	for i, x := range p.pieces {
		if bytes.Equal(x.dst, x.src) {
			arrived++
			continue
		}
		untouched = slices.Grow(untouched[:0], len(x.src))[:len(x.src)]
		if invert(untouched, x.src); !bytes.Equal(x.dst, untouched) {
			return fmt.Errorf("the receiver's memory differs from what was sent: message buffer %d of %d", i,
				len(p.pieces))
		}
	}
	if want := min(messages, len(p.pieces)); arrived < want || arrived == 0 {
		return fmt.Errorf("%d of %d message buffers have arrived, want at least %d", arrived, len(p.pieces),
			max(want, 1))
	}
	return nil
}

// streamProof is the length of the data that proveTCP sends.
const streamProof = 16 << 20

// proveTCP sends known data by TCP from one namespace to addr in the other, and compares what arrives.
func proveTCP(ctx context.Context, from, to *harness.Namespace, addr netip.Addr) (err error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	var l net.Listener
	if err := to.Do(func() (err error) {
		l, err = new(net.ListenConfig).Listen(ctx, "tcp", netip.AddrPortFrom(addr, 0).String())
		return err
	}); err != nil {
		return err
	}
	defer l.Close()
	var out net.Conn
	if err := from.Do(func() (err error) {
		out, err = new(net.Dialer).DialContext(ctx, "tcp", l.Addr().String())
		return err
	}); err != nil {
		return err
	}
	defer out.Close()
	in, err := l.Accept()
	if err != nil {
		return err
	}
	defer in.Close()
	end, _ := ctx.Deadline()
	if err := errors.Join(out.SetDeadline(end), in.SetDeadline(end)); err != nil {
		return err
	}
	var sending sync.WaitGroup
	var sent error
	sending.Go(func() {
		for left := streamProof; left > 0 && sent == nil; left -= len(noise()) {
			_, sent = out.Write(noise()[:min(left, len(noise()))])
		}
	})
	err = sameStream(in, streamProof)
	if err != nil {
		_ = out.Close() // ends the sender
	}
	sending.Wait()
	return errors.Join(err, sent)
}

// sameStream reads n bytes, which must be noise again and again.
func sameStream(r io.Reader, n int) error {
	buf := make([]byte, len(noise()))
	for at := 0; at < n; at += len(buf) {
		buf = buf[:min(len(buf), n-at)]
		if _, err := io.ReadFull(r, buf); err != nil {
			return fmt.Errorf("after %d of %d bytes of TCP: %w", at, n, err)
		}
		if !bytes.Equal(buf, noise()[:len(buf)]) {
			return fmt.Errorf("what arrived by TCP differs from what was sent, after %d of %d bytes", at, n)
		}
	}
	return nil
}
