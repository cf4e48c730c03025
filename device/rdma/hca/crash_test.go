package hca

import (
	"bytes"
	"encoding/binary"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/translate"
)

var everyCrash = flag.Bool("every-crash", false, "TestCrash ends the process at every point instead of a sample")

// corpse is what is left of a device that ended at a point: guest memory and the journal file.
type corpse struct {
	mem     []byte
	journal int
}

// remains copies what a process leaves that ends now: outside of the heap, where megabytes would cost the race detector
// more than all else of a test.
func (g *guest) remains() corpse {
	g.tb.Helper()
	n := int(g.next - memBase)
	mem, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		g.tb.Fatal(err)
	}
	g.tb.Cleanup(func() { _ = unix.Munmap(mem) })
	copy(mem, g.mem)
	fd, err := unix.MemfdCreate("journal", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err == nil {
		err = copyFile(fd, g.Device.journal.file.FD())
	}
	if err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK)
	}
	if err != nil {
		g.tb.Fatal(err)
	}
	return corpse{mem, fd}
}

// copyFile makes the file to like from, with its holes.
func copyFile(to, from int) error {
	var st unix.Stat_t
	if err := unix.Fstat(from, &st); err != nil {
		return err
	}
	if err := unix.Ftruncate(to, st.Size); err != nil {
		return err
	}
	for end := int64(0); ; {
		at, err := unix.Seek(from, end, unix.SEEK_DATA)
		if err == unix.ENXIO { // only a hole is left
			return nil
		}
		if err == nil {
			end, err = unix.Seek(from, at, unix.SEEK_HOLE)
		}
		for there := at; err == nil && at < end; {
			_, err = unix.CopyFileRange(from, &at, to, &there, int(end-at), 0)
		}
		if err != nil {
			return err
		}
	}
}

// replace ends g's device without a trace, gives the guest the memory of c, and lets a new device revive it. The test
// goes on with g.
func (g *guest) replace(c corpse) {
	g.tb.Helper()
	g.replaceStopped(c)
	g.up.Store(true)
	g.paused.Store(false)
	for _, e := range g.engines {
		if err := g.thaw(e); err != nil {
			g.tb.Fatal(err)
		}
	}
}

// replaceStopped is replace; the new device's command queue has to be started.
func (g *guest) replaceStopped(c corpse) {
	g.tb.Helper()
	g.Disconnected()
	g.Close()
	copy(g.mem, c.mem)
	d, err := New(g.cfg)
	if err != nil {
		g.tb.Fatal(err)
	}
	g.Device, g.dataSide, g.space = d, d.data, translate.NewSpace(1)
	if g.paged { // nothing of it has been touched
		g.driver.Close()
		g.servePages()
	} else if err := g.space.Map(memBase, g.mem); err != nil {
		g.tb.Fatal(err)
	}
	g.Connected(fakeConn{g})
	if err := g.Revive(c.journal); err != nil {
		g.tb.Fatal(err)
	}
	if _, err := g.Journal(); err != nil {
		g.tb.Fatal(err)
	}
	_ = unix.Close(c.journal)
	g.port.SetHCA(d.HCAFace())
	g.SetPort(framePort(g.w.carry))
	if LocalPath && g.w.lose == nil {
		g.SetPort(&shortcut{g.port, g.w})
	}
}

// endAt has f called at each point, until stop.
func endAt(f func()) (stop func()) {
	atStore.Store(&f)
	return func() { atStore.Store(nil) }
}

// crash is a program on two guests, of which the devices of victims end at a point, and others go on.
type crash struct {
	t       testing.TB
	w       *world
	a, b    *tqp
	op      uint32
	victims []*guest
	at      int // the point
	points  int // passed
	poll    bool
	left    []corpse

	n            int // messages
	signalEvery  int
	burst        int // requests posted at a time
	size         int
	src, dst     translate.PA // of a and b, n slots of slotSize
	lkey, rkey   uint32
	fastKey      uint32       // REG_MR: registered, used and invalidated in turns
	list         translate.PA // its page list
	consumed     int          // WRITE: messages that were seen by polling memory
	posted       int
	ready        int // receives posted
	sent, gotten []abi.WC
}

