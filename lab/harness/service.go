package harness

import (
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// ServiceManager does for one service what systemd does: it keeps descriptors that the service stores (FDSTORE,
// FDSTOREREMOVE of sd_notify(3)) and passes them to the service when it is started again.
type ServiceManager struct {
	socket string
	conn   *net.UnixConn
	done   chan struct{}

	mu    sync.Mutex
	names []string
	files []*os.File
}

// NewServiceManager listens for a service's messages on a socket in dir.
func NewServiceManager(dir string) (*ServiceManager, error) {
	m := &ServiceManager{socket: filepath.Join(dir, "notify"), done: make(chan struct{})}
	var err error
	if m.conn, err = net.ListenUnixgram("unixgram", &net.UnixAddr{Name: m.socket, Net: "unixgram"}); err != nil {
		return nil, err
	}
	go m.listen()
	return m, nil
}

// Start starts the service as Namespace.Start does and passes the stored descriptors. Output is appended to the log.
func (m *ServiceManager) Start(ns *Namespace, log string, env []string, argv ...string) (*Process, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	env = append(slices.Clone(env), "NOTIFY_SOCKET="+m.socket, "LISTEN_FDS="+strconv.Itoa(len(m.files)), "LISTEN_FDNAMES="+
		strings.Join(m.names, ":"))
	// LISTEN_PID is known only to the process itself.
	argv = append([]string{"/bin/sh", "-c", `LISTEN_PID=$$ exec "$@"`, "sh"}, argv...)
	f, err := os.OpenFile(log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return nil, err
	}
	return ns.start(f, env, m.files, argv...)
}

// Kept returns the names of the stored descriptors. vnicd stores numbers, and the names in a table: a file with 256
// bytes for each, the name behind its length.
func (m *ServiceManager) Kept() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	kept := slices.Clone(m.names)
	table := slices.Index(m.names, "names/1")
	for i, name := range kept {
		number, err := strconv.ParseInt(strings.TrimPrefix(name, "/"), 36, 32)
		if err != nil || table < 0 || !strings.HasPrefix(name, "/") {
			continue
		}
		entry := make([]byte, 256)
		if _, err := m.files[table].ReadAt(entry, number*256); err == nil || errors.Is(err, io.EOF) {
			kept[i] = string(entry[1:][:min(int(entry[0]), 255)])
		}
	}
	return kept
}

// Close closes the stored descriptors.
func (m *ServiceManager) Close() error {
	err := m.conn.Close()
	<-m.done
	for _, f := range m.files {
		err = errors.Join(err, f.Close())
	}
	return err
}

func (m *ServiceManager) listen() {
	defer close(m.done)
	b, oob := make([]byte, 4096), make([]byte, unix.CmsgSpace(16*4))
	for {
		n, oobn, _, _, err := m.conn.ReadMsgUnix(b, oob)
		if err != nil {
			return
		}
		m.handle(string(b[:n]), oob[:oobn])
	}
}

func (m *ServiceManager) handle(state string, oob []byte) {
	var fds []int
	if msgs, err := unix.ParseSocketControlMessage(oob); err == nil && len(msgs) == 1 {
		fds, _ = unix.ParseUnixRights(&msgs[0])
	}
	words := strings.Split(state, "\n")
	name := ""
	for _, w := range words {
		if v, ok := strings.CutPrefix(w, "FDNAME="); ok {
			name = v
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, fd := range fds {
		unix.CloseOnExec(fd)
		f := os.NewFile(uintptr(fd), name)
		if !slices.Contains(words, "FDSTORE=1") {
			_ = f.Close()
			continue
		}
		if slices.ContainsFunc(m.files, func(o *os.File) bool { return sameFile(f, o) }) {
			_ = f.Close() // as systemd does: an open file is stored once, whatever its name
			continue
		}
		m.names, m.files = append(m.names, name), append(m.files, f)
	}
	if slices.Contains(words, "FDSTOREREMOVE=1") {
		for i := len(m.names) - 1; i >= 0; i-- {
			if m.names[i] == name {
				_ = m.files[i].Close()
				m.names, m.files = slices.Delete(m.names, i, i+1), slices.Delete(m.files, i, i+1)
			}
		}
	}
}

// sameFile reports whether two descriptors are of the same open file (kcmp(2)).
func sameFile(a, b *os.File) bool {
	pid := uintptr(unix.Getpid())
	order, _, errno := unix.Syscall6(unix.SYS_KCMP, pid, pid, 0, a.Fd(), b.Fd(), 0) // 0: KCMP_FILE
	return errno == 0 && order == 0
}
