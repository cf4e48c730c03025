package roce

import (
	"bytes"
	"encoding/binary"
	"math/rand"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/translate"
)

// withRTT returns a pair of vnicds (back: the responder is none) whose response time is known, and a function that
// sends requests of 8 bytes from a, waits for them, and returns how long that took.
func withRTT(t *testing.T, back bool) (f *fabric, a *node, send func(op WROpcode, n int) int64) {
	f = newFabric(t, 3)
	f.delay = 20e3
	o := opts()
	o.backB = back
	o.rd, o.destRd = 16, 16
	a, b := f.pair(o)
	a.reg(1, 0, 4096, allAccess)
	b.reg(2, 0, 4096, allAccess)
	send = func(op WROpcode, n int) int64 {
		t.Helper()
		began := f.now
		for range n {
			a.post(WQE{Opcode: op, RKey: 2, SGEs: []SGE{sge(1, 0, 8)}})
		}
		f.until("the requests", 60e9, func() bool { return len(a.sends) == len(a.sq) })
		return f.now - began
	}
	for range 10 {
		send(WRWrite, 1)
	}
	if a.used != 0 {
		t.Errorf("%d early timers were of use, although nothing was lost", a.used)
	}
	return f, a, send
}

// A message that is lost alone, of any kind, is sent again after a fraction of a millisecond, if the peer is a vnicd.
func TestEarlyProbe(t *testing.T) {
	for _, tc := range []struct {
		name string
		op   WROpcode
		n    int
		lost wire.Opcode
		back bool
		most int64 // ns
	}{
		{"WRITE", WRWrite, 1, wire.OpRCWriteOnly, false, 500e3},
		{"three WRITEs", WRWrite, 3, wire.OpRCWriteOnly, false, 500e3},
		{"READ request", WRRead, 1, wire.OpRCReadRequest, false, 500e3},
		{"READ response", WRRead, 1, wire.OpRCReadResponseOnly, false, 500e3},
		{"acknowledgement", WRWrite, 1, wire.OpRCAck, false, 500e3},
		{"response of an atomic", WRFetchAdd, 1, wire.OpRCAtomicAck, false, 500e3},
		{"to another responder", WRWrite, 1, wire.OpRCWriteOnly, true, 8e6},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f, a, send := withRTT(t, tc.back)
			window := a.q.recovery.cwnd
			lost := 0
			f.loss = func(p *wire.RoCE) bool {
				if p.BTH.Opcode != tc.lost || lost == tc.n {
					return false
				}
				lost++
				return true
			}
			took := send(tc.op, tc.n)
			if lost != tc.n && !(tc.lost == wire.OpRCAck && lost > 0) {
				t.Fatalf("%d packets were lost", lost)
			}
			if took > tc.most || tc.back && took < 2e6 {
				t.Errorf("it took %d us, want at most %d", took/1e3, tc.most/1e3)
			}
			if !tc.back && a.q.recovery.cwnd.Size < window.Size {
				t.Errorf("the congestion window was reduced from %d to %d", window.Size, a.q.recovery.cwnd.Size)
			}
			if s := a.q.Stats(); s.Timeouts != 0 {
				t.Errorf("%d timeouts", s.Timeouts)
			}
			// It was of use if no second answer comes.
			f.loss = nil
			for range earlyJudged {
				send(WRWrite, 1)
			}
			if want := map[bool]int{false: 1}[tc.back]; a.used != want {
				t.Errorf("%d early timers were of use, want %d", a.used, want)
			}
		})
	}
}

// Of a peer that has just been silent, or is new, many packets are not probed early, and their probe is no later for
// that.
func TestEarlyProbeOfMany(t *testing.T) {
	f, a, _ := withRTT(t, false)
	var sent []int64
	a.onTx = func(*wire.RoCE, []byte) bool { sent = append(sent, f.now); return false }
	f.loss = func(p *wire.RoCE) bool { return len(sent) <= earlyPackets+1 }
	for range earlyPackets + 1 {
		a.post(WQE{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 8)}})
	}
	f.until("the WRITEs", 1e9, func() bool { return len(a.sends) == len(a.sq) })
	if again := sent[earlyPackets+1] - sent[0]; again < probeMin || again > probeMin+earlyMin/2 {
		t.Errorf("sent again after %d us, want %d", again/1e3, int64(probeMin/1e3))
	}
}

