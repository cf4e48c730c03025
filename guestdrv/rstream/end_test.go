package rstream_test

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/guestdrv/internal/rig"
	"github.com/vnicd/vnicd/guestdrv/rdmacm"
	"github.com/vnicd/vnicd/guestdrv/rstream"
)

// CloseWrite ends one direction: the peer reads all data and io.EOF, and can still write.
func TestCloseWrite(t *testing.T) {
	p := newPair(t, rstream.Config{})
	a, b := p.connect(t, rstream.Config{})
	data := bytes.Repeat([]byte("0123456789"), 9000) // fills more than a half of the receive buffer
	if n, err := a.Write(data); n != len(data) || err != nil {
		t.Fatalf("%d, %v", n, err)
	}
	for range 2 {
		if err := a.CloseWrite(); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := a.Write(data); !errors.Is(err, rstream.ErrShutdown) || !errors.Is(err, syscall.EPIPE) {
		t.Errorf("Write after CloseWrite: %v", err)
	}
	if got, err := io.ReadAll(b); err != nil || !bytes.Equal(got, data) {
		t.Fatalf("%d bytes, %v", len(got), err)
	}
	if n, err := b.Write([]byte("answer")); n != 6 || err != nil {
		t.Fatalf("%d, %v", n, err)
	}
	if err := b.Close(); err != nil {
		t.Error(err)
	}
	if got, err := io.ReadAll(a); err != nil || string(got) != "answer" {
		t.Errorf("%q, %v", got, err)
	}
}

// Close: the peer reads all data and io.EOF, and can no longer write. Calls of the closed end fail.
func TestClose(t *testing.T) {
	p := newPair(t, rstream.Config{})
	ends := p.net.Hosts[:2]
	before := [...]rig.Objects{ends[0].Objects(), ends[1].Objects()}
	a, b := p.connect(t, rstream.Config{})
	data := bytes.Repeat([]byte("0123456789"), 9000)
	if n, err := a.Write(data); n != len(data) || err != nil {
		t.Fatalf("%d, %v", n, err)
	}
	for range 2 {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	}
	for name, f := range map[string]func() error{
		"Read":        func() error { _, err := a.Read(data); return err },
		"Write":       func() error { _, err := a.Write(data); return err },
		"CloseWrite":  a.CloseWrite,
		"SetDeadline": func() error { return a.SetDeadline(time.Now()) },
	} {
		if err := f(); !errors.Is(err, net.ErrClosed) {
			t.Errorf("%s of a closed connection: %v", name, err)
		}
	}
	if got, err := io.ReadAll(b); err != nil || !bytes.Equal(got, data) {
		t.Fatalf("%d bytes, %v", len(got), err)
	}
	if _, err := b.Write(data); !errors.Is(err, rstream.ErrReset) || !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("Write to a closed connection: %v", err)
	}
	if err := b.Close(); err != nil {
		t.Error(err)
	}
	for i, h := range ends {
		rig.Until(t, "nothing is left", func() bool { return h.Objects() == before[i] })
	}
}

// A peer that is gone without a word: writes fill the buffers, deadlines end them, and Close does not wait for ever.
func TestPeerDies(t *testing.T) {
	p := newPair(t, rstream.Config{})
	a, b := p.connect(t, rstream.Config{CloseTimeout: time.Millisecond})
	talk(t, a, b)
	p.net.Hosts[1].Kill()
	if err := a.SetDeadline(time.Now().Add(50 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("Read: %v", err)
	}
	if n, err := a.Write(make([]byte, 1<<20)); n == 1<<20 ||
		!errors.Is(err, os.ErrDeadlineExceeded) && !errors.Is(err, rstream.ErrReset) {
		t.Errorf("Write: %d, %v", n, err)
	}
	if err := a.Close(); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("Close: %v", err)
	}
	if err := a.Close(); err != nil {
		t.Errorf("Close again: %v", err)
	}
}

