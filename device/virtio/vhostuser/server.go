package vhostuser

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/virtio"
	"github.com/vnicd/vnicd/hypervisor/hostdriver"
	"github.com/vnicd/vnicd/translate"
)

// ErrInUse is wrapped by Listen's error if the socket is being served already.
var ErrInUse = errors.New("socket is in use")

// Config of a Server.
type Config struct {
	Path string       // of the socket
	Mode os.FileMode  // of the socket; 0 means 0660
	UID  int          // owner; 0 or less: the daemon's own
	GID  int          // likewise
	Log  hclog.Logger // nil: silent
	// VMs, if set, is the host's GVM identifier table: the memory of each connection is bound there while it lasts (PF-1).
	VMs *translate.GVMTable
	// Attribute, if set, applies to the memory of each connection (PF-3); the servers of one VM share it.
	Attribute *translate.Attribute
	// Budget, if set, bounds what the device keeps resident of the guest's
	// memory (PF-15); the servers of one VM share it.
	Budget *hostdriver.Budget
	// MaxMemory bounds the bytes that the front end may share; 0: no limit. Sealed accepts only memory files that
	// cannot shrink, which are memfds: for front ends that are not trusted (with a file of a slow or hostile file
	// system the device would wait for it).
	MaxMemory uint64
	Sealed    bool
	// SlotName, if set, names an epoch's reader slot, for messages about memory whose release takes long.
	SlotName func(slot int) string
	// Keeper, if set, keeps the connection under the name KeepAs, so that it outlives this process; see keeping. Kept
	// has the previous process's descriptors: Listen takes those with that name and continues the connection.
	Keeper Keeper
	KeepAs string
	Kept   Kept
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
	ln   *net.UnixListener
	file fileID // of the socket in the file system

	offer  uint64 // virtio features
	protos uint64 // protocol features
	queues int

	patience time.Duration
	slot     chan struct{}   // holds a token while a connection is served
	ctx      context.Context // ends with Close
	cancel   context.CancelFunc
	wg       sync.WaitGroup
	once     sync.Once

	mu   sync.Mutex
	conn *Transport // being served
}

// Listen makes the socket and serves dev under gvmi. A dead process's socket is replaced; for one that is served the
// error is ErrInUse, and any other file at that path is left alone.
func Listen(cfg Config, dev virtio.Device, gvmi translate.GVMI) (*Server, error) {
	if cfg.Log == nil {
		cfg.Log = hclog.NewNullLogger()
	}
	if cfg.Mode == 0 {
		cfg.Mode = 0o660
	}
	n := dev.NumQueues()
	if n < 1 || n > MaxQueues {
		return nil, fmt.Errorf("vhostuser: a device with %d queues, want 1 to %d", n, MaxQueues)
	}
	if c := dev.ConfigSize(); c < 0 || c > MaxConfigSize {
		return nil, fmt.Errorf("vhostuser: a device with %d bytes of configuration, want at most %d", c, MaxConfigSize)
	}
	ln, id, err := listen(cfg)
	if err != nil {
		return nil, err
	}
	s := &Server{
		cfg: cfg, dev: dev, gvmi: gvmi, log: cfg.Log, ln: ln,
		offer:    dev.Features() | transportFeatures,
		protos:   ProtoMQ | ProtoReplyAck | ProtoBackendReq | ProtoResetDevice | ProtoConfigureMemSlots | ProtoStatus,
		queues:   n,
		patience: takeoverPatience,
		slot:     make(chan struct{}, 1),
		file:     id,
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	if dev.ConfigSize() > 0 {
		s.protos |= ProtoConfig
	}
	if _, ok := dev.(virtio.NetDevice); ok {
		s.protos |= ProtoRARP | ProtoMTU
	}
	s.resume()
	s.wg.Add(1)
	go s.accept()
	return s, nil
}

// resume continues the previous process's connection, if there is one.
func (s *Server) resume() {
	if s.cfg.Keeper == nil {
		return
	}
	kept := s.cfg.Kept.of(s.cfg.KeepAs)
	c, err := kept.connection(s.cfg.KeepAs)
	if c == nil {
		if err != nil {
			s.log.Error("connection of the previous vnicd cannot be resumed", "socket", s.cfg.Path, "error", err)
		}
		kept.drop(s.cfg.Keeper)
		return
	}
	s.slot <- struct{}{}
	s.begin(c, kept)
}

// begin serves a connection on its own goroutine; the caller has acquired the slot.
func (s *Server) begin(c *net.UnixConn, kept Kept) {
	t := NewTransport(c)
	s.mu.Lock()
	s.conn = t
	s.mu.Unlock()
	s.wg.Add(1)
	go s.serve(t, kept)
}

// listen binds another name and renames it, so that the socket never exists with other permissions than configured.
func listen(cfg Config) (*net.UnixListener, fileID, error) {
	fail := func(err error) (*net.UnixListener, fileID, error) {
		return nil, fileID{}, fmt.Errorf("vhostuser: %s: %w", cfg.Path, err)
	}
	if err := clearStale(cfg.Path); err != nil {
		return fail(err)
	}
	tmp := fmt.Sprintf("%s.%d", cfg.Path, os.Getpid())
	if room := len(unix.RawSockaddrUnix{}.Path) - 1; len(tmp) > room {
		return fail(fmt.Errorf("path is %d bytes too long for a socket", len(tmp)-room))
	}
	_ = os.Remove(tmp)
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: tmp, Net: "unix"})
	if err != nil {
		return fail(err)
	}
	ln.SetUnlinkOnClose(false)
	var st unix.Stat_t
	err = errors.Join(os.Chmod(tmp, cfg.Mode), os.Chown(tmp, orKeep(cfg.UID), orKeep(cfg.GID)), unix.Lstat(tmp, &st))
	if err == nil {
		err = os.Rename(tmp, cfg.Path)
	}
	if err != nil {
		_ = ln.Close()
		_ = os.Remove(tmp)
		return fail(err)
	}
	return ln, fileID{st.Dev, st.Ino}, nil
}

