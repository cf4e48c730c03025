package libvnicd_test

import (
	"io"
	"net"
	"path/filepath"
	"sync"
	"syscall"
	"testing"

	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/guestdrv/internal/rig"
)

// hostile is a server that is not a vnicd, and the error that vnicd_open then gives.
type hostile struct {
	code   int // negative errno
	text   string
	answer func(h vhostuser.Header) []byte // to a request; nil: closes the connection
}

// accept serves the first connection to path, until the test ends.
func accept(t *testing.T, path string, serve func(*net.UnixConn)) {
	t.Helper()
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	t.Cleanup(func() { _ = l.Close(); wg.Wait() })
	wg.Go(func() {
		if conn, err := l.Accept(); err == nil {
			defer conn.Close()
			serve(conn.(*net.UnixConn))
		}
	})
}

// serve listens on path until the test ends.
func (c hostile) serve(t *testing.T, path string) {
	t.Helper()
	accept(t, path, func(conn *net.UnixConn) {
		for {
			var b [vhostuser.HeaderSize]byte
			if _, err := io.ReadFull(conn, b[:]); err != nil {
				return
			}
			h, err := vhostuser.ParseHeader(b[:])
			if err != nil {
				t.Error(err)
				return
			}
			if _, err := io.CopyN(io.Discard, conn, int64(h.Size)); err != nil {
				return
			}
			reply := c.answer(h)
			if reply == nil {
				return
			}
			if _, err := conn.Write(reply); err != nil {
				return
			}
		}
	})
}

func hostileServers() map[string]hostile {
	protocol, gone := -int(syscall.EPROTO), -int(syscall.ENODEV)
	reply := func(r vhostuser.Request, flags, size uint32, body []byte) []byte {
		return append(vhostuser.Header{Request: r, Flags: flags, Size: size}.Append(nil), body...)
	}
	const good = vhostuser.FlagVersion | vhostuser.FlagReply
	return map[string]hostile{
		"closes": {gone, "closed the connection", func(vhostuser.Header) []byte { return nil }},
		"other virtio device": {protocol, "not a vnicd", func(h vhostuser.Header) []byte {
			return reply(h.Request, good, 8, vhostuser.AppendU64(nil, 1))
		}},
		"wrong request": {protocol, "in place of", func(h vhostuser.Header) []byte {
			return reply(h.Request+1, good, 8, make([]byte, 8))
		}},
		"memory that nobody asked for": {protocol, "in place of", func(vhostuser.Header) []byte {
			return reply(vhostuser.ReqGetMemory, good, 8, make([]byte, 8))
		}},
		"no reply flag": {protocol, "flags", func(h vhostuser.Header) []byte {
			return reply(h.Request, vhostuser.FlagVersion, 8, make([]byte, 8))
		}},
		"long reply": {protocol, "reply of 4294967295 bytes", func(h vhostuser.Header) []byte {
			return reply(h.Request, good, 1<<32-1, make([]byte, 64))
		}},
		"short reply": {protocol, "reply of 4 bytes", func(h vhostuser.Header) []byte {
			return reply(h.Request, good, 4, make([]byte, 4))
		}},
	}
}

// TestOutOfStep: the device is unusable from a wrong reply on. A later one might be taken for the reply to another
// request: memory would be thought shared, or taken back, that is not.
func TestOutOfStep(t *testing.T) {
	n := rig.New(t, 1)
	path := filepath.Join(t.TempDir(), "between")
	accept(t, path, func(front *net.UnixConn) {
		back, err := net.Dial("unix", n.Hosts[0].Path)
		if err != nil {
			t.Error(err)
			return
		}
		between(front, back.(*net.UnixConn))
	})
	run(t, build(t, "outofstep", ""), path)
}

// between passes messages on, but for the replies to all ADD_MEM_REG after the first, which become others.
func between(front, back *net.UnixConn) {
	f, b := vhostuser.NewTransport(front), vhostuser.NewTransport(back)
	pass := func(from, to *vhostuser.Transport, change func(*vhostuser.Header)) {
		defer func() { _ = to.CloseWrite() }()
		var m vhostuser.Message
		for from.Recv(&m, func(vhostuser.Header) error { return nil }) == nil {
			change(&m.Header)
			err := to.Send(m.Header, m.Body, m.FDs...)
			m.Close()
			if err != nil {
				return
			}
		}
	}
	var wg sync.WaitGroup
	wg.Go(func() { pass(f, b, func(*vhostuser.Header) {}) })
	added := 0
	pass(b, f, func(h *vhostuser.Header) {
		if h.Request == vhostuser.ReqAddMemReg {
			if added++; added > 1 {
				h.Request = vhostuser.ReqSetOwner
			}
		}
	})
	wg.Wait()
	_ = b.Close()
}
