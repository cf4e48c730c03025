package frontend

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/translate"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newMemory(t testing.TB, ranges ...Range) *Memory {
	t.Helper()
	m, err := NewMemory(ranges...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	return m
}

// TestSparse allocates far more than it accesses: memory becomes resident on first access, also where it was used
// before.
func TestSparse(t *testing.T) {
	const size = 1 << 40
	m := newMemory(t, Range{PA: 1 << 42, Size: size})
	resident := func() int64 {
		t.Helper()
		var st unix.Stat_t
		if err := unix.Fstat(m.FD(), &st); err != nil {
			t.Fatal(err)
		}
		return st.Blocks * 512
	}
	small, err := m.Alloc(pageSize, 1)
	if err != nil {
		t.Fatal(err)
	}
	b, err := m.Bytes(small, pageSize)
	if err != nil {
		t.Fatal(err)
	}
	b[7] = 0xaa
	m.Free(small, pageSize)
	all, err := m.Alloc(size, 1)
	if err != nil || all != small {
		t.Fatalf("%v, %v", all, err)
	}
	if b[7] != 0 {
		t.Error("used memory was not cleared")
	}
	if n := resident(); n > 4<<20 { // one huge page or two
		t.Errorf("%d bytes are resident", n)
	}
}

// TestAllocator compares the allocator with a map of bytes.
func TestAllocator(t *testing.T) {
	// Two adjacent ranges: no allocation may span them.
	m := newMemory(t, Range{PA: 0x10000, Size: 0x8000}, Range{PA: 0x18000, Size: 0x8000}, Range{PA: 0x40000, Size: 0x4000})
	r := rand.New(rand.NewPCG(3, 4))
	type span struct {
		pa translate.PA
		n  int
	}
	var live []span
	owner := map[translate.PA]bool{}
	for range 5000 {
		if len(live) > 0 && r.IntN(5) < 2 {
			i := r.IntN(len(live))
			s := live[i]
			live[i] = live[len(live)-1]
			live = live[:len(live)-1]
			m.Free(s.pa, s.n)
			for k := range s.n {
				delete(owner, s.pa+translate.PA(k))
			}
			continue
		}
		n, align := 1+r.IntN(0x1800), 1<<r.IntN(13)
		pa, err := m.Alloc(n, align)
		if errors.Is(err, ErrNoMemory) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		b, err := m.Bytes(pa, n)
		if err != nil || pa%translate.PA(align) != 0 {
			t.Fatalf("%v, %d bytes, aligned to %d: %v", pa, n, align, err)
		}
		for k := range n {
			if owner[pa+translate.PA(k)] || b[k] != 0 {
				t.Fatalf("%v is in use or not zeroed", pa+translate.PA(k))
			}
			owner[pa+translate.PA(k)] = true
		}
		copy(b, bytes.Repeat([]byte{0xaa}, n))
		live = append(live, span{pa, n})
	}
	for _, s := range live {
		m.Free(s.pa, s.n)
	}
	if len(m.free) != 3 {
		t.Fatalf("free list after freeing all: %v", m.free)
	}
	for _, bad := range [][2]int{{0, 1}, {1, 3}, {-1, 1}, {1, 0}} {
		if _, err := m.Alloc(bad[0], bad[1]); err == nil || errors.Is(err, ErrNoMemory) {
			t.Errorf("Alloc%v: %v", bad, err)
		}
	}
	if _, err := m.Alloc(0x8001, 1); !errors.Is(err, ErrNoMemory) {
		t.Error("allocation across two ranges", err)
	}
}

