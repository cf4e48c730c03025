package vhostuser

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/vnicd/vnicd/device/virtio"
	"github.com/vnicd/vnicd/hypervisor/hostdriver"
	"github.com/vnicd/vnicd/hypervisor/localsocket"
	"github.com/vnicd/vnicd/hypervisor/loglimit"
	"github.com/vnicd/vnicd/hypervisor/worktime"
	"github.com/vnicd/vnicd/translate"
)

// ErrInUse is wrapped by Listen's error if the socket is being served already.
var ErrInUse = localsocket.ErrInUse

// Config of a Server.
type Config struct {
	Path string       // of the socket
	Also []string     // further names of the socket, in directories that exist
	Mode os.FileMode  // of the socket; 0 means 0660
	Log  hclog.Logger // made to limit its lines, see loglimit; nil: silent
	// Owner, if set, are the only processes besides root's that may open the socket. The server also asks who each front
	// end is (SO_PEERCRED), those of the previous process too, and refuses others.
	Owner *localsocket.Owner
	// VMs, if set, is the host's GVM identifier table: the memory of each connection is bound there while it lasts (PF-1).
	VMs *translate.GVMTable
	// Attribute, if set, applies to the memory of each connection (PF-3); the servers of one VM share it.
	Attribute *translate.Attribute
	// Budget, if set, bounds what the device keeps resident of the guest's
	// memory (PF-15); the servers of one VM share it.
	Budget *hostdriver.Budget
	// Work, if set, counts the processor time of the connection; the servers of one VM share it.
	Work *worktime.Account
	// MaxMemory bounds the bytes that the front end may share; 0: no limit. Sealed accepts only memory files that
	// cannot shrink, which are memfds, and seals them against holes and new writable mappings when the first ring
	// starts: for front ends that are not trusted (with a file of a slow or hostile file system, or one from which
	// pages are taken, the device would wait). With a Keeper it also offers memory files that are safe from the
	// beginning (ReqGetMemory). A connection with other memory is not kept: the next process could not map that. One
	// that is kept is continued with the device's state, or ended: such drivers do not begin anew on it.
	MaxMemory uint64
	Sealed    bool
	// SlotName, if set, names an epoch's reader slot, for messages about memory whose release takes long.
	SlotName func(slot int) string
	// Keeper, if set, keeps the connection under the name KeepAs, so that it outlives this process; see keeping. Kept
	// has the previous process's descriptors: Listen takes those with that name and continues the connection.
	Keeper Keeper
	KeepAs string
	Kept   Kept
	// Inner says that the front end of the connection in Kept was within the previous process: Listen leaves it to
	// Resume.
	Inner bool
	// Blameless says that the previous process was ended by somebody else, so that no front end can have caused it.
	Blameless bool
	// Reconnects says that the front end begins a new connection by itself when one ends, as QEMU does for network
	// devices. So a connection that cannot be continued as a whole is ended: its driver sees the link go down.
	Reconnects bool
	// Hide are features of the device that are not offered. A front end that has accepted them keeps them.
	Hide uint64
	// MachineReset, if set, is called when the front end resets the device (RESET_DEVICE). QEMU does so when the machine
	// is reset, whether the device has a driver or not, and when a driver begins or ends; not to pause the VM.
	MachineReset func()
	// Continuity, if set, counts what became of Kept.
	Continuity *Continuity
	// Migrates says that the device has no state but its rings and what QEMU knows, so that QEMU can migrate the VM: the
	// pages that it writes to are logged if the front end asks for that (log.go).
	Migrates bool
	// Follower, if set, is told of each connection's memory and rings.
	Follower Follower
}

// Follower follows the connection of one device of a VM, for a device of the same VM whose front end says nothing of
// guest memory and of pauses (device/virtio/ivshmem). Its methods are called on the connection's goroutine, one at a
// time; the front end gets its answer after they have returned.
type Follower interface {
	// AddMemory reports a region, and the file that it is in, which the caller closes afterwards.
	AddMemory(r Region, fd int)
	// RemoveMemory reports that a region is about to be withdrawn.
	RemoveMemory(r Region)
	// Run reports that rings run, or that the last one has stopped: the VM is being paused, or has no driver.
	Run(on bool)
	// Log reports where to log the pages that are written to, and the file that this is in, which the caller closes
	// afterwards; -1: nowhere.
	Log(where LogBase, fd int)
}

// takeoverPatience is how long a new front end waits for its predecessor's tear-down. A killed QEMU leaves a device
// that may have to drain; the next QEMU must not be refused for that.
const takeoverPatience = 3 * time.Second

