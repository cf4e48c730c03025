package worker

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"
)

// Spawner is the daemon's side of the process that starts workers.
type Spawner struct {
	log     hclog.Logger
	sock    *net.UnixConn
	process *os.Process
	done    sync.WaitGroup
	down    chan struct{} // closed when the process has ended

	mu    sync.Mutex
	next  uint32
	exits map[uint32]chan string // of running workers; capacity 1
}

// startTime is how long the spawner may take to be ready.
const startTime = 20 * time.Second

// Start starts the spawner. It must be called before the daemon forbids itself to start programs.
func Start(log hclog.Logger) (*Spawner, error) {
	c, other, err := pair()
	if err != nil {
		return nil, err
	}
	defer other.Close()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		_ = c.Close()
		return nil, fmt.Errorf("worker: %w", err)
	}
	defer null.Close()
	// No PR_SET_PDEATHSIG: it would follow this thread, not the process. The socket ends with the process.
	p, err := os.StartProcess(self, []string{"vnicd", command, spawnerName}, &os.ProcAttr{
		Env: []string{}, Files: []*os.File{null, null, os.Stderr, other}, Sys: &syscall.SysProcAttr{Setsid: true}})
	if err != nil {
		_ = c.Close()
		return nil, fmt.Errorf("worker: start of the spawner: %w", err)
	}
	s := &Spawner{log: log, sock: c.sock, process: p, down: make(chan struct{}), exits: map[uint32]chan string{}}
	b := make([]byte, pktMax)
	_ = s.sock.SetReadDeadline(time.Now().Add(startTime))
	n, err := s.sock.Read(b)
	if err == nil && (n < pktHeader || b[0] != pktReady) {
		err = errors.New("it answers nonsense")
	}
	_ = s.sock.SetReadDeadline(time.Time{})
	if err != nil {
		_ = p.Kill()
		_, _ = p.Wait()
		_ = s.sock.Close()
		return nil, fmt.Errorf("worker: the spawner is not ready: %w", err)
	}
	s.done.Go(s.read)
	return s, nil
}

// Close ends the spawner. Supervisors must be closed before.
func (s *Spawner) Close() {
	_ = s.sock.Close()
	s.done.Wait()
}

// Ended reports whether the spawner has ended by itself, its workers with it: none can be started again.
func (s *Spawner) Ended() bool {
	select {
	case <-s.down:
		return true
	default:
		return false
	}
}

// read takes the spawner's reports until it ends.
func (s *Spawner) read() {
	b := make([]byte, pktMax)
	for {
		n, err := s.sock.Read(b)
		if err != nil || n < pktHeader || b[0] != pktEnd {
			if !errors.Is(err, net.ErrClosed) {
				s.log.Error("the process that starts workers has ended; workers that end cannot be started again until vnicd is " +
					"restarted")
			}
			break
		}
		s.mu.Lock()
		id := binary.LittleEndian.Uint32(b[1:])
		if exited := s.exits[id]; exited != nil {
			exited <- string(b[pktHeader:n])
			delete(s.exits, id)
		}
		s.mu.Unlock()
	}
	_ = s.sock.Close()
	_, _ = s.process.Wait()
	close(s.down)
}

