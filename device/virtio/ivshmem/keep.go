package ivshmem

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/loop/eventfd"
	"github.com/vnicd/vnicd/device/virtio"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
)

// QEMU's ivshmem device does not notice when its server ends, and never connects again. So a Keeper has what it was
// given, for the next process (CO-1, CO-2):
//
//	NAME          QEMU's connection, once QEMU has everything
//	NAME/parts    a datagram socket with one message, whose descriptors are the memory of BAR 2, the doorbells and the
//	              interrupts
//
// The eventfds are in a message because the device's server keeps those of its rings, and a keeper does not store an
// open file twice. All else is with the device's server, or in BAR 2: a request that was not answered is there still.
// A process that is killed while it introduces itself leaves a QEMU that cannot start.

func (cfg *Config) parts() string { return cfg.KeepAs + "/parts" }

// keeper returns nil if nothing is kept.
func (s *Server) keeper() vhostuser.Keeper {
	if s.cfg.KeepAs == "" {
		return nil
	}
	return s.cfg.Device.Keeper()
}

// ending reports whether the next process goes on with what there is now: nothing is to change any more.
func (s *Server) ending() bool {
	k := s.keeper()
	return k != nil && k.Ending()
}

// keepParts keeps what QEMU is about to get, and keepConnection QEMU's connection after that.
func (se *session) keepParts() error {
	return se.keep(func(k vhostuser.Keeper) error {
		fd, err := bundle(slices.Concat([]int{se.bar.fd}, se.in, se.out))
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return k.Keep(se.srv.cfg.parts(), fd)
	})
}

func (se *session) keepConnection() error {
	return se.keep(func(k vhostuser.Keeper) (err error) {
		raw, err := se.qemu.SyscallConn()
		if err != nil {
			return err
		}
		cerr := raw.Control(func(fd uintptr) { err = k.Keep(se.srv.cfg.KeepAs, int(fd)) })
		err = errors.Join(cerr, err)
		se.srv.keeps.Store(err == nil)
		return err
	})
}

func (se *session) keep(f func(vhostuser.Keeper) error) error {
	if k := se.srv.keeper(); k != nil {
		if err := f(k); err != nil {
			return fmt.Errorf("the connection cannot be kept for the next vnicd: %w", err)
		}
	}
	return nil
}

// forget removes the session from the keeper, unless the next process is to have it.
func (se *session) forget() {
	se.srv.keeps.Store(false)
	if k := se.srv.keeper(); k != nil {
		_ = errors.Join(k.Forget(se.srv.cfg.KeepAs), k.Forget(se.srv.cfg.parts())) // at worst the next process drops them
	}
}

// takeKept makes a session of what the previous process has left; nil: nothing.
func (s *Server) takeKept() (se *session, err error) {
	kept := s.cfg.Kept.Of(s.cfg.KeepAs)
	if kept == nil || s.keeper() == nil {
		return nil, nil
	}
	defer func() {
		if err != nil {
			kept.Discard(s.keeper())
		}
	}()
	se = &session{srv: s, unsure: true, begun: make(chan struct{})}
	defer func() {
		if err != nil {
			se.close()
			se = nil
		}
	}()
	if se.qemu, err = kept.Connection(s.cfg.KeepAs); err != nil {
		return se, err
	}
	fd, ok := kept.Take(s.cfg.parts())
	if !ok || se.qemu == nil {
		return se, errors.New("only a part of the connection was kept")
	}
	defer unix.Close(fd)
	if err := s.admits(se.qemu); err != nil {
		return se, err
	}
	fds, err := unbundle(fd)
	if err != nil {
		return se, err
	}
	n := len(fds) / 2
	se.in, se.out = fds[1:1+n:1+n], fds[1+n:]
	if se.bar, err = adoptBar(fds[0]); err != nil {
		return se, err
	}
	if want := Vectors(s.cfg.Queues); len(se.in) != want || len(se.out) != want {
		return se, fmt.Errorf("QEMU has %d doorbells and %d interrupts, the device now needs %d: has the number of engines changed?",
			len(se.in), len(se.out), want)
	}
	if err := se.makeBell(); err != nil {
		return se, err
	}
	return se, se.reconnect()
}

