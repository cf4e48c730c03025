package hca

import (
	"maps"
	"math"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/virtio/virtq"
	"github.com/vnicd/vnicd/translate"
)

// commandCrash is a driver of which the device ends at a point while it executes commands.
type commandCrash struct {
	*drvcq
	at, points int
	ended      chan corpse   // has what is left once the point was reached
	release    chan struct{} // lets the goroutine that ended go on, for its end
	mu         sync.Mutex    // held while the driver writes memory, which is not undone
}

func (c *commandCrash) point() {
	if c.points++; c.points == c.at {
		c.mu.Lock()
		c.ended <- c.g.remains()
		c.mu.Unlock()
		<-c.release
	}
}

// revive replaces the device, and starts its command queue as the transport does.
func (c *commandCrash) revive(left corpse) {
	g := c.g
	g.tb.Helper()
	atStore.Store(nil)
	close(c.release)
	g.StopQueue(abi.CommandQueue)
	g.replaceStopped(left)
	call := virtq.NewNotifier()
	if err := call.Set(dup(g.tb, c.call)); err != nil {
		g.tb.Fatal(err)
	}
	g.tb.Cleanup(call.Close)
	q, err := virtq.New(g.space, virtq.Config{Index: abi.CommandQueue, Size: int(c.size), Desc: c.desc, Avail: c.avail,
		Used: c.used, Kick: c.kick, Call: call})
	if err == nil {
		err = g.space.Epochs().Within(commandSlot, func() error { _, err := q.Resume(); return err })
	}
	if err == nil {
		err = g.StartQueue(abi.CommandQueue, q)
	}
	if err != nil {
		g.tb.Fatal(err)
	}
	c.q = q
}

// run submits commands at once and waits for their answers, which it returns in that order.
func (c *commandCrash) run(cmds ...command) [][]byte {
	g := c.g
	g.tb.Helper()
	numbers := c.submitAll(cmds)
	answered := map[uint16]bool{}
	for end := time.Now().Add(patienceHere); len(answered) < len(cmds); {
		select {
		case left := <-c.ended:
			c.revive(left)
		default:
		}
		fds := []unix.PollFd{{Fd: int32(c.call), Events: unix.POLLIN}}
		if _, err := unix.Poll(fds, 1); err == nil && fds[0].Revents != 0 {
			var b [8]byte
			_, _ = unix.Read(c.call, b[:])
		}
		for _, i := range c.done() {
			if answered[i] {
				g.tb.Errorf("command %d was answered twice", i)
			}
			answered[i] = true
		}
		if time.Now().After(end) {
			g.tb.Fatalf("%d of %d commands answered", len(answered), len(cmds))
		}
	}
	var out [][]byte
	for i, n := range numbers {
		if s := c.status(n); s != abi.StatusOK {
			g.tb.Errorf("%v: %v", cmds[i].op, s)
		}
		out = append(out, slices.Clone(g.at(c.out+translate.PA(int(n)*cmdBuf)+abi.SizeResp, 64)))
	}
	return out
}

func (c *commandCrash) submitAll(cmds []command) (numbers []uint16) {
	c.mu.Lock()
	defer c.mu.Unlock()
	select {
	case left := <-c.ended:
		c.revive(left)
	default:
	}
	for _, x := range cmds {
		numbers = append(numbers, c.submit(x.op, x.in))
	}
	return numbers
}

type command struct {
	op abi.Opcode
	in []byte
}

func handleOf(b []byte) uint32 { return le.Uint32(b) }

// The process ends while it executes commands: each is executed once and answered once, and what they make is there
// (CO-2).
func TestCrashInCommands(t *testing.T) {
	if LocalPath || Journaled {
		t.Skip("its devices have both anyway")
	}
	size, buffers := logSize, poolSize
	logSize, poolSize = 256<<10, 128
	defer func() { logSize, poolSize = size, buffers }()
	step := 7
	if *everyCrash {
		step = 1
	}
	points := 0
	err := eachPoint(t, t.Run, 1, step, func(t *testing.T, at int) int {
		points = crashInCommands(t, at)
		return points
	})
	if err != nil {
		t.Error(err)
	}
	t.Logf("%d points", points)
}

