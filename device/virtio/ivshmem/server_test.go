package ivshmem

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/virtio"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/device/virtio/virtq"
)

const (
	testQueues  = 3
	testFeature = 1 << 3
	badFeature  = 1 << 4 // which the device offers, and does not accept
)

// device is a virtio device that records what its server asks of it.
type device struct {
	mu       sync.Mutex
	conn     virtio.Conn
	features uint64
	queues   [testQueues]*virtq.Queue
	config   [maxConfig / 2]byte
	resets   int
}

func (d *device) Features() uint64                 { return testFeature | badFeature }
func (d *device) NumQueues() int                   { return testQueues }
func (d *device) ConfigSize() int                  { return len(d.config) }
func (d *device) WriteConfig(uint32, []byte) error { return errors.New("read-only") }
func (d *device) locked(f func())                  { d.mu.Lock(); defer d.mu.Unlock(); f() }
func (d *device) Connected(c virtio.Conn)          { d.locked(func() { d.conn = c }) }
func (d *device) Disconnected()                    { d.locked(func() { d.conn = nil }) }
func (d *device) ReadConfig(b []byte, o uint32) error {
	d.locked(func() { copy(b, d.config[o:]) })
	return nil
}
func (d *device) StopQueue(i int) { d.locked(func() { d.queues[i] = nil }) }

func (d *device) Reset() {
	d.locked(func() { d.resets++; d.config[1]++ })
}

func (d *device) SetFeatures(f uint64) error {
	if f&badFeature != 0 {
		return errors.New("bad feature")
	}
	d.locked(func() { d.features = f })
	return nil
}

func (d *device) StartQueue(i int, q *virtq.Queue) error {
	d.locked(func() { d.queues[i] = q })
	return nil
}

// queue returns queue i, nil if it does not run.
func (d *device) queue(i int) (q *virtq.Queue) {
	d.locked(func() { q = d.queues[i] })
	return q
}

// countResets returns how often the device was reset, which config space shows, too.
func (d *device) countResets() (n int) {
	d.locked(func() { n = d.resets })
	return n
}

func (d *device) connected() (is bool) {
	d.locked(func() { is = d.conn != nil })
	return is
}

// guest is a QEMU with its guest: what the server has sent it.
type guest struct {
	t       testing.TB
	c       *net.UnixConn
	mem     []byte
	in, out []int // of the device's peer, and of QEMU's
	n       uint32
}

type rig struct {
	t   testing.TB
	dev *device
	srv *vhostuser.Server
	s   *Server
	mem []int // memory files
}

func newRig(t testing.TB) *rig {
	d := &device{}
	return newRigOf(t, d, d)
}

// newRigOf serves dev, which is d or is made of it.
func newRigOf(t testing.TB, d *device, dev virtio.Device) *rig {
	r := &rig{t: t, dev: d}
	path := filepath.Join(t.TempDir(), "hca")
	var err error
	if r.srv, err = vhostuser.Offer(vhostuser.Config{Path: path}, dev, 1); err != nil {
		t.Fatal(err)
	}
	if r.s, err = Listen(Config{Path: path, VirtioID: 38, Queues: testQueues, Device: r.srv}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(r.s.Close(), r.srv.Close()); err != nil {
			t.Error(err)
		}
		if r.dev.connected() {
			t.Error("the device is connected after Close")
		}
		for _, fd := range r.mem {
			_ = unix.Close(fd)
		}
	})
	return r
}

