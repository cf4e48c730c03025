package cluster

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"time"

	"golang.org/x/sys/unix"
)

// DefaultName is the name of a cluster that stays if its user gives none.
const DefaultName = "default"

// Files in the directory of a cluster that stays.
const (
	socketFile = "socket"
	logFile    = "log" // what Serve prints
)

var clusterName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,31}$`)

// ValidName reports whether a cluster may have the name.
func ValidName(name string) error {
	if !clusterName.MatchString(name) {
		return fmt.Errorf("name %q: want 1 to 32 letters, digits, dots, hyphens and underscores; a letter or digit first",
			name)
	}
	return nil
}

// parents returns the directories in which this user's clusters may have theirs; the first is for new ones. Another
// login of the same user may have had others.
func parents() (dirs []string) {
	uid := os.Getuid()
	for _, d := range []string{os.Getenv("XDG_RUNTIME_DIR"), fmt.Sprintf("/run/user/%d", uid)} {
		var st unix.Stat_t
		if filepath.IsAbs(d) && unix.Stat(d, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR && int(st.Uid) == uid {
			dirs = append(dirs, filepath.Join(d, "vnicd-lab"))
		}
	}
	return append(dirs, fmt.Sprintf("/tmp/vnicd-labs-%d", uid))
}

// openPrivate opens a directory that is this user's alone.
func openPrivate(path string) (*os.File, error) {
	d, err := os.OpenFile(path, unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(d.Fd()), &st); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	if int(st.Uid) != os.Getuid() || st.Mode&0o077 != 0 {
		return nil, errors.Join(fmt.Errorf("%s belongs to user %d with mode %#o: want user %d and 0700; remove it, or set "+
			"XDG_RUNTIME_DIR to a directory of your own", path, st.Uid, st.Mode&0o777, os.Getuid()), d.Close())
	}
	return d, nil
}

// Place is the directory of a cluster that stays. Its lock (flock) is held by the process that brings the cluster up,
// and by those of the cluster, as long as they run.
type Place struct {
	Name string
	path string
	dir  *os.File
}

// find opens the place of an existing cluster. The error wraps fs.ErrNotExist if there is none.
func find(name string) (*Place, error) {
	if err := ValidName(name); err != nil {
		return nil, err
	}
	for _, parent := range parents() {
		if p, err := openPlace(parent, name); !errors.Is(err, fs.ErrNotExist) {
			return p, err
		}
	}
	return nil, notThere(name)
}

// notThere is the error for a name without a cluster.
func notThere(name string) error {
	return missing(fmt.Sprintf("no lab %q: `vnicd lab list` shows those that exist, `vnicd lab up --name %s` makes it", name,
		name))
}

// missing is an error that is fs.ErrNotExist.
type missing string

func (m missing) Error() string        { return string(m) }
func (m missing) Is(target error) bool { return target == fs.ErrNotExist }

func openPlace(parent, name string) (*Place, error) {
	d, err := openPrivate(parent)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	p := &Place{Name: name, path: filepath.Join(parent, name)}
	p.dir, err = openPrivate(p.path)
	return p, err
}

// Claim makes the place of a new cluster, which nobody else can make then. What a cluster of that name has left that
// was killed is removed.
func Claim(name string) (*Place, error) {
	for range 100 {
		p, err := find(name)
		if errors.Is(err, fs.ErrNotExist) {
			p, err = makePlace(name)
		}
		if errors.Is(err, fs.ErrNotExist) {
			continue // the end of another cluster has removed the directories in between
		}
		if err != nil {
			return nil, err
		}
		switch err := p.lockWithin(lookTime); {
		case errors.Is(err, errGone):
			_ = p.Close()
			continue
		case errors.Is(err, unix.EWOULDBLOCK):
			return nil, errors.Join(fmt.Errorf("lab %q exists already: end it with `vnicd lab down %s`, or choose another "+
				"--name", name, name), p.Close())
		case err != nil:
			return nil, errors.Join(err, p.Close())
		}
		for _, f := range []string{socketFile, logFile} {
			if err := os.Remove(filepath.Join(p.path, f)); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return nil, errors.Join(err, p.Close())
			}
		}
		return p, nil
	}
	return nil, fmt.Errorf("lab %q: its directory is removed again and again", name)
}

// makePlace makes the directories of a place and opens it.
func makePlace(name string) (*Place, error) {
	parent := parents()[0]
	for _, d := range []string{parent, filepath.Join(parent, name)} {
		if err := os.Mkdir(d, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, err
		}
	}
	return openPlace(parent, name)
}

// errGone reports that a place was removed after it had been opened.
var errGone = errors.New("removed meanwhile")

// lock locks the place, with EWOULDBLOCK if its cluster exists.
func (p *Place) lock() error {
	if err := unix.Flock(int(p.dir.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return err
	}
	var open, named unix.Stat_t
	if err := unix.Fstat(int(p.dir.Fd()), &open); err != nil {
		return err
	}
	if unix.Stat(p.path, &named) != nil || open.Dev != named.Dev || open.Ino != named.Ino {
		return errGone
	}
	return nil
}

// lockWithin waits for the end of the cluster's processes, and locks the place.
func (p *Place) lockWithin(d time.Duration) error {
	for end := time.Now().Add(d); ; time.Sleep(20 * time.Millisecond) {
		if err := p.lock(); !errors.Is(err, unix.EWOULDBLOCK) || time.Now().After(end) {
			return err
		}
	}
}

// Remove removes a locked place.
func (p *Place) Remove() error {
	err := os.RemoveAll(p.path)
	_ = os.Remove(filepath.Dir(p.path)) // fails if other clusters exist
	return errors.Join(err, p.Close())
}

// Close closes the place, which remains.
func (p *Place) Close() error { return p.dir.Close() }

// address is the address of the place's socket. Paths of sockets are short (unix(7)); this one always is.
func (p *Place) address() string { return fmt.Sprintf("/proc/self/fd/%d/%s", p.dir.Fd(), socketFile) }

// bind makes the socket. It does not listen yet.
func (p *Place) bind() (*os.File, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), socketFile)
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: p.address()}); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// dial connects with the cluster. The place is locked if the error is errEnded.
func (p *Place) dial() (*net.UnixConn, error) {
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: p.address(), Net: "unix"})
	if err == nil {
		return c, nil
	}
	switch lerr := p.lock(); {
	case errors.Is(lerr, unix.EWOULDBLOCK):
		return nil, fmt.Errorf("lab %q %w: wait for its `vnicd lab up` or `down`, or interrupt `up`", p.Name, errBusy)
	case errors.Is(lerr, errGone):
		return nil, notThere(p.Name)
	case lerr == nil:
		return nil, fmt.Errorf("lab %q %w: `vnicd lab down %s` removes what it has left", p.Name, errEnded, p.Name)
	}
	return nil, err
}

// lookTime is longer than others hold a lock who only look whether a cluster exists.
const lookTime = time.Second

var (
	errBusy  = errors.New("is being made or removed")
	errEnded = errors.New("has ended by itself, or was killed")
)
