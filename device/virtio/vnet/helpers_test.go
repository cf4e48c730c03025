package vnet

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
	"github.com/vnicd/vnicd/translate"
)

func TestMain(m *testing.M) {
	code := m.Run()
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, "leaked:", err)
			code = 1
		}
		if b, err := os.ReadFile("/proc/self/maps"); err != nil || strings.Contains(string(b), "memfd:vnicd-guest") {
			fmt.Fprintln(os.Stderr, "leaked mappings of guest memory", err)
			code = 1
		}
	}
	os.Exit(code)
}

const mtu = 9000

// ringKinds are the feature bits of each layout.
var ringKinds = map[string]uint64{"split": 0, "packed": FeatureRingPacked}

// bothRings runs f for guests with split and with packed rings.
func bothRings(t *testing.T, loops int, f func(t *testing.T, h *host)) {
	for name, features := range ringKinds {
		t.Run(name, func(t *testing.T) {
			h := newHost(t, loops, true)
			h.rings = features
			f(t, h)
		})
	}
}

// host is one vnicd: loops, buffers and a network.
type host struct {
	t     testing.TB
	loops []*loop.Loop
	pool  *frame.Pool
	net   *vswitch.Network
	rings uint64 // feature bits of the guests' ring layout
}

func newHost(t testing.TB, loops int, started bool) *host {
	t.Helper()
	h := &host{t: t}
	for i := range loops {
		l, err := loop.New(loop.Config{ID: i})
		if err != nil {
			t.Fatal(err)
		}
		if started {
			if err := l.Start(); err != nil {
				t.Fatal(err)
			}
		}
		t.Cleanup(l.Close)
		h.loops = append(h.loops, l)
	}
	var err error
	if h.pool, err = frame.NewPool(frame.Config{Count: 2048, Capacity: 10000, Big: 16}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if n := h.pool.InUse(); n != 0 {
			t.Errorf("%d buffers leaked", n)
		}
	})
	if h.net, err = vswitch.NewNetwork(vswitch.Config{VNI: 5, Name: "n", MTU: mtu}); err != nil {
		t.Fatal(err)
	}
	return h
}

// vm is a guest: device, port, and the driver's side.
type vm struct {
	h    *host
	mac  vswitch.MAC
	port *vswitch.VMPort
	dev  *Device
	path string
	mem  *frontend.Memory
	fe   *frontend.Device

	refuse uint64 // virtio features that the driver does not accept
	rxSize int
	tx     [MaxPairs]txRing
}

type txRing struct {
	pa   translate.PA
	free []int
}

const (
	txSlots    = 64
	txSlotSize = 12288
)

func (h *host) vm(i int, pairs int) *vm {
	h.t.Helper()
	v := &vm{h: h, mac: vswitch.MAC{2, 0, 0, 0, 0, byte(i)}}
	var err error
	if v.port, err = vswitch.NewVMPort(h.net, vswitch.VMPortConfig{Name: fmt.Sprint("vm", i), MAC: v.mac}); err != nil {
		h.t.Fatal(err)
	}
	var loops []*loop.Loop
	for k := range h.loops {
		loops = append(loops, h.loops[(i+k)%len(h.loops)])
	}
	if v.dev, err = New(Config{Name: fmt.Sprint("vm", i), MAC: v.mac, Pairs: pairs, Loops: loops, Pool: h.pool,
		Port: v.port}); err != nil {
		h.t.Fatal(err)
	}
	v.port.SetNet(v.dev)
	v.path = filepath.Join(h.t.TempDir(), "net")
	s, err := vhostuser.Listen(vhostuser.Config{Path: v.path}, v.dev, translate.GVMI(i))
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() {
		s.Close()
		v.port.SetNet(nil)
		v.port.Close()
		v.dev.Close()
	})
	return v
}

