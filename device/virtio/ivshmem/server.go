package ivshmem

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/hypervisor/localsocket"
	"github.com/vnicd/vnicd/hypervisor/loglimit"
	"github.com/vnicd/vnicd/hypervisor/worktime"
	"github.com/vnicd/vnicd/translate"
)

// Config of a Server.
type Config struct {
	Path string      // of the socket that QEMU opens
	Mode os.FileMode // of the socket; 0 means 0660
	Log  hclog.Logger
	// Owner, if set, are the only processes besides root's that may open the socket.
	Owner *localsocket.Owner
	// Work, if set, counts the processor time of requests; the servers of one VM share it.
	Work *worktime.Account
	// VirtioID is the id of the virtio device. Queues is the number of its virtqueues, 1..MaxQueues.
	VirtioID uint32
	Queues   int
	// Device is the device's server. If it has a Keeper, that keeps QEMU's connection, too, under the name KeepAs; ""
	// for none. Kept has what the previous process has left: Listen takes what has that name.
	Device *vhostuser.Server
	KeepAs string
	Kept   vhostuser.Kept
}

// Server offers one virtio device to one QEMU at a time. It is the vhostuser.Follower of the VM's network card.
type Server struct {
	cfg Config
	log hclog.Logger
	ln  *localsocket.Listener
	wg  sync.WaitGroup

	standTimeout time.Duration

	attached atomic.Bool // now is not nil
	keeps    atomic.Bool // the keeper has what QEMU was given

	mu      sync.Mutex
	closed  bool
	regions []region
	runs    bool // the VM runs, as far as its network card tells
	told    bool // it has told so, or that it does not
	now     *session
	// wasReset: the machine was reset while now was being resumed.
	wasReset bool
	writes   *writeLog // of the pages that are written to; nil: nobody wants one
}

// region is a part of guest memory. Its file is a duplicate of what the network card's front end has passed.
type region struct {
	vhostuser.Region
	fd int
}

// sendTimeout bounds how long QEMU may take to receive what it gets at the beginning.
const sendTimeout = 10 * time.Second

// releaseTimeout bounds how long the device may take to let go of guest memory.
const releaseTimeout = 10 * time.Second

// standTimeout bounds how long a VM that stops waits for a session that is being resumed.
const standTimeout = 10 * time.Second

// Listen makes the socket and serves it. Vectors tells how many vectors QEMU's device needs.
func Listen(cfg Config) (*Server, error) {
	if cfg.Queues < 1 || cfg.Queues > MaxQueues {
		return nil, fmt.Errorf("ivshmem: a device with %d queues, want 1 to %d", cfg.Queues, MaxQueues)
	}
	if cfg.Mode == 0 {
		cfg.Mode = 0o660
	}
	ln, err := localsocket.Listen(cfg.Path, cfg.Mode, cfg.Owner)
	if err != nil {
		return nil, fmt.Errorf("ivshmem: %s: %w", cfg.Path, err)
	}
	s := &Server{cfg: cfg, log: loglimit.New(cfg.Log), ln: ln, standTimeout: standTimeout}
	s.resume()
	s.wg.Add(1)
	go s.accept()
	return s, nil
}

// Vectors is the number of vectors of a device with that many queues: one for requests and changes of config space, one
// for each queue.
func Vectors(queues int) int { return 1 + queues }

// Attached reports whether a QEMU is connected. Any goroutine.
func (s *Server) Attached() bool { return s.attached.Load() }

// Keeps reports whether a QEMU is connected whose device outlives this process. Any goroutine.
func (s *Server) Keeps() bool { return s.keeps.Load() && s.cfg.Device.Keeps() }

// Close ends the connection with QEMU, if any, and removes the socket. It returns after the device has been
// disconnected. The network card's server must have been closed before.
func (s *Server) Close() error {
	s.mu.Lock()
	s.closed = true
	now, live := s.now, s.live()
	s.mu.Unlock()
	_ = s.ln.Close()
	if now != nil {
		_ = now.qemu.Close()
	}
	if now != live { // it waits for the device
		_ = now.dev.Close()
	}
	s.wg.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.regions {
		_ = unix.Close(r.fd)
	}
	s.regions = nil
	s.writes.close()
	s.writes = nil
	return nil
}

func (s *Server) accept() {
	defer s.wg.Done()
	for {
		c, err := s.ln.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil {
			err = s.serve(c)
			if err != nil {
				_ = c.Close()
			}
		}
		if err != nil {
			s.log.Error("QEMU cannot attach its ivshmem device", "socket", s.cfg.Path, "error", err)
			time.Sleep(10 * time.Millisecond) // out of descriptors, perhaps: the socket stays
		}
	}
}

// serve begins a session with QEMU, which ends by itself; after an error c is the caller's.
func (s *Server) serve(c *net.UnixConn) error {
	if err := s.admits(c); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed || s.ending():
		return net.ErrClosed
	case s.now != nil:
		return errors.New("another QEMU is attached")
	}
	se, err := newSession(s, c)
	if err != nil {
		return err
	}
	s.attend(se, func() error { return nil })
	return nil
}

