package main

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"

	"github.com/vnicd/vnicd/guestdrv"
)

// identity is what the ends send each other over TCP, in the form of ibv_rc_pingpong: LID (none in Ethernet), QP
// number, first PSN and GID in hexadecimal.
type identity struct {
	qpn, psn uint32
	gid      guestdrv.GID
}

// messageSize includes the NUL that C programs send.
const messageSize = len("0000:000000:000000:00000000000000000000000000000000") + 1

// done is the client's last message.
const done = "done\x00"

func (i identity) String() string {
	return fmt.Sprintf("QPN %#06x PSN %#06x GID %v", i.qpn, i.psn, i.gid)
}

func (i identity) encode() []byte {
	return fmt.Appendf(nil, "0000:%06x:%06x:%x\x00", i.qpn, i.psn, i.gid[:])
}

func decode(b []byte) (i identity, err error) {
	f := strings.Split(strings.TrimRight(string(b), "\x00"), ":")
	if len(f) != 4 || len(f[3]) != 2*len(i.gid) {
		return i, fmt.Errorf("the other end sent %q, which is not a message of ibv_rc_pingpong", b)
	}
	var n [2]uint64
	for k, s := range f[1:3] {
		if n[k], err = strconv.ParseUint(s, 16, 24); err != nil {
			return i, fmt.Errorf("the other end sent %q: %w", b, err)
		}
	}
	i.qpn, i.psn = uint32(n[0]), uint32(n[1])
	_, err = hex.Decode(i.gid[:], []byte(f[3]))
	return i, err
}

// exchange connects to the server, or waits for a client, and receives the peer's identity. ready completes the
// exchange.
func exchange(ctx context.Context, o options, mine identity) (_ *net.TCPConn, theirs identity, err error) {
	conn, err := dial(ctx, o)
	if err != nil {
		return nil, theirs, err
	}
	defer func() {
		if err != nil {
			_ = conn.Close()
		}
	}()
	if deadline, ok := ctx.Deadline(); ok {
		_ = conn.SetDeadline(deadline)
	}
	if o.peer != "" {
		if _, err := conn.Write(mine.encode()); err != nil {
			return nil, theirs, err
		}
	}
	var b [messageSize]byte
	if _, err := io.ReadFull(conn, b[:]); err != nil {
		return nil, theirs, fmt.Errorf("the other end did not send its identity: %w", err)
	}
	theirs, err = decode(b[:])
	return conn, theirs, err
}

// ready tells the peer that this end can receive: a server sends its identity only now.
func ready(conn net.Conn, o options, mine identity) error {
	if o.peer != "" {
		_, err := conn.Write([]byte(done))
		return err
	}
	if _, err := conn.Write(mine.encode()); err != nil {
		return err
	}
	var b [len(done)]byte
	if _, err := io.ReadFull(conn, b[:]); err != nil {
		return fmt.Errorf("the client has gone: %w", err)
	}
	return nil
}

// leave waits until the peer has what it waited for, too: the acknowledgement of its last message may be lost, and a QP
// that is destroyed repeats none. ibv_rc_pingpong has closed its side of the TCP connection long before.
func leave(conn *net.TCPConn) error {
	if err := conn.CloseWrite(); err != nil {
		return err
	}
	switch n, err := conn.Read(make([]byte, 1)); {
	case n != 0:
		return errors.New("the other end sent more than its identity")
	case err != io.EOF:
		return fmt.Errorf("the other end did not finish: %w", err)
	}
	return nil
}

func dial(ctx context.Context, o options) (*net.TCPConn, error) {
	if o.peer != "" {
		var d net.Dialer
		return tcp(d.DialContext(ctx, "tcp", net.JoinHostPort(o.peer, strconv.Itoa(o.port))))
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", ":"+strconv.Itoa(o.port))
	if err != nil {
		return nil, err
	}
	defer l.Close()
	defer context.AfterFunc(ctx, func() { _ = l.Close() })()
	fmt.Println("waiting for a client on", l.Addr())
	return tcp(l.Accept())
}

func tcp(conn net.Conn, err error) (*net.TCPConn, error) {
	if err != nil {
		return nil, err
	}
	return conn.(*net.TCPConn), nil
}
