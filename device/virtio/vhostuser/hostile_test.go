package vhostuser_test

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/testutil/testlog"
	"github.com/vnicd/vnicd/device/virtio"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
	"github.com/vnicd/vnicd/translate"
)

// target returns a server to attack, and its log.
func target(t *testing.T) (*echo, string, *testlog.Log) {
	t.Helper()
	dev, log := newEcho(3), &testlog.Log{}
	path := t.TempDir() + "/s"
	s, err := vhostuser.Listen(vhostuser.Config{Path: path, Log: log.Logger()}, dev, 9)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return dev, path, log
}

func header(req vhostuser.Request, size int) []byte {
	return vhostuser.Header{Request: req, Flags: vhostuser.FlagVersion, Size: uint32(size)}.Append(nil)
}

func message(req vhostuser.Request, body []byte) []byte {
	return append(header(req, len(body)), body...)
}

// null opens a descriptor of the wrong kind.
func null(t testing.TB) int {
	t.Helper()
	f, err := os.OpenFile("/dev/null", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return int(f.Fd())
}

func eventfd(t testing.TB) int {
	t.Helper()
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}

// TestViolations: each message ends the connection with a log line that names the message and the error; the next front
// end is served.
func TestViolations(t *testing.T) {
	m := memory(t)
	r := m.Regions()[0]
	state := func(i, n uint32) []byte { return vhostuser.VringState{Index: i, Num: n}.Append(nil) }
	word := func(v uint64) []byte { return vhostuser.AppendU64(nil, v) }
	proto := message(vhostuser.ReqSetProtocolFeatures,
		word(vhostuser.ProtoMQ|vhostuser.ProtoConfigureMemSlots|vhostuser.ProtoStatus|vhostuser.ProtoConfig|
			vhostuser.ProtoBackendReq))
	ev, nul := eventfd(t), null(t)
	small, err := unix.MemfdCreate("vnicd-guest", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(small)
	for _, tc := range []struct {
		name string
		msg  []byte
		fds  []int
		want string
	}{
		{"unknown request", header(99, 0), nil, "request 99 is unknown"},
		{"log base", header(vhostuser.ReqSetLogBase, 0), nil, "SET_LOG_BASE: payload of 0 bytes, want 16"},
		{"wrong version", vhostuser.Header{Request: 1, Flags: 2}.Append(nil), nil, "version 2, want 1"},
		{"reply as a request", vhostuser.Header{Request: 1, Flags: 5}.Append(nil), nil, "reply bit"},
		{"enormous size", header(vhostuser.ReqSetFeatures, 1<<31), nil, "SET_FEATURES: payload of 2147483648 bytes"},
		{"short body", header(vhostuser.ReqSetFeatures, 8)[:12], nil, "closed within the payload"},
		{"short header", header(vhostuser.ReqSetFeatures, 8)[:5], nil, "closed within a header, after 5 bytes"},
		{"not negotiated", message(vhostuser.ReqGetQueueNum, nil), nil, "GET_QUEUE_NUM without protocol feature"},
		{"features not offered", message(vhostuser.ReqSetFeatures, word(1<<26)), nil, "features 0x4000000 were not offered"},
		{"protocol features not offered", message(vhostuser.ReqSetProtocolFeatures, word(1<<1)), nil, "were not offered"},
		{"unexpected descriptor", header(vhostuser.ReqGetFeatures, 0), []int{ev}, "1 file descriptors, want 0"},
		{"many descriptors", header(vhostuser.ReqGetFeatures, 0), slices.Repeat([]int{ev}, 40),
			"more than 8 file descriptors"},
		{"ring index", message(vhostuser.ReqSetVringNum, state(3, 8)), nil, "ring 3, device has 3"},
		{"ring index huge", message(vhostuser.ReqSetVringBase, state(0xffffffff, 8)), nil, "ring 4294967295"},
		{"ring size", message(vhostuser.ReqSetVringNum, state(0, 7)), nil, "7 entries, want a power of two"},
		{"ring size zero", message(vhostuser.ReqSetVringNum, state(0, 0)), nil, "0 entries"},
		{"ring base", message(vhostuser.ReqSetVringBase, state(0, 0x10000)), nil, "base 0x10000"},
		{"enable", message(vhostuser.ReqSetVringEnable, state(0, 2)), nil, "enable value 2"},
		{"kick without a descriptor", message(vhostuser.ReqSetVringKick, word(0)), nil, "0 file descriptors, want 1"},
		{"kick of the wrong kind", message(vhostuser.ReqSetVringKick, word(0)), []int{nul}, "/dev/null"},
		{"call of the wrong kind", message(vhostuser.ReqSetVringCall, word(0)), []int{small}, "want an eventfd"},
		{"kick index", message(vhostuser.ReqSetVringKick, word(77)), []int{ev}, "ring 77"},
		{"address logging", message(vhostuser.ReqSetVringAddr, vhostuser.VringAddr{Flags: 1}.Append(nil)), nil,
			"logging is not offered"},
		{"memory that is no file", slices.Concat(proto, message(vhostuser.ReqAddMemReg, vhostuser.AppendMemReg(nil, r))),
			[]int{ev}, "ADD_MEM_REG"},
		{"memory shorter than said", slices.Concat(proto, message(vhostuser.ReqAddMemReg, vhostuser.AppendMemReg(nil, r))),
			[]int{small}, "ADD_MEM_REG: refused"},
		{"table without files", message(vhostuser.ReqSetMemTable, vhostuser.AppendMemTable(nil, m.Regions())), nil,
			"0 file descriptors, want 1"},
		{"table with a hole in its file", message(vhostuser.ReqSetMemTable, vhostuser.AppendMemTable(nil, m.Regions())),
			[]int{small}, "SET_MEM_TABLE: refused"},
		{"overlapping table", message(vhostuser.ReqSetMemTable, vhostuser.AppendMemTable(nil, []vhostuser.Region{r, r})),
			[]int{m.FD(), m.FD()}, "overlap"},
		{"removing an unknown region", slices.Concat(proto, message(vhostuser.ReqRemMemReg, vhostuser.AppendMemReg(nil, r))),
			nil, "no memory region"},
		{"status", slices.Concat(proto, message(vhostuser.ReqSetStatus, word(256))), nil, "device status 0x100"},
		{"channel of the wrong kind", slices.Concat(proto, message(vhostuser.ReqSetBackendReqFD, nil)), []int{ev},
			"no Unix stream socket"},
		{"configuration size", slices.Concat(proto, header(vhostuser.ReqGetConfig, 12), make([]byte, 4), []byte{9, 0, 0, 0},
			make([]byte, 4)), nil, "configuration of 9 bytes"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			dev, path, log := target(t) // of its own, because a server's lines are limited
			c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			// Descriptors must arrive with their message.
			first := tc.msg
			if bytes.HasPrefix(first, proto) {
				if _, err := c.Write(proto); err != nil {
					t.Fatal(err)
				}
				first = first[len(proto):]
			}
			if _, _, err := c.WriteMsgUnix(first, unix.UnixRights(tc.fds...), nil); err != nil {
				t.Fatal(err)
			}
			if strings.HasPrefix(tc.want, "closed within") {
				if err := c.CloseWrite(); err != nil {
					t.Fatal(err)
				}
			}
			if err := c.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
				t.Fatal(err)
			}
			if b, err := io.ReadAll(c); len(b) != 0 || (err != nil && !errors.Is(err, unix.ECONNRESET)) {
				t.Fatalf("the connection replied %x, %v", b, err)
			}
			dev.wait(t, "disconnect", func() bool { return slices.Contains(dev.log, "disconnected") })
			testutil.Eventually(t, "log line", func() bool { return strings.Contains(log.String(), tc.want) })
			if t.Failed() {
				t.Log(log.String())
			}
			d := open(t, frontend.Config{Path: path, Memory: m})
			roundTrip(t, d, m, 2, "still alive")
		})
	}
}

