package systemd

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// names is the table of the stored descriptors' names. systemd passes the names of all of them to the next process in
// one environment variable, which Linux limits to 128 KiB (MAX_ARG_STRLEN): with more, no next process would start. So
// a descriptor is stored as "/N", N being the number of an entry of the table in base 36, and the table is a memory
// file, which is stored under the name namesFile. Descriptors of an older vnicd keep the names that they have.
//
// An entry is written before its descriptor is stored, and used again only when the manager has confirmed that it has
// removed that: whenever the process is killed, no descriptor has another's name.
type names struct {
	mu     sync.Mutex
	file   *os.File       // nil: not yet made
	number map[string]int // of each stored name; old: one of an older vnicd
	used   int            // entries from here on were never used
	free   []int          // below used
	freed  []int          // the manager may not have removed their descriptors yet
	bad    map[int]bool   // of descriptors that were refused, until settle
	long   int            // bytes of the older vnicd's names
	kinds  map[string]int // how many names begin with "kind/"
}

const (
	namesFile  = "names/1" // 1: the version of its format
	namesBytes = 120 << 10 // for all names with their separators; the rest is for those of sockets
	shortBytes = 5         // of one name with its separator, at most
	maxNames   = namesBytes / shortBytes
	entrySize  = 256       // a byte with the name's length, 0 if there is none, and the name
	noName     = ":\n\x00" // no name has these
	old        = -1
)

// short is an entry's name with the manager.
func short(number int) string { return "/" + strconv.FormatInt(int64(number), 36) }

// add returns the name under which the manager shall store name. store stores the table, if it is new.
func (n *names) add(name string, store func(fd int) error) (as string, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	number, ok := n.number[name]
	switch {
	case ok && number == old:
		return name, nil
	case ok:
		return short(number), nil
	case name == "" || len(name) >= entrySize || strings.ContainsAny(name, noName):
		return "", fmt.Errorf("systemd: name %q of a descriptor: want 1 to %d bytes without colons", name, entrySize-1)
	}
	if n.file == nil {
		if err := n.create(store); err != nil {
			return "", fmt.Errorf("systemd: memory file for names: %w", err)
		}
	}
	switch last := len(n.free) - 1; {
	case last >= 0:
		number, n.free = n.free[last], n.free[:last]
	case n.used < maxNames-(n.long+shortBytes-1)/shortBytes:
		number = n.used
		n.used++
	default:
		return "", fmt.Errorf("systemd: the store is full: %d descriptors, whose names fill the environment of the "+
			"next process; run fewer VMs on this host, or with fewer engines", len(n.number))
	}
	entry := append([]byte{byte(len(name))}, name...)
	if _, err := n.file.WriteAt(entry, int64(number)*entrySize); err != nil {
		n.free = append(n.free, number)
		return "", fmt.Errorf("systemd: name of a descriptor: %w", err)
	}
	n.enter(name, number)
	return short(number), nil
}

// enter notes the number of a name that has none. The caller holds mu.
func (n *names) enter(name string, number int) {
	if n.number == nil {
		n.number = map[string]int{}
	}
	if n.kinds == nil {
		n.kinds = map[string]int{}
	}
	n.number[name] = number
	n.kinds[kindOf(name)]++
}

// kindOf returns the beginning of a name, with the slash.
func kindOf(name string) string { return name[:strings.IndexByte(name, '/')+1] }

// count returns the number of names, how many of them begin with one of the kinds ("hca/"), and the limit of all.
func (n *names) count(kinds ...string) (stored, ofKinds, most int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, k := range kinds {
		ofKinds += n.kinds[k]
	}
	return len(n.number), ofKinds, maxNames - (n.long+shortBytes-1)/shortBytes
}

func (n *names) create(store func(fd int) error) error {
	fd, err := unix.MemfdCreate("vnicd-names", unix.MFD_CLOEXEC)
	if err != nil {
		return err
	}
	if err := store(fd); err != nil {
		_ = unix.Close(fd)
		return err
	}
	n.file = os.NewFile(uintptr(fd), namesFile)
	return nil
}

// remove calls send with the name under which the manager has what is stored as name, if it has.
func (n *names) remove(name string, send func(as string) error) error {
	n.mu.Lock()
	number, ok := n.number[name]
	delete(n.number, name)
	if ok {
		n.kinds[kindOf(name)]--
	}
	if number == old {
		n.long -= len(name) + 1
	}
	n.mu.Unlock()
	switch {
	case !ok:
		return nil
	case number == old:
		return send(name)
	}
	if err := send(short(number)); err != nil {
		return err // the number is lost
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.freed = append(n.freed, number)
	return nil
}

// removed returns how many removals were sent and not yet confirmed; what follows confirms them.
func (n *names) removed() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.freed)
}

// confirmed makes the entries of the first removals usable again.
func (n *names) confirmed(removals int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.free = append(n.free, n.freed[:removals]...)
	n.freed = append(n.freed[:0], n.freed[removals:]...)
}

// adopt takes the table from the previous process, nil if it left none.
func (n *names) adopt(f *os.File) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.file, n.number, n.kinds = f, map[string]int{}, map[string]int{}
}

// numberIn returns the number of the entry that as names.
func numberIn(as string) (number int, ok bool) {
	text, ok := strings.CutPrefix(as, "/")
	n, err := strconv.ParseUint(text, 36, 32)
	number = int(n)
	return number, ok && err == nil && number < maxNames && short(number) == as
}

// passed returns the name of a descriptor that the previous process has stored as as. An error says that it has none.
func (n *names) passed(as string) (name string, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	name, number := as, old
	if strings.HasPrefix(as, "/") {
		var ok bool
		switch number, ok = numberIn(as); {
		case !ok:
			return "", fmt.Errorf("%q is not the number of a name", as)
		case n.file == nil:
			return "", errors.New("the table of names is missing")
		}
		entry := make([]byte, entrySize)
		got, _ := n.file.ReadAt(entry, int64(number)*entrySize) // what is behind the end is zero
		length := int(entry[0])
		if length == 0 || length >= got || bytes.ContainsAny(entry[1:1+length], noName) {
			return "", fmt.Errorf("%q has no name", as)
		}
		name = string(entry[1 : 1+length])
	}
	if _, twice := n.number[name]; twice {
		return "", fmt.Errorf("there are two of %q", name)
	}
	if number == old {
		n.long += len(name) + 1
	}
	n.enter(name, number)
	return name, nil
}

// refuse calls send with the name of a descriptor that passed has refused, for its removal. Until that is confirmed,
// the entry is not used again: the manager may still have the descriptor, and the next process would take it for
// another.
func (n *names) refuse(as string, send func(as string) error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	number, ok := numberIn(as)
	if n.bad[number] && ok {
		return // two of the same: one removal is for both
	}
	err := send(as)
	if !ok {
		return
	}
	if n.bad == nil {
		n.bad = map[int]bool{}
	}
	if n.bad[number] = true; err == nil { // else the number is lost
		n.freed = append(n.freed, number)
	}
}

// settle ends a series of passed and refuse: what was not passed is free.
func (n *names) settle() {
	n.mu.Lock()
	defer n.mu.Unlock()
	taken := map[int]bool{}
	for _, number := range n.number {
		taken[number] = true
		n.used = max(n.used, number+1)
	}
	for number := range n.bad {
		taken[number] = true
		n.used = max(n.used, number+1)
	}
	n.bad = nil
	for number := range n.used {
		if !taken[number] {
			n.free = append(n.free, number)
		}
	}
}
