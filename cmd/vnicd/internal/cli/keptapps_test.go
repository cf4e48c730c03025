package cli

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	stdflag "flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/testutil/nstest"
	"github.com/vnicd/vnicd/guestdrv"
)

const twoApplications = `
applications:
  - {name: one, network: blue, mac: "02:00:00:00:00:01", ips: [10.0.0.1], memory: 64MiB}
  - {name: two, network: blue, mac: "02:00:00:00:00:02", ips: [10.0.0.2], memory: 64MiB}
`

// Of an end's memory: what its program sends and receives, and what the peer reads and writes. The peer's program alone
// changes the last part, and knows what is in it.
const (
	window   = 64 << 10 // bytes that the peer writes and reads
	counters = 8        // words behind it, for the peer's atomics
	messages = 64       // places for received messages
	longest  = 2000     // bytes of one
	batch    = 16       // requests outstanding

	receiveOff = 128 << 10
	sendOff    = receiveOff + messages*2048
	resultOff  = sendOff + batch*window
	endMemory  = resultOff + batch*window
)

var killTimes = stdflag.Int("kills", 12, "how often tests of applications kill the daemon, for each configuration")

// end is a program on an application's or a VM's socket, with one connection.
type end struct {
	*guestdrv.Device
	gid      guestdrv.GID
	pd       *guestdrv.PD
	buf      *guestdrv.Buffer
	mr       *guestdrv.MR
	scq, rcq *guestdrv.CQ
	qp       *guestdrv.QP
	peer     *end
	done     atomic.Uint64 // requests completed
	arrived  atomic.Uint64 // messages received
}

func attachEnd(ctx context.Context, socket, address string) (e *end, err error) {
	e = &end{gid: guestdrv.IPGID(netip.MustParseAddr(address))}
	if e.Device, err = guestdrv.Open(ctx, socket, guestdrv.Config{Memory: 16 << 20}); err != nil {
		return nil, err
	}
	err = e.SetGID(ctx, 0, e.gid, guestdrv.GIDOptions{})
	if err == nil {
		e.pd, err = e.AllocPD(ctx)
	}
	if err == nil {
		e.buf, err = e.Alloc(endMemory)
	}
	if err == nil {
		e.mr, err = e.pd.Register(ctx, e.buf, guestdrv.AccessLocalWrite|remoteAll)
	}
	if err == nil {
		e.scq, err = e.CreateCQ(ctx, batch, guestdrv.CQOptions{})
	}
	if err == nil {
		e.rcq, err = e.CreateCQ(ctx, messages, guestdrv.CQOptions{})
	}
	if err == nil {
		e.qp, err = e.pd.CreateQP(ctx, guestdrv.QPConfig{Type: guestdrv.QPTypeRC, SendCQ: e.scq, RecvCQ: e.rcq,
			MaxSendWR: batch, MaxRecvWR: messages})
	}
	if err != nil {
		return nil, errors.Join(err, e.Close())
	}
	return e, nil
}

const remoteAll = guestdrv.AccessRemoteWrite | guestdrv.AccessRemoteRead | guestdrv.AccessRemoteAtomic

// end opens a socket, and closes the device at the end of the test.
func (k *keptDaemon) end(ctx context.Context, name, address string) *end {
	k.Helper()
	e, err := attachEnd(ctx, filepath.Join(k.dir, "run", name+".hca"), address)
	if err != nil {
		k.Fatal(err)
	}
	k.Cleanup(func() { _ = e.Close() })
	return e
}

// connect connects two ends. For a VM, whose network card has no driver here, nobody answers address resolution.
func connect(ctx context.Context, a, b *end, resolve bool) error {
	for _, x := range [][2]*end{{a, b}, {b, a}} {
		e, peer := x[0], x[1]
		e.peer = peer
		path := guestdrv.Path{GID: peer.gid, MAC: peer.MAC()}
		if resolve {
			var err error
			if path, err = e.Resolve(ctx, peer.gid, 0); err != nil {
				return err
			}
		}
		for i := range uint64(messages) {
			if err := e.qp.PostRecv(guestdrv.NewRecv(i, e.mr.SGE(receiveOff+int(i)*2048, longest))); err != nil {
				return err
			}
		}
		err := e.qp.Connect(ctx, guestdrv.Peer{QPN: peer.qp.Number(), Path: path},
			guestdrv.ConnectOptions{Access: remoteAll, Timeout: 18})
		if err != nil {
			return err
		}
	}
	return nil
}