// Of many packets the oldest is sent again early. If that was not needed the window stays as it was; else it gets
// smaller.
func TestEarlyProbeOfOldest(t *testing.T) {
	const many, more = 3 * earlyPackets, 16 * earlyPackets
	for _, tc := range []struct {
		name  string
		n     int
		lost  func(p *wire.RoCE, sent int) bool // sent: by a
		again uint64                            // packets sent again
		kept  bool
	}{
		{"acknowledgement", many, func(p *wire.RoCE, sent int) bool {
			return p.BTH.Opcode == wire.OpRCAck && sent == many
		}, 1, true},
		{"all", many, func(p *wire.RoCE, sent int) bool { return sent <= many }, many, false},
		{"all of many more", more, func(p *wire.RoCE, sent int) bool { return sent <= more }, more, false},
		{"the second half", many, func(p *wire.RoCE, sent int) bool { return sent > many/2 && sent <= many }, many / 2,
			false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f, a, send := withRTT(t, false)
			send(WRWrite, earlyHeard)
			window, before, sent := a.q.recovery.cwnd.Size, a.q.Stats().Retransmits, 0
			a.onTx = func(*wire.RoCE, []byte) bool { sent++; return false }
			f.loss = func(p *wire.RoCE) bool { return tc.lost(p, sent) }
			if took := send(WRWrite, tc.n); took > probeMin {
				t.Errorf("it took %d us, want less than an ordinary probe takes, %d", took/1e3, int64(probeMin/1e3))
			}
			f.loss = nil
			send(WRWrite, 1) // no duplicate comes before its acknowledgement
			s := a.q.Stats()
			if n := s.Retransmits - before; n < tc.again || n > tc.again+earlyPackets {
				t.Errorf("%d packets were sent again, want %d", n, tc.again)
			}
			if now := a.q.recovery.cwnd.Size; (now >= window) != tc.kept {
				t.Errorf("the congestion window was %d and is %d", window, now)
			}
			if (a.used == 0) != tc.kept {
				t.Errorf("%d early timers were of use", a.used)
			}
			if s.Timeouts != 0 {
				t.Errorf("%d timeouts", s.Timeouts)
			}
		})
	}
}

