package frontend

import (
	"bytes"
	"context"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/hca"
	"github.com/vnicd/vnicd/device/virtio"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/translate"
)

// generic is a front end that sends what Cloud Hypervisor's generic vhost-user device sends, in its order (as of v53).
// It needs KVM, so that it itself cannot be tried everywhere.
type generic struct {
	t      *testing.T
	c      *Client
	mem    *Memory
	offer  uint64
	proto  uint64
	queues []*Queue
}

const (
	// The features that it passes on to the guest; none of the device's own, 0 to 23, is among them. Those in numbers:
	// LOG_ALL, IN_ORDER, ORDER_PLATFORM, NOTIFICATION_DATA.
	genericFeatures = virtio.FeatureIndirectDesc | virtio.FeatureEventIdx | virtio.FeatureVersion1 |
		vhostuser.FeatureProtocolFeatures | 1<<26 | 1<<35 | 1<<36 | 1<<38

	inflight     = 1 << 12 // VHOST_USER_PROTOCOL_F_INFLIGHT_SHMFD
	genericProto = vhostuser.ProtoConfig | vhostuser.ProtoMQ | vhostuser.ProtoConfigureMemSlots | vhostuser.ProtoReplyAck |
		vhostuser.ProtoLogSHMFD | vhostuser.ProtoBackendReq | vhostuser.ProtoDeviceState | inflight
)

func (g *generic) must(err error) {
	g.t.Helper()
	if err != nil {
		g.t.Fatal(err)
	}
}

func (g *generic) connect(path string, queues int) {
	g.t.Helper()
	c, err := Dial(context.Background(), path)
	g.must(err)
	g.t.Cleanup(func() { _ = c.Close() })
	g.c = c
	g.must(c.SetOwner())
	offered, err := c.GetFeatures()
	g.must(err)
	proto, err := c.GetProtocolFeatures()
	g.must(err)
	g.offer, g.proto = offered&genericFeatures, proto&genericProto
	g.must(c.SetProtocolFeatures(g.proto))
	if g.proto&inflight != 0 {
		g.t.Fatal("the back end offers INFLIGHT_SHMFD, which this front end does not have")
	}
	n, err := c.QueueNum()
	g.must(err)
	if int(n) != queues {
		g.t.Fatalf("%d queues, want %d", n, queues)
	}
}

// activate is what the guest's driver causes when it sets DRIVER_OK.
func (g *generic) activate(size int) {
	g.t.Helper()
	c := g.c
	g.must(c.SetFeatures(g.offer))
	var fds []int
	for range g.mem.Regions() {
		fds = append(fds, g.mem.FD())
	}
	g.must(c.SetMemTable(g.mem.Regions(), fds...))
	for i := range g.queues {
		q, err := newQueue(g.mem, i, size, false, g.offer&virtio.FeatureEventIdx != 0,
			g.offer&virtio.FeatureIndirectDesc != 0)
		g.must(err)
		g.t.Cleanup(q.close)
		g.queues[i] = q
		g.must(c.SetVringNum(i, uint32(size)))
	}
	for i, q := range g.queues {
		g.must(c.SetVringAddr(vhostuser.VringAddr{Index: uint32(i), Desc: g.mem.UserAddr(q.descPA),
			Avail: g.mem.UserAddr(q.availPA), Used: g.mem.UserAddr(q.usedPA)}))
		g.must(c.SetVringBase(i, 0))
		g.must(c.SetVringCall(i, q.CallFD()))
		g.must(c.SetVringKick(i, q.KickFD()))
	}
	g.enable(true)
	fd, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	g.must(err)
	g.t.Cleanup(func() { _ = unix.Close(fd[0]) })
	g.must(c.SetBackendReqFD(fd[1]))
	_ = unix.Close(fd[1])
}

func (g *generic) enable(on bool) {
	g.t.Helper()
	for i := range g.queues {
		g.must(g.c.SetVringEnable(i, on))
	}
}

