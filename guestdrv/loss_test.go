package guestdrv_test

import (
	"bytes"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/guestdrv"
)

// impairment is a bad network behind an HCA. Its numbers are how many of 1000 frames it drops, duplicates, corrupts and
// holds back (until a few others have passed).
type impairment struct {
	drop, double, corrupt, delay int
}

type impaired struct {
	impairment
	next func(l *loop.Loop, b *frame.Buf)

	mu   sync.Mutex // several loops send
	rng  *rand.Rand
	held []heldFrame
	pool *frame.Pool
}

type heldFrame struct {
	b    *frame.Buf
	left int // frames that may still overtake it
}

// impair puts the impairment behind host h.
func (r *rig) impair(h *host, i impairment, seed uint64) {
	im := &impaired{impairment: i, next: h.port.InputHCA, rng: rand.New(rand.NewPCG(seed, 1)), pool: h.site.pool}
	h.hca.SetPort(framePort(im.input))
	r.tb.Cleanup(func() {
		im.mu.Lock()
		defer im.mu.Unlock()
		for _, f := range im.held {
			f.b.Free()
		}
		im.held = nil
	})
}

// framePort is a Port that carries frames and has no paths.
type framePort func(l *loop.Loop, b *frame.Buf)

func (f framePort) InputHCA(l *loop.Loop, b *frame.Buf)                  { f(l, b) }
func (f framePort) SendHCA(l *loop.Loop, b *frame.Buf, _ *vswitch.Path)  { f(l, b) }
func (f framePort) ResolveHCA(*loop.Loop, []byte, *vswitch.Path) bool    { return false }
func (f framePort) Claim() error                                         { return nil }
func (f framePort) RouteHCA(*loop.Loop, *vswitch.Flow) (r vswitch.Route) { return r }
func (f framePort) Owner([16]byte, uint16) (mac vswitch.MAC, ok bool)    { return mac, false }

func (im *impaired) input(l *loop.Loop, b *frame.Buf) {
	im.mu.Lock()
	n := im.rng.IntN(1000)
	var out []*frame.Buf
	take := func(share int) bool {
		hit := n >= 0 && n < share
		n -= share
		return hit
	}
	switch {
	case take(im.drop):
	case take(im.double):
		b.Ref()
		b.Ref()
		out = append(out, b, b)
	case take(im.corrupt):
		// The frame belongs to the sender: corrupt a copy, anywhere behind the Ethernet header.
		if c := im.pool.Get(); c != nil {
			c.Append(b.Bytes())
			f := c.Bytes()
			f[14+im.rng.IntN(len(f)-14)] ^= 1 << im.rng.IntN(8)
			out = append(out, c)
		}
	case take(im.delay) && len(im.held) < 32:
		b.Ref()
		im.held = append(im.held, heldFrame{b, 1 + im.rng.IntN(8)})
	default:
		b.Ref()
		out = append(out, b)
	}
	rest := im.held[:0]
	for _, f := range im.held {
		if f.left--; f.left < 0 {
			out = append(out, f.b)
		} else {
			rest = append(rest, f)
		}
	}
	im.held = rest
	im.mu.Unlock()
	for _, o := range out {
		im.next(l, o)
		o.Free()
	}
}

// TestImpairedNetwork runs all operations over networks that lose, duplicate, corrupt and reorder. Every completion
// must be a success and all data right.
func TestImpairedNetwork(t *testing.T) {
	for _, tc := range []struct {
		name string
		i    impairment
	}{
		{"loss", impairment{drop: 20}},
		{"duplication", impairment{double: 200}},
		{"corruption", impairment{corrupt: 20}},
		{"reordering", impairment{delay: 50}},
		{"all", impairment{drop: 10, double: 20, corrupt: 10, delay: 20}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newRig(t, rigConfig{})
			for i, h := range r.hosts {
				r.impair(h, tc.i, uint64(i))
			}
			// A short timeout: no later packet reveals the loss of a message's end.
			a, b := connect(t, r.hosts[0], r.hosts[1], qpDefaults(), guestdrv.ConnectOptions{Timeout: 12})
			mixedTraffic(t, a, b, 150, 1)
			st, err := a.h.Stats(bg)
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("requester: retransmits %d, timeouts %d, icrc errors %d", st[guestdrv.StatRetransmits],
				st[guestdrv.StatTimeouts], st[guestdrv.StatICRCErrors])
		})
	}
}