func eventually(t testing.TB, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

// addMemory shares a MiB of guest memory at pa, as the network card's session reports it.
func (r *rig) addMemory(pa uint64) vhostuser.Region {
	r.t.Helper()
	fd, err := unix.MemfdCreate("guest", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err == nil {
		err = unix.Ftruncate(fd, 1<<20)
	}
	if err != nil {
		r.t.Fatal(err)
	}
	r.mem = append(r.mem, fd)
	x := vhostuser.Region{GuestPA: pa, Size: 1 << 20, UserAddr: 0x7f0000000000 + pa}
	r.s.AddMemory(x, fd)
	return x
}

// receive takes one message: its number, and its descriptor or -1.
func receive(c *net.UnixConn) (v int64, fd int, err error) {
	b, oob := make([]byte, 8), make([]byte, unix.CmsgSpace(4))
	n, k, _, _, err := c.ReadMsgUnix(b, oob)
	if err != nil || n != 8 {
		return 0, -1, errors.Join(err, fmt.Errorf("%d bytes", n))
	}
	fd = -1
	if k > 0 {
		msgs, err := unix.ParseSocketControlMessage(oob[:k])
		if err != nil {
			return 0, -1, err
		}
		fds, err := unix.ParseUnixRights(&msgs[0])
		if err != nil {
			return 0, -1, err
		}
		fd = fds[0]
	}
	return int64(le.Uint64(b)), fd, nil
}

// attach connects a QEMU, which checks the order of what it gets.
func (r *rig) attach() *guest {
	r.t.Helper()
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: r.s.cfg.Path})
	if err != nil {
		r.t.Fatal(err)
	}
	g := &guest{t: r.t, c: c}
	want := []int64{0, 0, -1}
	for _, peer := range []int64{devicePeer, 0} {
		for range 1 + testQueues {
			want = append(want, peer)
		}
	}
	for i, w := range want {
		v, fd, err := receive(c)
		if err != nil || v != w || (fd >= 0) != (i >= 2) {
			r.t.Fatalf("message %d is %d with descriptor %d, want %d: %v", i, v, fd, w, err)
		}
		switch {
		case i == 2:
			if g.mem, err = unix.Mmap(fd, 0, barSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
				r.t.Fatal(err)
			}
			_ = unix.Close(fd)
		case i > 2 && v == devicePeer:
			g.in = append(g.in, fd)
		case i > 2:
			g.out = append(g.out, fd)
		}
	}
	return g
}

// detach ends QEMU.
func (g *guest) detach() {
	_ = g.c.Close()
	_ = unix.Munmap(g.mem)
	for _, fd := range append(g.in, g.out...) {
		_ = unix.Close(fd)
	}
}

func (g *guest) get32(off int) uint32 { return word(g.mem[off:]).Load() }

// ring rings a doorbell of the device's peer.
func (g *guest) ring(vector int) {
	g.t.Helper()
	if _, err := unix.Write(g.in[vector], []byte{1, 0, 0, 0, 0, 0, 0, 0}); err != nil {
		g.t.Fatal(err)
	}
}

// rung takes a signal of an eventfd, if there is one.
func rung(fd int) bool {
	_, err := unix.Read(fd, make([]byte, 8))
	return err == nil
}

// ask makes a request, and returns its result and the device status after it.
func (g *guest) ask(status uint32) (result, now uint32) {
	g.t.Helper()
	g.n++
	word(g.mem[offDriverStatus:]).Store(status)
	word(g.mem[offRequest:]).Store(g.n)
	g.ring(0)
	eventually(g.t, "an answer", func() bool { return g.get32(offAnswer) == g.n })
	return g.get32(offResult), g.get32(offStatus)
}

func (g *guest) want(status, result, now uint32) {
	g.t.Helper()
	if r, s := g.ask(status); r != result || s != now {
		g.t.Errorf("request %#x: result %d, status %#x, want %d, %#x", status, r, s, result, now)
	}
}

func (g *guest) setQueue(i int, desc, avail, used uint64, size uint16) {
	q := g.mem[offQueue+i*queueLen:]
	le.PutUint64(q, desc)
	le.PutUint64(q[8:], avail)
	le.PutUint64(q[16:], used)
	le.PutUint16(q[24:], size)
}

const (
	chosen   = virtio.StatusAcknowledge | virtio.StatusDriver | virtio.StatusFeaturesOK
	driverOK = chosen | virtio.StatusDriverOK
)