// boot connects a driver with rx buffers of the given size.
func (v *vm) boot(features uint64, rxSize, rxCount int) *vm {
	t := v.h.t
	t.Helper()
	var err error
	if v.mem, err = frontend.NewMemory(frontend.Range{PA: 0x200000, Size: 16 << 20}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	v.fe, err = frontend.Open(ctx, frontend.Config{Path: v.path, Memory: v.mem, Features: features | v.h.rings,
		NumQueues: v.dev.NumQueues(), QueueSize: 128, Refuse: v.refuse})
	if err != nil {
		t.Fatal(err)
	}
	fe, mem := v.fe, v.mem
	t.Cleanup(func() {
		fe.Close()
		mem.Close()
	})
	v.rxSize = rxSize
	for p := range v.dev.NumQueues() / 2 {
		for range rxCount {
			v.post(p, v.alloc(rxSize))
		}
		v.fe.Queue(2 * p).Kick()
		v.tx[p] = txRing{pa: v.alloc(txSlots * txSlotSize)}
		for i := range txSlots {
			v.tx[p].free = append(v.tx[p].free, i)
		}
	}
	return v
}

func (v *vm) alloc(n int) translate.PA {
	v.h.t.Helper()
	pa, err := v.mem.Alloc(n, 64)
	if err != nil {
		v.h.t.Fatal(err)
	}
	return pa
}

func (v *vm) bytes(pa translate.PA, n int) []byte {
	b, err := v.mem.Bytes(pa, n)
	if err != nil {
		v.h.t.Fatal(err)
	}
	return b
}

func (v *vm) post(pair int, pa translate.PA) {
	if err := v.fe.Queue(2*pair).Add(uint64(pa), nil, []frontend.Buf{{PA: pa, Len: uint32(v.rxSize)}}); err != nil {
		v.h.t.Fatal(err)
	}
}

// reap takes back the transmitted buffers.
func (v *vm) reap(pair int) {
	for {
		tok, n, ok, err := v.fe.Queue(2*pair + 1).Get()
		if err != nil || n != 0 {
			v.h.t.Fatal("transmit queue returned", tok, n, err)
		}
		if !ok {
			return
		}
		v.tx[pair].free = append(v.tx[pair].free, int(tok))
	}
}

// sendRaw puts header and frame unchanged on a transmit queue, in pieces.
func (v *vm) sendRaw(pair int, raw []byte, cuts ...int) {
	t := v.h.t
	t.Helper()
	r, q := &v.tx[pair], v.fe.Queue(2*pair+1)
	v.reap(pair)
	for len(r.free) == 0 {
		wait(t, q)
		v.reap(pair)
	}
	slot := r.free[len(r.free)-1]
	r.free = r.free[:len(r.free)-1]
	pa := r.pa + translate.PA(slot*txSlotSize)
	copy(v.bytes(pa, txSlotSize), raw)
	var bufs []frontend.Buf
	at := 0
	for _, c := range append(cuts, len(raw)) {
		bufs = append(bufs, frontend.Buf{PA: pa + translate.PA(at), Len: uint32(c - at)})
		at = c
	}
	if err := q.Add(uint64(slot), bufs, nil); err != nil {
		t.Fatal(err)
	}
	q.Kick()
}

func (v *vm) send(pair int, frame []byte) {
	v.h.t.Helper()
	v.sendRaw(pair, append(make([]byte, headerLen), frame...), headerLen)
}

func wait(t testing.TB, q *frontend.Queue) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := q.Wait(ctx); err != nil {
		t.Fatal(err)
	}
}

// recv waits for a frame and posts its buffers again.
func (v *vm) recv(pair int) []byte {
	t := v.h.t
	t.Helper()
	wait(t, v.fe.Queue(2*pair))
	f, err := v.take(pair)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

var errNone = errors.New("no frame")

// take returns the next frame, which must be complete, without waiting.
func (v *vm) take(pair int) ([]byte, error) {
	h, f, err := v.takeAny(pair)
	if err == nil && !bytes.Equal(h[:10], make([]byte, 10)) {
		return nil, fmt.Errorf("header %x", h)
	}
	return f, err
}

// takeAny returns the next frame and its header without waiting.
func (v *vm) takeAny(pair int) (h, frame []byte, err error) {
	q := v.fe.Queue(2 * pair)
	tok, n, ok, err := q.Get()
	if err != nil {
		return nil, nil, err
	}
	if !ok {
		return nil, nil, errNone
	}
	pa := translate.PA(tok)
	if int(n) < headerLen {
		return nil, nil, fmt.Errorf("%d bytes written", n)
	}
	raw := bytes.Clone(v.bytes(pa, int(n)))
	v.post(pair, pa)
	h = raw[:headerLen]
	bufs := int(binary.LittleEndian.Uint16(h[10:12]))
	if bufs < 1 {
		return nil, nil, fmt.Errorf("header %x", h)
	}
	frame = raw[headerLen:]
	for range bufs - 1 {
		tok, n, ok, err := q.Get()
		if !ok || err != nil {
			return nil, nil, fmt.Errorf("frame in %d buffers is incomplete: %v", bufs, err)
		}
		frame = append(frame, v.bytes(translate.PA(tok), int(n))...)
		v.post(pair, translate.PA(tok))
	}
	q.Kick()
	return h, frame, nil
}

// buildFrame builds an Ethernet frame of n bytes.
func buildFrame(dst, src vswitch.MAC, n int, fill byte) []byte {
	f := make([]byte, 0, n)
	f = append(f, dst[:]...)
	f = append(f, src[:]...)
	f = append(f, 0x88, 0xb5) // IEEE local experimental
	for len(f) < n {
		f = append(f, fill)
		fill++
	}
	return f
}

func (v *vm) dropped(r vswitch.Reason) uint64 { return v.port.Attachment().Counters.Dropped(r) }
