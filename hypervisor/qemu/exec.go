package qemu

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
)

// Result is the outcome of a finished guest command.
type Result struct {
	Stdout, Stderr string
	ExitCode       int // 0..255, or 128 + the signal that killed it
}

// ExitError reports a guest command with an exit status other than 0.
type ExitError struct {
	Command string
	Result  Result
}

func (e *ExitError) Error() string {
	s := fmt.Sprintf("guest command %q: exit status %d", e.Command, e.Result.ExitCode)
	if t := strings.TrimSpace(e.Result.Stderr); t != "" {
		s += ": " + tail(t, 2000)
	} else if t := strings.TrimSpace(e.Result.Stdout); t != "" {
		s += ": " + tail(t, 2000)
	}
	return s
}

func tail(s string, n int) string {
	if len(s) > n {
		return "..." + s[len(s)-n:]
	}
	return s
}

// ErrTruncated reports a command with more output than the agent keeps (16 MiB per stream).
var ErrTruncated = errors.New("guest agent: output is longer than 16 MiB")

// Command is a program to run in the guest, as root.
type Command struct {
	Argv  []string // program (found through PATH) and arguments
	Stdin []byte
	Env   []string // KEY=VALUE, added to the agent's environment
}

// Process is a running guest command. It stays valid until the guest reboots.
type Process struct {
	a    *agent
	pid  int
	name string
}

// PID is the process id in the guest, and the id of its session and process group.
func (p *Process) PID() int { return p.pid }

type execStatus struct {
	Exited       bool   `json:"exited"`
	ExitCode     int    `json:"exitcode"`
	Signal       int    `json:"signal"`
	Out          []byte `json:"out-data"`
	Err          []byte `json:"err-data"`
	OutTruncated bool   `json:"out-truncated"`
	ErrTruncated bool   `json:"err-truncated"`
}

// start runs cmd in a new session, so that Kill reaches its children, too.
func (a *agent) start(ctx context.Context, cmd Command) (*Process, error) {
	if len(cmd.Argv) == 0 || cmd.Argv[0] == "" {
		return nil, errors.New("guest command: no program given")
	}
	args := map[string]any{"path": "/usr/bin/setsid", "arg": cmd.Argv, "capture-output": true}
	// With env the agent starts the program with an empty environment; env(1) adds to the agent's instead.
	if len(cmd.Env) > 0 {
		args["arg"] = append(append([]string{"/usr/bin/env"}, cmd.Env...), cmd.Argv...)
	}
	if len(cmd.Stdin) > 0 {
		args["input-data"] = cmd.Stdin // encodes as base64
	}
	var r struct {
		PID int `json:"pid"`
	}
	if err := a.call(ctx, "guest-exec", args, &r); err != nil {
		return nil, err
	}
	if r.PID <= 0 {
		return nil, fmt.Errorf("guest agent: guest-exec returned pid %d", r.PID)
	}
	return &Process{a: a, pid: r.PID, name: strings.Join(cmd.Argv, " ")}, nil
}

// Wait waits until the command has ended and no process holds its output open. It may be called once per process: the
// agent forgets a process after reporting its end.
func (p *Process) Wait(ctx context.Context) (Result, error) {
	pause := 5 * time.Millisecond
	for {
		var st execStatus
		if err := p.a.call(ctx, "guest-exec-status", map[string]int{"pid": p.pid}, &st); err != nil {
			return Result{}, err
		}
		if st.Exited {
			r := Result{Stdout: string(st.Out), Stderr: string(st.Err), ExitCode: st.ExitCode}
			if st.Signal != 0 {
				r.ExitCode = 128 + st.Signal
			}
			if st.OutTruncated || st.ErrTruncated {
				return r, fmt.Errorf("guest command %q: %w", p.name, ErrTruncated)
			}
			return r, nil
		}
		// Polling uses the guest's CPU and would disturb a benchmark.
		select {
		case <-time.After(pause):
		case <-p.a.done:
		case <-ctx.Done():
		}
		pause = min(pause*3/2, 250*time.Millisecond)
	}
}

// Signal sends a signal (by name, "KILL") to the command and its children. It is not an error if they have ended.
func (p *Process) Signal(ctx context.Context, sig string) error {
	k, err := p.a.start(ctx, Command{Argv: []string{"kill", "-s", sig, "--", fmt.Sprintf("-%d", p.pid)}})
	if err != nil {
		return err
	}
	_, err = k.Wait(ctx)
	return err
}

// Kill ends the command and its children.
func (p *Process) Kill(ctx context.Context) error { return p.Signal(ctx, "KILL") }

// killGrace bounds the time to kill a command whose context ended.
const killGrace = 10 * time.Second

// exec runs cmd to its end; if ctx ends first, it kills cmd.
func (a *agent) exec(ctx context.Context, cmd Command) (Result, error) {
	p, err := a.start(ctx, cmd)
	if err != nil {
		return Result{}, err
	}
	r, err := p.Wait(ctx)
	if err != nil && ctx.Err() != nil {
		late, cancel := context.WithTimeout(context.WithoutCancel(ctx), killGrace)
		defer cancel()
		if kerr := p.Kill(late); kerr == nil {
			// Collect its output, the best hint at why it hung.
			if lr, werr := p.Wait(late); werr == nil {
				r = lr
			}
		}
		return r, fmt.Errorf("guest command %q: %w; so far: %s", p.name, ctx.Err(), tail(r.Stdout+r.Stderr, 1000))
	}
	return r, err
}

// fileChunk is the size of the parts in which files are transferred.
const fileChunk = 256 << 10

// writeFile creates or replaces a file in the guest.
func (a *agent) writeFile(ctx context.Context, path string, data []byte) (err error) {
	var h int64
	if err := a.call(ctx, "guest-file-open", map[string]string{"path": path, "mode": "w"}, &h); err != nil {
		return err
	}
	defer func() {
		if cerr := a.call(ctx, "guest-file-close", map[string]int64{"handle": h}, nil); err == nil {
			err = cerr
		}
	}()
	for len(data) > 0 {
		n := min(len(data), fileChunk)
		var r struct {
			Count int `json:"count"`
		}
		if err := a.call(ctx, "guest-file-write", map[string]any{"handle": h, "buf-b64": data[:n]}, &r); err != nil {
			return err
		}
		if r.Count <= 0 || r.Count > n {
			return fmt.Errorf("guest agent: guest-file-write wrote %d of %d bytes", r.Count, n)
		}
		data = data[r.Count:]
	}
	return nil
}

// readFile reads at most limit bytes of a guest file; a longer file is an error.
func (a *agent) readFile(ctx context.Context, path string, limit int) ([]byte, error) {
	var h int64
	if err := a.call(ctx, "guest-file-open", map[string]string{"path": path, "mode": "r"}, &h); err != nil {
		return nil, err
	}
	defer func() { _ = a.call(ctx, "guest-file-close", map[string]int64{"handle": h}, nil) }()
	var data []byte
	for {
		var r struct {
			Buf []byte `json:"buf-b64"`
			EOF bool   `json:"eof"`
		}
		if err := a.call(ctx, "guest-file-read", map[string]int64{"handle": h, "count": fileChunk}, &r); err != nil {
			return nil, err
		}
		data = append(data, r.Buf...)
		if len(data) > limit {
			return nil, fmt.Errorf("guest file %s is longer than %d bytes", path, limit)
		}
		if r.EOF || len(r.Buf) == 0 {
			return data, nil
		}
	}
}
