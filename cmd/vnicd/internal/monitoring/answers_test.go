package monitoring

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/monitoring/query"
)

// busy is a daemon with many VMs, which counts what it is asked for and can be made to wait.
type busy struct {
	status         *daemon.Status
	asked, at, top atomic.Int32
	wait           chan struct{} // nil: it answers at once
}

func newBusy(vms int) *busy {
	b := &busy{status: filled()}
	one := b.status.VMs[0]
	b.status.VMs = nil
	for i := range vms {
		one.Name = fmt.Sprint("vm", i)
		b.status.VMs = append(b.status.VMs, one)
	}
	return b
}

func (b *busy) Status() *daemon.Status {
	b.asked.Add(1)
	n := b.at.Add(1)
	defer b.at.Add(-1)
	for top := b.top.Load(); n > top && !b.top.CompareAndSwap(top, n); top = b.top.Load() {
	}
	if b.wait != nil {
		<-b.wait
	}
	return b.status
}

func (b *busy) Healthy(context.Context) error { b.asked.Add(1); return nil }

func (b *busy) Connections(string) ([]daemon.VMConnection, error) { return nil, nil }

// pair makes a socket pair.
func pair(t *testing.T) (a, b net.Conn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var conns [2]net.Conn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair")
		if conns[i], err = net.FileConn(f); err != nil {
			t.Fatal(err)
		}
		_ = f.Close()
	}
	t.Cleanup(func() { _, _ = conns[0].Close(), conns[1].Close() })
	return conns[0], conns[1]
}

// fake is a process that was taken over: it has the slots, and does with them what it likes.
type fake struct {
	*testing.T
	kinds []query.Kind
	slots []net.Conn
	ended <-chan error // from the slots
	close context.CancelFunc
}

func newFake(t *testing.T, a *answers) *fake {
	t.Helper()
	f := &fake{T: t, kinds: a.slots}
	var ours []net.Conn
	for range a.slots {
		x, y := pair(t)
		ours, f.slots = append(ours, x), append(f.slots, y)
	}
	ctx, cancel := context.WithCancel(context.Background())
	f.ended, f.close = a.start(ctx, ours), cancel
	t.Cleanup(func() {
		for _, c := range f.slots {
			_ = c.Close()
		}
		cancel()
	})
	return f
}

// newStand returns answers without a process, which end with the test.
func newStand(t *testing.T, page, profiles bool, src Source) *answers {
	var s *sampler
	if page {
		s = &sampler{last: &view{status: src.Status()}}
	}
	a := newAnswers(query.Slots(page, profiles), src, s, (*ruleFile)(nil).certificateEnd, hclog.NewNullLogger())
	t.Cleanup(a.running.Wait)
	return a
}

// slot returns the first slot of a kind.
func (f *fake) slot(k query.Kind) net.Conn { return f.slots[slices.Index(f.kinds, k)] }

// broken waits for the daemon to give the process up; why is part of the reason.
func (f *fake) broken(why string) {
	f.Helper()
	select {
	case err := <-f.ended:
		if !strings.Contains(err.Error(), why) {
			f.Errorf("the daemon gave the process up with %v, want %q", err, why)
		}
		f.close() // as Server.talk does
	case <-time.After(time.Minute):
		f.Fatalf("the daemon still serves, want an end with %q", why)
	}
	for i, c := range f.slots {
		if err := c.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
			f.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, c); err != nil && !errors.Is(err, unix.ECONNRESET) {
			f.Errorf("slot %d is not closed: %v", i, err)
		}
	}
}

func ask(t *testing.T, conn net.Conn, q query.Query) (*query.Answer, string) {
	t.Helper()
	if _, err := conn.Write(q.Append(nil)); err != nil {
		t.Fatal(err)
	}
	a, err := query.ReadAnswer(conn)
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(a)
	if err != nil {
		t.Fatal(err)
	}
	return a, string(text)
}

