package systemd

import (
	"strings"
	"sync/atomic"
	"syscall"
)

// Store is systemd's file descriptor store (FileDescriptorStoreMax=): what is kept there is passed to the service when
// it is started again, however it ended. Names have a slash, which tells them from those of sockets.
type Store struct{ frozen atomic.Bool }

// Keep stores a copy of fd under name.
func (s *Store) Keep(name string, fd int) error {
	return notify("FDSTORE=1\nFDNAME="+name, fd)
}

// Forget drops what is stored under name.
func (s *Store) Forget(name string) error {
	if s.frozen.Load() {
		return nil
	}
	return notify("FDSTOREREMOVE=1\nFDNAME=" + name)
}

// Freeze makes Forget do nothing: the service ends, and leaves what it has kept to the next.
func (s *Store) Freeze() { s.frozen.Store(true) }

// Kept are the descriptors that were passed, by name. They belong to the caller.
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