func crashInCommands(t *testing.T, at int) (points int) {
	w := newWorld(t, 2, 1, Limits{})
	g := w.guests[0]
	g.cfg.Journal = true
	if _, err := g.Journal(); err != nil {
		t.Fatal(err)
	}
	c := &commandCrash{drvcq: g.commandQueue(64), at: at, ended: make(chan corpse, 1), release: make(chan struct{})}
	cq, srq := g.ring(64, abi.WCLog2ElemSize), g.ring(32, 7)
	larger, arm, mem := g.ring(128, abi.WCLog2ElemSize), g.alloc(4), g.alloc(8192)
	sq, rq := g.ring(64, 9), g.ring(64, 7)
	defer endAt(c.point)()

	pds := c.run(command{abi.CmdCreatePD, nil}, command{abi.CmdCreatePD, nil}, command{abi.CmdCreatePD, nil})
	pd := handleOf(pds[0])
	out := c.run(
		command{abi.CmdCreateCQ, enc(abi.SizeCreateCQ, &abi.CreateCQ{Ring: cq.desc, ArmPA: uint64(arm)}, cq.pas...)},
		command{abi.CmdCreateSRQ, enc(abi.SizeCreateSRQ, &abi.CreateSRQ{PDN: pd, MaxSGE: 4, Ring: srq.desc}, srq.pas...)},
		command{abi.CmdCreateMR, enc(abi.SizeCreateMR, &abi.CreateMR{PDN: pd, Access: abi.AccessLocalWrite, PageShift: 12,
			IOVA: 1 << 40, Length: 8192, NPages: 2})},
		command{abi.CmdCreateMW, enc(abi.SizeCreateMW, &abi.CreateMW{PDN: pd, Type: 1})})
	cqn, srqn, mw := handleOf(out[0]), handleOf(out[1]), handleOf(out[3])
	var mr abi.CreateMRResp
	if err := mr.Decode(out[2][:abi.SizeCreateMRResp]); err != nil {
		t.Fatal(err)
	}
	qpOf := func(typ uint32) command {
		return command{abi.CmdCreateQP, enc(abi.SizeCreateQP, &abi.CreateQP{Type: typ, PDN: pd, SendCQN: cqn, RecvCQN: cqn,
			MaxSendSGE: 4, MaxRecvSGE: 4, SQ: sq.desc, RQ: rq.desc}, append(slices.Clone(sq.pas), rq.pas...)...)}
	}
	out = c.run(
		command{abi.CmdSetMTT, enc(abi.SizeSetMTT, &abi.SetMTT{Handle: mr.Handle, Count: 2}, uint64(mem), uint64(mem)+4096)},
		qpOf(abi.QPTypeUD), command{abi.CmdResizeCQ, enc(abi.SizeResizeCQ, &abi.ResizeCQ{CQN: cqn, Ring: larger.desc},
			larger.pas...)},
		command{abi.CmdModifyCQ, enc(abi.SizeModifyCQ, &abi.ModifyCQ{CQN: cqn, Count: 4, Period: 16})})
	qpn := handleOf(out[1])
	modify := func(state uint8, mask uint32) command {
		return command{abi.CmdModifyQP, enc(abi.SizeQPAttr, &abi.QPAttr{QPN: qpn, QPState: state, PortNum: 1,
			AttrMask: abi.QPAttrState | mask})}
	}
	group := abi.Mcast{QPN: qpn, GID: [16]byte{0: 0xff, 1: 2, 15: 1}}
	c.run(modify(abi.QPInit, abi.QPAttrPKeyIndex|abi.QPAttrPort|abi.QPAttrQKey))
	c.run(modify(abi.QPRTR, 0))
	c.run(modify(abi.QPRTS, abi.QPAttrSQPSN))
	c.run(command{abi.CmdAttachMcast, enc(abi.SizeMcast, &group)}, command{abi.CmdDestroyPD, handle(handleOf(pds[1]))},
		command{abi.CmdModifySRQ, enc(abi.SizeModifySRQ, &abi.ModifySRQ{SRQN: srqn, Flags: abi.SRQLimit, Limit: 5})},
		command{abi.CmdDestroyMW, handle(mw)})
	c.run(command{abi.CmdDetachMcast, enc(abi.SizeMcast, &group)})
	c.run(modify(abi.QPReset, 0))
	c.run(command{abi.CmdDestroyQP, handle(qpn)}, command{abi.CmdClearMTT, enc(abi.SizeClearMTT, &abi.ClearMTT{
		Handle: mr.Handle, First: 1, Count: 1})})
	last := c.run(qpOf(abi.QPTypeRC))
	atStore.Store(nil)
	select {
	case left := <-c.ended: // after the last answer
		c.revive(left)
	default:
	}
	c.run(command{abi.CmdDestroyCQ, handle(c.freshCQ(arm))})

	g.StopQueue(abi.CommandQueue)
	tb := &g.tables
	if got := slices.Sorted(maps.Keys(tb.pds)); !slices.Equal(got, slices.Sorted(slices.Values([]uint32{pd,
		handleOf(pds[2])}))) || handleOf(pds[0]) == handleOf(pds[2]) {
		t.Errorf("protection domains %v", got)
	}
	if len(tb.cqs) != 1 || len(tb.srqs) != 1 || len(tb.mrs) != 1 || len(tb.mws) != 0 || len(tb.qpList) != 1 {
		t.Errorf("%d CQs, %d SRQs, %d regions, %d windows, %d QPs", len(tb.cqs), len(tb.srqs), len(tb.mrs), len(tb.mws),
			len(tb.qpList))
	}
	if o := tb.cqs[cqn]; o == nil || o.q.r.mask != 127 {
		t.Errorf("CQ %d does not have its second ring", cqn)
	} else if m := o.q.moderation.Load(); m == nil || m.count != 4 || m.period != 16 {
		t.Errorf("CQ %d is moderated by %+v, want 4 completions or 16 us", cqn, m)
	}
	if o := tb.srqs[srqn]; o == nil || o.q.limit != 5 {
		t.Errorf("SRQ %d does not have its limit", srqn)
	}
	if tb.qpList[handleOf(last[0])] == nil {
		t.Error("the last QP does not exist")
	}
	if reg, err := g.vm.Region(mr.Handle); err != nil {
		t.Error(err)
	} else {
		var runs []translate.PageRun
		for run := range reg.Pages(0, math.MaxUint64) {
			runs = append(runs, run)
		}
		if want := []translate.PageRun{{N: 1, PA: mem}, {N: 1, PA: abi.MTTAbsent}}; !slices.Equal(runs, want) {
			t.Errorf("pages %v, want %v", runs, want)
		}
	}
	g.checkAccount()
	return c.points
}

// freshCQ creates a CQ, so that its word in the journal is one that was used before.
func (c *commandCrash) freshCQ(arm translate.PA) uint32 {
	r := c.g.ring(64, abi.WCLog2ElemSize)
	return handleOf(c.run(command{abi.CmdCreateCQ, enc(abi.SizeCreateCQ, &abi.CreateCQ{Ring: r.desc, ArmPA: uint64(arm)},
		r.pas...)})[0])
}
