package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/vnicd/vnicd/hypervisor/qemu"
)

// job is a command with what its caller gives it.
type job struct {
	Command
	dir            string // where it begins
	stdin          io.Reader
	stdout, stderr io.Writer
	// id, if set, is unique in the cluster, which outlives the job: a job that is cancelled must end in its VMs, too.
	id string
	// resized, if set, reports changes of the size of the terminal that is stdin.
	resized <-chan struct{}
}

// jobVariable has the id of the job in the environment of its processes in the VMs.
const jobVariable = "VNICD_LAB_JOB"

// command runs a job on a VM, or on all, and returns its exit status: of several, that of the VM with the lowest rank
// that is not 0. A VM that ends is an error.
func (c *cluster) command(ctx context.Context, j *job) (int, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	first, err := c.vm(j.VM)
	if err != nil {
		return 0, err
	}
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
	if j.Each {
		var mu sync.Mutex
		err = c.all(func(v *vm) (err error) {
			each := *j
			out := &prefixed{mu: &mu, to: j.stdout, prefix: v.name}
			errOut := &prefixed{mu: &mu, to: j.stderr, prefix: v.name}
			each.stdin, each.stdout, each.stderr = nil, out, errOut
			status[v.rank], err = c.ssh(ctx, v, &each)
			return errors.Join(err, out.flush(), errOut.flush())
		})
	} else {
		status[0], err = c.ssh(ctx, first, j)
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

// vm returns the VM of a name; "": the first.
func (c *cluster) vm(name string) (*vm, error) {
	for _, v := range c.vms {
		if name == "" || v.name == name {
			return v, nil
		}
	}
	return nil, fmt.Errorf("no VM %q: want vm1 to vm%d", name, len(c.vms))
}

// ssh runs the job's command on one VM and returns its exit status. If ctx ends first, the error is that of ctx.
func (c *cluster) ssh(ctx context.Context, v *vm, j *job) (int, error) {
	argv := []string{"ssh", "-F", c.keys.clientFile()}
	if len(j.Argv) == 0 {
		argv = append(argv, "-tt")
	}
	env := j.Env
	if j.id != "" {
		env = append(slices.Clone(env), jobVariable+"="+j.id)
	}
	argv = v.host.NS.Argv(append(argv, v.addr.Addr().String(), "--", remote(j.dir, env, j.Argv)))
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = j.stdin, j.stdout, j.stderr
	cmd.WaitDelay = 5 * time.Second
	if j.id != "" {
		cmd.Cancel = func() error { return c.endJob(v, j.id, cmd.Process) }
	}
	err := cmd.Start()
	if err != nil {
		return 0, err
	}
	done := make(chan struct{})
	go func() {
		for {
			select {
			case <-j.resized:
				_ = cmd.Process.Signal(syscall.SIGWINCH)
			case <-done:
				return
			}
		}
	}()
	err = cmd.Wait()
	close(done)
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		return 0, ctx.Err()
	case errors.As(err, &exit) && exit.Exited():
		return exit.ExitCode(), nil
	}
	return 0, err
}

// endJob ends the processes of a job in a VM, then its ssh. sshd ends a command by itself only if that has a terminal.
func (c *cluster) endJob(v *vm, id string, ssh *os.Process) error {
	ctx, cancel := context.WithTimeout(context.Background(), endTime/2)
	defer cancel()
	_, _ = v.Run(ctx, fmt.Sprintf(`for e in $(grep -lszx '%s=%s' /proc/[0-9]*/environ); do p=${e%%/environ}; `+
		`kill -s TERM "${p#/proc/}"; done; true`, jobVariable, id))
	return ssh.Signal(syscall.SIGTERM)
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
