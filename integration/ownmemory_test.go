package integration

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

const (
	ownSize  = 8 << 30 // of the program's own memory
	ownLimit = 1 << 30 // of vnicd and all of that memory which is present
	ownChunk = 1 << 20 // of a request
	ownDepth = 8       // requests at a time
	ownPart  = 2 << 30 // given back in the middle
)

// TestOwnMemoryOnDemand: a program of the host (PF-4) shares 8 GiB of its own memory with the device and registers them
// on demand (ODP-1), where the host has 1 GiB for all of it and swaps the rest (PF-14, HF-4). A peer writes and reads
// every byte, while the program starts others (fork), reads its memory itself, and gives a part of it back: that is
// deregistered, taken from the device and unmapped under load (EP-3).
func TestOwnMemoryOnDemand(t *testing.T) {
	l, ctx := newLabWithoutModule(t)
	group := must[*harness.MemoryGroup](t)(harness.NewMemoryGroup("vnicd-own"))
	l.Add(func() { check(t, group.Close()) })
	remove, err := harness.AddSwap(l.Dir+"/swap", (ownSize+ownLimit)>>20)
	check(t, err)
	l.Add(func() { check(t, remove()) })
	h := must[*lab.Host](t)(l.Host("h1"))
	h.Group = group
	check(t, h.Run(ctx, `networks: [{name: blue, vni: 100}]
applications:
  - {name: app1, network: blue, mac: "02:00:00:00:00:a1", ips: [10.0.0.101], memory: 9GiB}
  - {name: app2, network: blue, mac: "02:00:00:00:00:a2", ips: [10.0.0.102]}
`))
	check(t, group.SetLimit(ctx, ownLimit))

	owner, peer := newOwnEnd(ctx, t, h, "app1", "10.0.0.101"), newOwnEnd(ctx, t, h, "app2", "10.0.0.102")
	owner.connect(ctx, t, peer)
	kept := owner.share(ctx, t, ownSize-ownPart)
	part := owner.share(ctx, t, ownPart)

	// Children begin and end all the time.
	forking, stop := context.WithCancel(ctx)
	forked := make(chan error, 1)
	go func() {
		var err error
		n := 0
		for ; forking.Err() == nil && err == nil; n++ {
			err = exec.Command("true").Run()
		}
		t.Logf("%d children", n)
		forked <- err
	}()
	defer stop()

	most := uint64(0)
	within := func() {
		t.Helper()
		used := must[uint64](t)(group.Usage())
		// The kernel charges some pages that it must have above the limit.
		if most = max(most, used); used > ownLimit+16<<20 {
			t.Fatalf("%d MiB are in use", used>>20)
		}
	}
	chunks := func(size int) (all []int) {
		for i := range size / ownChunk {
			all = append(all, i)
		}
		return all
	}
	peer.transfer(ctx, t, true, kept, 1, chunks(ownSize-ownPart), within)
	peer.transfer(ctx, t, true, part, 2, chunks(ownPart), within)

	order := chunks(ownSize - ownPart)
	rand.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
	half := len(order) / 2
	peer.transfer(ctx, t, false, kept, 1, order[:half], within)
	peer.transfer(ctx, t, false, part, 2, chunks(ownPart)[:64], within)
	given := make(chan error, 1)
	go func() { given <- part.giveBack() }()
	peer.transfer(ctx, t, false, kept, 1, order[half:], within)
	check(t, <-given)
	for _, i := range order[:64] {
		if err := verifyChunk(kept.data[i*ownChunk:][:ownChunk], 1, i); err != nil {
			t.Error("what the program reads itself: ", err)
		}
	}
	stop()
	check(t, <-forked)

	s, faults := statusOf(ctx, t, h, "app1"), kept.mr.Stats()
	t.Logf("%d MiB at most; %d faults of regions, %d of the host; %d MiB resident", most>>20, faults.Faults,
		s.HCA.Faults.Host.Raised, s.Memory.Resident>>20)
	if faults.Faults == 0 || s.HCA.Faults.Host.Raised == 0 {
		t.Error("no page fault: nothing was on demand")
	}
	// The part's key is gone with it.
	check(t, peer.qp.PostSend(guestdrv.NewWrite(9, guestdrv.Remote{Addr: part.addr, RKey: part.rkey},
		peer.sge(0)).With(guestdrv.SendSignaled)))
	if wc := peer.completion(ctx, t); wc.Status != guestdrv.WCRemAccessErr {
		t.Errorf("a WRITE to what was given back: %v", wc.Status)
	}
	check(t, kept.giveBack())
}