func TestMemoryBounds(t *testing.T) {
	m := newMemory(t, Range{PA: 0x10000, Size: 0x1000})
	for _, b := range []struct {
		pa translate.PA
		n  int
		ok bool
	}{{0x10000, 0x1000, true}, {0x10fff, 1, true}, {0x11000, 0, true}, {0x10fff, 2, false}, {0xffff, 1, false},
		{0x10000, -1, false}, {1 << 60, 1, false}} {
		if _, err := m.Bytes(b.pa, b.n); (err == nil) != b.ok {
			t.Errorf("Bytes(%v, %d): %v", b.pa, b.n, err)
		}
	}
	if _, err := m.Uint32(0x10002); err == nil {
		t.Error("misaligned word")
	}
	for _, r := range []Range{{PA: 1, Size: 4096}, {PA: 0, Size: 100}, {PA: 0, Size: 0}} {
		if _, err := NewMemory(r); err == nil {
			t.Errorf("%+v accepted", r)
		}
	}
}

// TestQueueNoDescriptors: if the process has no descriptors left for one or both of a queue's eventfds, newQueue
// returns an error and leaves nothing behind.
func TestQueueNoDescriptors(t *testing.T) {
	m := newMemory(t, Range{PA: 0x10000, Size: 0x10000})
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	for left := range 2 {
		next, err := unix.Dup(0) // the lowest free one
		if err != nil {
			t.Fatal(err)
		}
		_ = unix.Close(next)
		low := limit
		low.Cur = uint64(next + left)
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &low); err != nil {
			t.Fatal(err)
		}
		q, err := newQueue(m, 0, 4, false, false, false)
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
			t.Fatal(err)
		}
		if q != nil || !errors.Is(err, unix.EMFILE) {
			t.Errorf("%d descriptors left: %v, %v; want EMFILE", left, q, err)
		}
		again, err := unix.Dup(0)
		if err != nil {
			t.Fatal(err)
		}
		_ = unix.Close(again)
		if again != next {
			t.Errorf("%d descriptors left: the next one is %d, was %d", left, again, next)
		}
	}
	if pa, err := m.Alloc(0x10000, pageSize); err != nil { // all of it
		t.Errorf("memory is left: %#x, %v", pa, err)
	}
}

// TestQueueFormat: the ring's layout of virtio 1.2, 2.7, byte for byte.
func TestQueueFormat(t *testing.T) {
	m := newMemory(t, Range{PA: 0x10000, Size: 0x10000})
	q, err := newQueue(m, 0, 4, false, false, false)
	if err != nil {
		t.Fatal(err)
	}
	defer q.close()
	if err := q.Add(9, []Buf{{PA: 0x1111, Len: 0x22}}, []Buf{{PA: 0x3333, Len: 0x44}}); err != nil {
		t.Fatal(err)
	}
	desc, avail, _ := q.Rings()
	d, _ := m.Bytes(desc, 64)
	a, _ := m.Bytes(avail, 14)
	if !bytes.Equal(d[:32], []byte{0x11, 0x11, 0, 0, 0, 0, 0, 0, 0x22, 0, 0, 0, 1, 0, 1, 0, 0x33, 0x33, 0, 0, 0, 0, 0, 0,
		0x44, 0, 0, 0, 2, 0, 0, 0}) {
		t.Fatalf("descriptors %x", d)
	}
	if binary.LittleEndian.Uint16(a[2:]) != 0 {
		t.Fatal("available before Kick")
	}
	if !q.Kick() || q.Kick() {
		t.Fatal("kick")
	}
	if !bytes.Equal(a[:6], []byte{0, 0, 1, 0, 0, 0}) {
		t.Fatalf("available ring %x", a)
	}
	if err := q.Add(1, make([]Buf, 3), nil); !errors.Is(err, ErrFull) {
		t.Fatal(err)
	}
	if q.Add(1, make([]Buf, 5), nil) == nil || q.Add(1, nil, nil) == nil {
		t.Fatal("invalid chain accepted")
	}
}