const (
	crashSlot = 128 << 10
	crashMTU  = 1024
)

func newCrash(t testing.TB, op uint32, srq, local bool, victims string, at, size int) *crash {
	before := LocalPath
	LocalPath = local
	defer func() { LocalPath = before }()
	w := newWorld(t, 1, 2, Limits{})
	for _, g := range w.guests {
		g.cfg.Journal = true
		if _, err := g.Journal(); err != nil {
			t.Fatal(err)
		}
	}
	c := &crash{t: t, w: w, op: op, at: at, n: 12, signalEvery: 1, size: 3*crashMTU - 100, poll: at%2 == 0}
	ga, gb := w.guests[0], w.guests[1]
	for _, v := range victims {
		c.victims = append(c.victims, w.guests[v-'a'])
	}
	c.a = ga.qp(qpSpec{pd: ga.pd(), elems: 8, scq: ga.cq(8), flags: abi.QPPrivileged})
	c.fastKey, c.list = ga.fast(1)
	spec := qpSpec{pd: gb.pd(), elems: 4, scq: gb.cq(8)} // its queues are used several times
	if srq {
		n, ring := gb.srq(spec.pd, 4, 0)
		spec.flags, spec.srq = abi.QPHasSRQ, n
		c.b = gb.qp(spec)
		c.b.rq = *ring
	} else {
		c.b = gb.qp(spec)
	}
	c.a.connectRC(c.b)
	c.b.connectRC(c.a)
	c.src, c.dst = ga.alloc(c.n*crashSlot), gb.alloc(c.n*crashSlot)
	c.lkey = ga.mr(1, c.src, c.n*crashSlot, abi.AccessLocalWrite)
	c.rkey = gb.mr(1, c.dst, c.n*crashSlot, abi.AccessLocalWrite|remoteAll)
	if size != 0 {
		c.size = size
	}
	if c.atomic() || op == abi.WRAtomicWrite {
		c.size = 8
	}
	for i := range c.n {
		if op == abi.WRRDMARead {
			fill(gb.at(c.dst+translate.PA(i*crashSlot), c.size), byte(i+1))
		} else if !c.atomic() {
			fill(ga.at(c.src+translate.PA(i*crashSlot), c.size), byte(i+1))
		}
	}
	c.postRecvs()
	return c
}

func (c *crash) atomic() bool {
	return c.op == abi.WRAtomicFetchAndAdd || c.op == abi.WRAtomicCmpAndSwp
}

// fails reports whether compare and swap i stores nothing: every second of those that are posted several at a time. It
// must not find what a later one has stored.
func (c *crash) fails(i int) bool { return c.op == abi.WRAtomicCmpAndSwp && c.burst > 0 && i%2 == 1 }

// before returns the value of the word before atomic i.
func (c *crash) before(i int) uint64 {
	if c.op == abi.WRAtomicCmpAndSwp && c.burst > 0 {
		return uint64(i+1) / 2
	}
	return uint64(i)
}

// opOf is the operation of request i.
func (c *crash) opOf(i int) uint32 {
	if c.op == abi.WRRegMR {
		return [...]uint32{abi.WRRegMR, abi.WRSend, abi.WRLocalInv}[i%3]
	}
	return c.op
}

// recvs is the number of receives.
func (c *crash) recvs() int {
	switch {
	case c.op == abi.WRRegMR:
		return c.n / 3
	case c.receives():
		return c.n
	}
	return 0
}

func (c *crash) receives() bool {
	return c.op == abi.WRRegMR || c.op == abi.WRSend || c.op == abi.WRRDMAWriteWithImm || c.op == abi.WRSendWithImm
}

