package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"
)

// ErrInterrupted reports that the caller's context ended first.
var ErrInterrupted = errors.New("interrupted")

// endTime bounds the end of an interrupted cluster. Then the kernel ends it.
const endTime = 30 * time.Second

// Descriptors of Serve: it reads the Spec from the first, whose end of file ends the cluster unless it has been
// released, and writes its result to the second. A cluster that stays has the other two: a socket that is bound, and
// the socket's directory, which is locked as long as the cluster exists.
const (
	controlFD = 3
	resultFD  = 4
	socketFD  = 5
	placeFD   = 6
)

// result is how Serve, a command or a request ended.
type result struct {
	Status int    // of the command
	Error  string // why there is no status; "": there is one
	Logs   string // directory of the logs that were kept; "": none
}

// release is what the caller of a cluster that stays writes after the Spec: the cluster no longer ends with the caller.
type release struct{ Stay bool }

// engine is the process that runs Serve, seen by its caller.
type engine struct {
	process *os.Process
	control *os.File
	results *os.File
	ended   chan error // has the process's end, once
	sent    error      // of the Spec
}

// start runs `vnicd ARGS...`, which must call Serve, in namespaces of its own. files are its descriptors from socketFD
// on, which it has if it stays; then it is not in the caller's session, whose signals it does not get.
func start(s *Spec, args []string, stdin io.Reader, stdout, stderr io.Writer, files ...*os.File) (*engine, error) {
	theirControl, control, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	results, theirResults, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(err, theirControl.Close(), control.Close())
	}
	cmd := exec.Command(filepath.Join(s.Recipes, "rootless"), append([]string{"--private", s.VNICD}, args...)...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, stdout, stderr
	cmd.ExtraFiles = append([]*os.File{theirControl, theirResults}, files...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: len(files) > 0}
	// /run is a file system of these namespaces.
	cmd.Env = append(append(os.Environ(), s.imageEnv()...), "TMPDIR=/run")
	cmd.WaitDelay = time.Second
	err = cmd.Start()
	_, _ = theirControl.Close(), theirResults.Close()
	e := &engine{process: cmd.Process, control: control, results: results, ended: make(chan error, 1)}
	if err != nil {
		e.close()
		return nil, err
	}
	go func() { e.ended <- cmd.Wait() }()
	e.sent = json.NewEncoder(control).Encode(s)
	return e, nil
}

func (e *engine) close() { _, _ = e.control.Close(), e.results.Close() }

// interrupt ends the cluster and waits for that.
func (e *engine) interrupt() {
	_ = e.control.Close()
	select {
	case <-e.ended:
	case <-time.After(endTime):
		_ = e.process.Kill() // unshare --kill-child: the first process of the PID namespace dies with it
		<-e.ended
	}
}

// result returns what Serve has written. err is how its process ended, for the error if it has written nothing.
func (e *engine) result(err error) (result, error) {
	var r result
	if json.NewDecoder(e.results).Decode(&r) != nil {
		if err = errors.Join(err, e.sent); err == nil {
			err = io.ErrUnexpectedEOF
		}
		return r, fmt.Errorf("the lab did not start, or ended by itself: %w", err)
	}
	if r.Error != "" {
		return r, errors.New(r.Error)
	}
	return r, nil
}

// Enter runs `vnicd ARGS...`, which must call Serve, in namespaces of its own, and returns the command's exit status.
// If ctx ends, it waits until the cluster has been removed and returns ErrInterrupted. When this process dies, so does
// the cluster.
func Enter(ctx context.Context, s *Spec, args []string, stdin io.Reader, stdout, stderr io.Writer) (int, error) {
	e, err := start(s, args, stdin, stdout, stderr)
	if err != nil {
		return 0, err
	}
	defer e.close()
	select {
	case err = <-e.ended:
	case <-ctx.Done():
		e.interrupt()
		return 0, ErrInterrupted
	}
	r, err := e.result(err)
	return r.Status, err
}

// Serve makes a cluster in the namespaces that Enter or Up has made, runs its command or those that it is asked for,
// and removes it.
func Serve(stdin io.Reader, stdout, stderr io.Writer) error {
	if os.Getpid() != 1 {
		return errors.New("this command is part of `vnicd lab run`, which starts it in namespaces of its own")
	}
	syscall.CloseOnExec(controlFD)
	syscall.CloseOnExec(resultFD)
	control, results := os.NewFile(controlFD, "control"), os.NewFile(resultFD, "results")
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	in := json.NewDecoder(control)
	var s Spec
	if err := in.Decode(&s); err != nil {
		return fmt.Errorf("reading the lab's description: %w", err)
	}
	var d *door
	if s.Stay {
		syscall.CloseOnExec(socketFD)
		syscall.CloseOnExec(placeFD)
		var err error
		if d, err = openDoor(&s, cancel, results); err != nil {
			return err
		}
		defer d.close()
	}
	go func() {
		var rel release
		if in.Decode(&rel) != nil || !rel.Stay {
			cancel(ErrInterrupted)
		}
	}()
	r, err := s.serve(ctx, d, stdin, stdout, stderr)
	if err != nil {
		r.Error = err.Error()
	}
	if d != nil {
		d.finish(r)
	}
	err = json.NewEncoder(results).Encode(r)
	if d != nil && d.isReady() {
		return nil // nobody reads it any more
	}
	return err
}