// start asks for a process. The last of files are its streams. Its end is sent to exited.
func (s *Spawner) start(kind string, level hclog.Level, streams int, files []*os.File) (id uint32, exited chan string,
	err error) {
	if len(files) > maxFiles+2 {
		return 0, nil, fmt.Errorf("worker: %d descriptors, at most %d", len(files)-2, maxFiles)
	}
	var fds []int
	for _, f := range files {
		// Not Fd, which would make the file blocking.
		raw, err := f.SyscallConn()
		if err == nil {
			err = raw.Control(func(fd uintptr) { fds = append(fds, int(fd)) })
		}
		if err != nil {
			return 0, nil, fmt.Errorf("worker: descriptors: %w", err)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.next++
	id, exited = s.next, make(chan string, 1)
	s.exits[id] = exited
	rest := string([]byte{byte(level), byte(streams)}) + kind
	if _, _, err := s.sock.WriteMsgUnix(packet(pktStart, id, rest), unix.UnixRights(fds...), nil); err != nil {
		delete(s.exits, id)
		return 0, nil, fmt.Errorf("worker: start: %w", err)
	}
	return id, exited, nil
}

func (s *Spawner) kill(id uint32) {
	_, _ = s.sock.Write(packet(pktKill, id, "")) // without a spawner there is no worker
}

// Config describes a supervised worker.
type Config struct {
	Kind string
	Log  hclog.Logger // named as the kind
	// Files are passed to each process. They stay the caller's, and must stay open until the Supervisor is closed.
	Files []*os.File
	// Streams is the number of byte streams that each process has besides its connection: Conn.Streams.
	Streams int
	// Serve talks with one process. It returns soon after c has ended (an error of c's) or ctx has, and at once, with an
	// error that says why, if the worker sends what it must not. The process is ended afterwards: killed, or, if ctx has
	// ended, asked to end itself by the end of its connection.
	Serve func(ctx context.Context, c *Conn) error
}

// Pauses before a worker is started again: they double from first to last, and begin anew with one that lived longer
// than steady.
const (
	firstPause = 100 * time.Millisecond
	lastPause  = 30 * time.Second
	steady     = time.Minute
)

// endTime is how long a worker may take to end by itself.
const endTime = 5 * time.Second

// Supervisor keeps one worker.
type Supervisor struct {
	s    *Spawner
	c    Config
	stop context.CancelFunc
	done sync.WaitGroup
}

// Supervise starts a worker, and starts it again whenever it ends, until Close.
func (s *Spawner) Supervise(c Config) *Supervisor {
	ctx, stop := context.WithCancel(context.Background())
	v := &Supervisor{s: s, c: c, stop: stop}
	v.done.Go(func() { v.run(ctx) })
	return v
}

// Close ends the worker and waits for its end. It may be called twice.
func (v *Supervisor) Close() {
	v.stop()
	v.done.Wait()
}

func (v *Supervisor) run(ctx context.Context) {
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		began := time.Now()
		why := v.once(ctx)
		if ctx.Err() != nil {
			return
		}
		if time.Since(began) > steady {
			pause = firstPause
		}
		v.c.Log.Error("worker process ended; it is started again", "why", why, "after", pause)
		select {
		case <-ctx.Done():
			return
		case <-v.s.down:
			v.c.Log.Error("worker process cannot be started again until vnicd is restarted")
			return
		case <-time.After(pause):
		}
	}
}

// once starts a process and returns when it has ended, with the reason.
func (v *Supervisor) once(ctx context.Context) error {
	conn, other, err := pair()
	if err != nil {
		return err
	}
	defer conn.Close()
	defer other.Close()
	logs, logTo, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("worker: %w", err)
	}
	defer logs.Close()
	defer logTo.Close()
	ours, others, err := streams(v.c.Streams)
	conn.Streams = ours
	defer func() {
		for _, s := range ours {
			_ = s.Close()
		}
	}()
	files := slices.Concat([]*os.File{logTo, other}, v.c.Files, others)
	var id uint32
	var exited chan string
	if err == nil {
		id, exited, err = v.s.start(v.c.Kind, v.c.Log.GetLevel(), len(others), files)
	}
	for _, f := range others {
		_ = f.Close()
	}
	if err != nil {
		return err
	}
	_ = other.Close()
	_ = logTo.Close()
	var relay sync.WaitGroup
	relay.Go(func() { relayLog(logs, v.c.Log, time.Now) })
	defer relay.Wait()
	// Lines that the process wrote before its end are there; nobody else has the pipe.
	defer func() { _ = logs.SetReadDeadline(time.Now().Add(time.Second)) }()

	served := make(chan error, 1)
	relay.Go(func() { served <- v.c.Serve(ctx, conn) })
	var why error
	var end string
	ended, returned := false, false
	select {
	case why = <-served:
		returned = true
	case end = <-exited:
		ended = true
	case <-v.s.down:
		end, ended = "the spawner has ended", true
	}
	if !returned {
		why = <-served // which reads what is left, and meets the end
	}
	_ = conn.Close()
	if !ended {
		var limit <-chan time.Time
		if ctx.Err() != nil {
			limit = time.After(endTime)
		} else if gone(why) {
			limit = time.After(time.Second) // it closed its end: its own words about the reason are on their way
		} else {
			v.s.kill(id)
		}
		for !ended {
			select {
			case end = <-exited:
				ended = true
			case <-v.s.down:
				end, ended = "the spawner has ended", true
			case <-limit:
				v.s.kill(id)
			}
		}
	}
	if why == nil || gone(why) {
		return errors.New(end)
	}
	return fmt.Errorf("%w (%s)", why, end)
}