// start negotiates, and starts all queues with rings at pa.
func (g *guest) start(pa uint64) {
	g.t.Helper()
	g.want(0, 0, 0)
	le.PutUint64(g.mem[offDriverFeat:], virtio.FeatureVersion1|testFeature)
	g.want(chosen, 0, chosen)
	for i := range testQueues {
		at := pa + uint64(i)*3<<14
		g.setQueue(i, at, at+1<<14, at+2<<14, 64)
	}
	g.want(driverOK, 0, driverOK)
}

// The driver negotiates, queues run, doorbells and interrupts pass, and a reset ends all that.
func TestDriver(t *testing.T) {
	r := newRig(t)
	r.addMemory(0)
	r.s.Run(true)
	g := r.attach()
	defer g.detach()
	if m, v := le.Uint64(g.mem), g.get32(offVersion); m != magic || v != version || g.get32(offVirtioID) != 38 ||
		g.get32(offPeer) != devicePeer || g.get32(offNumQueues) != testQueues || g.get32(offNumVectors) != 1+testQueues {
		t.Fatalf("registers %x", g.mem[:64])
	}
	if f := le.Uint64(g.mem[offFeatures:]); f&testFeature == 0 || f&virtio.FeatureVersion1 == 0 ||
		f&(virtio.FeatureRingPacked|vhostuser.FeatureProtocolFeatures) != 0 {
		t.Fatalf("features %#x", f)
	}
	g.start(1 << 12)
	r.dev.locked(func() {
		if r.dev.features&testFeature == 0 {
			t.Errorf("the device got features %#x", r.dev.features)
		}
	})
	for i := range testQueues {
		q := r.dev.queue(i)
		if q == nil || q.Size() != 64 {
			t.Fatalf("queue %d: %+v", i, q)
		}
		g.ring(1 + i)
		eventually(t, "the doorbell", func() bool { return rung(q.KickFD()) })
		rung(g.out[1+i])
		q.Interrupt()
		for k, fd := range g.out {
			if got := rung(fd); got != (k == 1+i) {
				t.Errorf("interrupt of queue %d: vector %d is signalled: %v", i, k, got)
			}
		}
	}
	g.want(driverOK, 0, driverOK) // once more: nothing changes
	before := g.get32(offGeneration)
	g.want(0, 0, 0)
	resets := r.dev.countResets()
	if r.dev.queue(0) != nil || resets == 0 {
		t.Error("the reset has not reached the device")
	}
	// Config space belongs to the device after the reset.
	if g.mem[offConfig+1] != byte(resets) || g.get32(offGeneration) == before || g.get32(offGeneration)&1 != 0 {
		t.Errorf("config space of %d resets, generation %d after %d", g.mem[offConfig+1], g.get32(offGeneration), before)
	}
	g.start(1 << 12)
	if r.dev.queue(2) == nil {
		t.Error("the device did not start again")
	}
}

// What a driver must not ask for is refused, and changes nothing.
func TestRefused(t *testing.T) {
	r := newRig(t)
	r.addMemory(0)
	r.s.Run(true)
	g := r.attach()
	defer g.detach()
	const refused = uint32(unix.EINVAL)
	g.want(0, 0, 0)
	g.want(1<<20, refused, 0)
	g.want(driverOK, refused, 0) // features were never set
	le.PutUint64(g.mem[offDriverFeat:], virtio.FeatureVersion1|1<<40)
	g.want(chosen, refused, 0)
	le.PutUint64(g.mem[offDriverFeat:], virtio.FeatureVersion1|badFeature)
	g.want(chosen, 0, chosen&^virtio.StatusFeaturesOK) // the driver sees that FEATURES_OK is missing
	g.want(0, 0, 0)
	le.PutUint64(g.mem[offDriverFeat:], virtio.FeatureVersion1)
	g.want(chosen, 0, chosen)
	for what, q := range map[string]func(){
		"size": func() { g.setQueue(0, 0, 1<<14, 2<<14, 48) },
		"long": func() { g.setQueue(0, 0, 1<<14, 2<<14, 512) },
		"desc": func() { g.setQueue(0, 8, 1<<14, 2<<14, 64) },
		"used": func() { g.setQueue(0, 0, 1<<14, 2<<14+2, 64) },
		"more": func() { g.setQueue(testQueues, 0, 1<<14, 2<<14, 64) },
	} {
		clear(g.mem[offQueue:driverEnd])
		q()
		if res, s := g.ask(driverOK); res != refused || s != chosen || r.dev.queue(0) != nil {
			t.Errorf("%s: result %d, status %#x", what, res, s)
		}
	}
	clear(g.mem[offQueue:driverEnd])
	g.start(0)
	if r.dev.queue(0) == nil {
		t.Error("a proper request is not obeyed afterwards")
	}
}

