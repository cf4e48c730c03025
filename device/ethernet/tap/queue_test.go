package tap_test

import (
	"fmt"
	"net"
	"net/netip"
	"sync/atomic"
	"testing"

	"github.com/vnicd/vnicd/device/ethernet/tap"
	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/testutil"
)

// tally counts the frames that each loop reads.
type tally struct{ loops [loop.MaxLoops]atomic.Int64 }

func (c *tally) Deliver(l *loop.Loop, b *frame.Buf, _ vswitch.Destination) {
	if f := b.Bytes(); len(f) > 42 && f[23] == 17 && string(f[42:]) == "counted" {
		c.loops[l.ID()].Add(1)
	}
}

// A TAP with a queue for each of three loops: the host's flows are spread over them, no frame is lost, and frames
// written by any loop arrive.
func TestQueues(t *testing.T) {
	for _, plain := range []bool{false, true} {
		t.Run(fmt.Sprint("without offloads ", plain), func(t *testing.T) {
			r := newRig(t)
			loops := []*loop.Loop{r.loop}
			for i := 1; i < 3; i++ {
				l, err := loop.New(loop.Config{ID: i})
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(l.Close)
				if err := l.Start(); err != nil {
					t.Fatal(err)
				}
				loops = append(loops, l)
			}
			if _, err := r.try(tap.Config{Offloads: true, Name: "twice", More: []*loop.Loop{r.loop}}); err == nil {
				t.Error("Open accepted a loop listed twice")
			}
			p := r.open(tap.Config{Name: "queues", More: loops[1:], Offloads: !plain,
				Addrs: []netip.Prefix{netip.MustParsePrefix("10.1.2.5/24")}})
			c := &tally{}
			peer := vswitch.MAC{2, 0, 0, 0, 0, 9}
			att, err := r.net.Attach(c, vswitch.PortConfig{Name: "tally", Kind: vswitch.KindVM, MACs: []vswitch.MAC{peer}})
			if err != nil {
				t.Fatal(err)
			}
			r.ns.IP("neigh", "add", "10.1.2.9", "lladdr", peer.String(), "dev", "queues")
			const flows = 60
			r.ns.Do(func() {
				for range flows {
					s, err := net.Dial("udp", "10.1.2.9:7")
					if err == nil {
						_, err = s.Write([]byte("counted"))
						s.Close()
					}
					if err != nil {
						t.Fatal(err)
					}
				}
			})
			testutil.Eventually(t, "all frames arrive", func() bool {
				return c.loops[0].Load()+c.loops[1].Load()+c.loops[2].Load() == flows
			})
			for i := range loops {
				if c.loops[i].Load() == 0 {
					t.Errorf("loop %d read none of %d flows", i, flows)
				}
			}
			var server net.PacketConn
			r.ns.Do(func() {
				if server, err = net.ListenPacket("udp", "10.1.2.5:9"); err != nil {
					t.Fatal(err)
				}
			})
			defer server.Close()
			for i, l := range loops {
				l.Do(func() {
					b := r.pool.Get()
					defer b.Free()
					b.Append(udpTo(p.MAC(), peer, byte(i)))
					att.Input(l, b, vswitch.Source{})
				})
				got := make([]byte, 10)
				if n, _, err := server.ReadFrom(got); err != nil || n != 1 || got[0] != byte(i) {
					t.Errorf("loop %d: %x, %v", i, got[:n], err)
				}
			}
		})
	}
}

// udpTo returns a datagram of one byte from 10.1.2.9 to 10.1.2.5:9.
func udpTo(dst, src vswitch.MAC, data byte) []byte {
	f := append(append(dst[:], src[:]...), 8, 0, 0x45, 0, 0, 29, 0, 0, 0, 0, 64, 17, 0, 0, 10, 1, 2, 9, 10, 1, 2, 5, 0, 7,
		0, 9, 0, 9, 0, 0, data)
	sum := uint32(0)
	for i := 14; i < 34; i += 2 {
		sum += uint32(f[i])<<8 | uint32(f[i+1])
	}
	sum = ^(sum>>16 + sum&0xffff)
	f[24], f[25] = byte(sum>>8), byte(sum)
	return f
}
