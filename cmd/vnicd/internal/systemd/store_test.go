package systemd

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// keepingManager stores descriptors as systemd does, one message after the other.
type keepingManager struct {
	c    *net.UnixConn
	done chan struct{}
	gate chan struct{} // closed when barriers are passed
	wait sync.WaitGroup

	mu       sync.Mutex
	names    []string // as entries of the table, and the table's first
	fds      []int
	barriers int
}

func newKeepingManager(tb testing.TB) *keepingManager {
	tb.Helper()
	path := tb.TempDir() + "/notify"
	c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Setenv("NOTIFY_SOCKET", path)
	m := &keepingManager{c: c, done: make(chan struct{}), gate: make(chan struct{})}
	go m.listen()
	tb.Cleanup(func() {
		_ = c.Close()
		<-m.done
		m.open()
		m.wait.Wait()
		m.forget()
	})
	return m
}

// forget closes what is stored, and returns how many there were.
func (m *keepingManager) forget() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, fd := range m.fds {
		_ = syscall.Close(fd)
	}
	n := len(m.names)
	m.names, m.fds = nil, nil
	return n
}

func (m *keepingManager) listen() {
	defer close(m.done)
	b, oob := make([]byte, 4096), make([]byte, syscall.CmsgSpace(4))
	for {
		n, oobn, _, _, err := m.c.ReadMsgUnix(b, oob)
		if err != nil {
			return
		}
		fd := -1
		if msgs, err := syscall.ParseSocketControlMessage(oob[:oobn]); err == nil && len(msgs) == 1 {
			if fds, err := syscall.ParseUnixRights(&msgs[0]); err == nil && len(fds) == 1 {
				fd = fds[0]
			}
		}
		if state := string(b[:n]); state == "BARRIER=1" {
			m.mu.Lock()
			m.barriers++
			m.mu.Unlock()
			m.wait.Go(func() {
				<-m.gate
				_ = syscall.Close(fd)
			})
		} else if name, ok := strings.CutPrefix(state, "FDSTORE=1\nFDNAME="); ok {
			m.mu.Lock()
			m.names, m.fds = append(m.names, name), append(m.fds, fd)
			m.mu.Unlock()
		}
	}
}

// open lets barriers pass from now on.
func (m *keepingManager) open() {
	select {
	case <-m.gate:
	default:
		close(m.gate)
	}
}

func (m *keepingManager) has(name string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, n := range m.names {
		if n == name {
			return true
		}
	}
	return false
}

// numberOf is what the manager has name as.
func numberOf(s *Store, name string) string {
	s.names.mu.Lock()
	defer s.names.mu.Unlock()
	return short(s.names.number[name])
}

func (m *keepingManager) counted() (names, barriers int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.names), m.barriers
}

// keepMany is a daemon that adopts so many VMs at once: each stores descriptors one after the other.
func keepMany(s *Store, vms, descriptors, fd int, kept func(name string) error) error {
	failed := make(chan error, vms)
	for vm := range vms {
		go func() {
			var err error
			for i := range descriptors {
				name := fmt.Sprintf("hca/vm%d/%d", vm, i)
				if err = s.Keep(name, fd); err == nil {
					err = kept(name)
				}
				if err != nil {
					break
				}
			}
			failed <- err
		}()
	}
	var err error
	for range vms {
		err = errors.Join(err, <-failed)
	}
	return err
}

// TestKeepTogether: who waits at the same time waits for one answer of the manager, and nobody returns before the
// manager has what was stored.
func TestKeepTogether(t *testing.T) {
	m := newKeepingManager(t)
	var s Store
	const vms, descriptors = 50, 6
	finished := make(chan error, 1)
	go func() {
		finished <- keepMany(&s, vms, descriptors, 0, func(name string) error {
			if !m.has(numberOf(&s, name)) {
				return fmt.Errorf("%s is not stored yet", name)
			}
			return nil
		})
	}()
	for end := time.Now().Add(10 * time.Second); ; {
		if n, barriers := m.counted(); n == vms+1 && barriers == 1 { // one each, while the manager is busy
			break
		}
		if time.Now().After(end) {
			n, barriers := m.counted()
			t.Fatalf("%d descriptors and %d barriers have been sent, want %d and 1", n, barriers, vms+1)
		}
		time.Sleep(time.Millisecond)
	}
	m.open()
	if err := <-finished; err != nil {
		t.Fatal(err)
	}
	n, barriers := m.counted()
	if n != vms*descriptors+1 || barriers > n/2 {
		t.Errorf("%d descriptors, %d barriers", n, barriers)
	}
}

// TestKeepTogetherStuck: a manager that does not answer delays those who wait together once.
func TestKeepTogetherStuck(t *testing.T) {
	newKeepingManager(t)
	var s Store
	begin := time.Now()
	if err := keepMany(&s, 20, 3, 0, func(string) error { return nil }); err != nil {
		t.Error(err)
	}
	if took := time.Since(begin); took < keepLimit || took > 2*keepLimit {
		t.Errorf("took %v, want %v", took, keepLimit)
	}
}

// BenchmarkKeepMany is the start after a crash of a daemon with 200 VMs, each of which stores six descriptors.
func BenchmarkKeepMany(b *testing.B) {
	f, err := os.Open(os.DevNull)
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	m := newKeepingManager(b)
	m.open()
	for b.Loop() {
		var s Store
		if err := keepMany(&s, 200, 6, int(f.Fd()), func(string) error { return nil }); err != nil {
			b.Fatal(err)
		}
		if n := m.forget(); n != 1201 {
			b.Fatalf("%d descriptors are stored", n)
		}
	}
	_, barriers := m.counted()
	b.ReportMetric(float64(barriers)/float64(b.N), "barriers/op")
}