// Server offers one device on one Unix socket, to one front end at a time. When a front end disconnects, its rings are
// stopped and its memory is unmapped; then the next is served.
type Server struct {
	cfg  Config
	dev  virtio.Device
	gvmi translate.GVMI
	log  hclog.Logger
	ln   *localsocket.Listener // nil: none, see Offer

	offer  uint64 // virtio features
	protos uint64 // protocol features
	queues int

	patience time.Duration
	slot     chan struct{}   // holds a token while a connection is served
	ctx      context.Context // ends with Close
	cancel   context.CancelFunc
	wg       sync.WaitGroup
	once     sync.Once
	keeps    atomic.Bool // the keeper has the connection that is being served
	wrecked  atomic.Bool // the device cannot be used any more: slot stays taken

	mu   sync.Mutex
	conn *Transport // being served
}

// Listen makes the socket and serves dev under gvmi. A dead process's socket is replaced; for one that is served the
// error is ErrInUse, and any other file at that path is left alone.
func Listen(cfg Config, dev virtio.Device, gvmi translate.GVMI) (*Server, error) {
	s, err := Offer(cfg, dev, gvmi)
	if err != nil {
		return nil, err
	}
	if cfg.Mode == 0 {
		cfg.Mode = 0o660
	}
	if s.ln, err = localsocket.Listen(cfg.Path, cfg.Mode, cfg.Owner, cfg.Also...); err != nil {
		return nil, fmt.Errorf("vhostuser: %s: %w", cfg.Path, err)
	}
	s.resume()
	s.wg.Add(1)
	go s.accept()
	return s, nil
}

// Offer makes a server without a socket, which serves only front ends within this process (inprocess.go). Path is for
// messages.
func Offer(cfg Config, dev virtio.Device, gvmi translate.GVMI) (*Server, error) {
	cfg.Log = loglimit.New(cfg.Log)
	n := dev.NumQueues()
	if n < 1 || n > MaxQueues {
		return nil, fmt.Errorf("vhostuser: a device with %d queues, want 1 to %d", n, MaxQueues)
	}
	if c := dev.ConfigSize(); c < 0 || c > MaxConfigSize {
		return nil, fmt.Errorf("vhostuser: a device with %d bytes of configuration, want at most %d", c, MaxConfigSize)
	}
	s := &Server{
		cfg: cfg, dev: dev, gvmi: gvmi, log: cfg.Log,
		offer:    dev.Features() | transportFeatures,
		protos:   ProtoMQ | ProtoReplyAck | ProtoBackendReq | ProtoResetDevice | ProtoConfigureMemSlots | ProtoStatus,
		queues:   n,
		patience: takeoverPatience,
		slot:     make(chan struct{}, 1),
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	if cfg.Keeper != nil {
		s.cfg.Keeper = newPacer(s.ctx, cfg.Keeper)
	}
	if dev.ConfigSize() > 0 {
		s.protos |= ProtoConfig
	}
	if cfg.Sealed && cfg.Keeper != nil {
		s.protos |= ProtoMemory
	}
	if _, ok := dev.(virtio.NetDevice); ok {
		s.protos |= ProtoRARP | ProtoMTU
	}
	return s, nil
}

// errBusy is the error of admit for a device that is in use.
var errBusy = errors.New("device in use by another")

// admit serves c once the device is free; after an error c is the caller's. inner: its front end is in this process.
func (s *Server) admit(c *net.UnixConn, inner bool) error {
	t := time.NewTimer(s.patience)
	defer t.Stop()
	select {
	case s.slot <- struct{}{}:
		s.begin(c, nil, inner)
		return nil
	case <-t.C:
		if s.wrecked.Load() {
			return errors.New("device was left unusable by a bug; restart vnicd")
		}
		return errBusy
	case <-s.ctx.Done():
		return net.ErrClosed
	}
}

// resume continues the previous process's connection, if there is one.
func (s *Server) resume() {
	if s.cfg.Keeper == nil || s.cfg.Inner {
		return
	}
	kept := s.cfg.Kept.Of(s.cfg.KeepAs)
	c, err := kept.Connection(s.cfg.KeepAs)
	if c != nil && !s.admits(c) {
		_ = c.Close()
		c = nil
	}
	if c == nil {
		if kept != nil {
			_ = s.cfg.Keeper.Forget(s.cfg.KeepAs) // at worst the next process finds and drops it
		}
		if err != nil {
			s.log.Error("connection of the previous vnicd cannot be resumed", "socket", s.cfg.Path, "error", err)
		}
		kept.Discard(s.cfg.Keeper)
		return
	}
	s.slot <- struct{}{}
	s.cfg.Continuity.begin()
	s.begin(c, kept, false)
}

// begin serves a connection on its own goroutine; the caller has acquired the slot.
func (s *Server) begin(c *net.UnixConn, kept Kept, inner bool) {
	t := NewTransport(c)
	s.mu.Lock()
	s.conn = t
	s.mu.Unlock()
	s.wg.Add(1)
	go s.serve(t, kept, inner)
}

// Keeps reports whether a front end is connected whose connection outlives this process. Any goroutine.
func (s *Server) Keeps() bool { return s.keeps.Load() }

// Close ends the connection, if any, and removes the socket. It returns after the device has been disconnected. It may
// be called twice.
func (s *Server) Close() error {
	s.once.Do(func() {
		s.cancel()
		if s.ln != nil {
			_ = s.ln.Close()
		}
		s.mu.Lock()
		if s.conn != nil {
			// A front end that sees its connection closed may take its memory for unmapped, so the session closes it.
			s.conn.Stop()
		}
		s.mu.Unlock()
	})
	s.wg.Wait()
	return nil
}

// fileID identifies a file.
type fileID struct{ dev, ino uint64 }

func (f fileID) String() string { return fmt.Sprintf("%x-%x", f.dev, f.ino) }

// accept serves one connection after the other.
func (s *Server) accept() {
	defer s.wg.Done()
	for {
		c, err := s.ln.AcceptUnix()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			// Probably out of descriptors: the socket stays, so try again.
			s.log.Error("cannot accept a front end", "socket", s.cfg.Path, "error", err)
			if !s.pause(time.Second) {
				return
			}
			continue
		}
		// What a process stores that is ending would stand beside what it leaves of this front end's predecessor.
		ending := s.cfg.Keeper != nil && s.cfg.Keeper.Ending()
		if ending || !s.admits(c) {
			_ = c.Close()
			continue
		}
		if err := s.admit(c, false); err != nil {
			if !errors.Is(err, net.ErrClosed) {
				s.log.Warn("front end refused: "+err.Error(), "socket", s.cfg.Path, "peer", peer(c))
			}
			_ = c.Close()
		}
	}
}