// ownEnd is one of the two programs, with a connection to the other one.
type ownEnd struct {
	dev *guestdrv.Device
	gid guestdrv.GID
	pd  *guestdrv.PD
	cq  *guestdrv.CQ
	qp  *guestdrv.QP
	buf *guestdrv.Buffer // ownDepth chunks
	mr  *guestdrv.MR
}

func newOwnEnd(ctx context.Context, t *testing.T, h *lab.Host, name, addr string) *ownEnd {
	t.Helper()
	e := &ownEnd{gid: guestdrv.IPGID(netip.MustParseAddr(addr))}
	e.dev = must[*guestdrv.Device](t)(guestdrv.Open(ctx, h.Dir+"/"+name+".hca",
		guestdrv.Config{Memory: ownDepth*ownChunk + 16<<20}))
	t.Cleanup(func() { check(t, e.dev.Close()) })
	check(t, e.dev.SetGID(ctx, 0, e.gid, guestdrv.GIDOptions{}))
	e.pd = must[*guestdrv.PD](t)(e.dev.AllocPD(ctx))
	e.buf = must[*guestdrv.Buffer](t)(e.dev.Alloc(ownDepth * ownChunk))
	e.mr = must[*guestdrv.MR](t)(e.pd.Register(ctx, e.buf, guestdrv.AccessLocalWrite))
	e.cq = must[*guestdrv.CQ](t)(e.dev.CreateCQ(ctx, 2*ownDepth, guestdrv.CQOptions{}))
	e.qp = must[*guestdrv.QP](t)(e.pd.CreateQP(ctx, guestdrv.QPConfig{Type: guestdrv.QPTypeRC, SendCQ: e.cq,
		RecvCQ: e.cq, MaxSendWR: ownDepth, MaxRecvWR: 1}))
	return e
}

// connect connects the two ends' QPs.
func (e *ownEnd) connect(ctx context.Context, t *testing.T, peer *ownEnd) {
	t.Helper()
	for _, x := range [][2]*ownEnd{{e, peer}, {peer, e}} {
		path := must[guestdrv.Path](t)(x[0].dev.Resolve(ctx, x[1].gid, 0))
		check(t, x[0].qp.Connect(ctx, guestdrv.Peer{QPN: x[1].qp.Number(), Path: path}, guestdrv.ConnectOptions{
			Access: guestdrv.AccessRemoteRead | guestdrv.AccessRemoteWrite}))
	}
}

// ownMemory is memory of the program's own that is registered on demand.
type ownMemory struct {
	data   []byte
	buffer *guestdrv.Buffer
	mr     *guestdrv.OnDemandMR
	addr   uint64 // of its first byte for the peer
	rkey   uint32
}

