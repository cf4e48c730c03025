// Package qmp implements QEMU's machine protocol over the monitor socket of one VM.
//
// It wraps the socket monitor of github.com/digitalocean/go-qemu/qmp and adds deadlines, a closed state that every
// caller sees, and events that never block commands.
//
// Ownership: Dial starts one goroutine, Close joins it. All methods may be called from several goroutines; commands run
// one at a time.
package qmp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	goqmp "github.com/digitalocean/go-qemu/qmp"
)

// ErrClosed reports that the monitor connection is closed: QEMU ended, Close was called, or an earlier command was
// abandoned (its late reply could not be told from the next one's).
var ErrClosed = errors.New("qmp: monitor connection is closed")

// Event is an asynchronous message of QEMU such as RESET or SHUTDOWN.
type Event = goqmp.Event

// CommandError is QEMU's refusal of a command.
type CommandError struct {
	Command string // the QMP command
	Desc    string // QEMU's explanation
}

func (e *CommandError) Error() string { return fmt.Sprintf("qmp: %s: %s", e.Command, e.Desc) }

// eventBacklog bounds the events kept for a slow or absent reader; the oldest are dropped.
const eventBacklog = 256

// Client is a connection to one monitor socket.
type Client struct {
	mon    *goqmp.SocketMonitor
	events chan Event
	done   chan struct{} // closed when the connection has ended

	runMu sync.Mutex // one command at a time

	mu     sync.Mutex
	closed bool // guarded by mu
}

// Dial connects to the monitor socket at path and negotiates capabilities, within ctx.
func Dial(ctx context.Context, path string) (*Client, error) {
	timeout := 30 * time.Second
	if dl, ok := ctx.Deadline(); ok {
		timeout = time.Until(dl)
	}
	mon, err := goqmp.NewSocketMonitor("unix", path, timeout)
	if err != nil {
		return nil, fmt.Errorf("qmp: connecting to %s: %w", path, err)
	}
	c := &Client{mon: mon, events: make(chan Event, eventBacklog), done: make(chan struct{})}
	connected := make(chan error, 1)
	go func() { connected <- mon.Connect() }()
	select {
	case err = <-connected:
	case <-ctx.Done():
		// Connect reads without a deadline; closing the socket ends it in any state.
		err = ctx.Err()
		_ = mon.Disconnect()
		if cerr := <-connected; cerr == nil {
			// It succeeded before ctx ended and has a listener, which must end, too.
			drain(mon)
		}
		return nil, fmt.Errorf("qmp: negotiating on %s: %w", path, err)
	}
	if err != nil {
		_ = mon.Disconnect()
		return nil, fmt.Errorf("qmp: negotiating on %s: %w", path, err)
	}
	ev, err := mon.Events(ctx)
	if err != nil {
		_ = mon.Disconnect()
		return nil, fmt.Errorf("qmp: events of %s: %w", path, err)
	}
	go c.forward(ev)
	return c, nil
}

func drain(mon *goqmp.SocketMonitor) {
	ev, err := mon.Events(context.Background())
	if err != nil {
		return
	}
	_ = mon.Disconnect()
	for range ev {
	}
}

// forward reads every event at once: while an event is unread, the monitor's reader stalls, and with it all commands.
func (c *Client) forward(ev <-chan Event) {
	defer close(c.done)
	defer close(c.events)
	for e := range ev {
		for {
			select {
			case c.events <- e:
			default:
				select {
				case <-c.events:
				default:
				}
				continue
			}
			break
		}
	}
}

// Events returns the channel of QEMU's events since Dial; it is closed when the connection ends. At most 256 wait for
// the reader; older ones are dropped. All callers share the channel.
func (c *Client) Events() <-chan Event { return c.events }

// Done is closed when the connection has ended for any reason.
func (c *Client) Done() <-chan struct{} { return c.done }

// Version is QEMU's version as "11.1.3".
func (c *Client) Version() string { return c.mon.Version.String() }

// Run executes a command with args (nil, or a value that encodes to a JSON object) and decodes the reply into out (nil:
// ignored). If ctx ends first, the connection is closed, because the reply may still come.
func (c *Client) Run(ctx context.Context, command string, args, out any) error {
	req, err := json.Marshal(goqmp.Command{Execute: command, Args: args})
	if err != nil {
		return fmt.Errorf("qmp: encoding the arguments of %s: %w", command, err)
	}
	c.runMu.Lock()
	defer c.runMu.Unlock()
	if c.isClosed() {
		return fmt.Errorf("qmp: %s: %w", command, ErrClosed)
	}
	type reply struct {
		buf []byte
		err error
	}
	replied := make(chan reply, 1)
	go func() {
		buf, err := c.mon.Run(append(req, '\n'))
		replied <- reply{buf, err}
	}()
	var r reply
	select {
	case r = <-replied:
	case <-ctx.Done():
		_ = c.Close()
		<-replied
		return fmt.Errorf("qmp: %s: %w", command, ctx.Err())
	}
	if r.err != nil {
		var syntax *json.SyntaxError
		var netErr net.Error
		var opErr *net.OpError
		if errors.As(r.err, &syntax) || errors.As(r.err, &netErr) || errors.As(r.err, &opErr) || c.isClosed() {
			return fmt.Errorf("qmp: %s: %w (%v)", command, ErrClosed, r.err)
		}
		return &CommandError{Command: command, Desc: r.err.Error()}
	}
	if out == nil {
		return nil
	}
	var env struct {
		Return json.RawMessage `json:"return"`
	}
	if err := json.Unmarshal(r.buf, &env); err != nil {
		return fmt.Errorf("qmp: reply to %s: %w", command, err)
	}
	if err := json.Unmarshal(env.Return, out); err != nil {
		return fmt.Errorf("qmp: reply to %s: %w", command, err)
	}
	return nil
}

func (c *Client) isClosed() bool {
	select {
	case <-c.done:
		return true
	default:
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closed
}

// Close ends the connection and joins its goroutine. Idempotent. QEMU keeps running.
func (c *Client) Close() error {
	c.mu.Lock()
	already := c.closed
	c.closed = true
	c.mu.Unlock()
	if !already {
		// An error only means that the other side closed first.
		_ = c.mon.Disconnect()
	}
	<-c.done
	return nil
}