// mixedTraffic runs n operations of all kinds and random sizes from a to b, several at once, and compares both memories
// with a model at the end.
func mixedTraffic(t *testing.T, a, b *end, n int, seed uint64) {
	t.Helper()
	const slots, slotSize = 16, 20000
	rng := rand.New(rand.NewPCG(seed, 2))
	local, lmr := a.h.region(t, 2*slots*slotSize, guestdrv.AccessLocalWrite)
	remote, rmr := b.h.region(t, 2*slots*slotSize, allAccess)
	fill(local.Bytes(), 1)
	fill(remote.Bytes(), 2)
	wantL, wantR := append([]byte{}, local.Bytes()...), append([]byte{}, remote.Bytes()...)

	// The lower half of each memory is the source, the upper half the target, so that the order among concurrent READs
	// and WRITEs does not matter. Each target slot is used by one operation at a time because RC executes in order.
	ctx := ctxFor(t)
	type recv struct{ off, n int }
	var recvs []recv
	var counter uint64
	const counterOff = 2*slots*slotSize - 8
	le.PutUint64(remote.Bytes()[counterOff:], 0)
	wcs := make([]guestdrv.Completion, 8)
	done, received := 0, 0
	collect := func() {
		k := a.scq.Poll(wcs)
		for _, wc := range wcs[:k] {
			if wc.Status != guestdrv.WCSuccess || wc.ID != uint64(done) {
				t.Fatalf("completion %+v (%s), want id %d", wc, wc.Status, done)
			}
			done++
			a.completed.Add(1)
		}
		k = b.rcq.Poll(wcs)
		for _, wc := range wcs[:k] {
			if wc.Status != guestdrv.WCSuccess || wc.ID != uint64(received) || int(wc.ByteLen) != recvs[received].n {
				t.Fatalf("receive %+v (%s), want id %d, %+v", wc, wc.Status, received, recvs[received])
			}
			received++
		}
		if ctx.Err() != nil {
			t.Fatalf("%d of %d requests completed", done, n)
		}
	}
	for i := range n {
		slot, size := rng.IntN(slots-1), rng.IntN(slotSize)
		if rng.IntN(3) == 0 {
			size %= 300
		}
		from, to := slot*slotSize, (slots+slot)*slotSize
		wr := request{ID: uint64(i), Flags: guestdrv.SendSignaled, SGL: []guestdrv.SGE{lmr.SGE(from, size)},
			RemoteAddr: remote.Addr() + uint64(to), RKey: rmr.RKey()}
		switch rng.IntN(6) {
		case 0, 1:
			wr.Opcode = guestdrv.WRRDMAWrite
			copy(wantR[to:], wantL[from:from+size])
		case 2:
			wr.Opcode = guestdrv.WRRDMAWriteWithImm
			copy(wantR[to:], wantL[from:from+size])
			for b.qp.PostRecv(&guestdrv.RecvWR{ID: uint64(len(recvs))}) != nil {
				collect()
			}
			recvs = append(recvs, recv{0, size})
		case 3:
			wr.Opcode = guestdrv.WRRDMARead
			wr.SGL = []guestdrv.SGE{lmr.SGE(to, size/2), lmr.SGE(to+size/2, size-size/2)}
			wr.RemoteAddr = remote.Addr() + uint64(from)
			copy(wantL[to:], wantR[from:from+size])
		case 4:
			wr.Opcode = guestdrv.WRSend
			for b.qp.PostRecv(&guestdrv.RecvWR{ID: uint64(len(recvs)), SGL: []guestdrv.SGE{rmr.SGE(to, slotSize)}}) != nil {
				collect()
			}
			recvs = append(recvs, recv{to, size})
			copy(wantR[to:], wantL[from:from+size])
		case 5:
			wr.Opcode, wr.CompareAdd = guestdrv.WRAtomicFetchAndAdd, uint64(i)
			wr.SGL = []guestdrv.SGE{lmr.SGE(counterOff, 8)}
			wr.RemoteAddr = remote.Addr() + counterOff
			le.PutUint64(wantL[counterOff:], counter)
			counter += uint64(i)
		}
		for postSend(a.qp, &wr) == guestdrv.ErrFull {
			collect()
		}
	}
	for done < n || received < len(recvs) {
		collect()
	}
	le.PutUint64(wantR[counterOff:], counter)
	if !bytes.Equal(local.Bytes(), wantL) {
		t.Error("requester's memory differs from the model")
	}
	if !bytes.Equal(remote.Bytes(), wantR) {
		t.Error("responder's memory differs from the model")
	}
}
