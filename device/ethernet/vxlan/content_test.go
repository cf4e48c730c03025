package vxlan_test

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/ethernet/tap"
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/testutil/nstest"
)

// framesGot returns the number of frames, large ones counted once, that the kernel has received from an interface.
func framesGot(t *testing.T, ns *nstest.NS, dev string) uint64 {
	t.Helper()
	var links []struct {
		Stats struct {
			RX struct{ Packets uint64 }
		} `json:"stats64"`
	}
	if err := json.Unmarshal([]byte(ns.IP("-s", "-j", "link", "show", dev)), &links); err != nil || len(links) != 1 {
		t.Fatalf("%v: %v", err, links)
	}
	return links[0].Stats.RX.Packets
}

// Large frames over a wire inside the machine, which passes messages on unchanged, on both underlays, both ways: every
// byte arrives intact (coalesced frames have no checksum that a receiver verifies), and most segments reach the
// receiver's kernel in large frames.
func TestOffloadsContent(t *testing.T) {
	for _, c := range []struct{ name, a, b string }{{"IPv4", "192.0.2.1", "192.0.2.2"},
		{"IPv6", "2001:db8::1", "2001:db8::2"}} {
		t.Run(c.name, func(t *testing.T) {
			a, b := nstest.New(t, "a"), nstest.New(t, "b")
			nstest.Pair(a, b, "under", 1500)
			underlay(a, "under", c.a)
			underlay(b, "under", c.b)
			loops := newLoops(t, 2)
			mk := func(ns *nstest.NS, l *loop.Loop, local, peer string, i int) *host {
				return newHost(t, ns, []*loop.Loop{l}, hostConfig{vni: 4711, whole: true, local: local, peers: []string{peer},
					tap: tap.Config{Offloads: true,
						Name: "tenant", Addrs: []netip.Prefix{netip.MustParsePrefix(fmt.Sprintf("10.0.0.%d/24", i)),
							netip.MustParsePrefix(fmt.Sprintf("fd00::%d/64", i))}}})
			}
			mk(a, loops[0], c.a, c.b, 1)
			hb := mk(b, loops[1], c.b, c.a, 2)
			a.Ping("10.0.0.2")
			for _, to := range []string{"10.0.0.2:7000", "[fd00::2]:7000"} {
				transfer(t, a, b, to, 24<<20)
			}
			frames, wire := framesGot(t, b, "tenant"), hb.tap.Attachment().Counters.Totals().OutFrames
			t.Logf("%d segments arrived in %d frames", wire, frames)
			if wire < 2*24<<20/1500 || frames > wire/2 {
				t.Errorf("%d segments arrived in %d frames", wire, frames)
			}
			datagrams(t, a, b)
		})
	}
}

// transfer sends random bytes to an echo service, and compares the echo.
func transfer(t *testing.T, from, to *nstest.NS, addr string, size int64) {
	t.Helper()
	var l net.Listener
	to.Do(func() { l = must[net.Listener](t)(net.Listen("tcp", addr)) })
	defer l.Close()
	echoed := make(chan error, 1)
	go func() {
		s, err := l.Accept()
		if err == nil {
			_, err = io.Copy(s, s)
			s.Close()
		}
		echoed <- err
	}()
	var s net.Conn
	from.Do(func() { s = must[net.Conn](t)(net.Dial("tcp", addr)) })
	defer s.Close()
	_ = s.SetDeadline(time.Now().Add(2 * time.Minute))
	sent, back := sha256.New(), sha256.New()
	done := make(chan error, 1)
	go func() {
		_, err := io.Copy(io.MultiWriter(s, sent), io.LimitReader(rand.NewChaCha8([32]byte{1}), size))
		_ = s.(*net.TCPConn).CloseWrite()
		done <- err
	}()
	n, err := io.Copy(back, s)
	if err != nil || n != size {
		t.Fatalf("%d of %d bytes were echoed: %v", n, size, err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if err := <-echoed; err != nil {
		t.Fatal(err)
	}
	if [32]byte(sent.Sum(nil)) != [32]byte(back.Sum(nil)) {
		t.Error("the echo differs from the data sent")
	}
}
