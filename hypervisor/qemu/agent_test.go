package qemu

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// fakeGuest is a qemu-ga that runs a few made-up programs. Like the real one it answers in order, one request at a
// time.
type fakeGuest struct {
	t    *testing.T
	conn net.Conn

	mu    sync.Mutex
	procs map[int]*fakeProc // guarded by mu
	files map[string][]byte
	open  map[int]string
	pos   map[int]int
	next  int
	lose  map[string]int // commands whose next n requests get no reply
	polls int
}

type fakeProc struct {
	argv   []string
	stdin  []byte
	polls  int // status requests until it ends; -1: only when killed
	killed bool
	out    []byte
	code   int
	trunc  bool
}

func newFake(t *testing.T) (*fakeGuest, *agent) {
	t.Helper()
	t.Cleanup(func() { goleak.VerifyNone(t) })
	host, guest := net.Pipe()
	f := &fakeGuest{t: t, conn: guest, procs: map[int]*fakeProc{}, files: map[string][]byte{}, open: map[int]string{},
		pos: map[int]int{}, next: 100, lose: map[string]int{}}
	a := newAgent(host)
	a.resync = 50 * time.Millisecond
	done := make(chan struct{})
	go func() { defer close(done); f.serve() }()
	t.Cleanup(func() { a.close(); guest.Close(); <-done })
	return f, a
}

func (f *fakeGuest) serve() {
	sc := bufio.NewScanner(f.conn)
	sc.Buffer(nil, 1<<26)
	for sc.Scan() {
		line := sc.Bytes()
		if i := bytes.LastIndexByte(line, delimiter); i >= 0 {
			line = line[i+1:]
		}
		var req struct {
			Execute   string          `json:"execute"`
			Arguments json.RawMessage `json:"arguments"`
			ID        json.RawMessage `json:"id"`
		}
		if err := json.Unmarshal(line, &req); err != nil {
			continue // like the real one: an error without id
		}
		f.mu.Lock()
		ret, err := f.handle(req.Execute, req.Arguments)
		lost := f.lose[req.Execute] > 0
		if lost {
			f.lose[req.Execute]--
		}
		f.mu.Unlock()
		if lost {
			continue
		}
		var reply any
		if err != nil {
			reply = map[string]any{"error": map[string]string{"class": "GenericError", "desc": err.Error()}, "id": req.ID}
		} else {
			reply = map[string]any{"return": ret, "id": req.ID}
		}
		b, _ := json.Marshal(reply)
		if req.Execute == "guest-sync-delimited" {
			b = append([]byte{delimiter}, b...)
		}
		if _, err := f.conn.Write(append(b, '\n')); err != nil {
			return
		}
	}
}

func (f *fakeGuest) handle(cmd string, raw json.RawMessage) (any, error) {
	var a struct {
		ID     int64    `json:"id"`
		Path   string   `json:"path"`
		Mode   string   `json:"mode"`
		Arg    []string `json:"arg"`
		Input  []byte   `json:"input-data"`
		PID    int      `json:"pid"`
		Handle int      `json:"handle"`
		Buf    []byte   `json:"buf-b64"`
		Count  int      `json:"count"`
	}
	if err := json.Unmarshal(raw, &a); err != nil {
		return nil, err
	}
	f.next++
	switch cmd {
	case "guest-sync-delimited":
		return a.ID, nil
	case "guest-exec":
		return map[string]int{"pid": f.next}, f.exec(f.next, a.Arg, a.Input)
	case "guest-exec-status":
		f.polls++
		p := f.procs[a.PID]
		if p == nil {
			return nil, fmt.Errorf("PID %d does not exist", a.PID)
		}
		if p.polls != 0 && !p.killed {
			p.polls--
			return map[string]any{"exited": false}, nil
		}
		delete(f.procs, a.PID)
		if p.killed {
			return map[string]any{"exited": true, "signal": 9, "out-data": p.out}, nil
		}
		return map[string]any{"exited": true, "exitcode": p.code, "out-data": p.out, "err-data": []byte("e"),
			"out-truncated": p.trunc}, nil
	case "guest-file-open":
		if a.Mode == "r" && f.files[a.Path] == nil {
			return nil, errors.New("No such file or directory")
		}
		if a.Mode == "w" {
			f.files[a.Path] = []byte{}
		}
		f.open[f.next] = a.Path
		return f.next, nil
	case "guest-file-write":
		n := min(len(a.Buf), 100_000) // a short write
		f.files[f.open[a.Handle]] = append(f.files[f.open[a.Handle]], a.Buf[:n]...)
		return map[string]any{"count": n, "eof": false}, nil
	case "guest-file-read":
		b := f.files[f.open[a.Handle]][f.pos[a.Handle]:]
		n := min(len(b), a.Count)
		f.pos[a.Handle] += n
		return map[string]any{"count": n, "buf-b64": b[:n], "eof": n == len(b)}, nil
	case "guest-file-close":
		delete(f.open, a.Handle)
		return map[string]any{}, nil
	}
	return nil, fmt.Errorf("The command %s has not been found", cmd)
}