// The oldest of many READs or atomics is sent again early like any other request, a long READ from the first response
// on that is missing. Its responses show by themselves whether it was needed: none is an answer to others, too.
func TestEarlyProbeOfREAD(t *testing.T) {
	const many, mtu = 3 * earlyPackets, 1024
	one := func(answer bool, n int) bool { return !answer && n <= 1 }
	two := func(answer bool, n int) bool { return !answer && n <= 2 }
	all := func(answer bool, n int) bool { return !answer && n <= many }
	responses := func(answer bool, n int) bool { return answer && n <= many }
	half := func(answer bool, n int) bool { return answer && n > many/2 && n <= many }
	late := func(bool, int) bool { return false }
	for _, tc := range []struct {
		name  string
		op    WROpcode
		n     int                           // requests
		size  int                           // bytes of each
		lost  func(answer bool, n int) bool // the nth answer, or else request
		again uint64                        // PSNs sent again
		kept  bool                          // the congestion window
		shown bool                          // that packets were lost
	}{
		{"one READ", WRRead, 1, many * mtu, one, many, false, false},
		{"two READs", WRRead, 2, many / 2 * mtu, two, many, false, true},
		{"READs", WRRead, many, mtu, all, many, false, true},
		{"atomics", WRFetchAdd, many, 8, all, many, false, true},
		{"responses of one READ", WRRead, 1, many * mtu, responses, many, false, false},
		{"responses of READs", WRRead, many, mtu, responses, many, false, true},
		{"results of atomics", WRFetchAdd, many, 8, responses, many, false, true},
		{"last responses of one READ", WRRead, 1, many * mtu, half, many / 2, false, false},
		{"last responses of READs", WRRead, many, mtu, half, many / 2, false, true},
		{"nothing of one READ", WRRead, 1, many * mtu, late, many, true, false},
		{"nothing of READs", WRRead, many, mtu, late, 1, true, false},
		{"nothing of atomics", WRFetchAdd, many, 8, late, 1, true, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f, a, send := withRTT(t, false)
			a.reg(3, 0, many*mtu, allAccess)
			from := f.nodes[1].reg(4, 0, many*mtu, allAccess)
			sum := binary.LittleEndian.Uint64(from.buf)
			send(WRWrite, earlyHeard)
			window, before, requests, answers := a.q.recovery.cwnd.Size, *a.q.Stats(), 0, 0
			f.loss = func(p *wire.RoCE) bool {
				if p.BTH.DestQP == a.q.QPN() {
					answers++
					return tc.lost(true, answers)
				}
				requests++
				return tc.lost(false, requests)
			}
			if tc.kept {
				f.delay = 250e3 // they are late
			}
			began, want := f.now, len(a.sends)+tc.n
			for i := range tc.n {
				at := uint64(i * tc.size % (many * mtu))
				w := WQE{Opcode: tc.op, RKey: 4, RemoteVA: translate.VA(at), SGEs: []SGE{sge(3, at, tc.size)}}
				if tc.op == WRFetchAdd {
					w.RemoteVA, w.SwapAdd = 0, 1
				}
				a.post(w)
			}
			f.until("the requests", 60e9, func() bool { return len(a.sends) == want })
			if took := f.now - began; took > probeMin {
				t.Errorf("it took %d us, want less than an ordinary probe takes, %d", took/1e3, int64(probeMin/1e3))
			}
			if tc.op == WRRead && !bytes.Equal(a.regions[3].buf, from.buf) {
				t.Error("the data differ")
			}
			if now := binary.LittleEndian.Uint64(from.buf); tc.op == WRFetchAdd && now != sum+uint64(tc.n) {
				t.Errorf("%d were added, want %d", now-sum, tc.n)
			}
			f.settle(1e6) // answers to what was sent twice
			f.loss, f.delay = nil, 20e3
			for range earlyJudged {
				send(WRWrite, 1)
			}
			s := a.q.Stats()
			if n := s.Retransmits - before.Retransmits; n < tc.again || n > tc.again+earlyPackets {
				t.Errorf("%d PSNs were sent again, want %d", n, tc.again)
			}
			if now := a.q.recovery.cwnd.Size; (now >= window) != tc.kept {
				t.Errorf("the congestion window was %d and is %d", window, now)
			}
			if (a.used != 0) != tc.shown {
				t.Errorf("%d early timers were of use", a.used)
			}
			if s.Timeouts != 0 {
				t.Errorf("%d timeouts", s.Timeouts)
			}
		})
	}
}

// inOrder is a source of random numbers with which a busy loop of a fabric receives all there is before QPs run.
type inOrder struct{}

func (inOrder) Int63() int64 { return 0 }
func (inOrder) Seed(int64)   {}

// busyPeer lets the responder's loop run when runsAt says. It then receives all there is before its QP runs.
func (f *fabric) busyPeer(runsAt func(now int64) int64) {
	f.lag, f.rng = 5e3, rand.New(inOrder{})
	f.nodes[1].runsAt = runsAt
}

// Under traffic the answer to a packet that was sent twice is one to others, too: that no duplicate comes does not show
// that the oldest of many was lost, and timers that near go on being armed rarely. A gap shows that packets are lost.
func TestEarlyProbeUnderTraffic(t *testing.T) {
	f, a, send := withRTT(t, false)
	send(WRWrite, earlyHeard)
	before, resumes, flood := *a.q.Stats(), f.now+3*earlyMin/2, 512
	f.busyPeer(func(now int64) int64 { return max(now, resumes) })
	send(WRWrite, flood)
	s := a.q.Stats()
	if s.Retransmits == before.Retransmits || s.Duplicates != before.Duplicates {
		t.Fatalf("%d packets were sent again, %d duplicates came", s.Retransmits-before.Retransmits,
			s.Duplicates-before.Duplicates)
	}
	if a.used != 0 {
		t.Errorf("%d early timers were of use, although nothing was lost", a.used)
	}
	sent := 0
	a.onTx = func(*wire.RoCE, []byte) bool { sent++; return false }
	f.loss = func(*wire.RoCE) bool { return sent == 8 }
	send(WRWrite, flood)
	if a.used == 0 {
		t.Error("a gap is no sign that packets are lost: no early timer was of use")
	}
}

