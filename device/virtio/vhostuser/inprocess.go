package vhostuser

import (
	"errors"
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// Front ends within this process. They end with it, and so do their sockets: a Keeper has neither the connection nor
// its back-end channel. All else serves the front end's successor (Resume).

// Connect begins a connection of a front end within this process, and returns its end of it. It waits for the
// predecessor's tear-down as for a front end in another process.
func (s *Server) Connect() (*net.UnixConn, error) {
	back, front, err := socketPair()
	if err != nil {
		return nil, err
	}
	if err := s.admit(back, true); err != nil {
		return nil, errors.Join(err, back.Close(), front.Close())
	}
	return front, nil
}

// Resumed is what a connection that is resumed has, if the device goes on.
type Resumed struct {
	Regions  []Region // of memory
	Running  []bool   // whether a ring runs, by number
	Features uint64   // that the driver has acknowledged
}

// Resume continues a connection of the previous process, of which Config.Kept has the rest, with a front end that has
// taken the place of the one there, and returns its end: what the front end has negotiated and said of memory and rings
// stands, but for the back-end channel. If the device does not go on, its status is 0 and no ring has a description. c
// is nil if there is no such connection.
func (s *Server) Resume() (c *net.UnixConn, was *Resumed, err error) {
	if s.cfg.Keeper == nil {
		return nil, nil, nil
	}
	kept := s.cfg.Kept.Of(s.cfg.KeepAs)
	if kept == nil {
		return nil, nil, nil
	}
	defer func() {
		if err != nil {
			kept.Discard(s.cfg.Keeper)
		}
	}()
	k := keeping{name: s.cfg.KeepAs}
	// A reply to the predecessor, which nobody waits for.
	if pipe, ok := kept[k.replies()]; ok {
		if err := empty(pipe); err != nil {
			return nil, nil, err
		}
	}
	fd, ok := kept[k.agreed()]
	if !ok {
		return nil, nil, errors.New("the connection's state was not kept")
	}
	state, err := readState(fd)
	if err != nil {
		return nil, nil, fmt.Errorf("the connection's state: %w", err)
	}
	back, front, err := socketPair()
	if err != nil {
		return nil, nil, err
	}
	s.slot <- struct{}{}
	s.cfg.Continuity.begin()
	s.begin(back, kept, true)
	return front, state.resumed(), nil
}

func (s *keptState) resumed() *Resumed {
	was := &Resumed{}
	for i := range s.Regions {
		was.Regions = append(was.Regions, s.Regions[i].region())
	}
	h := s.Handed
	if h == nil {
		h = s.Running
	}
	if h != nil {
		was.Features = h.Features
		for _, r := range h.Rings {
			was.Running = append(was.Running, r.Started && r.Enabled)
		}
	}
	return was
}

// Keeper returns the Keeper of the server's connections, which delays a front end that changes too much; nil: none.
func (s *Server) Keeper() Keeper { return s.cfg.Keeper }

// socketPair returns both ends of a connection.
func socketPair() (back, front *net.UnixConn, err error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	ends := [2]**net.UnixConn{&back, &front}
	for i, fd := range pair {
		c, ferr := unixConn(fd, "vhost-user")
		*ends[i], err = c, errors.Join(err, ferr)
	}
	if err != nil {
		for _, c := range ends {
			if *c != nil {
				_ = (*c).Close()
			}
		}
		return nil, nil, err
	}
	return back, front, nil
}

// unixConn takes over fd, a Unix socket.
func unixConn(fd int, name string) (*net.UnixConn, error) {
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	c, err := net.FileConn(f) // duplicates the descriptor
	if err != nil {
		return nil, err
	}
	u, ok := c.(*net.UnixConn)
	if !ok {
		return nil, errors.Join(errors.New("not a Unix socket"), c.Close())
	}
	return u, nil
}
