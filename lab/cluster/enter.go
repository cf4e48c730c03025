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

// Descriptors of Serve: it reads the Spec from the first, whose end of file ends the cluster, and writes its result to
// the second.
const (
	controlFD = 3
	resultFD  = 4
)

// result is how Serve ended.
type result struct {
	Status int    // of the command
	Error  string // why there is no status; "": there is one
}

// Enter runs `vnicd ARGS...`, which must call Serve, in namespaces of its own, and returns the command's exit status.
// If ctx ends, it waits until the cluster has been removed and returns ErrInterrupted. When this process dies, so does
// the cluster.
func Enter(ctx context.Context, s *Spec, args []string, stdin io.Reader, stdout, stderr io.Writer) (int, error) {
	theirControl, control, err := os.Pipe()
	if err != nil {
		return 0, err
	}
	defer control.Close()
	results, theirResults, err := os.Pipe()
	if err != nil {
		_ = theirControl.Close()
		return 0, err
	}
	defer results.Close()
	cmd := exec.Command(filepath.Join(s.Recipes, "rootless"), append([]string{"--private", s.VNICD}, args...)...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, stdout, stderr
	cmd.ExtraFiles = []*os.File{theirControl, theirResults}
	// /run is a file system of these namespaces.
	cmd.Env = append(append(os.Environ(), s.imageEnv()...), "TMPDIR=/run")
	cmd.WaitDelay = time.Second
	err = cmd.Start()
	_, _ = theirControl.Close(), theirResults.Close()
	if err != nil {
		return 0, err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	sent := json.NewEncoder(control).Encode(s)
	select {
	case err = <-ended:
	case <-ctx.Done():
		_ = control.Close()
		select {
		case <-ended:
		case <-time.After(endTime):
			_ = cmd.Process.Kill() // unshare --kill-child: the first process of the PID namespace dies with it
			<-ended
		}
		return 0, ErrInterrupted
	}
	var r result
	if json.NewDecoder(results).Decode(&r) != nil {
		return 0, fmt.Errorf("the lab did not start, or ended by itself: %w", errors.Join(err, sent))
	}
	if r.Error != "" {
		return 0, errors.New(r.Error)
	}
	return r.Status, nil
}

// Serve makes a cluster in the namespaces that Enter has made, runs its command, and removes it.
func Serve(stdin io.Reader, stdout, stderr io.Writer) error {
	if os.Getpid() != 1 {
		return errors.New("this command is part of `vnicd lab run`, which starts it in namespaces of its own")
	}
	syscall.CloseOnExec(controlFD)
	syscall.CloseOnExec(resultFD)
	control, results := os.NewFile(controlFD, "control"), os.NewFile(resultFD, "results")
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var s Spec
	if err := json.NewDecoder(control).Decode(&s); err != nil {
		return fmt.Errorf("reading the lab's description: %w", err)
	}
	go func() {
		defer cancel()
		_, _ = io.Copy(io.Discard, control)
	}()
	var r result
	var err error
	if r.Status, err = s.serve(ctx, stdin, stdout, stderr); err != nil {
		r.Error = err.Error()
	}
	return json.NewEncoder(results).Encode(r)
}
