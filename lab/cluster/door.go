package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/hypervisor/localsocket"
	"github.com/vnicd/vnicd/hypervisor/qemu"
)

// request is what a client of a cluster that stays asks for, in JSON, after one byte that carries the descriptors of a
// job: stdin, stdout, stderr. The answer is a result, or a State. The end of the connection ends a job.
type request struct {
	Down bool     // end the cluster
	Job  *Command // run this
	Dir  string   // the job's caller's current directory
	// Neither: the State.
}

// resize follows the request of a job whenever the size of its terminal has changed.
type resize struct{}

// requestTime bounds the time that a client has for its request, and that for the answer.
const requestTime = 10 * time.Second

var (
	errDown   = errors.New("ended by `vnicd lab down`")
	errPlace  = errors.New("the lab's directory was removed")
	errNotYet = errors.New("the lab is not up yet: wait for its `vnicd lab up`")
)

// door is where a cluster that stays serves its clients.
type door struct {
	spec    *Spec
	ln      *net.UnixListener
	place   *os.File
	results io.Writer               // to Up
	end     context.CancelCauseFunc // ends the cluster while it is made
	since   time.Time
	jobs    atomic.Uint64 // that have begun

	down     chan struct{} // closed when the end has been asked for
	downOnce sync.Once
	finished chan struct{} // closed when last is set
	last     result
	handlers sync.WaitGroup

	mu  sync.Mutex
	c   *cluster        // nil: not up yet
	ctx context.Context // of jobs
}

// openDoor serves the socket that this process has inherited.
func openDoor(s *Spec, end context.CancelCauseFunc, results io.Writer) (*door, error) {
	if err := unix.Listen(socketFD, 64); err != nil {
		return nil, fmt.Errorf("listening on the lab's socket: %w", err)
	}
	f := os.NewFile(socketFD, socketFile)
	l, err := net.FileListener(f)
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, err
	}
	d := newDoor(s, l.(*net.UnixListener), os.NewFile(placeFD, "place"), end, results)
	go d.accept()
	return d, nil
}

func newDoor(s *Spec, ln *net.UnixListener, place *os.File, end context.CancelCauseFunc, results io.Writer) *door {
	ln.SetUnlinkOnClose(false)
	return &door{spec: s, ln: ln, place: place, end: end, results: results, since: time.Now(),
		down: make(chan struct{}), finished: make(chan struct{})}
}

func (d *door) accept() {
	for {
		conn, err := d.ln.AcceptUnix()
		if err != nil {
			return
		}
		d.handlers.Go(func() { d.handle(conn) })
	}
}