// Queues stand while the VM does, go on where they were, and wait for memory that is not known yet.
func TestPause(t *testing.T) {
	r := newRig(t)
	g := r.attach()
	defer g.detach()
	g.start(5 << 20)
	r.s.Run(true)
	if r.dev.queue(0) != nil {
		t.Fatal("a queue runs without memory")
	}
	x := r.addMemory(5 << 20)
	for i := range testQueues {
		if r.dev.queue(i) == nil {
			t.Fatalf("queue %d does not run", i)
		}
	}
	for range 3 {
		r.s.Run(false)
		for i := range testQueues { // at once: QEMU gets its answer afterwards
			if r.dev.queue(i) != nil {
				t.Fatalf("queue %d runs in a paused VM", i)
			}
		}
		if n := r.dev.countResets(); n != 1 {
			t.Fatalf("%d resets: a pause is none", n)
		}
		r.s.Run(true)
		q := r.dev.queue(1)
		if q == nil {
			t.Fatal("the queue does not run after the pause")
		}
		g.ring(2)
		eventually(t, "the doorbell", func() bool { return rung(q.KickFD()) })
	}
	r.s.RemoveMemory(x)
	if r.dev.queue(0) != nil {
		t.Error("a queue runs in memory that was withdrawn")
	}
	g.want(0, 0, 0)
}

// A change of config space shows in BAR 2, and by vector 0.
func TestConfig(t *testing.T) {
	r := newRig(t)
	r.addMemory(0)
	r.s.Run(true)
	g := r.attach()
	defer g.detach()
	g.start(0)
	for v := byte(1); v < 5; v++ {
		rung(g.out[0])
		before := g.get32(offGeneration)
		r.dev.locked(func() { r.dev.config[7] = v })
		var c virtio.Conn
		r.dev.locked(func() { c = r.dev.conn })
		c.ConfigChanged()
		eventually(t, "the interrupt", func() bool { return rung(g.out[0]) })
		if n := g.get32(offGeneration); g.mem[offConfig+7] != v || n == before || n&1 != 0 {
			t.Errorf("config space has %d, generation %d after %d", g.mem[offConfig+7], n, before)
		}
	}
}

// QEMUs come and go. Each has memory and eventfds of its own, one at a time, and nothing is left of it.
func TestQEMUs(t *testing.T) {
	r := newRig(t)
	r.addMemory(0)
	r.s.Run(true)
	var before int
	for i := range 5 {
		g := r.attach()
		if g.get32(offRequest) != 0 {
			t.Fatal("the registers are those of the QEMU before")
		}
		g.start(0)
		// The device was free for this one: what the QEMU before had is closed.
		if n := descriptors(t); i == 0 {
			before = n
		} else if n != before {
			t.Errorf("%d descriptors with QEMU %d, %d with the first one", n, i, before)
		}
		second, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: r.s.cfg.Path})
		if err != nil {
			t.Fatal(err)
		}
		if n, err := second.Read(make([]byte, 1)); n > 0 || !errors.Is(err, io.EOF) {
			t.Errorf("a second QEMU gets %d bytes: %v", n, err)
		}
		_ = second.Close()
		g.detach()
		eventually(t, "the device is disconnected", func() bool { return !r.dev.connected() })
	}
}

