package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/hypervisor/localsocket"
)

// State describes a cluster that stays.
type State struct {
	Name      string    `json:"name"`
	State     string    `json:"state"` // starting, up, failed, ended
	Error     string    `json:"error,omitempty"`
	Hosts     int       `json:"hosts,omitempty"`
	VMs       []string  `json:"vms"`
	Kernel    string    `json:"kernel,omitempty"`
	Directory string    `json:"directory,omitempty"` // mounted in the VMs
	Since     time.Time `json:"since,omitzero"`
}

// Up runs `vnicd ARGS...`, which must call Serve, in namespaces of its own, and returns when the cluster is up, which
// then stays until Down. If ctx ends first, or this process dies, nothing stays. Up takes over the place.
func Up(ctx context.Context, s *Spec, p *Place, args []string, log io.Writer) error {
	remove := p.Remove
	defer func() { _ = remove() }()
	socket, err := p.bind()
	if err != nil {
		return err
	}
	defer socket.Close()
	out, err := os.OpenFile(filepath.Join(p.path, logFile), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer out.Close()
	in, err := os.Open(out.Name())
	if err != nil {
		return err
	}
	defer in.Close()
	stays := *s
	stays.Stay = true
	e, err := start(&stays, args, nil, out, out, socket, p.dir)
	if err != nil {
		return err
	}
	defer e.close()
	type answer struct {
		r   result
		err error
	}
	answers := make(chan answer, 1)
	go func() {
		r, err := e.result(nil) // at the latest when the process ends
		answers <- answer{r, err}
	}()
	t := time.NewTicker(100 * time.Millisecond)
	defer t.Stop()
	for {
		select {
		case <-t.C:
			_, _ = io.Copy(log, in)
		case a := <-answers:
			_, _ = io.Copy(log, in)
			if a.err != nil {
				e.interrupt()
				_, _ = io.Copy(log, in)
				return a.err
			}
			if err := json.NewEncoder(e.control).Encode(release{Stay: true}); err != nil {
				e.interrupt()
				return err
			}
			remove = p.Close
			return nil
		case <-ctx.Done():
			e.interrupt()
			_, _ = io.Copy(log, in)
			return ErrInterrupted
		}
	}
}

// Exec runs a command in a cluster that stays, with the descriptors in, out and errOut, and returns its exit status. It
// begins in this process's current directory if that is mounted in the VMs. If ctx ends, so does the command. In the
// background of a terminal it has no input.
func Exec(ctx context.Context, name string, cmd *Command, in, out, errOut *os.File) (int, error) {
	if err := cmd.Validate(); err != nil {
		return 0, err
	}
	p, err := find(name)
	if err != nil {
		return 0, err
	}
	defer p.Close()
	conn, err := p.dial()
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	dir, err := os.Getwd()
	if err == nil {
		dir, err = filepath.EvalSymlinks(dir)
	}
	if err != nil {
		return 0, err
	}
	if background(in) {
		if in, err = os.Open(os.DevNull); err != nil {
			return 0, err
		}
		defer in.Close()
	}
	defer keepTerminal(in)()
	if err := send(conn, &request{Job: cmd, Dir: dir}, in, out, errOut); err != nil {
		return 0, err
	}
	resized := make(chan os.Signal, 1)
	signal.Notify(resized, unix.SIGWINCH)
	defer signal.Stop(resized)
	var r result
	answered := make(chan error, 1)
	go func() { answered <- json.NewDecoder(conn).Decode(&r) }()
	for {
		select {
		case <-resized:
			_ = json.NewEncoder(conn).Encode(resize{})
		case err := <-answered:
			if err != nil {
				return 0, fmt.Errorf("lab %q has ended: %w", name, err)
			}
			if r.Error != "" {
				return 0, errors.New(r.Error)
			}
			return r.Status, nil
		case <-ctx.Done():
			_ = conn.CloseWrite()
			select {
			case <-answered:
			case <-time.After(endTime):
			}
			return 0, ErrInterrupted
		}
	}
}

// background reports whether f is this session's terminal, and this process in its background. The kernel stops such a
// process when it reads, but not the ssh of a job, which belongs to no session of this terminal: it would take what is
// typed for others. And whoever changes the terminal's settings is stopped.
func background(f *os.File) bool {
	foreground, err := unix.IoctlGetInt(int(f.Fd()), unix.TIOCGPGRP)
	return err == nil && foreground != unix.Getpgrp()
}

// keepTerminal returns a function that restores the settings of a terminal, which a killed ssh leaves changed.
func keepTerminal(f *os.File) (restore func()) {
	fd := int(f.Fd())
	was, err := unix.IoctlGetTermios(fd, unix.TCGETS)
	if err != nil {
		return func() {}
	}
	return func() { _ = unix.IoctlSetTermios(fd, unix.TCSETS, was) }
}

// downTime bounds the time for keeping the logs of a cluster, and for its end.
const downTime = 5 * time.Minute

// Down ends a cluster that stays and removes all that it has left. note says what its user should know.
func Down(ctx context.Context, name string) (note string, err error) {
	p, err := find(name)
	if err != nil {
		return "", err
	}
	conn, err := p.dial()
	if errors.Is(err, errBusy) && p.lockWithin(lookTime) == nil { // it was the end of one that was killed
		err = errEnded
	}
	if errors.Is(err, errEnded) {
		return fmt.Sprintf("lab %q %v", name, errEnded), p.Remove()
	}
	if err != nil {
		return "", errors.Join(err, p.Close())
	}
	defer conn.Close()
	// The process that listens, which is the first of the cluster's PID namespace; the others end with it.
	peer, err := localsocket.PeerOf(conn)
	if err != nil {
		return "", errors.Join(err, p.Close())
	}
	process, err := os.FindProcess(peer.PID)
	if err != nil {
		return "", errors.Join(err, p.Close())
	}
	defer func() { _ = process.Release() }()
	if err := send(conn, &request{Down: true}); err != nil {
		return "", errors.Join(err, p.Close())
	}
	var r result
	answered := make(chan error, 1)
	go func() { answered <- json.NewDecoder(conn).Decode(&r) }()
	select {
	case <-answered: // an error is its end
	case <-time.After(downTime):
	case <-ctx.Done():
		return "", errors.Join(ErrInterrupted, p.Close())
	}
	err = p.lockWithin(endTime)
	if errors.Is(err, unix.EWOULDBLOCK) {
		_ = process.Kill()
		err = p.lockWithin(endTime)
	}
	switch {
	case errors.Is(err, errGone): // `up` removes it, too, or another `down`
		err = p.Close()
	case err != nil:
		err = errors.Join(fmt.Errorf("lab %q: process %d does not end: %w", name, peer.PID, err), p.Close())
	default:
		err = p.Remove()
	}
	var notes []string
	if r.Error != "" && r.Error != errDown.Error() {
		notes = append(notes, r.Error)
	}
	if r.Logs != "" {
		notes = append(notes, "logs: "+r.Logs)
	}
	return strings.Join(notes, "; "), err
}

// List returns this user's clusters that stay, by name.
func List() ([]State, error) {
	list := []State{}
	for _, parent := range parents() {
		entries, err := os.ReadDir(parent)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			p, err := openPlace(parent, e.Name())
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				return nil, err
			}
			if s, there := p.state(); there {
				list = append(list, s)
			}
			_ = p.Close()
		}
	}
	slices.SortFunc(list, func(a, b State) int { return strings.Compare(a.Name, b.Name) })
	return list, nil
}

// state asks the cluster for its state, unless it has been removed.
func (p *Place) state() (s State, there bool) {
	conn, err := p.dial()
	if err == nil {
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(requestTime))
		err = errors.Join(send(conn, &request{}), json.NewDecoder(conn).Decode(&s))
	}
	s.Name = p.Name
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return s, false
	case errors.Is(err, errBusy):
		s.State = "starting"
	case errors.Is(err, errEnded):
		s.State, s.Error = "ended", errEnded.Error()
	case err != nil:
		s.State, s.Error = "failed", err.Error()
	}
	return s, true
}
