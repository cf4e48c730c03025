package cli

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
	"github.com/vnicd/vnicd/device/virtio/vnet"
	"github.com/vnicd/vnicd/translate"
)

const twoVMs = `
vms:
  - {name: one, network: blue, mac: "02:00:00:00:00:01"}
  - {name: two, network: blue, mac: "02:00:00:00:00:02"}
`

// Of a card's memory.
const (
	cardHeader  = 12 // of virtio-net
	cardBuffers = 128
	cardFrames  = 32 // places for frames to send
	cardFrame   = 1400
	cardPlace   = 2048 // of a buffer or a frame
)

// card is a driver of a VM's network device.
type card struct {
	*frontend.Device
	mem     *frontend.Memory
	mac     [6]byte
	rx, tx  translate.PA
	size    uint32        // of a receive buffer
	free    []uint64      // places of tx
	arrived atomic.Uint64 // the last frame's number
	seen    uint64        // frames received, of the goroutine that receives
	twice   uint64        // of these, repeated ones
	lost    int           // bursts with frames that did not arrive, of the goroutine that sends
}

// card attaches a driver to a VM's network device.
func (k *keptDaemon) card(ctx context.Context, name string, last byte, features uint64) *card {
	k.Helper()
	c := &card{mac: [6]byte{2, 5: last}, size: cardPlace}
	if features&vnet.FeatureMrgRxbuf != 0 {
		c.size = 600 // a frame may need three
	}
	var err error
	if c.mem, err = frontend.NewMemory(frontend.Range{PA: 0x200000, Size: 4 << 20}); err != nil {
		k.Fatal(err)
	}
	k.Cleanup(c.mem.Close)
	c.Device, err = frontend.Open(ctx, frontend.Config{Path: filepath.Join(k.dir, "run", name+".net"), Memory: c.mem,
		Features: features, NumQueues: 2, QueueSize: 128})
	if err != nil {
		k.Fatal(err)
	}
	k.Cleanup(func() { _ = c.Close() })
	c.rx, err = c.mem.Alloc(cardBuffers*cardPlace, 64)
	if err == nil {
		c.tx, err = c.mem.Alloc(cardFrames*cardPlace, 64)
	}
	for i := range uint64(cardBuffers) {
		err = errors.Join(err, c.post(i))
	}
	if err != nil {
		k.Fatal(err)
	}
	c.Queue(0).Kick()
	for i := range uint64(cardFrames) {
		c.free = append(c.free, i)
	}
	return c
}

func (c *card) post(i uint64) error {
	return c.Queue(0).Add(i, nil, []frontend.Buf{{PA: c.rx + translate.PA(i*cardPlace), Len: c.size}})
}

// content makes frame n of c to a peer: its number, and a length and bytes that follow from that.
func (c *card) content(to [6]byte, n uint64) []byte {
	rng := rand.New(rand.NewPCG(n, uint64(c.mac[5])))
	f := make([]byte, 64+rng.IntN(cardFrame-64))
	for i := range f {
		f[i] = byte(rng.Uint32())
	}
	copy(f, to[:])
	copy(f[6:], c.mac[:])
	f[12], f[13] = 0x88, 0xb5 // IEEE local experimental
	binary.LittleEndian.PutUint64(f[16:], n)
	return f
}

// send sends bursts of frames until stop is closed, each when the last has arrived or has not for two seconds since a
// daemon took all of it: in these the daemon finds the other VM too, so that its end loses one burst of each VM,
// however long the next daemon takes to start. Each place must come back once.
func (c *card) send(ctx context.Context, peer *card, stop <-chan struct{}) error {
	rng, q := rand.New(rand.NewPCG(1, uint64(c.mac[5]))), c.Queue(1)
	out := [cardFrames]bool{}
	reap := func() error {
		for {
			token, n, ok, err := q.Get()
			if err != nil || !ok {
				return err
			}
			if token >= cardFrames || !out[token] || n != 0 {
				return fmt.Errorf("transmit queue returns place %d with %d bytes", token, n)
			}
			out[token] = false
			c.free = append(c.free, token)
		}
	}
	for n := uint64(0); ; {
		select {
		case <-stop:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		default:
		}
		for range 1 + rng.IntN(cardFrames) {
			if len(c.free) == 0 {
				break
			}
			place := c.free[len(c.free)-1]
			c.free = c.free[:len(c.free)-1]
			n++
			f := c.content(peer.mac, n)
			b, err := c.mem.Bytes(c.tx+translate.PA(place*cardPlace), cardHeader+len(f))
			if err != nil {
				return err
			}
			clear(b[:cardHeader])
			copy(b[cardHeader:], f)
			out[place] = true
			err = q.Add(place, []frontend.Buf{{PA: c.tx + translate.PA(place*cardPlace), Len: uint32(len(b))}}, nil)
			if err != nil {
				return err
			}
		}
		q.Kick()
		for taken := time.Now(); peer.arrived.Load() != n; time.Sleep(50 * time.Microsecond) {
			if err := reap(); err != nil {
				return err
			}
			if len(c.free) < cardFrames {
				taken = time.Now()
			}
			if time.Since(taken) > 2*time.Second {
				c.lost++
				break
			}
			if ctx.Err() != nil {
				return fmt.Errorf("%d of %d places have come back: %w", len(c.free), cardFrames, ctx.Err())
			}
		}
		if err := reap(); err != nil {
			return err
		}
	}
}