// A listener: nobody listens, a port in use, wrong sizes, Close while Accept waits and with connections in its
// backlog.
func TestListener(t *testing.T) {
	p := newPair(t, rstream.Config{Backlog: 2})
	if _, err := rstream.Dial(rig.Context(t), p.a, "10.0.0.2:1", rstream.Config{}); !errors.Is(err,
		rdmacm.RejectServiceID) {
		t.Errorf("nobody listens: %v", err)
	}
	if _, err := rstream.Listen(p.b, port, rstream.Config{}); !errors.Is(err, rdmacm.ErrInUse) {
		t.Errorf("a second listener: %v", err)
	}
	for _, cfg := range []rstream.Config{{SendBuffer: 1}, {ReceiveBuffer: 1 << 30}, {SendQueue: 15},
		{ReceiveQueue: 1 << 16}, {Backlog: -1}, {CloseTimeout: -1}, {HandshakeTimeout: -1}} {
		if _, err := rstream.Listen(p.b, port+1, cfg); !errors.Is(err, rstream.ErrInvalid) {
			t.Errorf("%+v: %v", cfg, err)
		}
	}
	before := p.net.Hosts[1].Objects()
	waiting, err := rstream.Dial(rig.Context(t), p.a, p.listener.Addr().String(), rstream.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer waiting.Close()
	if err := p.listener.Close(); err != nil {
		t.Error(err)
	}
	// Reset if the listener has not noticed that the connection was complete.
	if _, err := waiting.Read(make([]byte, 1)); err != io.EOF && !errors.Is(err, rstream.ErrReset) {
		t.Errorf("a connection that was not accepted: %v", err)
	}
	if _, err := p.listener.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Accept after Close: %v", err)
	}
	rig.Until(t, "nothing is left", func() bool { return p.net.Hosts[1].Objects() == before })

	l, err := rstream.Listen(p.b, port, rstream.Config{})
	if err != nil {
		t.Fatal(err)
	}
	accepting := make(chan error, 1)
	go func() {
		_, err := l.Accept()
		accepting <- err
	}()
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if err := <-accepting; !errors.Is(err, net.ErrClosed) {
		t.Errorf("Accept: %v", err)
	}
}

// An application's memory has no room for a connection's buffers: the connection fails, and the application goes on.
func TestNoMemory(t *testing.T) {
	big := rstream.Config{SendBuffer: 256 << 20}
	p := newPair(t, rstream.Config{})
	before := p.net.Hosts[0].Objects()
	if c, err := rstream.Dial(rig.Context(t), p.a, p.listener.Addr().String(), big); c != nil || !errors.Is(err,
		guestdrv.ErrNoMemory) {
		t.Errorf("Dial: %v, %v", c, err)
	}
	if now := p.net.Hosts[0].Objects(); now != before {
		t.Errorf("left by Dial: %+v, were %+v", now, before)
	}
	p.connect(t, rstream.Config{})

	l, err := rstream.Listen(p.b, port+1, big)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	before = p.net.Hosts[1].Objects()
	if c, err := rstream.Dial(rig.Context(t), p.a, l.Addr().String(), rstream.Config{}); err == nil {
		t.Errorf("a listener without memory accepted %v", c)
	}
	rig.Until(t, "nothing is left", func() bool { return p.net.Hosts[1].Objects() == before })
}

// In the steady state, nothing of this package allocates memory, whatever the size. (In the driver, waking a goroutine
// does.)
func TestAllocations(t *testing.T) {
	rate := runtime.MemProfileRate
	runtime.MemProfileRate = 1 // count every allocation
	defer func() { runtime.MemProfileRate = rate }()
	p := newPair(t, rstream.Config{})
	a, b := p.connect(t, rstream.Config{})
	const rounds = 200
	for _, size := range []int{1, 64, 65, 60000} { // at most half of the receive buffer, so that no write waits
		out, in := make([]byte, size), make([]byte, size)
		round := func() {
			for _, x := range [][2]net.Conn{{a, b}, {b, a}} {
				if _, err := x[0].Write(out); err != nil {
					t.Fatal(err)
				}
				if _, err := io.ReadFull(x[1], in); err != nil {
					t.Fatal(err)
				}
			}
		}
		for range rounds {
			round()
		}
		before := allocations()
		for range rounds {
			round()
		}
		for where, n := range allocations() {
			if n -= before[where]; n >= rounds/10 {
				t.Errorf("%d bytes: %d allocations in %d rounds by %s", size, n, rounds, where)
			}
		}
	}
	if allocations()["rstream.newConn"] < 2 { // made by connect
		t.Errorf("the profile misses allocations: %v", allocations())
	}
}

// allocations returns the number of allocations by function of package rstream.
func allocations() map[string]int64 {
	runtime.GC() // the profile is as of the last but one
	runtime.GC()
	var records []runtime.MemProfileRecord
	for {
		n, ok := runtime.MemProfile(records, true)
		if ok {
			records = records[:n]
			break
		}
		records = make([]runtime.MemProfileRecord, n+50)
	}
	by := map[string]int64{}
	for _, r := range records {
		frames := runtime.CallersFrames(r.Stack())
		frame, more := frames.Next()
		for more && strings.HasPrefix(frame.Function, "runtime.") {
			frame, more = frames.Next()
		}
		if _, name, ok := strings.Cut(frame.Function, "/guestdrv/rstream."); ok {
			by["rstream."+name] += r.AllocObjects
		}
	}
	return by
}