// A probe whose answer is one to other packets, too, which were only late, cuts no window.
func TestEarlyProbeOfLateFlight(t *testing.T) {
	f, a, send := withRTT(t, false)
	send(WRWrite, earlyHeard)
	before, window, done, began := *a.q.Stats(), a.q.recovery.cwnd.Size, len(a.sends), f.now
	first, closed, second := began+earlyMin+12e3, began+earlyMin+16e3, began+earlyMin+60e3
	f.busyPeer(func(now int64) int64 {
		if now < closed {
			return max(now, first)
		}
		return max(now, second)
	})
	flight := earlyPackets + 2
	write := func() {
		for range flight {
			a.post(WQE{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 8)}})
		}
	}
	write()
	f.after(earlyMin-1e3, write) // received with the probe
	f.until("the first answer", earlyMin+100e3, func() bool { return len(a.sends) == done+flight })
	if s := a.q.Stats(); s.Retransmits != before.Retransmits+1 || a.q.req.sent != a.q.req.una+uint64(flight) {
		t.Fatalf("%d packets were sent again, %d are in flight", s.Retransmits-before.Retransmits,
			a.q.req.sent-a.q.req.una)
	}
	f.until("the rest", earlyMin, func() bool { return len(a.sends) == len(a.sq) })
	send(WRWrite, 1)
	if n := a.q.Stats().Duplicates - before.Duplicates; n != 0 {
		t.Fatalf("%d duplicates came", n)
	}
	if now := a.q.recovery.cwnd.Size; now < window {
		t.Errorf("the congestion window was %d and is %d, although nothing was lost", window, now)
	}
}

// A flight whose oldest packet is probed and whose rest is then found lost by what arrives behind it cuts the window
// once.
func TestEarlyProbeCutsOnce(t *testing.T) {
	const many = 3 * earlyPackets
	f, a, send := withRTT(t, false)
	send(WRWrite, earlyHeard)
	sent := 0
	a.onTx = func(*wire.RoCE, []byte) bool { sent++; return false }
	f.loss = func(*wire.RoCE) bool { return sent > 0 && sent <= many }
	l := &a.q.recovery
	for range many {
		a.post(WQE{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 8)}})
	}
	f.until("the answer to the probe", 1e9, func() bool { return l.early.part })
	before := l.cwnd
	before.OnSelectiveLoss(many-1, false)
	send(WRWrite, many)
	send(WRWrite, 1)
	if l.early.whole != 0 {
		t.Error("whether the oldest packet was lost is not known")
	}
	if l.cwnd.Size < before.Size {
		t.Errorf("the congestion window is %d, want at least %d after one cut", l.cwnd.Size, before.Size)
	}
	if s := a.q.Stats(); s.Timeouts != 0 {
		t.Errorf("%d timeouts", s.Timeouts)
	}
}