// postNext posts the next request if the queue has room.
func (c *crash) postNext() {
	if c.posted == c.n || full(&c.a.sq) {
		return
	}
	i := c.posted
	flags := uint32(0)
	if (i+1)%c.signalEvery == 0 || i == c.n-1 {
		flags = abi.SendSignaled
	}
	s := c.a.wqe()
	s.SetRequest(uint64(i), c.opOf(i), flags)
	remote, key := uint64(c.dst)+uint64(i*crashSlot), c.fastKey&^0xff|uint32(i/3+1)
	switch c.opOf(i) {
	case abi.WRRegMR:
		binary.LittleEndian.PutUint64(c.w.guests[0].at(c.list, 8), uint64(c.src))
		setReg(s, uint64(i), flags, abi.RegWR{IOVA: 1 << 40, Length: 4096, PageList: uint64(c.list), NPages: 1,
			RKey: key, Access: abi.AccessLocalWrite})
		c.posted++
		c.a.post()
		return
	case abi.WRLocalInv:
		s.SetInvalidateRKey(key)
		c.posted++
		c.a.post()
		return
	case abi.WRAtomicFetchAndAdd:
		s.SetAtomic(uint64(c.dst), c.rkey, 1, 0)
	case abi.WRAtomicCmpAndSwp:
		compare := c.before(i)
		if c.fails(i) {
			compare = ^uint64(0)
		}
		s.SetAtomic(uint64(c.dst), c.rkey, compare, c.before(i)+1)
	case abi.WRSend:
	default:
		s.SetRDMA(remote, c.rkey)
	}
	s.SetSGEs([]abi.SGE{{Addr: uint64(c.src) + uint64(i*crashSlot), Length: uint32(c.size), LKey: c.lkey}})
	c.posted++
	c.a.post()
}

// postRecvs fills the receive queue.
func (c *crash) postRecvs() {
	for ; c.ready < c.recvs() && !full(&c.b.rq); c.ready++ {
		slot := c.ready
		if c.op == abi.WRRegMR {
			slot = 3*c.ready + 1
		}
		at := uint64(c.dst) + uint64(slot*crashSlot)
		c.b.recv(uint64(1000+c.ready), abi.SGE{Addr: at, Length: crashSlot, LKey: c.rkey})
	}
}

func full(r *tring) bool { return (r.prod().Load()+1)&(r.desc.NumElems-1) == r.cons().Load() }

// program is what the programs in the guests do at any time: they poll, and post the next requests.
func (c *crash) program() {
	c.postRecvs()
	c.sent = append(c.sent, c.a.scq.poll()...)
	c.gotten = append(c.gotten, c.b.rcq.poll()...)
	for range max(c.burst, 1) {
		c.postNext()
	}
	for c.op == abi.WRRDMAWrite && c.consumed < c.n {
		from, to := c.slots(c.consumed)
		if !bytes.Equal(from, to) {
			return
		}
		clear(to) // and it must not come again
		c.consumed++
	}
}

// slots returns the memory of message i at both ends.
func (c *crash) slots(i int) (from, to []byte) {
	at := translate.PA(i * crashSlot)
	return c.w.guests[0].at(c.src+at, c.size), c.w.guests[1].at(c.dst+at, c.size)
}

// point is called at each point. At the chosen one the victims end: the guests and the network go on from what there
// is, and what the victims still do is undone afterwards.
func (c *crash) point() {
	if c.points++; c.points != c.at {
		return
	}
	if c.poll {
		c.program()
	}
	for _, g := range c.victims {
		c.left = append(c.left, g.remains())
	}
	lose := c.w.lose
	c.w.lose = func(f []byte) bool {
		for _, g := range c.victims {
			if [6]byte(f[6:12]) == g.cfg.MAC || [6]byte(f[:6]) == g.cfg.MAC {
				return true
			}
		}
		return lose != nil && lose(f)
	}
}

// run runs the program to its end.
func (c *crash) run() {
	c.t.Helper()
	stop := endAt(c.point)
	defer stop()
	c.w.until(fmt.Sprintf("the program: %d sent, %d received", len(c.sent), len(c.gotten)), func() bool {
		if c.left != nil {
			stop()
			c.w.lose = nil
			for i, g := range c.victims {
				g.replace(c.left[i])
			}
			c.left = nil
		}
		c.program()
		return c.done()
	})
	stop()
	c.w.step(50)
	c.program()
	c.check()
}

