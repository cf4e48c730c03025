package rstream_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"testing"
	"time"

	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/guestdrv/internal/rig"
	"github.com/vnicd/vnicd/guestdrv/rstream"
)

// mapped is memory of one end that the other one writes to.
func mapped(tb testing.TB, dev *guestdrv.Device, n int) *guestdrv.Buffer {
	tb.Helper()
	b, err := dev.Alloc(n)
	if err != nil {
		tb.Fatal(err)
	}
	return b
}

// tell sends a byte from a to b, so that b has received all that a has sent before.
func tell(tb testing.TB, a, b net.Conn) {
	tb.Helper()
	if _, err := a.Write([]byte{7}); err != nil {
		tb.Fatal(err)
	}
	var got [1]byte
	if _, err := io.ReadFull(b, got[:]); err != nil || got[0] != 7 {
		tb.Fatal(got, err)
	}
}

// Both ends map memory, and each writes into the other one's, across mappings that follow each other.
func TestWriteAt(t *testing.T) {
	cfg := rstream.Config{Maps: 2, SendBuffer: 16 << 10, SendQueue: 16}
	p := newPair(t, cfg)
	a, b := p.connect(t, cfg)
	const size = 300000
	for _, x := range []struct {
		from, to *rstream.Conn
		dev      *guestdrv.Device
	}{{a, b, p.b.Device()}, {b, a, p.a.Device()}} {
		buf := mapped(t, x.dev, size)
		for _, part := range [][2]int{{0, 100000}, {100000, size - 100000}} {
			if _, err := x.to.Map(buf, part[0], part[1], int64(1<<40+part[0])); err != nil {
				t.Fatal(err)
			}
		}
		tell(t, x.to, x.from)
		want := make([]byte, size)
		write := func(off, n int) {
			t.Helper()
			for i := range n {
				want[off+i] = byte(rand.Uint32())
			}
			if k, err := x.from.WriteAt(want[off:off+n], int64(1<<40+off)); k != n || err != nil {
				t.Fatalf("%d of %d bytes at %d: %v", k, n, off, err)
			}
		}
		write(0, size)
		for range 300 {
			off := rand.IntN(size)
			write(off, rand.IntN(1+min(size-off, 1<<rand.IntN(18))))
		}
		tell(t, x.from, x.to)
		if !bytes.Equal(buf.Bytes(), want) {
			t.Error("data differ")
		}
		if n, err := x.from.WriteAt(make([]byte, 100), 1<<40+size-50); n != 50 || !errors.Is(err, rstream.ErrNotMapped) {
			t.Errorf("across the end: %d bytes, %v", n, err)
		}
		if n, err := x.from.WriteAt(make([]byte, 1), 1<<40-1); n != 0 || !errors.Is(err, rstream.ErrNotMapped) {
			t.Errorf("before the beginning: %d bytes, %v", n, err)
		}
		if _, err := x.to.Map(buf, 0, 1, 0); !errors.Is(err, rstream.ErrNoRoom) {
			t.Errorf("a third mapping: %v", err)
		}
		if err := buf.Close(); !errors.Is(err, guestdrv.StatusBusy) {
			t.Errorf("closing mapped memory: %v", err)
		}
		tell(t, x.from, x.to)
		defer func() { // the mappings end with the connection
			if err := errors.Join(x.to.Close(), buf.Close()); err != nil {
				t.Error(err)
			}
		}()
	}
}

// A mapping is taken back, and its place used again; who writes to it then loses the connection, and the memory stays
// as it is.
func TestUnmap(t *testing.T) {
	cfg := rstream.Config{Maps: 1}
	p := newPair(t, cfg)
	a, b := p.connect(t, cfg)
	buf := mapped(t, p.b.Device(), 8192)
	for i := range 5 {
		m, err := b.Map(buf, 4096, 100, int64(i)*1000)
		if err != nil {
			t.Fatal(err)
		}
		tell(t, b, a)
		if _, err := a.WriteAt([]byte{byte(i)}, int64(i)*1000+99); err != nil {
			t.Fatal(err)
		}
		tell(t, a, b)
		if got := buf.Bytes()[4096+99]; got != byte(i) {
			t.Errorf("round %d: %d", i, got)
		}
		if i > 0 {
			if _, err := a.WriteAt([]byte{1}, int64(i-1)*1000); !errors.Is(err, rstream.ErrNotMapped) {
				t.Errorf("at what was mapped before: %v", err)
			}
		}
		if err := errors.Join(m.Close(), m.Close()); err != nil {
			t.Fatal(err)
		}
	}
	want := bytes.Clone(buf.Bytes())
	if _, err := a.WriteAt([]byte{100}, 4000); err != nil { // the peer is not told
		t.Fatal(err)
	}
	if _, err := a.Read(make([]byte, 1)); !errors.Is(err, rstream.ErrReset) || !errors.Is(err, guestdrv.WCRemAccessErr) {
		t.Errorf("after a write to what was taken back: %v", err)
	}
	if _, err := a.WriteAt([]byte{1}, 4000); !errors.Is(err, rstream.ErrReset) {
		t.Errorf("WriteAt of a connection that has failed: %v", err)
	}
	if !bytes.Equal(buf.Bytes(), want) {
		t.Error("memory that was taken back was written to")
	}
	if err := errors.Join(a.Close(), b.Close(), buf.Close()); err != nil {
		t.Error(err)
	}
}