// attend serves requests until the cluster is to end. An error is what failed in it.
func (d *door) attend(ctx context.Context, c *cluster) error {
	jobs, cancel := context.WithCancelCause(ctx)
	d.mu.Lock()
	d.c, d.ctx = c, jobs
	d.mu.Unlock()
	defer cancel(errDown)
	if err := json.NewEncoder(d.results).Encode(result{}); err != nil {
		d.end(ErrInterrupted)
	}
	// The directory of a user's login is removed with the last login. Without it nobody could end the cluster.
	t := time.NewTicker(time.Second)
	defer t.Stop()
	for {
		select {
		case <-t.C:
			var st unix.Stat_t
			if err := unix.Fstatat(int(d.place.Fd()), socketFile, &st, 0); errors.Is(err, unix.ENOENT) {
				d.end(errPlace)
			}
		case <-d.down:
			return c.failed()
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// isReady reports whether the cluster has been up.
func (d *door) isReady() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.c != nil
}

// finish answers those who wait for the end.
func (d *door) finish(r result) {
	_ = d.ln.Close()
	d.last = r
	close(d.finished)
	d.handlers.Wait()
}

func (d *door) close() { _ = d.ln.Close() }

// failed reports the VMs that have ended.
func (c *cluster) failed() error {
	var errs []error
	for _, v := range c.vms {
		select {
		case <-v.Done():
			errs = append(errs, fmt.Errorf("VM %s: %w", v.name, qemu.ErrEnded))
		default:
		}
	}
	return errors.Join(errs...)
}

// handle serves one client.
func (d *door) handle(conn *net.UnixConn) {
	defer conn.Close()
	// The directory's mode says the same.
	if p, err := localsocket.PeerOf(conn); err != nil || p.UID != os.Getuid() {
		return
	}
	_ = conn.SetReadDeadline(time.Now().Add(requestTime))
	files, err := receive(conn)
	defer func() {
		for _, f := range files {
			_ = f.Close()
		}
	}()
	in := json.NewDecoder(conn)
	var q request
	if err == nil {
		err = in.Decode(&q)
	}
	var answer any
	switch {
	case err != nil:
		answer = result{Error: "a request that is not understood: " + err.Error()}
	case q.Down:
		d.downOnce.Do(func() { close(d.down) })
		if !d.isReady() {
			d.end(errDown)
		}
		<-d.finished
		answer = d.last
	case q.Job != nil && len(files) != 3:
		answer = result{Error: fmt.Sprintf("a job with %d descriptors: want 3", len(files))}
	case q.Job != nil:
		_ = conn.SetReadDeadline(time.Time{})
		answer = d.run(in, &q, files)
	default:
		answer = d.state()
	}
	_ = conn.SetWriteDeadline(time.Now().Add(requestTime))
	_ = json.NewEncoder(conn).Encode(answer)
}

// run runs a job.
func (d *door) run(in *json.Decoder, q *request, files []*os.File) (r result) {
	d.mu.Lock()
	c, ctx := d.c, d.ctx
	d.mu.Unlock()
	if c == nil {
		return result{Error: errNotYet.Error()}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	resized := make(chan struct{}, 1)
	go func() {
		var m resize
		for in.Decode(&m) == nil {
			select {
			case resized <- struct{}{}:
			default:
			}
		}
		cancel(ErrInterrupted)
	}()
	j := &job{Command: *q.Job, dir: d.spec.Dir, stdin: files[0], stdout: files[1], stderr: files[2],
		id: strconv.FormatUint(d.jobs.Add(1), 10), resized: resized}
	if within(q.Dir, j.dir) {
		j.dir = q.Dir
	}
	j.Env = slices.Concat(d.spec.Env, j.Env)
	var err error
	if r.Status, err = c.command(ctx, j); err != nil {
		r.Error = err.Error()
	}
	return r
}

// state returns the cluster's state.
func (d *door) state() State {
	o := &d.spec.Options
	s := State{State: "starting", Hosts: o.Hosts, Kernel: o.Kernel, Directory: o.Dir, Since: d.since}
	for _, v := range vmsOf(plan(o.Hosts, o.VMsPerHost)) {
		s.VMs = append(s.VMs, v.name)
	}
	d.mu.Lock()
	c := d.c
	d.mu.Unlock()
	if c == nil {
		return s
	}
	s.State = "up"
	if err := c.failed(); err != nil {
		s.State, s.Error = "failed", err.Error()
	}
	return s
}

// receive reads the first byte of a request, with its descriptors.
func receive(conn *net.UnixConn) (files []*os.File, err error) {
	b, oob := make([]byte, 1), make([]byte, unix.CmsgSpace(3*4))
	n, oobn, _, _, err := conn.ReadMsgUnix(b, oob)
	if err != nil || n != 1 {
		return nil, errors.Join(err, io.ErrUnexpectedEOF)
	}
	msgs, err := unix.ParseSocketControlMessage(oob[:oobn])
	for i := range msgs {
		fds, rerr := unix.ParseUnixRights(&msgs[i])
		err = errors.Join(err, rerr)
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "descriptor of a job"))
		}
	}
	return files, err
}

// send sends a request.
func send(conn *net.UnixConn, q *request, files ...*os.File) error {
	var rights []byte
	if len(files) > 0 {
		var fds []int
		for _, f := range files {
			fds = append(fds, int(f.Fd()))
		}
		rights = unix.UnixRights(fds...)
	}
	if _, _, err := conn.WriteMsgUnix([]byte("\n"), rights, nil); err != nil {
		return err
	}
	return json.NewEncoder(conn).Encode(q)
}