// model is what the requests of an end must have done to its peer's memory.
type model struct {
	rng    *rand.Rand
	memory [window]byte
	word   [counters]uint64
	sent   uint64
}

// planned is a request with what it must return.
type planned struct {
	wr   *guestdrv.SendWR
	want []byte // in the end's memory at resultOff, when it has completed; nil: nothing
	slot int
}

// next makes a request and does it to the model. Requests of a connection take effect in order, so the model need not
// wait for completions.
func (m *model) next(e *end, id uint64) planned {
	slot := int(id % batch)
	p := planned{slot: slot}
	off := m.rng.IntN(window - 1)
	n := 1 + m.rng.IntN(window-off)
	if m.rng.IntN(2) == 0 {
		n = min(n, 64)
	}
	send, result := sendOff+slot*window, resultOff+slot*window
	w := m.rng.IntN(counters)
	at := e.peer.mr.Remote(window + 8*w)
	old := binary.LittleEndian.AppendUint64(nil, m.word[w])
	switch m.rng.IntN(5) {
	case 0:
		b := e.buf.Bytes()[send:][:longest]
		n = 8 + m.rng.IntN(longest-8)
		m.sent++
		message(b[:n], m.sent)
		p.wr = guestdrv.NewSend(id, e.mr.SGE(send, n))
	case 1:
		b := e.buf.Bytes()[send:][:n]
		for i := range b {
			b[i] = byte(m.rng.Uint32())
		}
		copy(m.memory[off:], b)
		p.wr = guestdrv.NewWrite(id, e.peer.mr.Remote(off), e.mr.SGE(send, n))
	case 2:
		p.want = bytes.Clone(m.memory[off : off+n])
		p.wr = guestdrv.NewRead(id, e.peer.mr.Remote(off), e.mr.SGE(result, n))
	case 3:
		add := m.rng.Uint64()
		p.want = old
		m.word[w] += add
		p.wr = guestdrv.NewFetchAdd(id, at, add, e.mr.SGE(result, 8))
	case 4:
		compare, swap := m.word[w], m.rng.Uint64()
		if m.rng.IntN(4) == 0 {
			compare++ // differs
		} else {
			m.word[w] = swap
		}
		p.want = old
		p.wr = guestdrv.NewCompareSwap(id, at, compare, swap, e.mr.SGE(result, 8))
	}
	// With a fence, so that no READ that is repeated returns what a later request has written (IBTA 10.8.3.3).
	p.wr = p.wr.With(guestdrv.SendSignaled | guestdrv.SendFence)
	return p
}

// message fills b with message n: its number, and bytes that follow from it.
func message(b []byte, n uint64) {
	binary.LittleEndian.PutUint64(b, n)
	for i := range b[8:] {
		b[8+i] = byte(n) + byte(i)
	}
}