// admits returns an error unless the process at the other end may be QEMU.
func (s *Server) admits(c *net.UnixConn) error {
	if s.cfg.Owner == nil {
		return nil
	}
	p, err := localsocket.PeerOf(c)
	if err == nil && !s.cfg.Owner.Admits(p) {
		err = fmt.Errorf("process %d of user %d is not the owner of the device (%v)", p.PID, p.UID, s.cfg.Owner)
	}
	return err
}

// resume continues the session of the previous process, if it has left one.
func (s *Server) resume() {
	se, err := s.takeKept()
	if err != nil {
		s.log.Error("connection of the previous vnicd cannot be resumed", "socket", s.cfg.Path, "error", err)
	}
	if se != nil {
		s.attend(se, func() error {
			if err := se.resume(); err != nil {
				return fmt.Errorf("it cannot be resumed: %w", err)
			}
			s.mu.Lock()
			defer s.mu.Unlock()
			se.settle()
			return nil
		})
	}
}

// attend serves a session on its own goroutine once begin has returned. The caller holds Server.mu, or nobody else has
// the server.
func (s *Server) attend(se *session, begin func() error) {
	s.now = se
	s.attached.Store(true)
	s.wg.Add(1)
	go func() {
		defer s.wg.Done()
		err := translate.Contain(begin)
		close(se.begun)
		if err == nil {
			err = se.run()
		}
		s.mu.Lock()
		err = errors.Join(err, se.failed)
		se.close()
		s.now = nil
		s.attached.Store(false)
		s.mu.Unlock()
		if err != nil {
			s.log.Error("connection to QEMU's ivshmem device ended", "socket", s.cfg.Path, "error", err, "stack",
				translate.StackOf(err))
		}
	}()
}

// live returns the session unless it is being resumed; nil: none. The caller holds Server.mu.
func (s *Server) live() *session {
	if s.now != nil && s.now.ready {
		return s.now
	}
	return nil
}

// AddMemory implements vhostuser.Follower.
func (s *Server) AddMemory(r vhostuser.Region, fd int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.ending() {
		return
	}
	// The device's front end has no addresses of its own for guest memory: rings are named by guest physical ones.
	r.UserAddr = r.GuestPA
	dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		s.log.Error("guest memory is not available to the device", "address", r.GuestPA, "size", r.Size, "error", err)
		return
	}
	x := region{r, dup}
	s.regions = append(s.regions, x)
	if se := s.live(); se != nil {
		se.addMemory(x)
	}
}

// RemoveMemory implements vhostuser.Follower.
func (s *Server) RemoveMemory(r vhostuser.Region) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ending() {
		return
	}
	for i, x := range s.regions {
		if x.GuestPA == r.GuestPA && x.Size == r.Size {
			s.regions = append(s.regions[:i:i], s.regions[i+1:]...)
			if se := s.live(); se != nil {
				se.removeMemory(x.Region)
			}
			_ = unix.Close(x.fd)
			return
		}
	}
}

// MachineReset says that the VM's machine was reset. If the queues stand, their driver does not go on, because a paused
// VM resets nothing: the device is reset, so that the queues do not run again in memory that is the next driver's. A
// device whose queues run ignores the call. Any goroutine.
func (s *Server) MachineReset() {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch se := s.live(); {
	case se != nil:
		se.machineReset()
	case s.now != nil:
		s.wasReset = true
	}
}

// Run implements vhostuser.Follower. QEMU waits for it before it copies the last of the VM's memory: when the VM has
// stopped, the device writes nothing more, and its state is in BAR 2, also if its session was still being resumed.
func (s *Server) Run(on bool) {
	if se := s.tellRun(on); se != nil && !on {
		s.await(se)
	}
}

// await waits for a session that is being resumed, but holds up no vnicd that ends: the next one resumes it.
func (s *Server) await(se *session) {
	timeout := time.After(s.standTimeout)
	look := time.NewTicker(10 * time.Millisecond)
	defer look.Stop()
	for !s.ending() {
		select {
		case <-se.begun:
			return
		case <-timeout:
			s.log.Error("the HCA is still being resumed though its VM has stopped: what it writes does not leave with the VM",
				"socket", s.cfg.Path)
			return
		case <-look.C:
		}
	}
}

// tellRun does the work of Run, and returns the session if it is being resumed: that follows when it goes on.
func (s *Server) tellRun(on bool) *session {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ending() {
		return nil
	}
	s.runs, s.told = on, true
	se := s.live()
	if se == nil {
		return s.now
	}
	se.setRunning(on)
	return nil
}

// Log implements vhostuser.Follower.
func (s *Server) Log(where vhostuser.LogBase, fd int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.ending() {
		return
	}
	old := s.writes
	s.writes = nil
	if fd >= 0 {
		var err error
		if s.writes, err = newWriteLog(where, fd); err != nil {
			// The VM's card logs in the same file: this is a want of descriptors or of memory.
			s.log.Error("writes of the HCA are not logged: a migration of this VM must not go on", "error", err)
		}
	}
	if se := s.live(); se != nil {
		se.setLog()
	}
	old.close()
}
