package systemd

import (
	"strings"
	"sync/atomic"
	"syscall"
)

// Store is systemd's file descriptor store (FileDescriptorStoreMax=). systemd passes what is kept there to the service
// at its next start, however the service ended. Names contain a slash, unlike those of sockets.
type Store struct{ frozen atomic.Bool }

// Keep stores a copy of fd under name.
func (s *Store) Keep(name string, fd int) error {
	return notify("FDSTORE=1\nFDNAME="+name, fd)
}

// Forget removes the descriptors stored under name.
func (s *Store) Forget(name string) error {
	if s.frozen.Load() {
		return nil
	}
	return notify("FDSTOREREMOVE=1\nFDNAME=" + name)
}

// Freeze makes Forget do nothing: the service is ending and leaves its descriptors to the next.
func (s *Store) Freeze() { s.frozen.Store(true) }

// Ending reports whether Freeze was called.
func (s *Store) Ending() bool { return s.frozen.Load() }

// Kept returns the descriptors that were passed, by name. The caller owns them.
func (s *Store) Kept() map[string]int {
	kept := map[string]int{}
	passed(func(fd int, name string) bool {
		switch _, twice := kept[name]; {
		case !strings.Contains(name, "/"):
		case twice:
			_ = syscall.Close(fd)
		default:
			syscall.CloseOnExec(fd)
			kept[name] = fd
		}
		return true
	})
	return kept
}