// The oldest of many packets is to be probed, but the memory of its message is absent by then. When it is back
// everything goes on; when it turns out to be invalid that message fails, and not the one that is being sent.
func TestEarlyProbeOfAbsent(t *testing.T) {
	for _, invalid := range []bool{false, true} {
		t.Run(map[bool]string{false: "absent", true: "invalid"}[invalid], func(t *testing.T) {
			f, a, send := withRTT(t, false)
			send(WRWrite, earlyHeard)
			done := len(a.sends)
			a.reg(3, 0, 4096, allAccess)
			a.reg(4, 0, 1<<20, allAccess)
			f.nodes[1].reg(5, 0, 1<<20, allAccess)
			a.paging(1, 0, 0)
			a.refuse = func(translate.Miss) bool { return invalid }
			f.loss = func(*wire.RoCE) bool { return a.raised[Requester] == 0 }
			a.post(WQE{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(3, 0, 8)}})
			a.post(WQE{Opcode: WRWrite, RKey: 5, SGEs: []SGE{sge(4, 0, 1<<20)}}) // more than the window
			f.until("the first transmission", earlyMin, func() bool { return a.q.req.sent > a.q.req.una+earlyPackets })
			a.allGone(3, hostAbsent)
			f.until("the fault", probeMin/2, func() bool { return a.raised[Requester] != 0 })
			if !invalid {
				f.until("the requests", 1e9, func() bool { return len(a.sends) == done+2 })
				a.wantSends(make([]Status, done+2)...)
				return
			}
			f.until("an answer", probeMin/2, func() bool { return len(a.sends) == done+2 })
			a.wantSends(append(make([]Status, done), StatusLocProt, StatusFlush)...)
		})
	}
}

// Where responses come late now and then, although nothing is lost, early probes soon wait longer; when the path has
// been quiet for a while, they are early again.
func TestEarlyProbeInVain(t *testing.T) {
	f, a, send := withRTT(t, false)
	late := func(n int) (again uint64) {
		before := a.q.Stats().Retransmits
		for range n {
			f.delay = 250e3 // a response time of 500 us: the probe goes out before the response is here
			send(WRWrite, 1)
			f.delay = 20e3
			for range 5 {
				send(WRWrite, 1)
			}
		}
		return a.q.Stats().Retransmits - before
	}
	if n := late(20); n == 0 || n > earlyBackoff+1 {
		t.Errorf("%d requests were sent again for 20 late responses", n)
	}
	for range 10 * earlyCalm {
		send(WRWrite, 1)
	}
	if d := a.q.recovery.early.delay(40e3); d != earlyMin {
		t.Errorf("the next early probe waits for %d us", d/1e3)
	}
	if n := late(20); n == 0 {
		t.Error("no early probe afterwards")
	}
	if a.used != 0 {
		t.Errorf("%d early timers were of use, although nothing was lost", a.used)
	}
}

// budget is what a node's loop affords.
type budget struct {
	poor int64 // no alarm before this time
	used int   // calls of Used
}

func (b *budget) Affordable(at int64) int64 { return max(at, b.poor) }
func (b *budget) Used()                     { b.used++ }

// While alarms cost too much the early probe waits, and is still earlier than others.
func TestEarlyProbeAffordable(t *testing.T) {
	f, a, _ := withRTT(t, false)
	f.loss = func(*wire.RoCE) bool { return true }
	var sent []int64
	a.onTx = func(*wire.RoCE, []byte) bool { sent = append(sent, f.now); return false }
	a.poor = f.now + 2e6
	a.post(WQE{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 8)}})
	f.until("two transmissions", 1e9, func() bool { return len(sent) == 2 })
	if sent[1] < a.poor || sent[1] > a.poor+earlyMin {
		t.Errorf("sent again after %d us", (sent[1]-sent[0])/1e3)
	}
	if s := a.q.Stats(); s.Timeouts != 0 || a.q.recovery.probes != 0 {
		t.Errorf("%d timeouts, %d counted probes", s.Timeouts, a.q.recovery.probes)
	}
}

// A peer that does not answer gets one early probe.
func TestEarlyProbeOnce(t *testing.T) {
	f, a, _ := withRTT(t, false)
	f.loss = func(*wire.RoCE) bool { return true }
	var sent []int64
	a.onTx = func(*wire.RoCE, []byte) bool { sent = append(sent, f.now); return false }
	a.post(WQE{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 8)}})
	f.until("three transmissions", 1e9, func() bool { return len(sent) == 3 })
	if early, next := sent[1]-sent[0], sent[2]-sent[1]; early < earlyMin || early > 2*earlyMin || next < probeMin {
		t.Errorf("sent again after %d us, then after %d us", early/1e3, next/1e3)
	}
}