// reconnect connects with the device, which is going on meanwhile.
func (se *session) reconnect() error {
	conn, was, err := se.srv.cfg.Device.Resume()
	switch {
	case err != nil:
		return err
	case conn == nil:
		return errors.New("the device was not kept")
	}
	se.was, se.dev = was, frontend.NewClient(conn)
	se.dev.SetPatience(resumePatience)
	return nil
}

// resumePatience is how long the device may take until it goes on: while vnicd suspects VMs, it tries one at a time.
const resumePatience = 10 * time.Minute

// resume waits for the device, and finds out how it goes on. The caller does not hold Server.mu, and calls settle next.
func (se *session) resume() error {
	dev, was := se.dev, se.was
	if err := se.openChannel(); err != nil { // first: its end shows that the device has been disconnected
		return err
	}
	if err := se.ask(); err != nil {
		return err
	}
	status, err := dev.GetStatus()
	if err != nil {
		return err
	}
	se.status, se.has, se.features = uint32(status), was.Regions, was.Features&se.offered
	se.ran = se.status&virtio.StatusDriverOK != 0
	if se.status&virtio.StatusDriverOK == 0 {
		return nil
	}
	rings, run := 0, 0
	r := se.bar.request()
	for i, q := range r.queues[:se.srv.cfg.Queues] {
		if se.queues[i] = q; q.size != 0 {
			if rings++; i < len(was.Running) && was.Running[i] {
				run++
			}
		}
	}
	if se.running = run > 0 && run == rings; se.running {
		return nil
	}
	for i := range se.queues { // they stand, or the previous process has ended while it started or stopped them
		if se.queues[i].size == 0 {
			continue
		}
		if se.bases[i], err = dev.GetVringBase(i); err != nil && !se.refused(err) {
			return err
		}
	}
	return nil
}

// settle brings a session that was resumed into line with what the network card has told since, and the driver with the
// session: it may wait for an answer, and finds out if the device has not gone on. The caller holds Server.mu.
func (se *session) settle() {
	s := se.srv
	se.ready = true
	s.keeps.Store(true)
	se.describe()
	se.bar.put32(offStatus, se.status)
	for _, r := range s.regions {
		se.addMemory(r)
	}
	se.setLog()
	if s.told {
		se.setRunning(s.runs)
	}
	if s.wasReset {
		se.machineReset()
	}
	eventfd.Raise(se.out[0], &se.hint)
}

// bundle returns a socket with a message that has copies of descriptors.
func bundle(fds []int) (int, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, fmt.Errorf("socket for descriptors: %w", err)
	}
	defer unix.Close(pair[1])
	if err := unix.Sendmsg(pair[1], []byte{0}, unix.UnixRights(fds...), nil, 0); err != nil {
		_ = unix.Close(pair[0])
		return -1, fmt.Errorf("socket for descriptors: %w", err)
	}
	return pair[0], nil
}

// unbundle returns copies of the descriptors, at least one, and leaves the message where it is.
func unbundle(socket int) (fds []int, err error) {
	oob := make([]byte, unix.CmsgSpace(4*(1+2*Vectors(MaxQueues))))
	_, oobn, flags, _, err := unix.Recvmsg(socket, make([]byte, 1), oob,
		unix.MSG_PEEK|unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("socket for descriptors: %w", err)
	}
	messages, err := unix.ParseSocketControlMessage(oob[:oobn])
	for i := 0; i < len(messages) && err == nil; i++ {
		var part []int
		part, err = unix.ParseUnixRights(&messages[i])
		fds = append(fds, part...)
	}
	if err == nil && (len(fds) == 0 || flags&unix.MSG_CTRUNC != 0) {
		err = fmt.Errorf("%d descriptors, flags %#x", len(fds), flags)
	}
	if err != nil {
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
		return nil, fmt.Errorf("socket for descriptors: %w", err)
	}
	return fds, nil
}