// share makes memory and gives it to the device.
func (e *ownEnd) share(ctx context.Context, t *testing.T, size int) *ownMemory {
	t.Helper()
	fd := must[int](t)(unix.MemfdCreate("own", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING))
	f := os.NewFile(uintptr(fd), "own")
	defer f.Close()
	check(t, f.Truncate(int64(size)))
	m := &ownMemory{data: must[[]byte](t)(unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED))}
	t.Cleanup(func() { check(t, m.unmap()) }) // else the swap file cannot be removed after a failure
	m.buffer = must[*guestdrv.Buffer](t)(e.dev.Share(f, 0, m.data))
	base := m.buffer.Addr()
	pager := guestdrv.PagerFunc(func(_ context.Context, f guestdrv.PageFault, pas []uint64) error {
		for i := range pas {
			if off := f.VA - base + uint64(i*os.Getpagesize()); off < uint64(size) {
				pas[i] = m.buffer.PA() + off
			}
		}
		return nil
	})
	m.mr = must[*guestdrv.OnDemandMR](t)(e.pd.RegisterOnDemand(ctx, base, uint64(size),
		guestdrv.AccessLocalWrite|guestdrv.AccessRemoteRead|guestdrv.AccessRemoteWrite, pager))
	r := m.mr.Remote(0)
	m.addr, m.rkey = r.Addr, r.RKey
	return m
}

// giveBack deregisters the memory, takes it from the device and unmaps it.
func (m *ownMemory) giveBack() error {
	return errors.Join(m.mr.Close(), m.buffer.Close(), m.unmap())
}

// unmap may be called twice.
func (m *ownMemory) unmap() error {
	if m.data == nil {
		return nil
	}
	data := m.data
	m.data = nil
	return unix.Munmap(data)
}

func (e *ownEnd) sge(slot int) guestdrv.SGE { return e.mr.SGE(slot*ownChunk, ownChunk) }

// completion waits for the next one.
func (e *ownEnd) completion(ctx context.Context, t *testing.T) guestdrv.Completion {
	t.Helper()
	var wcs [1]guestdrv.Completion
	if n := must[int](t)(e.cq.PollWait(ctx, wcs[:])); n != 1 {
		t.Fatalf("%d completions", n)
	}
	return wcs[0]
}

// transfer writes chunks of m, filled by seed and number, or reads and verifies them; within is called now and then.
func (e *ownEnd) transfer(ctx context.Context, t *testing.T, writes bool, m *ownMemory, seed uint64, chunks []int,
	within func()) {
	t.Helper()
	for done := 0; done < len(chunks); done += ownDepth {
		some := chunks[done:min(done+ownDepth, len(chunks))]
		for slot, i := range some {
			data := e.buf.Bytes()[slot*ownChunk:][:ownChunk]
			remote := guestdrv.Remote{Addr: m.addr + uint64(i)*ownChunk, RKey: m.rkey}
			wr := guestdrv.NewRead(uint64(i), remote, e.sge(slot))
			if writes {
				fillChunk(data, seed, i)
				wr = guestdrv.NewWrite(uint64(i), remote, e.sge(slot))
			} else {
				clear(data)
			}
			check(t, e.qp.PostSend(wr.With(guestdrv.SendSignaled)))
		}
		for range some {
			if wc := e.completion(ctx, t); wc.Status != guestdrv.WCSuccess {
				t.Fatalf("chunk %d: %v", wc.ID, wc.Status)
			}
		}
		for slot, i := range some {
			if !writes {
				check(t, verifyChunk(e.buf.Bytes()[slot*ownChunk:][:ownChunk], seed, i))
			}
		}
		within()
	}
}

// fillChunk gives each word of a chunk a value of its own.
func fillChunk(data []byte, seed uint64, chunk int) {
	for off := 0; off < len(data); off += 8 {
		binary.LittleEndian.PutUint64(data[off:], ownWord(seed, chunk, off))
	}
}

func verifyChunk(data []byte, seed uint64, chunk int) error {
	for off := 0; off < len(data); off += 8 {
		if got, want := binary.LittleEndian.Uint64(data[off:]), ownWord(seed, chunk, off); got != want {
			return fmt.Errorf("chunk %d, byte %d: %#x, want %#x", chunk, off, got, want)
		}
	}
	return nil
}

func ownWord(seed uint64, chunk, off int) uint64 {
	return (seed<<56 | uint64(chunk)*ownChunk + uint64(off)) * 0x9e3779b97f4a7c15
}