// A front end that sends something is no QEMU.
func TestTalkativeFrontEnd(t *testing.T) {
	r := newRig(t)
	g := r.attach()
	if _, err := g.c.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	if n, err := g.c.Read(make([]byte, 1)); n > 0 || err == nil {
		t.Error("the connection goes on")
	}
	g.detach()
	eventually(t, "the device is disconnected", func() bool { return !r.dev.connected() })
	r.attach().detach()
}

// Any values in BAR 2 get an answer, and a proper driver finds a device afterwards.
func TestHostileRegisters(t *testing.T) {
	r := newRig(t)
	r.addMemory(0)
	r.s.Run(true)
	g := r.attach()
	defer g.detach()
	rng := rand.New(rand.NewPCG(1, 2))
	statuses := []uint32{0, chosen, driverOK, virtio.StatusFailed, 1, 1 << 31}
	for range 2000 {
		switch rng.IntN(4) {
		case 0: // everything, the device's part too
			for i := range g.mem[:offConfig+maxConfig] {
				if i < offAnswer || i >= offRequest+4 {
					g.mem[i] = byte(rng.Uint32())
				}
			}
		case 1:
			for i := range testQueues {
				g.setQueue(i, rng.Uint64()>>rng.IntN(64), rng.Uint64()>>rng.IntN(64), rng.Uint64()>>rng.IntN(64),
					1<<rng.IntN(16))
			}
		case 2:
			le.PutUint64(g.mem[offDriverFeat:], virtio.FeatureVersion1|rng.Uint64()&uint64(rng.IntN(2)*testFeature))
		default:
			r.s.Run(rng.IntN(2) == 0)
		}
		g.ask(statuses[rng.IntN(len(statuses))])
	}
	r.s.Run(true)
	clear(g.mem[offQueue:driverEnd])
	g.start(0)
	if r.dev.queue(0) == nil {
		t.Error("a proper driver has no device afterwards")
	}
}

// The layout is that of the C header.
func TestLayout(t *testing.T) {
	const c = `#include <stdio.h>
#include <stddef.h>
#include "vnicd_ivshmem.h"
#define F(f) (int)offsetof(struct vnicd_ivshmem, f)
int main(void)
{
	printf("%llu %u", (unsigned long long)VNICD_IVSHMEM_MAGIC, VNICD_IVSHMEM_ENDED);
	int v[] = { VNICD_IVSHMEM_VERSION, VNICD_IVSHMEM_BAR_SIZE, VNICD_IVSHMEM_QUEUES, VNICD_IVSHMEM_CONFIG,
		F(magic), F(version), F(virtio_id), F(peer), F(num_queues), F(num_vectors), F(config_size), F(device_features),
		F(max_size), F(answer), F(result), F(device_status), F(config_generation), F(request), F(status),
		F(driver_features), F(queue), F(config), sizeof(struct vnicd_ivshmem_queue) };
	for (unsigned i = 0; i < sizeof(v) / sizeof(v[0]); i++)
		printf(" %d", v[i]);
	return 0;
}
`
	dir := t.TempDir()
	src, prog := filepath.Join(dir, "layout.c"), filepath.Join(dir, "layout")
	if err := os.WriteFile(src, []byte(c), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := run("cc", "-I", "../../../guestdrv/linux", "-o", prog, src); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	out, err := run(prog)
	if err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf("%d %d", uint64(magic), uint32(ended))
	for _, v := range []int{version, regsSize, MaxQueues, maxConfig, offMagic, offVersion, offVirtioID, offPeer,
		offNumQueues, offNumVectors, offConfigSize, offFeatures, offMaxSize, offAnswer, offResult, offStatus, offGeneration,
		offRequest, offDriverStatus, offDriverFeat, offQueue, offConfig, queueLen} {
		want += fmt.Sprintf(" %d", v)
	}
	if out != want {
		t.Errorf("C has  %s\nGo has %s", out, want)
	}
}

func run(name string, args ...string) (string, error) {
	out, err := exec.Command(name, args...).CombinedOutput()
	return string(out), err
}
