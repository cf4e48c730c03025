package qemu

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"
)

// Errors of the guest agent.
var (
	// ErrAgentClosed: the agent's socket is closed, because QEMU has ended or is ending.
	ErrAgentClosed = errors.New("guest agent: connection is closed")
	// ErrAgentRestarted: the agent was restarted (for example by a reboot of the guest) and the request is lost.
	ErrAgentRestarted = errors.New("guest agent: restarted, the request is lost")
)

// AgentError is the agent's refusal of a command.
type AgentError struct {
	Command, Class, Desc string
}

func (e *AgentError) Error() string { return fmt.Sprintf("guest agent: %s: %s", e.Command, e.Desc) }

// maxAgentLine bounds one message of the agent: it caps captured output at 16 MiB per stream, base64 adds a third.
// The guest is hostile; a longer message ends the connection.
const maxAgentLine = 64 << 20

// delimiter makes the agent drop an unfinished request (guest-sync-delimited).
const delimiter = 0xff

// agent is a client of qemu-ga on a virtio-serial port. Requests carry ids, so calls may overlap, and a late reply to
// an abandoned call is recognised and dropped. The agent answers in order; a reply to a later guest-sync therefore
// proves that an earlier request was lost, which reveals a restart.
//
// One goroutine reads. Neither mutex is taken while the other is held.
type agent struct {
	conn   net.Conn
	done   chan struct{} // closed by the reader when the connection ended
	resync time.Duration // how long a call waits before it sends a sync

	writeMu sync.Mutex
	dirty   bool // guarded by writeMu: an incomplete request is in the pipe

	mu      sync.Mutex
	nextID  int64                    // guarded by mu
	pending map[int64]chan agentLine // guarded by mu
}

type agentLine struct {
	ID     *int64          `json:"id"`
	Return json.RawMessage `json:"return"`
	Error  *struct {
		Class string `json:"class"`
		Desc  string `json:"desc"`
	} `json:"error"`
}

// newAgent takes over conn.
func newAgent(conn net.Conn) *agent {
	a := &agent{conn: conn, done: make(chan struct{}), resync: 5 * time.Second, nextID: 1,
		pending: map[int64]chan agentLine{}}
	go a.read()
	return a
}

// close ends the connection and joins the reader. Idempotent.
func (a *agent) close() {
	_ = a.conn.Close()
	<-a.done
}

// reopen takes over another connection, after close, with the same agent at its end. No call is under way.
func (a *agent) reopen(conn net.Conn) {
	a.conn, a.done, a.dirty = conn, make(chan struct{}), true
	go a.read()
}

func (a *agent) read() {
	defer close(a.done)
	defer a.conn.Close()
	sc := bufio.NewScanner(a.conn)
	sc.Buffer(make([]byte, 64<<10), maxAgentLine)
	for sc.Scan() {
		line := sc.Bytes()
		if i := bytes.LastIndexByte(line, delimiter); i >= 0 {
			line = line[i+1:]
		}
		var l agentLine
		// Drop lines that are not a message of the agent, or that no call waits for.
		if json.Unmarshal(line, &l) != nil || l.ID == nil {
			continue
		}
		a.mu.Lock()
		ch := a.pending[*l.ID]
		delete(a.pending, *l.ID)
		a.mu.Unlock()
		if ch != nil {
			l.Return = bytes.Clone(l.Return)
			ch <- l // capacity 1, one reply per id
		}
	}
}

// send writes a request and returns the channel of its reply.
func (a *agent) send(ctx context.Context, command string, args any) (int64, <-chan agentLine, error) {
	ch := make(chan agentLine, 1)
	a.mu.Lock()
	id := a.nextID
	a.nextID++
	a.pending[id] = ch
	a.mu.Unlock()

	req := struct {
		Execute   string `json:"execute"`
		Arguments any    `json:"arguments,omitempty"`
		ID        int64  `json:"id"`
	}{command, args, id}
	buf, err := json.Marshal(req)
	if err != nil {
		a.forget(id)
		return 0, nil, fmt.Errorf("guest agent: encoding the arguments of %s: %w", command, err)
	}
	buf = append(buf, '\n')

	a.writeMu.Lock()
	defer a.writeMu.Unlock()
	if a.dirty || command == "guest-sync-delimited" {
		buf = append([]byte{delimiter}, buf...)
	}
	// A guest that does not read must not block the caller past ctx.
	expired := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(expired)
		_ = a.conn.SetWriteDeadline(time.Unix(1, 0))
	})
	n, err := a.conn.Write(buf)
	if !stop() {
		<-expired // otherwise it might set the deadline after it was cleared
		_ = a.conn.SetWriteDeadline(time.Time{})
	}
	if err != nil {
		a.dirty = a.dirty || n > 0
		a.forget(id)
		if ctx.Err() != nil {
			return 0, nil, fmt.Errorf("guest agent: %s: %w", command, ctx.Err())
		}
		return 0, nil, fmt.Errorf("guest agent: %s: %w (%v)", command, ErrAgentClosed, err)
	}
	a.dirty = false
	return id, ch, nil
}

func (a *agent) forget(id int64) {
	a.mu.Lock()
	delete(a.pending, id)
	a.mu.Unlock()
}

// call runs one command and decodes its result into out (nil: ignored).
func (a *agent) call(ctx context.Context, command string, args, out any) error {
	id, reply, err := a.send(ctx, command, args)
	if err != nil {
		return err
	}
	defer a.forget(id)
	timer := time.NewTimer(a.resync)
	defer timer.Stop()
	var sync <-chan agentLine
	for {
		select {
		case l := <-reply:
			return decode(command, l, out)
		case <-sync:
			// Both channels may have become ready together.
			select {
			case l := <-reply:
				return decode(command, l, out)
			default:
			}
			return fmt.Errorf("guest agent: %s: %w", command, ErrAgentRestarted)
		case <-timer.C:
			sid, ch, err := a.send(ctx, "guest-sync-delimited", map[string]int64{"id": id})
			if err != nil {
				return err
			}
			defer a.forget(sid)
			sync = ch
			timer.Reset(a.resync)
		case <-a.done:
			return fmt.Errorf("guest agent: %s: %w", command, ErrAgentClosed)
		case <-ctx.Done():
			return fmt.Errorf("guest agent: %s: %w", command, ctx.Err())
		}
	}
}

func decode(command string, l agentLine, out any) error {
	if l.Error != nil {
		return &AgentError{Command: command, Class: l.Error.Class, Desc: l.Error.Desc}
	}
	if out == nil {
		return nil
	}
	if err := json.Unmarshal(l.Return, out); err != nil {
		return fmt.Errorf("guest agent: result of %s: %w", command, err)
	}
	return nil
}

// ready waits until the agent answers, and so until the guest is up.
func (a *agent) ready(ctx context.Context) error {
	for {
		// A request sent before the agent opened its port may be lost, so repeat it.
		try, cancel := context.WithTimeout(ctx, time.Second)
		err := a.call(try, "guest-sync-delimited", map[string]int64{"id": 1}, nil)
		cancel()
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return fmt.Errorf("guest agent does not answer: %w", ctx.Err())
		case !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, ErrAgentRestarted):
			return err
		}
	}
}