// Arguments, deadlines and the end of the connection.
func TestWriteAtErrors(t *testing.T) {
	cfg := rstream.Config{Maps: 1}
	p := newPair(t, cfg)
	a, b := p.connect(t, cfg)
	buf := mapped(t, p.b.Device(), 4096)
	for _, x := range []struct{ off, n int }{{0, 0}, {0, -1}, {-1, 1}, {4096, 1}, {1, 4096}} {
		if _, err := b.Map(buf, x.off, x.n, 0); !errors.Is(err, rstream.ErrInvalid) {
			t.Errorf("%d bytes from %d on: %v", x.n, x.off, err)
		}
	}
	for _, at := range []int64{-1, 1<<63 - 2} {
		if _, err := b.Map(buf, 0, 2, at); !errors.Is(err, rstream.ErrInvalid) {
			t.Errorf("at offset %d: %v", at, err)
		}
	}
	m, err := b.Map(buf, 0, 4096, 0)
	if err != nil {
		t.Fatal(err)
	}
	tell(t, b, a)
	if _, err := a.WriteAt([]byte{1}, -1); !errors.Is(err, rstream.ErrInvalid) {
		t.Errorf("offset -1: %v", err)
	}
	if n, err := a.WriteAt(nil, 0); n != 0 || err != nil {
		t.Errorf("nothing: %d, %v", n, err)
	}
	if err := a.SetWriteDeadline(time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	if _, err := a.WriteAt([]byte{1}, 0); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("after the deadline: %v", err)
	}
	if err := errors.Join(a.SetWriteDeadline(time.Time{}), a.CloseWrite()); err != nil {
		t.Fatal(err)
	}
	if _, err := a.WriteAt([]byte{1}, 0); !errors.Is(err, rstream.ErrShutdown) {
		t.Errorf("after CloseWrite: %v", err)
	}
	if err := errors.Join(a.Close(), b.Close(), m.Close()); err != nil {
		t.Error(err)
	}
	if _, err := a.WriteAt([]byte{1}, 0); !errors.Is(err, net.ErrClosed) {
		t.Errorf("WriteAt after Close: %v", err)
	}
	if _, err := b.Map(buf, 0, 1, 0); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Map after Close: %v", err)
	}
	if err := buf.Close(); err != nil {
		t.Error(err)
	}
}

// A peer that announces memory that it has not harms only its own connection.
func TestHostileIOMap(t *testing.T) {
	p := newPair(t, rstream.Config{Maps: 2})
	ga, gb := p.connect(t, rstream.Config{})
	x, err := p.dialLiar(t, nothing)
	if err != nil {
		t.Fatal(err)
	}
	accepted, err := p.listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	c := accepted.(*rstream.Conn)
	defer c.Close()
	x.greet(t, c)
	if x.hello[1] != 2 || x.hello[7] != 2 {
		t.Fatalf("private data % x, expected the flag and 2 iomaps", x.hello[:8])
	}
	var entry [24]byte
	binary.LittleEndian.PutUint64(entry[8:], 1<<40)
	binary.LittleEndian.PutUint32(entry[16:], 0x99) // a key of nobody
	binary.LittleEndian.PutUint32(entry[20:], 4096)
	const one = 2*16 + 24 // entry 1, behind the target SGL
	at := guestdrv.Remote{Addr: binary.BigEndian.Uint64(x.hello[8:]) + one, RKey: binary.BigEndian.Uint32(x.hello[16:])}
	x.say(t, at, 6<<29|1, string(entry[:]))
	rig.Until(t, "the iomap has arrived", func() bool {
		_, err = c.WriteAt([]byte{1}, 0)
		return !errors.Is(err, rstream.ErrNotMapped)
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, rstream.ErrReset) || !errors.Is(err, guestdrv.WCRemAccessErr) {
		t.Errorf("%v", err)
	}
	<-x.Done()
	talk(t, ga, gb)
}