// TestPackedFormat: the ring's layout of virtio 1.2, 2.8, byte for byte.
func TestPackedFormat(t *testing.T) {
	m := newMemory(t, Range{PA: 0x10000, Size: 0x10000})
	q, err := newQueue(m, 0, 3, true, true, false)
	if err != nil {
		t.Fatal(err)
	}
	defer q.close()
	desc, driver, device := q.Rings()
	d, _ := m.Bytes(desc, 48)
	ev, _ := m.Bytes(driver, 4)
	dev, _ := m.Bytes(device, 4)
	want := func(what string, got []byte, want string) {
		t.Helper()
		if hex.EncodeToString(got) != want {
			t.Fatalf("%s: %x, want %s", what, got, want)
		}
	}
	if err := q.Add(9, []Buf{{PA: 0x1111, Len: 0x22}}, []Buf{{PA: 0x3333, Len: 0x44}}); err != nil {
		t.Fatal(err)
	}
	want("available before Kick", d[:16], "11110000000000002200000000000000")
	if !q.Kick() || q.Kick() {
		t.Fatal("kick")
	}
	want("first", d[:16], "11110000000000002200000000008100")
	want("last", d[16:32], "33330000000000004400000000008200")
	if err := q.Add(1, make([]Buf, 2), nil); !errors.Is(err, ErrFull) {
		t.Fatal(err)
	}
	q.EnableCall(true)
	want("interrupt for the first", ev, "00800200")
	q.EnableCall(false)
	want("no interrupts", ev, "00000100")
	if q.Pending() {
		t.Fatal("used")
	}
	// The device asks for a kick at the second place of the second round.
	copy(dev, []byte{1, 0, 2, 0})
	copy(d[8:16], []byte{0x33, 0, 0, 0, 0, 0, 0x82, 0x80})
	if token, n, ok, err := q.Get(); !ok || err != nil || token != 9 || n != 0x33 {
		t.Fatal(token, n, ok, err)
	}
	q.EnableCall(true)
	want("interrupt for the third", ev, "02800200")
	for i, kick := range []bool{false, false, true} { // places 2, 0 and 1
		if err := q.Add(uint64(i), []Buf{{PA: 1, Len: 1}}, nil); err != nil || q.Kick() != kick {
			t.Fatal(i, err)
		}
	}
	want("available in the second round", d[12:16], "01000080")
	// A chain that the device does not have, or has returned.
	for _, id := range []byte{3, 0xff} {
		d[32+12], d[32+14], d[32+15] = id, 0x80, 0x80
		if _, _, ok, err := q.Get(); ok || err == nil || !strings.Contains(err.Error(), "did not have") {
			t.Fatalf("id %d: %v", id, err)
		}
	}
}

// TestBadUsedEntries: a back end that returns chains that it does not have.
func TestBadUsedEntries(t *testing.T) {
	m := newMemory(t, Range{PA: 0x10000, Size: 0x10000})
	q, err := newQueue(m, 0, 4, false, true, false)
	if err != nil {
		t.Fatal(err)
	}
	defer q.close()
	if err := q.Add(9, make([]Buf, 2), nil); err != nil {
		t.Fatal(err)
	}
	q.Kick()
	_, _, used := q.Rings()
	u, _ := m.Bytes(used, 4+8*4)
	for _, id := range []uint32{1, 4, 0xffffffff} {
		binary.LittleEndian.PutUint32(u[4:], id)
		u[2] = 1
		if _, _, ok, err := q.Get(); ok || err == nil || !strings.Contains(err.Error(), "did not have") {
			t.Fatalf("id %d: %v", id, err)
		}
	}
	// Overwritten links have no effect: the driver has a private copy.
	desc, _, _ := q.Rings()
	d, _ := m.Bytes(desc, 64)
	for i := range d {
		d[i] = 0xff
	}
	binary.LittleEndian.PutUint32(u[4:], 0)
	if token, _, ok, err := q.Get(); !ok || err != nil || token != 9 || len(q.free) != 4 {
		t.Fatal(token, ok, err, q.free)
	}
}