// receive receives the peer's frames until stop is closed: whole, in order, except that the last ones may come again.
func (c *card) receive(peer *card, stop <-chan struct{}) error {
	q := c.Queue(0)
	for highest := uint64(0); ; {
		first, n, ok, err := q.Get()
		if err != nil {
			return err
		}
		if !ok {
			select {
			case <-stop:
				return nil
			default:
				time.Sleep(20 * time.Microsecond)
				continue
			}
		}
		b, err := c.mem.Bytes(c.rx+translate.PA(first*cardPlace), int(n))
		if err != nil || n < cardHeader+64 {
			return fmt.Errorf("buffer %d with %d bytes: %w", first, n, err)
		}
		frame := append([]byte{}, b[cardHeader:]...)
		tokens := []uint64{first}
		for pieces := int(binary.LittleEndian.Uint16(b[10:])); len(tokens) < pieces; {
			token, n, ok, err := q.Get()
			if err != nil {
				return err
			}
			if !ok { // the rest of a frame is there with its first part
				return fmt.Errorf("%d of %d buffers of a frame", len(tokens), pieces)
			}
			more, err := c.mem.Bytes(c.rx+translate.PA(token*cardPlace), int(n))
			if err != nil {
				return err
			}
			frame, tokens = append(frame, more...), append(tokens, token)
		}
		number := binary.LittleEndian.Uint64(frame[16:])
		if want := peer.content(c.mac, number); string(frame) != string(want) {
			return fmt.Errorf("frame %d after %d: %d bytes, want %d, or other ones", number, highest, len(frame), len(want))
		}
		switch c.seen++; {
		case number > highest:
			highest = number
			c.arrived.Store(number)
		case highest-number < cardFrames:
			c.twice++
		default:
			return fmt.Errorf("frame %d after %d", number, highest)
		}
		for _, token := range tokens {
			if err := c.post(token); err != nil {
				return err
			}
		}
		q.Kick()
	}
}

// The daemon is killed and upgraded again and again while two VMs' network devices exchange frames: their connections
// go on, so that no guest sees its link go down, each buffer comes back once, and what is lost or comes twice was on
// its way when the daemon ended (CO-1, CO-2).
func TestCardsKept(t *testing.T) {
	t.Parallel() // it mostly waits
	for _, tc := range []struct {
		name     string
		features uint64
	}{{"split", 0}, {"split, merged buffers", vnet.FeatureMrgRxbuf}, {"packed", vnet.FeatureRingPacked},
		{"packed, merged buffers, in order", vnet.FeatureRingPacked | vnet.FeatureMrgRxbuf | vnet.FeatureInOrder}} {
		t.Run(tc.name, func(t *testing.T) { cardsKept(t, tc.features) })
	}
}

func cardsKept(t *testing.T, features uint64) {
	k := keptDaemonOf(t, twoVMs)
	kept := func() int { // descriptors that the keeper has
		fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", k.keeper.Process.Pid))
		if err != nil {
			t.Fatal(err)
		}
		return len(fds)
	}
	first := kept()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	a, b := k.card(ctx, "one", 1, features), k.card(ctx, "two", 2, features)
	for _, v := range k.status().VMs {
		if v.NetOutlives != daemon.OutlivesKill {
			t.Errorf("%s outlives %q", v.Name, v.NetOutlives)
		}
	}
	stop := make(chan struct{})
	var running, receiving sync.WaitGroup
	fail := func(what string, err error) {
		if err != nil {
			t.Errorf("%s: %v", what, err)
			cancel()
		}
	}
	ended := make(chan struct{})
	for _, x := range [][2]*card{{a, b}, {b, a}} {
		c, peer := x[0], x[1]
		running.Go(func() { fail(fmt.Sprint("sending by ", c.mac[5]), c.send(ctx, peer, stop)) })
		receiving.Go(func() { fail(fmt.Sprint("receiving by ", c.mac[5]), c.receive(peer, ended)) })
	}
	finish := sync.OnceFunc(func() {
		close(stop)
		running.Wait()
		close(ended)
		receiving.Wait()
	})
	t.Cleanup(finish)
	moves := func() {
		t.Helper()
		for _, c := range []*card{a, b} {
			before := c.arrived.Load()
			testutil.Eventually(t, "frames arrive", func() bool { return c.arrived.Load() > before+2*cardFrames || t.Failed() })
		}
	}
	moves()
	rng := rand.New(rand.NewPCG(2, 2))
	events := max(*killTimes/2, 5)
	for i := range events {
		time.Sleep(time.Duration(rng.IntN(100)) * time.Millisecond)
		if i%5 == 4 {
			if status, out, errs := k.run("upgrade"); status != 0 {
				t.Fatalf("upgrade %d: status %d: %s%s", i, status, out, errs)
			}
		} else {
			k.kill()
		}
		if rng.IntN(2) == 0 {
			moves()
		}
		for _, c := range []*card{a, b} {
			select {
			case <-c.Gone():
				t.Fatalf("the device of VM %d saw its connection end at event %d", c.mac[5], i)
			default:
			}
		}
	}
	moves()
	finish()
	for _, c := range []*card{a, b} {
		if c.lost > events {
			t.Errorf("VM %d: frames were lost %d times, %d daemons have ended", c.mac[5], c.lost, events)
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		t.Logf("VM %d: %d frames arrived, %d again; bursts with lost frames: %d", c.mac[5], c.seen, c.twice, c.lost)
	}
	testutil.Eventually(t, "the keeper has nothing of front ends that have gone", func() bool { return kept() <= first })
}