// exec knows: echo WORDS, cat, exit N, big N, slow POLLS, hang, flood, kill.
func (f *fakeGuest) exec(pid int, argv []string, stdin []byte) error {
	p := &fakeProc{argv: argv, stdin: stdin}
	if argv[0] == "/usr/bin/env" {
		p.out = []byte(argv[1] + " ")
		argv = argv[2:]
	}
	n := 0
	if len(argv) > 1 {
		fmt.Sscan(argv[1], &n)
	}
	switch argv[0] {
	case "echo":
		p.out = append(p.out, strings.Join(argv[1:], " ")...)
	case "cat":
		p.out = stdin
	case "exit":
		p.code = n
	case "big":
		p.out = bytes.Repeat([]byte("x"), n)
	case "slow":
		p.polls = n
	case "hang":
		p.polls = -1
		p.out = []byte("stuck here")
	case "flood":
		p.trunc = true
	case "kill":
		var target int
		fmt.Sscan(strings.TrimPrefix(argv[len(argv)-1], "-"), &target)
		if q := f.procs[target]; q != nil {
			q.killed = true
		}
	default:
		return fmt.Errorf("Failed to execute child process “%s”", argv[0])
	}
	f.procs[pid] = p
	return nil
}

func testCtx(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func TestExec(t *testing.T) {
	_, a := newFake(t)
	ctx := testCtx(t)
	if err := a.ready(ctx); err != nil {
		t.Fatal(err)
	}
	if r, err := a.exec(ctx, Command{Argv: []string{"echo", "a", "b"}}); err != nil || r != (Result{"a b", "e", 0}) {
		t.Errorf("echo: %+v, %v", r, err)
	}
	if r, err := a.exec(ctx, Command{Argv: []string{"exit", "7"}}); err != nil || r.ExitCode != 7 {
		t.Errorf("exit: %+v, %v", r, err)
	}
	if r, err := a.exec(ctx, Command{Argv: []string{"cat"}, Stdin: []byte("\x00in")}); err != nil || r.Stdout != "\x00in" {
		t.Errorf("cat: %+v, %v", r, err)
	}
	if r, err := a.exec(ctx, Command{Argv: []string{"echo", "x"}, Env: []string{"A=1"}}); err != nil ||
		r.Stdout != "A=1 x" {
		t.Errorf("env: %+v, %v", r, err)
	}
	if r, err := a.exec(ctx, Command{Argv: []string{"slow", "5"}}); err != nil || r.ExitCode != 0 {
		t.Errorf("slow: %+v, %v", r, err)
	}
	if r, err := a.exec(ctx, Command{Argv: []string{"big", "3000000"}}); err != nil || len(r.Stdout) != 3000000 {
		t.Errorf("big: %d bytes, %v", len(r.Stdout), err)
	}
	if _, err := a.exec(ctx, Command{Argv: []string{"flood"}}); !errors.Is(err, ErrTruncated) {
		t.Errorf("flood: %v", err)
	}
	var ae *AgentError
	if _, err := a.exec(ctx, Command{Argv: []string{"none"}}); !errors.As(err, &ae) || ae.Command != "guest-exec" {
		t.Errorf("unknown program: %v", err)
	}
	if _, err := a.exec(ctx, Command{}); err == nil {
		t.Error("no program: no error")
	}
}

func TestExecConcurrent(t *testing.T) {
	_, a := newFake(t)
	ctx := testCtx(t)
	server, err := a.start(ctx, Command{Argv: []string{"hang"}})
	if err != nil {
		t.Fatal(err)
	}
	serverEnd := make(chan Result, 1)
	go func() {
		r, err := server.Wait(ctx)
		if err != nil {
			t.Error(err)
		}
		serverEnd <- r
	}()
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			want := fmt.Sprintf("client %d", i)
			if r, err := a.exec(ctx, Command{Argv: []string{"echo", want}}); err != nil || r.Stdout != want {
				t.Errorf("%s: %+v, %v", want, r, err)
			}
		}()
	}
	wg.Wait()
	if err := server.Kill(ctx); err != nil {
		t.Error(err)
	}
	if r := <-serverEnd; r.ExitCode != 128+9 || r.Stdout != "stuck here" {
		t.Errorf("server: %+v", r)
	}
}