func (c *crash) done() bool {
	n := c.n / c.signalEvery
	if c.n%c.signalEvery != 0 {
		n++
	}
	return len(c.sent) >= n && len(c.gotten) >= c.recvs()
}

// check compares with the model: each request completes once, in order; each receive too; the bytes are right.
func (c *crash) check() {
	c.t.Helper()
	var want []uint64
	for i := range c.n {
		if (i+1)%c.signalEvery == 0 || i == c.n-1 {
			want = append(want, uint64(i))
		}
	}
	if len(c.sent) != len(want) {
		c.t.Errorf("%d send completions, want %d: %v", len(c.sent), len(want), ids(c.sent))
	}
	for i, wc := range c.sent {
		if i < len(want) && (wc.ID != want[i] || wc.Status != abi.WCSuccess) {
			c.t.Errorf("send completion %d: request %d, status %d", i, wc.ID, wc.Status)
		}
	}
	for i, wc := range c.gotten {
		if i >= c.recvs() || wc.ID != uint64(1000+i) || wc.Status != abi.WCSuccess {
			c.t.Errorf("receive completion %d: request %d, status %d", i, wc.ID, wc.Status)
		}
	}
	gb := c.w.guests[1]
	zero := make([]byte, c.size)
	for i := range c.n {
		if op := c.opOf(i); op == abi.WRRegMR || op == abi.WRLocalInv {
			continue
		}
		from, to := c.slots(i)
		switch {
		case c.atomic():
			if v := binary.LittleEndian.Uint64(from); v != c.before(i) {
				c.t.Errorf("atomic %d returned %d", i, v)
			}
		case c.op == abi.WRRDMAWrite:
			if i >= c.consumed || !bytes.Equal(to, zero) {
				c.t.Errorf("message %d: %d were consumed, and its memory was written again", i, c.consumed)
			}
		case !bytes.Equal(from, to):
			c.t.Errorf("the bytes of message %d differ", i)
		}
	}
	if c.atomic() {
		if v := gb.u64(c.dst).Load(); v != c.before(c.n) {
			c.t.Errorf("the word is %d after %d atomics", v, c.n)
		}
	}
	if p, n := c.a.sq.prod().Load(), c.a.sq.cons().Load(); p != n {
		c.t.Errorf("send queue: producer %d, consumer %d", p, n)
	}
}

func ids(wcs []abi.WC) (out []uint64) {
	for _, wc := range wcs {
		out = append(out, wc.ID)
	}
	return out
}

// eachPoint has a program end at the points at, at+step, and so on, each of which is a subtest of run (t.Run), until
// one is not reached. program returns the number of points that it has passed. -run and -skip may leave subtests out,
// which does not say whether their points exist: then the points of a program that nothing ends (its point is 0) are
// counted. If -run names points that are not in the sample, all points are offered to it.
func eachPoint(t *testing.T, run func(string, func(*testing.T)) bool, at, step int,
	program func(t *testing.T, at int) (points int)) error {
	t.Helper()
	none, last := true, -1
	for reached := true; reached && !t.Failed() && (last < 0 || at <= last); at += step {
		ran := false
		run(fmt.Sprint(at), func(t *testing.T) {
			ran = true
			reached = program(t, at) >= at
		})
		if none = none && !ran; ran || last >= 0 {
			continue
		}
		if last = program(t, 0); none {
			at, step = 0, 1
		}
	}
	if none && !t.Failed() {
		return fmt.Errorf("-run selects none of the points 1 to %d", last)
	}
	return nil
}

// A filter may name any points, and the search for them ends.
func TestEachPoint(t *testing.T) {
	const points = 100
	for _, c := range []struct {
		only, at, step int // only: the point that -run names; 0: all
		want           []int
	}{
		{0, 3, 23, []int{3, 26, 49, 72, 95, 118}}, {0, 98, 1, []int{98, 99, 100, 101}}, {26, 3, 23, []int{0, 26}},
		{27, 3, 23, []int{0, 27}}, {3, 3, 23, []int{3, 0}}, {100, 1, 1, []int{0, 100}}, {101, 3, 23, []int{0}},
	} {
		var got []int
		tries := 0
		run := func(name string, f func(*testing.T)) bool {
			if tries++; tries > 10*points {
				t.Fatalf("%+v: no end", c)
			}
			if c.only == 0 || name == fmt.Sprint(c.only) {
				f(t)
			}
			return true
		}
		err := eachPoint(t, run, c.at, c.step, func(_ *testing.T, at int) int {
			got = append(got, at)
			if at > 0 {
				return min(at, points)
			}
			return points
		})
		if !slices.Equal(got, c.want) || (err != nil) != (c.only > points) {
			t.Errorf("%+v: %d, %v", c, got, err)
		}
	}
}