// TestAllowedAnswers: a process that was taken over gets the allowed answers only. Whatever else it sends ends it.
func TestAllowedAnswers(t *testing.T) {
	src := newBusy(1)
	profile := query.Query{Kind: query.Profile, Profile: 3}
	metrics, overview := query.Query{Kind: query.Metrics}, query.Query{Kind: query.Overview}
	bad := metrics.Append(nil)
	bad[query.Size-1] = 1
	for _, x := range []struct {
		page, profiles bool
		on             query.Kind
		send           []byte
		why            string
	}{
		{true, true, query.Metrics, make([]byte, query.Size), "malformed question"},
		{true, true, query.Metrics, bad, "malformed question"},
		{true, true, query.Health, []byte(strings.Repeat("GET / HTTP/1.1\r\n\r\n", 1000)), "malformed question"},
		{true, true, query.Metrics, profile.Append(nil), "a question for profile where only metrics"},
		{true, true, query.Health, metrics.Append(nil), "a question for metrics where only health"},
		{true, true, query.Overview, profile.Append(nil), "a question for profile where only overview"},
		{true, false, query.Metrics, profile.Append(nil), "a question for profile where only metrics"},
		{true, false, query.Overview, profile.Append(nil), "a question for profile where only overview"},
		{false, true, query.Profile, overview.Append(nil), "a question for overview where only profile"},
		{false, false, query.Health, overview.Append(nil), "a question for overview where only health"},
	} {
		f := newFake(t, newStand(t, x.page, x.profiles, src))
		if _, text := ask(t, f.slot(query.Health), query.Query{Kind: query.Health}); text != "ok\n" {
			t.Errorf("a good question: %q", text)
		}
		before := src.asked.Load()
		_, _ = f.slot(x.on).Write(x.send) // the daemon may close it earlier
		f.broken(x.why)
		if n := src.asked.Load() - before; n > 0 {
			t.Errorf("%s: the daemon was asked %d times", x.why, n)
		}
	}
}

// TestQuestionFlood: a process that floods all slots with questions and reads no answer makes the daemon work on one
// question per slot, and on few of a kind, also across processes; the daemon keeps no more than that.
func TestQuestionFlood(t *testing.T) {
	src := newBusy(200) // an answer is larger than a socket's buffer
	a := newStand(t, true, false, src)
	flood := func(f *fake) {
		for i, c := range f.slots {
			q := query.Query{Kind: f.kinds[i]}
			text := []byte(strings.Repeat(string(q.Append(nil)), 20_000)) // more than a socket's buffer
			go func() { _, _ = c.Write(text) }()
		}
	}
	first := newFake(t, a)
	before := runtime.NumGoroutine()
	flood(first)
	waitFor(t, "both slots to be worked on", func() bool { return len(a.kinds[query.Metrics].free) == 2 })
	second := newFake(t, a)
	flood(second)
	waitFor(t, "all slots of the page to be worked on", func() bool { return len(a.kinds[query.Overview].free) == 4 })
	time.Sleep(200 * time.Millisecond) // for what must not happen; otherwise the test shows less
	if n := src.top.Load(); n > 2 {
		t.Errorf("%d snapshots at once, want at most 2", n)
	}
	// The questions of the health check have small answers, which fit into a socket's buffer.
	if n, most := runtime.NumGoroutine()-before, 4*len(a.slots)+10; n > most {
		t.Errorf("%d more goroutines, want at most %d", n, most)
	}
}

// TestStuckReader: the daemon gives a process up that does not read its answer in time.
func TestStuckReader(t *testing.T) {
	a := newStand(t, false, false, newBusy(200))
	a.readTime = 50 * time.Millisecond
	f := newFake(t, a)
	q := query.Query{Kind: query.Metrics}
	if _, err := f.slot(query.Metrics).Write(q.Append(nil)); err != nil {
		t.Fatal(err)
	}
	f.broken("answer to metrics")
}

// TestAcrossProcesses: what the daemon still works on for a process that has ended counts for the next one.
func TestAcrossProcesses(t *testing.T) {
	src := newBusy(1)
	src.wait = make(chan struct{})
	a := newStand(t, false, false, src)
	q := query.Query{Kind: query.Metrics}
	for range 5 {
		f := newFake(t, a)
		for i, k := range f.kinds {
			if k == query.Metrics {
				_, _ = f.slots[i].Write(q.Append(nil))
			}
		}
		waitFor(t, "the daemon to work on two", func() bool { return src.at.Load() == 2 })
		for _, c := range f.slots {
			_ = c.Close()
		}
		if err := <-f.ended; err != io.EOF {
			t.Errorf("a process that ended: %v", err)
		}
		f.close()
	}
	f := newFake(t, a)
	if _, text := ask(t, f.slot(query.Health), query.Query{Kind: query.Health}); text != "ok\n" {
		t.Errorf("the health check of the last: %q", text)
	}
	if n := src.top.Load(); n != 2 {
		t.Errorf("%d snapshots at once, want 2", n)
	}
	close(src.wait)
	answer, text := ask(t, f.slot(query.Metrics), q)
	if answer.Status != 200 || !strings.Contains(text, "vnicd_build_info") {
		t.Errorf("then: %d %.100q", answer.Status, text)
	}
}

// TestPaced: questions of a kind that follow each other faster than its pace wait, and none is lost.
func TestPaced(t *testing.T) {
	k := &kind{pace: time.Second}
	at := time.Unix(1000, 0)
	for i := range 5 {
		if d := k.wait(at); d != time.Duration(i)*time.Second {
			t.Errorf("question %d waits %v", i, d)
		}
	}
	if d := k.wait(at.Add(10 * time.Second)); d != 0 {
		t.Errorf("after a pause one waits %v", d)
	}
}

func waitFor(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited a minute for %s", what)
		}
	}
}