func TestExecCancelKills(t *testing.T) {
	f, a := newFake(t)
	ctx, cancel := context.WithCancel(testCtx(t))
	go func() {
		for {
			f.mu.Lock()
			n := f.polls
			f.mu.Unlock()
			if n >= 2 {
				cancel()
				return
			}
			time.Sleep(time.Millisecond)
		}
	}()
	_, err := a.exec(ctx, Command{Argv: []string{"hang"}})
	if !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "stuck here") {
		t.Errorf("got %v", err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.procs) != 0 {
		t.Errorf("%d processes left in the guest", len(f.procs))
	}
}

// A request without a reply, although a later sync has one: the agent was restarted in between.
func TestAgentRestart(t *testing.T) {
	f, a := newFake(t)
	f.lose["guest-exec"] = 1
	ctx := testCtx(t)
	if _, err := a.exec(ctx, Command{Argv: []string{"echo", "x"}}); !errors.Is(err, ErrAgentRestarted) {
		t.Errorf("lost request: %v", err)
	}
	if r, err := a.exec(ctx, Command{Argv: []string{"echo", "y"}}); err != nil || r.Stdout != "y" {
		t.Errorf("afterwards: %+v, %v", r, err)
	}
}

// A slow agent is not mistaken for a restarted one; noise and unexpected replies are dropped.
func TestAgentSlowAndNoisy(t *testing.T) {
	host, guest := net.Pipe()
	a := newAgent(host)
	a.resync = 5 * time.Millisecond
	defer a.close()
	go func() {
		sc := bufio.NewScanner(guest)
		syncs := 0
		var first string
		for sc.Scan() {
			l := sc.Text()
			if !strings.Contains(l, "sync") {
				first = l
				continue
			}
			// The reply to the first request comes only after a few syncs.
			if syncs++; syncs == 3 {
				_ = first
				fmt.Fprintf(guest,
					"noise\n{\"return\": 5, \"id\": 4711}\n{\"return\": 6}\nhalf a li\xff{\"return\": 42, \"id\": 1}\n")
			}
		}
	}()
	var n int
	if err := a.call(testCtx(t), "guest-x", nil, &n); err != nil || n != 42 {
		t.Errorf("got %d, %v", n, err)
	}
	guest.Close()
	if err := a.call(testCtx(t), "guest-x", nil, &n); !errors.Is(err, ErrAgentClosed) {
		t.Errorf("after the end: %v", err)
	}
}

func TestAgentReadyTimesOut(t *testing.T) {
	host, guest := net.Pipe()
	defer guest.Close()
	a := newAgent(host)
	defer a.close()
	// The guest does not read: the write must not block past the context.
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if err := a.ready(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
}

func TestFiles(t *testing.T) {
	f, a := newFake(t)
	ctx := testCtx(t)
	data := bytes.Repeat([]byte("0123456789"), 70_000)
	if err := a.writeFile(ctx, "/x", data); err != nil {
		t.Fatal(err)
	}
	got, err := a.readFile(ctx, "/x", len(data))
	if err != nil || !bytes.Equal(got, data) {
		t.Errorf("read %d bytes back, %v", len(got), err)
	}
	if _, err := a.readFile(ctx, "/x", len(data)-1); err == nil || !strings.Contains(err.Error(), "longer than") {
		t.Errorf("over the limit: %v", err)
	}
	if _, err := a.readFile(ctx, "/none", 1); err == nil || !strings.Contains(err.Error(), "No such file") {
		t.Errorf("missing: %v", err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.open) != 0 {
		t.Errorf("%d handles left open", len(f.open))
	}
}

// The guest writes arbitrary data to its port: nothing may crash, and the reader always ends.
func FuzzAgentReader(f *testing.F) {
	f.Add([]byte("{\"return\": {\"pid\": 1}, \"id\": 1}\n"))
	f.Add([]byte("\xff{\"error\": {\"class\": \"C\", \"desc\": \"d\"}, \"id\": 1}\n"))
	f.Add([]byte("{\"id\": 99999999999999999999}\n\xff\xff\n{}\n"))
	f.Add([]byte("{\"return\": {\"exited\": true, \"out-data\": \"!!\"}, \"id\": 1}\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		host, guest := net.Pipe()
		a := newAgent(host)
		defer a.close()
		got := make(chan error, 1)
		go func() {
			var st execStatus
			got <- a.call(context.Background(), "guest-exec-status", nil, &st)
		}()
		if _, err := bufio.NewReader(guest).ReadSlice('\n'); err != nil {
			t.Fatal(err)
		}
		_, _ = guest.Write(data)
		guest.Close()
		<-got
	})
}
