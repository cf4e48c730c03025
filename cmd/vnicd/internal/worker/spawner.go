package worker

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"runtime"
	"strconv"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/confine"
)

// Packets between daemon and spawner: one byte for the purpose, four for the daemon's number of the process, and a
// rest. A start's rest is the log's level and the number of streams, one byte each, and the kind; its descriptors are
// the log, the connection, those of Config.Files, and the streams. An end's rest says why.
const (
	pktReady = 'R' // spawner: it can start workers
	pktStart = 'S' // daemon
	pktKill  = 'K' // daemon
	pktEnd   = 'E' // spawner: a worker has ended or could not be started

	pktHeader = 5
	pktMax    = 512
	maxFiles  = 128 // of one worker
)

func packet(purpose byte, id uint32, rest string) []byte {
	b := binary.LittleEndian.AppendUint32([]byte{purpose}, id)
	return append(b, rest[:min(len(rest), pktMax-pktHeader)]...)
}

// spawnerName is the spawner's place in `vnicd worker KIND`.
const spawnerName = "spawner"

// nobody is the user and group of workers that root starts.
const nobody = 65534

// spawner is the process that starts workers.
type spawner struct {
	kinds []Kind
	sock  *net.UnixConn
	null  *os.File

	mu      sync.Mutex
	running map[uint32]*os.Process
	done    sync.WaitGroup
}

// spawn runs until the daemon's end of the socket closes.
func spawn(kinds []Kind) error {
	// Parent of the workers, for PR_SET_PDEATHSIG, and holder of the capabilities that they inherit, is this thread.
	runtime.LockOSThread()
	// The daemon ends the spawner by closing the socket, after the workers that shall end their sessions.
	signal.Ignore(syscall.SIGHUP, syscall.SIGINT, syscall.SIGTERM)
	_ = os.WriteFile("/proc/self/comm", []byte("vnicd-"+spawnerName), 0) // for ps; otherwise it is "exe"
	if err := closeInherited(firstFile); err != nil {
		return err
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("PR_SET_NO_NEW_PRIVS: %w", err)
	}
	keep := []uint{unix.CAP_SETUID, unix.CAP_SETGID, unix.CAP_KILL}
	for _, k := range kinds {
		keep = append(keep, k.Capabilities...)
	}
	if err := confine.Bound(keep...); err != nil {
		return err
	}
	if err := confine.Keep(keep...); err != nil && !errors.Is(err, confine.ErrCgo) {
		return err
	}
	c, err := newConn(os.NewFile(connFile, "daemon"))
	if err != nil {
		return err
	}
	s := &spawner{kinds: kinds, sock: c.sock, running: map[uint32]*os.Process{}}
	if s.null, err = os.OpenFile(os.DevNull, os.O_RDWR, 0); err != nil {
		return err
	}
	_ = unix.Close(connFile) // c has a duplicate
	if _, err := s.sock.Write(packet(pktReady, 0, "")); err != nil {
		return err
	}
	err = s.serve()
	s.mu.Lock()
	for _, p := range s.running {
		_ = p.Kill()
	}
	s.mu.Unlock()
	s.done.Wait()
	return err
}

func (s *spawner) serve() error {
	b, rights := make([]byte, pktMax), make([]byte, unix.CmsgSpace(4*(maxFiles+2)))
	for {
		n, nr, flags, _, err := s.sock.ReadMsgUnix(b, rights)
		if err != nil || n == 0 {
			return nil // the daemon has ended
		}
		files, err := received(rights[:nr])
		if err == nil && (n < pktHeader || flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0) {
			err = errors.New("a request is malformed")
		}
		if err != nil {
			return err
		}
		id, rest := binary.LittleEndian.Uint32(b[1:]), b[pktHeader:n]
		switch {
		case b[0] == pktStart && len(rest) > 2 && len(files) >= 2+int(rest[1]):
			s.start(id, rest[0], rest[1], string(rest[2:]), files)
		case b[0] == pktKill:
			s.mu.Lock()
			if p := s.running[id]; p != nil {
				_ = p.Kill()
			}
			s.mu.Unlock()
		}
		for _, f := range files {
			_ = f.Close()
		}
	}
}

// received returns the descriptors of a packet.
func received(rights []byte) (files []*os.File, err error) {
	msgs, err := unix.ParseSocketControlMessage(rights)
	if err != nil {
		return nil, fmt.Errorf("descriptors: %w", err)
	}
	for i := range msgs {
		fds, err := unix.ParseUnixRights(&msgs[i])
		if err != nil {
			return nil, fmt.Errorf("descriptors: %w", err)
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "worker"))
		}
	}
	return files, nil
}

// start starts a worker: files are its log, its connection, and others, of which the last are streams.
func (s *spawner) start(id uint32, level, streams byte, kind string, files []*os.File) {
	p, err := s.process(level, streams, kind, files)
	if err != nil {
		s.report(id, "cannot be started: "+err.Error())
		return
	}
	s.mu.Lock()
	s.running[id] = p
	s.mu.Unlock()
	s.done.Go(func() {
		why := ""
		if st, err := p.Wait(); err != nil {
			why = err.Error()
		} else {
			why = st.String()
		}
		s.mu.Lock()
		delete(s.running, id)
		s.mu.Unlock()
		s.report(id, why)
	})
}

func (s *spawner) report(id uint32, why string) { _, _ = s.sock.Write(packet(pktEnd, id, why)) } // the daemon has ended

func (s *spawner) process(level, streams byte, name string, files []*os.File) (*os.Process, error) {
	k, ok := find(s.kinds, name)
	if !ok {
		return nil, fmt.Errorf("no kind of worker is named %q", name)
	}
	attr := &os.ProcAttr{
		Dir: "/", Env: []string{}, Files: append([]*os.File{s.null, files[0]}, files...),
		Sys: &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL},
	}
	for _, c := range k.Capabilities {
		if confine.Holds(c) {
			attr.Sys.AmbientCaps = append(attr.Sys.AmbientCaps, uintptr(c))
		}
	}
	argv := []string{"vnicd", command, k.Name, strconv.Itoa(int(level)), strconv.Itoa(len(files) - 2 - int(streams)),
		strconv.Itoa(int(streams))}
	if os.Geteuid() == 0 {
		attr.Sys.Credential = &syscall.Credential{Uid: nobody, Gid: nobody}
	}
	p, err := os.StartProcess(self, argv, attr)
	if attr.Sys.Credential != nil && (errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EPERM) ||
		errors.Is(err, unix.EACCES)) {
		// A user namespace without that user, or a program that only root may run. Without capabilities, and with
		// confine.Bound, the worker has no rights as root but those of files' owner.
		attr.Sys.Credential = nil
		p, err = os.StartProcess(self, argv, attr)
	}
	return p, err
}

// self is this program, also if its file has been replaced.
const self = "/proc/self/exe"

// closeInherited closes the descriptors from first on that were inherited: those without FD_CLOEXEC.
func closeInherited(first int) error {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return err
	}
	for _, e := range entries {
		fd, err := strconv.Atoi(e.Name())
		if err != nil || fd < first {
			continue
		}
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil && flags&unix.FD_CLOEXEC == 0 {
			_ = unix.Close(fd)
		}
	}
	return nil
}