func (s *Server) pause(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-s.ctx.Done():
		return false
	}
}

func (s *Server) serve(t *Transport, kept Kept, inner bool) {
	defer s.wg.Done()
	defer kept.Discard(s.cfg.Keeper)
	var se *session
	resumes, how := kept != nil, anew // kept is emptied
	defer func() {
		if resumes && (se == nil || !se.counted) {
			s.cfg.Continuity.end(how, 0)
		}
		s.mu.Lock()
		s.conn = nil
		s.mu.Unlock()
		if !s.wrecked.Load() {
			<-s.slot
		}
	}()
	select {
	case <-s.ctx.Done(): // Close may have been called before conn was set
		_ = t.Close()
		return
	default:
	}
	s.log.Debug("front end connected", "socket", s.cfg.Path, "peer", peer(t.c))
	var resumed *trial
	if kept != nil {
		var err error
		if resumed, err = s.try(kept); err != nil {
			s.refuseKept(t, err)
			if !errors.Is(err, context.Canceled) {
				how = lost
			}
			return
		}
	}
	se = newSession(s, t, inner)
	se.trial = resumed
	err := se.run(kept)
	if resumed != nil {
		resumed.end(true)
	}
	switch {
	case err == nil:
		s.log.Debug("front end disconnected", "socket", s.cfg.Path)
	case translate.StackOf(err) != "":
		var w *wreckError
		s.wrecked.Store(errors.As(err, &w))
		s.log.Error("connection to front end ended by a bug in vnicd; please report it", "socket", s.cfg.Path, "error", err,
			"stack", translate.StackOf(err))
	case errors.Is(err, net.ErrClosed):
		s.log.Debug("connection closed", "socket", s.cfg.Path)
	default:
		s.log.Error("connection to front end ended", "socket", s.cfg.Path, "error", err)
	}
}

// admits reports whether the process at the other end may be the front end. The answer is of when it connected, so it
// is the same for a connection that another process has accepted.
func (s *Server) admits(c *net.UnixConn) bool {
	if s.cfg.Owner == nil {
		return true
	}
	p, err := localsocket.PeerOf(c)
	if err == nil && s.cfg.Owner.Admits(p) {
		return true
	}
	s.log.Warn("front end refused: it is not the owner of the device", "socket", s.cfg.Path, "uid", p.UID, "gid", p.GID,
		"pid", p.PID, "expected", s.cfg.Owner.String(), "error", err)
	return false
}

// refuseKept ends a connection of the previous process that is not resumed.
func (s *Server) refuseKept(t *Transport, err error) {
	_ = t.Close()
	_ = s.cfg.Keeper.Forget(s.cfg.KeepAs) // serve drops the rest
	switch {
	case errors.Is(err, errGuilty):
		s.log.Error("connection of the previous vnicd dropped: the VM has lost this device until it is attached again",
			"socket", s.cfg.Path, "reason", err)
	case errors.Is(err, context.Canceled):
	default:
		s.log.Error("connection of the previous vnicd cannot be resumed", "socket", s.cfg.Path, "error", err)
	}
}

// peer describes the process at the other end, for the log.
func peer(c *net.UnixConn) string {
	p, err := localsocket.PeerOf(c)
	if err != nil {
		return "unknown"
	}
	return p.String()
}