// The process ends at a store: no program notices (CO-2). Victims: the requester's host, the responder's, or both,
// which are one host then and use the local path, too.
func TestCrash(t *testing.T) {
	if LocalPath || Journaled {
		t.Skip("its devices have both anyway")
	}
	size, buffers := logSize, poolSize
	logSize, poolSize = 256<<10, 128
	defer func() { logSize, poolSize = size, buffers }()
	rng := rand.New(rand.NewPCG(5, 6))
	total := 0
	for _, x := range []struct {
		name string
		op   uint32
		srq  bool
		sig  int
		size int // 0: a few packets; below 0: so many requests of a few packets at a time
	}{
		{"SEND", abi.WRSend, false, 1, 0}, {"SEND, SRQ", abi.WRSend, true, 1, 0},
		{"SEND, some signalled", abi.WRSend, false, 4, 0}, {"SEND, long", abi.WRSend, false, 1, 100 * crashMTU},
		{"WRITE", abi.WRRDMAWrite, false, 1, 0}, {"WRITE, some signalled", abi.WRRDMAWrite, false, 4, 0},
		{"WRITE, long", abi.WRRDMAWrite, false, 2, 100 * crashMTU},
		{"WRITE with immediate", abi.WRRDMAWriteWithImm, false, 2, 0}, {"READ", abi.WRRDMARead, false, 1, 0},
		{"READ, long", abi.WRRDMARead, false, 1, 100 * crashMTU},
		{"READ, seven at a time", abi.WRRDMARead, false, 3, -7}, // more than the responder remembers
		{"FETCH_ADD, seven at a time", abi.WRAtomicFetchAndAdd, false, 1, -7},
		{"REG_MR, SEND, LOCAL_INV", abi.WRRegMR, false, 2, 0},
		{"FETCH_ADD", abi.WRAtomicFetchAndAdd, false, 1, 0}, {"CMP_SWP", abi.WRAtomicCmpAndSwp, false, 3, 0},
		{"CMP_SWP, seven at a time, every second stores nothing", abi.WRAtomicCmpAndSwp, false, 1, -7},
		{"ATOMIC_WRITE", abi.WRAtomicWrite, false, 1, 0},
		{"ATOMIC_WRITE, seven at a time", abi.WRAtomicWrite, false, 3, -7},
	} {
		for _, victims := range []string{"a", "b", "ab", "AB"} {
			local := victims == "AB"
			t.Run(x.name+"/"+victims, func(t *testing.T) {
				at, step := 1, 1
				if !*everyCrash {
					step = 23 * raceDivisor
					at += rng.IntN(step)
				}
				err := eachPoint(t, t.Run, at, step, func(t *testing.T, at int) (points int) {
					c := newCrash(t, x.op, x.srq, local, strings.ToLower(victims), at, max(x.size, 0))
					c.burst = -x.size
					c.signalEvery = x.sig
					c.run()
					total += min(at, 1)
					return c.points
				})
				if err != nil {
					t.Error(err)
				}
			})
		}
	}
	t.Logf("the process ended at %d points", total)
}