// use uses the connection for requests of all kinds until stop is closed. Each must complete once, in order, without
// an error, and return what the model says; so must the peer's memory in the end.
func (e *end) use(ctx context.Context, seed uint64, stop <-chan struct{}) error {
	m := &model{rng: rand.New(rand.NewPCG(seed, 24))}
	wcs := make([]guestdrv.Completion, batch+1)
	var open []planned
	for id := uint64(0); ; {
		most := 1 + m.rng.IntN(batch)
		select {
		case <-stop:
			most = 0
		default:
		}
		for ; len(open) < most; id++ {
			p := m.next(e, id)
			if err := e.qp.PostSend(p.wr); err != nil {
				return err
			}
			open = append(open, p)
		}
		if len(open) == 0 {
			break
		}
		n, err := e.completions(ctx, e.scq, wcs, m.rng.IntN(2) == 0)
		if err != nil {
			return fmt.Errorf("request %d: %w", id, err)
		}
		for _, wc := range wcs[:n] {
			if len(open) == 0 || wc.ID != open[0].wr.ID || wc.Err() != nil {
				return fmt.Errorf("completion %+v (%w) with %d requests open, after %d", wc, wc.Err(), len(open), e.done.Load())
			}
			p := open[0]
			if got := e.buf.Bytes()[resultOff+p.slot*window:][:len(p.want)]; !bytes.Equal(got, p.want) {
				return fmt.Errorf("request %d returns %x, want %x", wc.ID, got[:min(len(got), 32)], p.want[:min(len(p.want), 32)])
			}
			open = open[1:]
			e.done.Add(1)
		}
	}
	there := e.peer.buf.Bytes()
	if !bytes.Equal(there[:window], m.memory[:]) {
		return errors.New("the peer's memory is not what was written")
	}
	for i, want := range m.word {
		if got := binary.LittleEndian.Uint64(there[window+8*i:]); got != want {
			return fmt.Errorf("counter %d is %#x, want %#x", i, got, want)
		}
	}
	for e.peer.arrived.Load() != m.sent {
		if ctx.Err() != nil {
			return fmt.Errorf("%d of %d messages have arrived", e.peer.arrived.Load(), m.sent)
		}
		time.Sleep(time.Millisecond)
	}
	return nil
}

// completions returns at least one completion, by waiting for an event or by polling.
func (e *end) completions(ctx context.Context, cq *guestdrv.CQ, wcs []guestdrv.Completion, wait bool) (int, error) {
	if wait {
		return cq.PollWait(ctx, wcs)
	}
	for {
		if n := cq.Poll(wcs); n > 0 {
			return n, nil
		}
		select {
		case <-e.Done():
			return 0, e.Err()
		case <-ctx.Done():
			return 0, ctx.Err()
		default:
			time.Sleep(20 * time.Microsecond)
		}
	}
}

// receive receives the peer's messages until ctx ends: each must arrive once, in order, with its bytes.
func (e *end) receive(ctx context.Context) error {
	wcs, want := make([]guestdrv.Completion, messages), make([]byte, longest)
	for n := uint64(0); ; {
		got, err := e.rcq.PollWait(ctx, wcs)
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		for _, wc := range wcs[:got] {
			place := n % messages
			n++
			if wc.ID != place || wc.Err() != nil || wc.ByteLen < 8 || wc.ByteLen > longest {
				return fmt.Errorf("message %d: completion %+v: %w", n, wc, wc.Err())
			}
			b := e.buf.Bytes()[receiveOff+int(place)*2048:][:wc.ByteLen]
			if message(want[:len(b)], n); !bytes.Equal(b, want[:len(b)]) {
				return fmt.Errorf("message %d has number %d, or other bytes", n, binary.LittleEndian.Uint64(b))
			}
			e.arrived.Store(n)
			if err := e.qp.PostRecv(guestdrv.NewRecv(place, e.mr.SGE(receiveOff+int(place)*2048, longest))); err != nil {
				return err
			}
		}
	}
}

// outlive checks what status says that connections outlive.
func (k *keptDaemon) outlive(want map[string]daemon.Outlives) {
	k.Helper()
	for _, v := range k.status().VMs {
		if v.Outlives != want[v.Name] {
			k.Errorf("%s outlives %q, want %q", v.Name, v.Outlives, want[v.Name])
		}
	}
}

// both uses a connection in both directions until finish. An error fails the test at once.
func (k *keptDaemon) both(ctx context.Context, a, b *end) (finish func()) {
	ctx, cancel := context.WithCancel(ctx)
	stop := make(chan struct{})
	var using, receiving sync.WaitGroup
	run := func(g *sync.WaitGroup, what string, f func() error) {
		g.Go(func() {
			if err := f(); err != nil {
				k.Errorf("%s: %v", what, err)
				cancel()
			}
		})
	}
	for i, e := range []*end{a, b} {
		run(&using, fmt.Sprint("end ", i), func() error { return e.use(ctx, uint64(i), stop) })
		run(&receiving, fmt.Sprint("receiver ", i), func() error { return e.receive(ctx) })
	}
	finish = sync.OnceFunc(func() {
		close(stop)
		using.Wait()
		cancel()
		receiving.Wait()
	})
	k.Cleanup(finish)
	return finish
}