// TestAcknowledgedRefusals: with REPLY_ACK the front end gets refusals as replies; the connection continues with its
// state unchanged.
func TestAcknowledgedRefusals(t *testing.T) {
	dev := newEcho(3)
	path, _ := serve(t, dev)
	m := memory(t, frontend.Range{PA: 0x100000, Size: 1 << 20}, frontend.Range{PA: 0x400000, Size: 1 << 20})
	d := open(t, frontend.Config{Path: path, Memory: m, Features: echoFeature})
	c := d.Client()
	rs := m.Regions()
	far := vhostuser.Region{GuestPA: 1 << 32, Size: 4096, UserAddr: 1 << 40}
	refused := func(what string, err error) {
		t.Helper()
		var r *frontend.RefusedError
		if !errors.As(err, &r) {
			t.Fatalf("%s: %v", what, err)
		}
		roundTrip(t, d, m, 0, what)
	}
	overlap := far
	overlap.GuestPA = rs[1].GuestPA + 4096
	refused("overlap in guest addresses", c.AddMemReg(overlap, m.FD()))
	overlap = far
	overlap.UserAddr = rs[0].UserAddr
	refused("overlap in user addresses", c.AddMemReg(overlap, m.FD()))
	beyond := far
	beyond.Offset = 1 << 40
	refused("offset beyond the file", c.AddMemReg(beyond, m.FD()))
	beyond = far
	beyond.GuestPA = 1 << 62
	refused("guest address too far", c.AddMemReg(beyond, m.FD()))
	refused("removal of half a region", c.RemMemReg(vhostuser.Region{GuestPA: rs[0].GuestPA, Size: 4096,
		UserAddr: rs[0].UserAddr}))
	refused("table with a region beyond its file", c.SetMemTable([]vhostuser.Region{rs[0], rs[1], beyond}, m.FD(), m.FD(),
		m.FD()))
	refused("ring outside memory", c.SetVringAddr(vhostuser.VringAddr{Index: 1, Desc: 1 << 50, Avail: 1 << 50,
		Used: 1 << 50}))

	roundTrip(t, d, m, 1, "the ring continues")
	refused("base of a running ring", c.SetVringBase(1, 0))
	refused("size of a running ring", c.SetVringNum(1, 8))
	refused("features under running rings", c.SetFeatures(d.Features()&^echoFeature))
	if err := c.SetFeatures(d.Features()); err != nil { // an unchanged set is accepted
		t.Fatal(err)
	}

	// A ring with a wrong address stays disabled until it is described correctly.
	if err := d.StopQueue(1); err != nil {
		t.Fatal(err)
	}
	if err := c.SetVringAddr(vhostuser.VringAddr{Index: 1, Desc: 1 << 50, Avail: 1 << 50, Used: 1 << 50}); err != nil {
		t.Fatal(err)
	}
	if err := c.SetVringKick(1, d.Queue(1).KickFD()); err != nil {
		t.Fatal(err)
	}
	refused("enabling a ring outside memory", c.SetVringEnable(1, true))
	if err := d.StartQueue(1); err != nil {
		t.Fatal(err)
	}
	roundTrip(t, d, m, 1, "back")

	n := 0
	for ; n < vhostuser.MaxMemSlots; n++ {
		r := vhostuser.Region{GuestPA: 1<<32 + uint64(n)<<12, Size: 4096, UserAddr: 1<<40 + uint64(n)<<12}
		if err := c.AddMemReg(r, m.FD()); err != nil {
			break
		}
	}
	if slots, err := c.MaxMemSlots(); err != nil || int(slots) != n+len(rs) {
		t.Fatalf("%d regions accepted beside %d, MaxMemSlots %d, %v", n, len(rs), slots, err)
	}
}