// Journals that were damaged are refused, or describe a device that can be taken down; nothing of them is left (CO-7).
// So are those of another VM, and of a device with other engines.
func TestDamagedJournal(t *testing.T) {
	if LocalPath || Journaled {
		t.Skip("its devices have both anyway")
	}
	size := logSize
	logSize = 256 << 10
	defer func() { logSize = size }()
	before := Journaled
	Journaled = true
	defer func() { Journaled = before }()
	w, g := furnished(t, 2)
	left := g.remains()
	defer unix.Close(left.journal)
	good, used := contentOf(t, left.journal)
	rng := rand.New(rand.NewPCG(7, 8))
	refused := 0
	for range 400 {
		bad := bytes.Clone(good)
		for range 1 + rng.IntN(3) {
			bad[used[rng.IntN(len(used))]] ^= byte(1 + rng.IntN(255))
		}
		if _, err := unix.Pwrite(left.journal, bad, 0); err != nil {
			t.Fatal(err)
		}
		if w.tryJournal(t, g, left.journal) != nil {
			refused++
		}
	}
	if refused < 100 || refused == 400 {
		t.Errorf("%d of 400 damaged journals were refused", refused)
	}
	if _, err := unix.Pwrite(left.journal, good, 0); err != nil {
		t.Fatal(err)
	}
	if err := w.tryJournal(t, g, left.journal); err != nil {
		t.Error(err)
	}
	if err := w.tryJournal(t, w.guests[1], left.journal); err == nil {
		t.Error("the journal of another VM was accepted")
	}
	one, h := furnished(t, 1)
	if err := one.tryJournal(t, h, left.journal); err == nil {
		t.Error("the journal of a device with other engines was accepted")
	}
}

// contentOf returns a journal's beginning, which has all that furnished makes, and the offsets of bytes that say
// something.
func contentOf(tb testing.TB, journal int) (content []byte, used []int) {
	tb.Helper()
	content = make([]byte, 1<<20)
	n, err := unix.Pread(journal, content, 0)
	if err != nil {
		tb.Fatal(err)
	}
	for i, b := range content[:n] {
		if b != 0 {
			used = append(used, i)
		}
	}
	return content[:n], used
}

// FuzzRevive revives journals that were changed in any places: each six bytes of input are one of them, and how.
// Nothing is left of a journal that is refused, and another describes a device that can be taken down (CO-7).
func FuzzRevive(f *testing.F) {
	if LocalPath || Journaled {
		f.Skip("its devices have both anyway")
	}
	size := logSize
	logSize, Journaled = 256<<10, true
	f.Cleanup(func() { logSize, Journaled = size, false })
	w, g := furnished(f, 2)
	left := g.remains()
	f.Cleanup(func() { _ = unix.Close(left.journal) })
	good, used := contentOf(f, left.journal)
	f.Add([]byte{})
	for i := range 64 {
		f.Add(binary.LittleEndian.AppendUint32([]byte{byte(i), byte(i * 37)}, uint32(i*len(used)/64)))
	}
	f.Fuzz(func(t *testing.T, changes []byte) {
		bad := bytes.Clone(good)
		for ; len(changes) >= 6; changes = changes[6:] {
			at := used[binary.LittleEndian.Uint32(changes[2:])%uint32(len(used))]
			switch how, v := changes[0]%4, changes[1]; {
			case how == 0:
				bad[at] ^= v
			case how == 1 || at+8 > len(bad):
				bad[at] = v
			case how == 2: // a number near a power of two
				binary.LittleEndian.PutUint64(bad[at&^7:], 1<<(v&63)-uint64(v>>6))
			default: // another part of the journal
				from := used[(int(v)*257+at)%len(used)] &^ 7
				copy(bad[at&^7:], good[from:min(from+8*int(1+v&7), len(good))])
			}
		}
		if _, err := unix.Pwrite(left.journal, bad, 0); err != nil {
			t.Fatal(err)
		}
		_ = w.tryJournal(t, g, left.journal)
	})
}

// tryJournal lets a twin of g revive a journal, do what it then does, and go.
func (w *world) tryJournal(tb testing.TB, g *guest, fd int) error {
	tb.Helper()
	x := w.twin(tb, g)
	defer x.dropTwin()
	if err := x.Revive(fd); err != nil {
		x.checkEmpty()
		return err
	}
	if _, err := x.Journal(); err != nil {
		tb.Fatal(err)
	}
	for _, e := range x.engines {
		_ = x.thaw(e)
	}
	w.step(20)
	return nil
}