// moves waits until both ends have got on, and fails with the log if they do not.
func (k *keptDaemon) moves(ends ...*end) {
	k.Helper()
	for _, e := range ends {
		before := e.done.Load()
		testutil.Eventually(k, "requests complete", func() bool { return e.done.Load() > before+batch || k.Failed() })
	}
}

// kill kills the daemon, and returns when another serves and all HCAs have been resumed.
func (k *keptDaemon) kill() daemon.Status {
	k.Helper()
	was := k.status()
	if err := syscall.Kill(was.PID, syscall.SIGKILL); err != nil {
		k.Fatal(err)
	}
	return k.after(was)
}

// after returns the status of the daemon after that one.
func (k *keptDaemon) after(was daemon.Status) (now daemon.Status) {
	k.Helper()
	client := daemon.NewClient(k.dir + "/run/vnicd.sock")
	testutil.Eventually(k, "another daemon has resumed all HCAs", func() bool {
		now = daemon.Status{}
		err := client.Do(k.Context(), "GET", "/v1/status", nil, &now)
		return err == nil && now.PID != was.PID && now.Continued.Pending == 0
	})
	return now
}

// The daemon is killed and upgraded again and again, at any moment, while two applications, and an application and a
// VM, use connections for requests of all kinds: programs notice nothing, and memory, counters and completions are what
// a model says (CO-1, CO-2).
func TestApplicationsKept(t *testing.T) {
	t.Parallel() // it mostly waits
	for _, tc := range []struct{ name, config string }{
		{"two applications", twoApplications},
		{"application and VM", `
applications: [{name: one, network: blue, mac: "02:00:00:00:00:01", memory: 64MiB}]
vms: [{name: two, network: blue, mac: "02:00:00:00:00:02"}]
`},
		{"on two engines", "engines: 2\n" + twoApplications},
	} {
		t.Run(tc.name, func(t *testing.T) {
			k := keptDaemonOf(t, tc.config)
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
			defer cancel()
			a, b := k.end(ctx, "one", "10.0.0.1"), k.end(ctx, "two", "10.0.0.2")
			if err := connect(ctx, a, b, strings.Contains(tc.config, "[10.0.0.2]")); err != nil {
				t.Fatal(err)
			}
			k.outlive(map[string]daemon.Outlives{"one": daemon.OutlivesKill, "two": daemon.OutlivesKill})
			finish := k.both(ctx, a, b)
			rng := rand.New(rand.NewPCG(1, 1))
			kills, upgrades := *killTimes, *killTimes/4
			for i := range kills + upgrades {
				time.Sleep(time.Duration(rng.IntN(100)) * time.Millisecond)
				if i%5 == 4 {
					status, out, errs := k.run("upgrade")
					if status != 0 || !strings.Contains(out, "HCAs that go on: 2") {
						t.Fatalf("upgrade %d: status %d: %s%s", i, status, out, errs)
					}
				} else if now := k.kill(); now.Continued.Revived != 2 {
					t.Fatalf("kill %d: %+v", i, now.Continued)
				}
				if rng.IntN(2) == 0 {
					k.moves(a, b)
				}
			}
			k.moves(a, b)
			finish()
			t.Logf("%d and %d requests, %d and %d messages", a.done.Load(), b.done.Load(), a.arrived.Load(), b.arrived.Load())
		})
	}
}

// away kills the daemon, and keeps the keeper from starting another until back.
func (k *keptDaemon) away() (back func() daemon.Status) {
	k.Helper()
	was := k.status()
	for _, x := range []struct {
		pid int
		sig syscall.Signal
	}{{k.keeper.Process.Pid, syscall.SIGSTOP}, {was.PID, syscall.SIGKILL}} {
		if err := syscall.Kill(x.pid, x.sig); err != nil {
			k.Fatal(err)
		}
	}
	again := sync.OnceFunc(func() { _ = syscall.Kill(k.keeper.Process.Pid, syscall.SIGCONT) })
	k.Cleanup(again)
	client := daemon.NewClient(k.dir + "/run/vnicd.sock")
	testutil.Eventually(k, "no daemon serves", func() bool {
		var s daemon.Status
		return client.Do(k.Context(), "GET", "/v1/status", nil, &s) != nil
	})
	return func() daemon.Status {
		k.Helper()
		again()
		return k.after(was)
	}
}

