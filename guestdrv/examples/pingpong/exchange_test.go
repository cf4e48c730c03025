package main

import (
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vnicd/vnicd/guestdrv"
)

// Messages of ibv_rc_pingpong, byte for byte, and invalid ones.
func TestIdentity(t *testing.T) {
	const said = "0000:000011:f42a24:00000000000000000000ffff0a000001\x00"
	want := identity{qpn: 0x11, psn: 0xf42a24, gid: guestdrv.IPGID(netip.MustParseAddr("10.0.0.1"))}
	if got, err := decode([]byte(said)); err != nil || got != want {
		t.Errorf("%+v, %v", got, err)
	}
	if got := string(want.encode()); got != said {
		t.Errorf("%q, want %q", got, said)
	}
	for _, bad := range []string{"", strings.Repeat("\x00", messageSize), strings.Repeat(":", messageSize),
		strings.Replace(said, "f42a24", "-42a24", 1),
		strings.Replace(said, "000011", "0x0011", 1), strings.Replace(said, "ffff", "ffxf", 1), said[:messageSize-3]} {
		if got, err := decode([]byte(bad)); err == nil {
			t.Errorf("%q is %+v", bad, got)
		}
	}
}

// An end that has all it waited for stays until the other has: its last acknowledgement may have to be repeated.
func TestLeaveTogether(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	first, err := tcp(net.Dial("tcp", l.Addr().String()))
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	last, err := tcp(l.Accept())
	if err != nil {
		t.Fatal(err)
	}
	defer last.Close()
	left := make(chan error, 1)
	go func() { left <- leave(first) }()
	select {
	case err := <-left:
		t.Fatalf("left alone: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	if err := leave(last); err != nil {
		t.Error(err)
	}
	if err := <-left; err != nil {
		t.Error(err)
	}
}
