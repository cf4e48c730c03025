package qmp

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const greeting = `{"QMP": {"version": {"qemu": {"micro": 3, "minor": 1, "major": 11}, "package": "x"}, "capabilities": ["oob"]}}`

// serve acts as QEMU: handle gets each command after the negotiation and writes any reply.
func serve(t *testing.T, handle func(w net.Conn, command string)) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "qmp.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	t.Cleanup(func() { l.Close(); <-done })
	go func() {
		defer close(done)
		conn, err := l.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		fmt.Fprintln(conn, greeting)
		sc := bufio.NewScanner(conn)
		for sc.Scan() {
			var c struct {
				Execute string `json:"execute"`
			}
			if err := json.Unmarshal(sc.Bytes(), &c); err != nil {
				t.Errorf("not JSON: %s", sc.Bytes())
				return
			}
			switch {
			case c.Execute == "qmp_capabilities":
				fmt.Fprintln(conn, `{"return": {}}`)
			case c.Execute == "hang up":
				return
			default:
				handle(conn, c.Execute)
			}
		}
	}()
	return path
}

func dial(t *testing.T, path string) *Client {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	c, err := Dial(ctx, path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func TestCommands(t *testing.T) {
	var seen []string
	c := dial(t, serve(t, func(w net.Conn, command string) {
		seen = append(seen, command)
		switch command {
		case "query-status":
			fmt.Fprintln(w, `{"return": {"status": "running", "running": true}}`)
		case "query-chardev":
			fmt.Fprintln(w, `{"return": [{"frontend-open": true, "filename": "unix:x", "label": "chr-hca0"}]}`)
		default:
			fmt.Fprintln(w, `{"error": {"class": "CommandNotFound", "desc": "The command is unknown"}}`)
		}
	}))
	ctx := context.Background()
	if c.Version() != "11.1.3" {
		t.Errorf("version %s", c.Version())
	}
	if s, err := c.Status(ctx); err != nil || s != (Status{Running: true, Status: "running"}) {
		t.Errorf("status %+v, %v", s, err)
	}
	l, err := c.Chardevs(ctx)
	if err != nil || len(l) != 1 || l[0] != (Chardev{Label: "chr-hca0", Filename: "unix:x", FrontendOpen: true}) {
		t.Errorf("chardevs %+v, %v", l, err)
	}
	var ce *CommandError
	if err := c.Reset(ctx); !errors.As(err, &ce) || ce.Command != "system_reset" || ce.Desc != "The command is unknown" {
		t.Errorf("reset: %v", err)
	}
	if want := []string{"query-status", "query-chardev", "system_reset"}; fmt.Sprint(seen) != fmt.Sprint(want) {
		t.Errorf("QEMU saw %q, expected %q", seen, want)
	}
}

// Unread events must not block commands, however many there are; the newest are kept.
func TestEventsNeverBlock(t *testing.T) {
	const n = 3 * eventBacklog
	sent := 0
	c := dial(t, serve(t, func(w net.Conn, command string) {
		// One reply after every few events: the client's reader must get past them.
		for range 8 {
			fmt.Fprintf(w, `{"timestamp": {"seconds": %d, "microseconds": 0}, "event": "E"}`+"\n", sent)
			sent++
		}
		fmt.Fprintln(w, `{"return": {}}`)
	}))
	for range n / 8 {
		if err := c.Run(context.Background(), "query-x", nil, nil); err != nil {
			t.Fatal(err)
		}
	}
	c.Close()
	var last int64 = -1
	count := 0
	for e := range c.Events() {
		if e.Timestamp.Seconds <= last {
			t.Fatalf("event %d after %d", e.Timestamp.Seconds, last)
		}
		last = e.Timestamp.Seconds
		count++
	}
	if last != n-1 || count > eventBacklog || count < eventBacklog-1 {
		t.Errorf("kept %d events, the last is %d; expected %d, the last %d", count, last, eventBacklog, n-1)
	}
}

func TestHangUp(t *testing.T) {
	c := dial(t, serve(t, nil))
	if err := c.Run(context.Background(), "hang up", nil, nil); !errors.Is(err, ErrClosed) {
		t.Errorf("hang up: %v", err)
	}
	<-c.Done()
	if err := c.Reset(context.Background()); !errors.Is(err, ErrClosed) {
		t.Errorf("afterwards: %v", err)
	}
}

func TestQuitWithoutReply(t *testing.T) {
	c := dial(t, serve(t, func(w net.Conn, _ string) { w.Close() }))
	if err := c.Quit(context.Background()); err != nil {
		t.Error(err)
	}
}

func TestRunGivesUp(t *testing.T) {
	asked := make(chan struct{})
	c := dial(t, serve(t, func(net.Conn, string) { close(asked) }))
	ctx, cancel := context.WithCancel(context.Background())
	go func() { <-asked; cancel() }()
	if err := c.Reset(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("no reply: %v", err)
	}
	// The late reply must not be taken for the next command's.
	if err := c.Reset(context.Background()); !errors.Is(err, ErrClosed) {
		t.Errorf("afterwards: %v", err)
	}
}

func TestDialErrors(t *testing.T) {
	if _, err := Dial(context.Background(), filepath.Join(t.TempDir(), "none")); err == nil {
		t.Error("no error for a missing socket")
	}
	path := filepath.Join(t.TempDir(), "mute.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if _, err := Dial(ctx, path); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("mute monitor: %v", err)
	}
}