// TestMemoryChanges: rings in unchanged memory are not disturbed; rings in removed memory are stopped, and restart when
// the memory is added again.
func TestMemoryChanges(t *testing.T) {
	dev := newEcho(2)
	path, _ := serve(t, dev)
	m := memory(t, frontend.Range{PA: 0x100000, Size: 1 << 20}, frontend.Range{PA: 0x400000, Size: 1 << 20})
	d := open(t, frontend.Config{Path: path, Memory: m})
	c, rs, fd := d.Client(), m.Regions(), m.FD()
	roundTrip(t, d, m, 0, "before")
	dev.clearCalls()
	expect := func(want ...string) {
		t.Helper()
		if got := dev.calls(); !slices.Equal(got, want) {
			t.Fatalf("calls %q, want %q", got, want)
		}
		dev.clearCalls()
	}
	// The whole table again, then without the region that has no ring.
	if err := c.SetMemTable(rs, fd, fd); err != nil {
		t.Fatal(err)
	}
	expect()
	if err := c.SetMemTable(rs[:1], fd); err != nil {
		t.Fatal(err)
	}
	expect()
	roundTrip(t, d, m, 0, "one region")
	if err := c.AddMemReg(rs[1], fd); err != nil {
		t.Fatal(err)
	}
	expect()
	if err := c.RemMemReg(rs[0]); err != nil {
		t.Fatal(err)
	}
	expect("stop 0", "stop 1")
	if err := c.AddMemReg(rs[0], fd); err != nil {
		t.Fatal(err)
	}
	expect("start 0", "start 1")
	roundTrip(t, d, m, 0, "ring is back")
	roundTrip(t, d, m, 1, "the other too")
	// The same addresses, another file: the region is replaced.
	other, err := unix.MemfdCreate("vnicd-guest", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(other)
	if err := unix.Ftruncate(other, 2<<20); err != nil {
		t.Fatal(err)
	}
	dev.clearCalls()
	if err := c.SetMemTable(rs, other, fd); err != nil {
		t.Fatal(err)
	}
	expect("stop 0", "stop 1", "start 0", "start 1")
	if err := c.SetMemTable(nil); err != nil {
		t.Fatal(err)
	}
	expect("stop 0", "stop 1")
}

// TestSpoiltRing: only a ring that breaks the rules stops, and the front end is notified by the error descriptor.
func TestSpoiltRing(t *testing.T) {
	dev := newEcho(2)
	path, _ := serve(t, dev)
	m := memory(t)
	d := open(t, frontend.Config{Path: path, Memory: m})
	errfd := eventfd(t)
	if err := d.Client().SetVringErr(0, errfd); err != nil {
		t.Fatal(err)
	}
	_, avail, _ := d.Queue(0).Rings()
	b, err := m.Bytes(avail+2, 2)
	if err != nil {
		t.Fatal(err)
	}
	b[0], b[1] = 0xff, 0x7f
	d.Queue(0).Notify()
	fds := []unix.PollFd{{Fd: int32(errfd), Events: unix.POLLIN}}
	if n, err := unix.Poll(fds, 20000); n != 1 || err != nil {
		t.Fatal("no error reported", n, err)
	}
	roundTrip(t, d, m, 1, "the other queue")
}

// TestMemoryVanishes: the guest's memory file, which is not sealed, is truncated under running rings; the daemon
// survives and the next front end is served.
func TestMemoryVanishes(t *testing.T) {
	dev := newEcho(1)
	path, _ := serve(t, dev)
	c, err := frontend.Dial(testContext(t), path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	fd, err := unix.MemfdCreate("vnicd-guest", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	const size = 1 << 20
	if err := unix.Ftruncate(fd, size); err != nil {
		t.Fatal(err)
	}
	kick := eventfd(t)
	must := func(errs ...error) {
		t.Helper()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
	}
	must(c.SetFeatures(virtio.FeatureVersion1),
		c.SetMemTable([]vhostuser.Region{{GuestPA: 0, Size: size, UserAddr: 1 << 30}}, fd),
		c.SetVringNum(0, 8), c.SetVringAddr(vhostuser.VringAddr{Desc: 1 << 30, Avail: 1<<30 + 0x1000, Used: 1<<30 + 0x2000}),
		c.SetVringKick(0, kick))
	dev.wait(t, "start", func() bool { return slices.Contains(dev.log, "start 0") })
	must(unix.Ftruncate(fd, 0))
	for range 3 {
		_, _ = unix.Write(kick, []byte{1, 0, 0, 0, 0, 0, 0, 0})
		if _, err := c.GetFeatures(); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := c.GetVringBase(0); err != nil {
		t.Fatal(err)
	}
	// Started again, the ring cannot be read: that is refused, and not fatal.
	must(c.SetVringKick(0, kick))
	if _, err := c.GetFeatures(); err != nil {
		t.Fatal(err)
	}
	c.Close()
	m := memory(t)
	d := open(t, frontend.Config{Path: path, Memory: m})
	roundTrip(t, d, m, 0, "next")
}

// TestRandomMessages sends plausible messages in random order with random contents to a server; it must not crash, leak
// or stop serving.
func TestRandomMessages(t *testing.T) {
	dev := newEcho(3)
	path, _ := serve(t, dev)
	m := memory(t)
	rng := rand.New(rand.NewPCG(1, 2))
	ev, nul := eventfd(t), null(t)
	reqs := []vhostuser.Request{}
	for i := range vhostuser.Request(45) {
		reqs = append(reqs, i)
	}
	for conn := range 300 {
		c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		go func() { _, _ = io.Copy(io.Discard, c) }()
		send := func(req vhostuser.Request, body []byte, fds ...int) bool {
			var oob []byte
			if len(fds) > 0 {
				oob = unix.UnixRights(fds...)
			}
			h := vhostuser.Header{Request: req, Flags: vhostuser.FlagVersion | uint32(rng.IntN(2))*vhostuser.FlagNeedReply,
				Size: uint32(len(body))}
			_, _, err := c.WriteMsgUnix(append(h.Append(nil), body...), oob, nil)
			return err == nil
		}
		send(vhostuser.ReqSetProtocolFeatures, vhostuser.AppendU64(nil, 0x18229))
		for range 40 {
			ok := true
			i := uint32(rng.IntN(3))
			base := m.Regions()[0].UserAddr
			switch rng.IntN(10) {
			case 0:
				ok = send(vhostuser.ReqSetFeatures, vhostuser.AppendU64(nil, virtio.FeatureVersion1|uint64(rng.IntN(8))<<28))
			case 1:
				ok = send(vhostuser.ReqSetMemTable, vhostuser.AppendMemTable(nil, m.Regions()), m.FD())
			case 2:
				ok = send(vhostuser.ReqSetVringNum, vhostuser.VringState{Index: i, Num: 1 << rng.IntN(10)}.Append(nil))
			case 3:
				ok = send(vhostuser.ReqSetVringAddr, vhostuser.VringAddr{Index: i, Desc: base + uint64(rng.IntN(8))<<12,
					Avail: base + uint64(rng.IntN(8))<<12, Used: base + uint64(rng.IntN(300))<<12}.Append(nil))
			case 4:
				ok = send(vhostuser.ReqSetVringKick, vhostuser.VringFD{Index: i}.Append(nil), ev)
			case 5:
				ok = send(vhostuser.ReqSetVringEnable, vhostuser.VringState{Index: i, Num: uint32(rng.IntN(2))}.Append(nil))
			case 6:
				ok = send(vhostuser.ReqGetVringBase, vhostuser.VringState{Index: i}.Append(nil))
			case 7:
				ok = send(vhostuser.ReqRemMemReg, vhostuser.AppendMemReg(nil, m.Regions()[0]))
			case 8:
				if rng.IntN(20) == 0 {
					body := make([]byte, rng.IntN(48))
					for k := range body {
						body[k] = byte(rng.Uint32() & 3)
					}
					fds := [][]int{nil, {ev}, {nul}, {m.FD()}, {ev, nul, ev}}[rng.IntN(5)]
					ok = send(reqs[rng.IntN(len(reqs))], body, fds...)
				}
			case 9:
				ok = send(vhostuser.ReqSetStatus, vhostuser.AppendU64(nil, uint64(rng.IntN(16))))
			}
			if !ok {
				break
			}
		}
		_ = conn
		c.Close()
	}
	d := open(t, frontend.Config{Path: path, Memory: m})
	roundTrip(t, d, m, 0, "after the random messages")
}

// TestPollingFrontEnd: no kick and no call descriptor.
func TestPollingFrontEnd(t *testing.T) {
	dev := newEcho(1)
	path, _ := serve(t, dev)
	m := memory(t)
	d := open(t, frontend.Config{Path: path, Memory: m})
	c := d.Client()
	if err := c.SetVringCall(0, -1); err != nil {
		t.Fatal(err)
	}
	if err := c.SetVringKick(0, -1); err != nil {
		t.Fatal(err)
	}
	dev.wait(t, "restart", func() bool { return dev.running[0] != nil && dev.running[0].q.KickFD() == -1 })
	q := d.Queue(0)
	pa, err := m.Alloc(16, 16)
	if err != nil {
		t.Fatal(err)
	}
	if err := q.Add(1, nil, []frontend.Buf{{PA: translate.PA(pa), Len: 16}}); err != nil {
		t.Fatal(err)
	}
	q.Kick()
	// The echo device does not poll; restarting the ring makes it look.
	if err := c.SetVringKick(0, -1); err != nil {
		t.Fatal(err)
	}
	testutil.Eventually(t, "the chain", q.Pending)
}