// application returns the status of one.
func (k *keptDaemon) application(name string) daemon.VMStatus {
	k.Helper()
	for _, v := range k.status().VMs {
		if v.Name == name {
			return v
		}
	}
	k.Fatalf("no application %s", name)
	return daemon.VMStatus{}
}

// What an application asks for while no daemon runs waits for the next one; what it has posted is done then (CO-2). An
// application that ends meanwhile leaves nothing behind.
func TestApplicationWithoutDaemon(t *testing.T) {
	k := keptDaemonOf(t, twoApplications)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	a, b := k.end(ctx, "one", "10.0.0.1"), k.end(ctx, "two", "10.0.0.2")
	if err := connect(ctx, a, b, true); err != nil {
		t.Fatal(err)
	}
	back := k.away()
	asked := map[string]func() error{
		"a completion queue": func() error { _, err := a.CreateCQ(ctx, 7, guestdrv.CQOptions{}); return err },
		"a region": func() error {
			_, err := a.pd.Register(ctx, a.buf, guestdrv.AccessLocalWrite)
			return err
		},
		"an address": func() error {
			p, err := a.Resolve(ctx, b.gid, 0)
			if err == nil && p.MAC != b.MAC() {
				err = fmt.Errorf("resolved to %v, want %v", p.MAC, b.MAC())
			}
			return err
		},
		"the state of a queue pair": func() error {
			q, err := a.qp.Query(ctx)
			if err == nil && q.State != guestdrv.QPRTS {
				err = fmt.Errorf("state %v", q.State)
			}
			return err
		},
		"the configuration": func() error { _, err := a.ReadInfo(ctx); return err },
		"a write": func() error {
			copy(a.buf.Bytes(), "while no daemon ran")
			wr := guestdrv.NewWrite(1, b.mr.Remote(0), a.mr.SGE(0, 19)).With(guestdrv.SendSignaled)
			if err := a.qp.PostSend(wr); err != nil {
				return err
			}
			wcs := make([]guestdrv.Completion, 2)
			n, err := a.scq.PollWait(ctx, wcs)
			if got := string(b.buf.Bytes()[:19]); err == nil && (n != 1 || wcs[0].Err() != nil || got != "while no daemon ran") {
				err = fmt.Errorf("%d completions, the first %+v; %q arrived", n, wcs[0], got)
			}
			return err
		},
	}
	type answer struct {
		what string
		err  error
	}
	answers := make(chan answer, len(asked))
	for what, ask := range asked {
		go func() { answers <- answer{what, ask()} }()
	}
	select {
	case x := <-answers:
		t.Fatalf("%s was answered while no daemon ran: %v", x.what, x.err)
	case <-time.After(100 * time.Millisecond):
	}
	if now := back(); now.Continued.Revived != 2 {
		t.Errorf("%+v", now.Continued)
	}
	for range asked {
		if x := <-answers; x.err != nil {
			t.Errorf("%s: %v", x.what, x.err)
		}
	}

	back = k.away()
	closed := make(chan error, 1)
	go func() { closed <- b.Close() }() // returns when the device accesses the memory no more
	select {
	case err := <-closed:
		t.Fatalf("closed while no daemon ran: %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	back()
	if err := <-closed; err != nil {
		t.Error(err)
	}
	testutil.Eventually(t, "nothing is left of the application", func() bool {
		s := k.application("two")
		return !s.HCA.Connected && len(s.HCA.QPs)+s.HCA.MRs+s.HCA.CQs+s.HCA.PDs == 0 && s.Memory.Resident == 0
	})
	if err := a.Err(); err != nil {
		t.Errorf("the other application: %v", err)
	}
	// Its place is free for another.
	c := k.end(ctx, "two", "10.0.0.2")
	if _, err := c.Resolve(ctx, a.gid, 0); err != nil {
		t.Error(err)
	}
}

// Without the right to make safe memory files vnicd serves applications as before: a connection ends with the daemon,
// the application knows, and the log has said so. Other connections go on.
func TestApplicationNotKept(t *testing.T) {
	nstest.Require(t, "setpriv", "util-linux")
	const less = "-linux_immutable"
	k := keptDaemonOf(t, `
applications: [{name: one, network: blue, mac: "02:00:00:00:00:01", memory: 64MiB}]
vms: [{name: two, network: blue, mac: "02:00:00:00:00:02"}]
`, "setpriv", "--bounding-set", less, "--inh-caps", less)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	a, b := k.end(ctx, "one", "10.0.0.1"), k.end(ctx, "two", "10.0.0.2")
	if err := connect(ctx, a, b, false); err != nil {
		t.Fatal(err)
	}
	k.outlive(map[string]daemon.Outlives{"one": daemon.OutlivesNothing, "two": daemon.OutlivesKill})
	finish := k.both(ctx, a, b)
	k.moves(a, b)
	finish()
	if want := "will end with this vnicd"; !strings.Contains(k.log.String(), want) ||
		!strings.Contains(k.log.String(), "CAP_LINUX_IMMUTABLE") {
		t.Errorf("the log has no %q", want)
	}
	if now := k.kill(); now.Continued.Revived != 1 {
		t.Errorf("%+v", now.Continued)
	}
	select {
	case <-a.Done():
	case <-ctx.Done():
		t.Fatal("the application does not notice that its connection has ended")
	}
	if err := a.Err(); !errors.Is(err, guestdrv.ErrDisconnected) {
		t.Error(err)
	}
	if err := b.Err(); err != nil {
		t.Errorf("the VM: %v", err)
	}
}

// What an application has, and who it is, is checked against the configuration of the next daemon. If it does not fit,
// the connection ends, and the application knows (CO-7).
func TestApplicationLimits(t *testing.T) {
	const user, other = 64411, 64412
	before := fmt.Sprintf("memory: 64MiB, user: %d", user)
	for what, after := range map[string]string{
		"memory":        fmt.Sprintf("memory: 8MiB, user: %d", user),
		"queue pairs":   fmt.Sprintf("memory: 64MiB, user: %d, limits: {qps: 2}", user),
		"pages":         fmt.Sprintf("memory: 64MiB, user: %d, limits: {pages: 20}", user),
		"another owner": fmt.Sprintf("memory: 64MiB, user: %d", other),
	} {
		t.Run(what, func(t *testing.T) {
			k := keptDaemonOf(t, strings.Replace(twoApplications, "memory: 64MiB", before, 1))
			if err := os.Chmod(filepath.Dir(k.dir), 0o755); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
			defer cancel()
			var a *end
			testutil.AsUser(t, user, user, nil, func() { a = k.end(ctx, "one", "10.0.0.1") })
			b := k.end(ctx, "two", "10.0.0.2")
			for range 2 {
				_, err := a.pd.CreateQP(ctx, guestdrv.QPConfig{Type: guestdrv.QPTypeUD, SendCQ: a.scq, RecvCQ: a.rcq})
				if err != nil {
					t.Fatal(err)
				}
			}
			if now := k.kill(); now.Continued.Revived != 2 { // as it fits
				t.Errorf("%+v", now.Continued)
			}
			k.configure(strings.Replace(twoApplications, "memory: 64MiB", after, 1))
			now := k.kill()
			select {
			case <-a.Done():
			case <-ctx.Done():
				t.Fatal("the application keeps more than it may have")
			}
			if err := a.Err(); !errors.Is(err, guestdrv.ErrDisconnected) {
				t.Error(err)
			}
			if err := b.Err(); err != nil || now.Continued.Revived != 1 {
				t.Errorf("the other application: %v, %+v", err, now.Continued)
			}
			_ = a.Close()
			dev, err := guestdrv.Open(ctx, filepath.Join(k.dir, "run", "one.hca"), guestdrv.Config{Memory: 4 << 20})
			if err != nil {
				t.Fatal(err)
			}
			_ = dev.Close()
		})
	}
}