// orKeep maps 0 to "unchanged": the zero Config must not mean root.
func orKeep(id int) int {
	if id <= 0 {
		return -1
	}
	return id
}

func clearStale(path string) error {
	st, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if st.Mode()&fs.ModeSocket == 0 {
		return errors.New("exists and is not a socket")
	}
	c, err := net.DialTimeout("unix", path, time.Second)
	if err == nil {
		_ = c.Close()
		return ErrInUse
	}
	if !errors.Is(err, unix.ECONNREFUSED) {
		return fmt.Errorf("cannot tell whether the socket is in use: %w", err)
	}
	return nil // rename replaces it
}

// Close ends the connection, if any, and removes the socket. It returns after the device has been disconnected. It may
// be called twice.
func (s *Server) Close() error {
	s.once.Do(func() {
		s.cancel()
		// Another daemon may have replaced the socket.
		if s.ours() {
			_ = os.Remove(s.cfg.Path)
		}
		_ = s.ln.Close()
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

// ours reports whether the path still leads to this server's listener.
func (s *Server) ours() bool {
	var st unix.Stat_t
	return unix.Lstat(s.cfg.Path, &st) == nil && fileID{st.Dev, st.Ino} == s.file
}

// fileID identifies a file.
type fileID struct{ dev, ino uint64 }

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
		t := time.NewTimer(s.patience)
		select {
		case s.slot <- struct{}{}:
			s.begin(c, nil)
		case <-t.C:
			s.log.Warn("front end refused: device in use by another", "socket", s.cfg.Path, "peer", peer(c))
			_ = c.Close()
		case <-s.ctx.Done():
			_ = c.Close()
		}
		t.Stop()
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

func (s *Server) serve(t *Transport, kept Kept) {
	defer s.wg.Done()
	defer kept.drop(s.cfg.Keeper)
	defer func() {
		s.mu.Lock()
		s.conn = nil
		s.mu.Unlock()
		<-s.slot
	}()
	select {
	case <-s.ctx.Done(): // Close may have been called before conn was set
		_ = t.Close()
		return
	default:
	}
	s.log.Debug("front end connected", "socket", s.cfg.Path, "peer", peer(t.c))
	err := newSession(s, t).run(kept)
	switch {
	case err == nil:
		s.log.Debug("front end disconnected", "socket", s.cfg.Path)
	case errors.Is(err, net.ErrClosed):
		s.log.Debug("connection closed", "socket", s.cfg.Path)
	default:
		s.log.Error("connection to front end ended", "socket", s.cfg.Path, "error", err)
	}
}

// peer describes the process at the other end, for the log.
func peer(c *net.UnixConn) string {
	raw, err := c.SyscallConn()
	if err != nil {
		return "unknown"
	}
	var (
		cred *unix.Ucred
		cerr error
	)
	if err := raw.Control(func(fd uintptr) {
		cred, cerr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil || cerr != nil {
		return "unknown"
	}
	return fmt.Sprintf("pid %d uid %d", cred.Pid, cred.Uid)
}