// reset is what it does when the guest's driver resets the device.
func (g *generic) reset() {
	g.t.Helper()
	for i := range g.queues {
		g.must(g.c.SetVringEnable(i, false))
		_, err := g.c.GetVringBase(i)
		g.must(err)
	}
}

// ask sends a command of the HCA's driver, without waiting for its answer.
func (g *generic) ask(op abi.Opcode) (reply []byte) {
	g.t.Helper()
	pa, err := g.mem.Alloc(8192, 4096)
	g.must(err)
	out, err := g.mem.Bytes(pa, abi.SizeReq)
	g.must(err)
	(&abi.Req{Opcode: op}).Encode(out)
	reply, err = g.mem.Bytes(pa+4096, 4096)
	g.must(err)
	q := g.queues[abi.CommandQueue]
	g.must(q.Add(1, []Buf{{PA: pa, Len: abi.SizeReq}}, []Buf{{PA: pa + translate.PA(4096), Len: 4096}}))
	q.Kick()
	return reply
}

// answered waits for the answer to ask.
func (g *generic) answered(when string, reply []byte) {
	g.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	q := g.queues[abi.CommandQueue]
	if err := q.Wait(ctx); err != nil {
		g.t.Fatalf("%s: no answer: %v", when, err)
	}
	_, n, ok, err := q.Get()
	var r abi.Resp
	if err == nil && ok {
		err = r.Decode(reply)
	}
	if err != nil || !ok || r.Status != abi.StatusOK || n <= abi.SizeResp {
		g.t.Fatalf("%s: answer of %d bytes, %+v: %v, %v", when, n, r, ok, err)
	}
}

// The HCA works behind Cloud Hypervisor's front end, of which its driver gets no feature of the HCA's own: through a
// reset, a pause, and a read of the configuration space in any parts.
func TestCloudHypervisorsOrder(t *testing.T) {
	pool, err := frame.NewPool(frame.Config{Count: 256})
	if err != nil {
		t.Fatal(err)
	}
	l, err := loop.New(loop.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	if err := l.Start(); err != nil {
		t.Fatal(err)
	}
	d, err := hca.New(hca.Config{Name: "vm1", MAC: [6]byte{2, 0, 0, 0, 0, 1}, Loops: []*loop.Loop{l}, Pool: pool})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Close)
	path := filepath.Join(t.TempDir(), "hca")
	s, err := vhostuser.Listen(vhostuser.Config{Path: path}, d, 1)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})

	g := &generic{t: t, mem: newMemory(t, Range{PA: 0, Size: 16 << 20}, Range{PA: 1 << 32, Size: 1 << 20}),
		queues: make([]*Queue, d.NumQueues())}
	g.connect(path, d.NumQueues())
	whole := make([]byte, abi.SizeConfig)
	g.must(g.c.GetConfig(whole, 0))
	for _, n := range []int{1, 2, 4, 8} {
		var parts []byte
		for at := 0; at < len(whole); at += n {
			b := make([]byte, min(n, len(whole)-at))
			g.must(g.c.GetConfig(b, uint32(at)))
			parts = append(parts, b...)
		}
		if !bytes.Equal(parts, whole) {
			t.Errorf("the configuration in parts of %d bytes is %x, want %x", n, parts, whole)
		}
	}

	g.activate(256)
	g.answered("at first", g.ask(abi.CmdQueryDevice))
	g.reset()
	g.activate(128)
	g.answered("after a reset", g.ask(abi.CmdQueryDevice))
	g.answered("the second one", g.ask(abi.CmdQueryDevice))
	g.enable(false)
	reply := g.ask(abi.CmdQueryDevice)
	time.Sleep(10 * time.Millisecond) // enough for a back end that does not pause
	if q := g.queues[abi.CommandQueue]; q.Pending() {
		t.Error("a command was executed while the VM is paused")
	}
	g.enable(true)
	g.answered("after a pause", reply)
}
