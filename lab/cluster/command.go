package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"sync"
	"time"

	"github.com/vnicd/vnicd/hypervisor/qemu"
)

// command runs the command on the first VM, or on all, and returns its exit status: of several, that of the VM with the
// lowest rank that is not 0. A VM that ends is an error.
func (c *cluster) command(ctx context.Context, stdin io.Reader, stdout, stderr io.Writer) (int, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	for _, v := range c.vms {
		go func() {
			select {
			case <-v.Done():
				cancel(fmt.Errorf("VM %s: %w", v.name, qemu.ErrEnded))
			case <-ctx.Done():
			}
		}()
	}
	status := make([]int, len(c.vms))
	var err error
	if c.Each {
		var mu sync.Mutex
		err = c.all(func(v *vm) (err error) {
			out, errOut := &prefixed{mu: &mu, to: stdout, prefix: v.name}, &prefixed{mu: &mu, to: stderr, prefix: v.name}
			status[v.rank], err = c.ssh(ctx, v, nil, out, errOut)
			return errors.Join(err, out.flush(), errOut.flush())
		})
	} else {
		status[0], err = c.ssh(ctx, c.vms[0], stdin, stdout, stderr)
	}
	if ctx.Err() != nil {
		return 0, context.Cause(ctx)
	}
	for _, s := range status {
		if s != 0 {
			return s, err
		}
	}
	return 0, err
}

// ssh runs the command on one VM and returns its exit status. If ctx ends first, the error is that of ctx.
func (c *cluster) ssh(ctx context.Context, v *vm, stdin io.Reader, stdout, stderr io.Writer) (int, error) {
	argv := []string{"ssh", "-F", c.keys.clientFile()}
	if len(c.Command) == 0 {
		argv = append(argv, "-tt")
	}
	argv = v.host.NS.Argv(append(argv, v.addr.Addr().String(), "--", remote(c.Dir, c.Env, c.Command)))
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, stdout, stderr
	cmd.WaitDelay = 5 * time.Second
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		return 0, ctx.Err()
	case errors.As(err, &exit) && exit.Exited():
		return exit.ExitCode(), nil
	}
	return 0, err
}

// remote returns the line that runs a command, or an interactive shell, in dir. Its shell outlives the command, because
// ssh does not pass on that a signal ended it; the status is then 128 plus the signal's number.
func remote(dir string, env, argv []string) string {
	line := "cd " + quote(dir) + " &&"
	for _, v := range env {
		name, value, _ := strings.Cut(v, "=")
		line += " export " + name + "=" + quote(value) + " &&"
	}
	if len(argv) == 0 {
		return line + " exec bash -l"
	}
	for _, w := range argv {
		line += " " + quote(w)
	}
	return line + "; exit $?"
}

// maxLine bounds the lines that prefixed keeps together, in bytes.
const maxLine = 64 << 10

// prefixed writes whole lines with a prefix to a writer that others use, too.
type prefixed struct {
	mu     *sync.Mutex // guards to
	to     io.Writer
	prefix string
	line   []byte // begun
}

// Write writes the lines that are complete.
func (p *prefixed) Write(b []byte) (int, error) {
	n := len(b)
	for len(b) > 0 {
		end := bytes.IndexByte(b, '\n') + 1
		if end == 0 {
			end = len(b)
		}
		end = min(end, maxLine-len(p.line))
		p.line = append(p.line, b[:end]...)
		b = b[end:]
		if p.line[len(p.line)-1] == '\n' || len(p.line) == maxLine {
			if err := p.flush(); err != nil {
				return 0, err
			}
		}
	}
	return n, nil
}

// flush writes the line that was begun.
func (p *prefixed) flush() error {
	if len(p.line) == 0 {
		return nil
	}
	line := fmt.Appendf(nil, "%s: %s\n", p.prefix, bytes.TrimSuffix(p.line, []byte("\n")))
	p.line = p.line[:0]
	p.mu.Lock()
	defer p.mu.Unlock()
	_, err := p.to.Write(line)
	return err
}