func TestWaitEnds(t *testing.T) {
	m := newMemory(t, Range{PA: 0x10000, Size: 0x10000})
	for _, size := range []int{1, 2} {
		q, err := newQueue(m, 0, size, false, true, true)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		go cancel()
		if err := q.Wait(ctx); !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		if _, err := unix.Write(q.CallFD(), []byte{1, 0, 0, 0, 0, 0, 0, 0}); err != nil {
			t.Fatal(err)
		}
		// An interrupt without a chain is spurious; the wait continues.
		ctx, cancel = context.WithTimeout(context.Background(), 10*time.Millisecond)
		if err := q.Wait(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
		cancel()
		q.close()
	}
}

// TestBadReplies: a back end that sends a wrong reply, or none.
func TestBadReplies(t *testing.T) {
	h := vhostuser.Header{Request: vhostuser.ReqGetFeatures, Flags: vhostuser.FlagVersion | vhostuser.FlagReply, Size: 8}
	other := h
	other.Request = vhostuser.ReqGetStatus
	request := h
	request.Flags = vhostuser.FlagVersion
	short := h
	short.Size = 4
	for name, reply := range map[string][]byte{
		"nothing":       nil,
		"half a header": h.Append(nil)[:6],
		"no body":       h.Append(nil),
		"another reply": append(other.Append(nil), make([]byte, 8)...),
		"a request":     append(request.Append(nil), make([]byte, 8)...),
		"short body":    append(short.Append(nil), make([]byte, 4)...),
	} {
		fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			t.Fatal(err)
		}
		if len(reply) > 0 {
			if _, err := unix.Write(fds[0], reply); err != nil {
				t.Fatal(err)
			}
		}
		if err := unix.Shutdown(fds[0], unix.SHUT_WR); err != nil {
			t.Fatal(err)
		}
		c := NewClient(fileConn(t, fds[1]))
		if f, err := c.GetFeatures(); err == nil {
			t.Errorf("%s: features %#x", name, f)
		}
		c.Close()
		unix.Close(fds[0])
	}
}

// TestLateReplies: the reply to a request that was given up is not taken for that to a later one.
func TestLateReplies(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fds[0])
	say := func(r vhostuser.Request, n uint64) {
		t.Helper()
		h := vhostuser.Header{Request: r, Flags: vhostuser.FlagVersion | vhostuser.FlagReply, Size: 8}
		if _, err := unix.Write(fds[0], vhostuser.AppendU64(h.Append(nil), n)); err != nil {
			t.Fatal(err)
		}
	}
	c := NewClient(fileConn(t, fds[1]))
	defer c.Close()
	c.SetPatience(20 * time.Millisecond)
	giveUp := func() {
		t.Helper()
		if n, err := c.GetFeatures(); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatal(n, err)
		}
	}
	for round := range uint64(3) {
		giveUp()
		giveUp()
		say(vhostuser.ReqGetFeatures, 10*round+1)
		say(vhostuser.ReqGetFeatures, 10*round+2)
		say(vhostuser.ReqGetFeatures, 10*round+3)
		if n, err := c.GetFeatures(); n != 10*round+3 || err != nil {
			t.Errorf("%d, %v, want the latest reply, %d", n, err, 10*round+3)
		}
	}
	giveUp()
	say(vhostuser.ReqGetFeatures, 1)
	say(vhostuser.ReqGetQueueNum, 7)
	if n, err := c.QueueNum(); n != 7 || err != nil {
		t.Errorf("%d queues, %v, want 7", n, err)
	}
	for range maxOwed {
		giveUp()
	}
	if _, err := c.GetFeatures(); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("with %d replies owed: %v", maxOwed, err)
	}
}

func fileConn(t *testing.T, fd int) *net.UnixConn {
	t.Helper()
	f := os.NewFile(uintptr(fd), "socket")
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		t.Fatal(err)
	}
	return c.(*net.UnixConn)
}
