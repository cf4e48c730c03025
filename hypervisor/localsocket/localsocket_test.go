package localsocket

import (
	"errors"
	"fmt"
	"io/fs"
	"net"

	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/testutil"
)

// Users and groups that need not exist.
const (
	someone, another, stranger    = 64301, 64302, 64303
	someGroup, theirGroup, noGood = 64311, 64312, 64313
)

// public makes a directory that all users can enter, owned by one of them.
func public(t *testing.T, uid, gid int) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "vnicd-socket-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := errors.Join(os.Chmod(dir, 0o755), os.Chown(dir, uid, gid)); err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestOwner: exactly the processes of the owner can connect, whether the socket's maker may change owners (root) or has
// to grant access by a list; and Admits judges them as the file system does.
func TestOwner(t *testing.T) {
	for _, maker := range []int{0, another} {
		for _, x := range []struct {
			mode  os.FileMode
			owner *Owner
			opens [5]bool // the processes below
		}{
			{0o660, &Owner{someone, None}, [5]bool{true, false, false, false, false}},
			{0o660, &Owner{None, someGroup}, [5]bool{false, true, true, false, false}},
			{0o660, &Owner{someone, someGroup}, [5]bool{true, true, true, false, false}},
			{0o666, &Owner{someone, None}, [5]bool{true, false, false, false, false}},
			{0o600, &Owner{someone, someGroup}, [5]bool{true, false, false, false, false}},
			{0o660, &Owner{None, theirGroup}, [5]bool{false, false, false, true, false}},
			{0o660, &Owner{0, None}, [5]bool{}},
			{0o660, &Owner{None, None}, [5]bool{}},
			{0o666, nil, [5]bool{true, true, true, true, true}},
			{0o660, nil, [5]bool{false, false, false, true, false}},
		} {
			t.Run(fmt.Sprintf("by %d: %o %v", maker, x.mode, x.owner), func(t *testing.T) {
				path := filepath.Join(public(t, maker, theirGroup), "s")
				var l *Listener
				var err error
				testutil.AsUser(t, maker, theirGroup, nil, func() { l, err = Listen(path, x.mode, x.owner) })
				if err != nil {
					t.Fatal(err)
				}
				defer l.Close()
				for i, who := range []struct {
					uid, gid int
					groups   []int
				}{
					{someone, noGood, nil}, {stranger, someGroup, nil}, {stranger, noGood, []int{5, someGroup}},
					{stranger, theirGroup, nil}, {stranger, noGood, []int{7, noGood}},
				} {
					peer, err := visit(t, l, path, who.uid, who.gid, who.groups)
					if opens := err == nil; opens != x.opens[i] {
						t.Errorf("%+v: %v, want %v", who, err, x.opens[i])
					} else if !opens {
						if !errors.Is(err, unix.EACCES) {
							t.Errorf("%+v: %v", who, err)
						}
						continue
					}
					if peer.UID != who.uid || peer.GID != who.gid || peer.PID != os.Getpid() ||
						!slices.Equal(peer.Groups, who.groups) {
						t.Errorf("%+v connected, but the peer is %+v", who, peer)
					}
					if !x.owner.Admits(peer) {
						t.Errorf("%v does not admit %v", x.owner, peer)
					}
				}
			})
		}
	}
}

// visit connects as a user; the result is who the listener sees.
func visit(t *testing.T, l *Listener, path string, uid, gid int, groups []int) (Peer, error) {
	t.Helper()
	var c net.Conn
	var err error
	testutil.AsUser(t, uid, gid, groups, func() { c, err = net.Dial("unix", path) })
	if err != nil {
		return Peer{}, err
	}
	defer c.Close()
	s, err := l.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	p, err := PeerOf(s)
	if err != nil {
		t.Fatal(err)
	}
	return p, nil
}

// TestAdmits: strangers, whatever they share with the owner besides user and group; root always may.
func TestAdmits(t *testing.T) {
	o := &Owner{someone, someGroup}
	for p, want := range map[*Peer]bool{
		{UID: someone, GID: noGood}:                            true,
		{UID: stranger, GID: someGroup}:                        true,
		{UID: stranger, GID: noGood, Groups: []int{someGroup}}: true,
		{UID: 0, GID: 0}:                                       true,
		{UID: stranger, GID: noGood, Groups: []int{someone}}:   false,
		{UID: someGroup, GID: someone}:                         false,
		{UID: None, GID: None, Groups: []int{None}}:            false,
	} {
		if o.Admits(*p) != want {
			t.Errorf("%+v: %v", *p, !want)
		}
	}
	if (&Owner{None, None}).Admits(Peer{UID: None, GID: None, Groups: []int{None}}) {
		t.Error("an owner that is nobody admits an unknown user")
	}
	if s := o.String(); s != fmt.Sprintf("root, user %d or group %d", someone, someGroup) {
		t.Error(s)
	}
}

// TestManyGroups: a process with more groups than the first buffer holds.
func TestManyGroups(t *testing.T) {
	path := filepath.Join(public(t, 0, 0), "s")
	l, err := Listen(path, 0o660, &Owner{None, someGroup})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	groups := []int{}
	for i := range 300 {
		groups = append(groups, 10000+i)
	}
	groups = append(groups, someGroup)
	if p, err := visit(t, l, path, stranger, noGood, groups); err != nil || !slices.Equal(p.Groups, groups) {
		t.Errorf("%v, %v", p.Groups, err)
	}
}

// TestListen: what is at the path already.
func TestListen(t *testing.T) {
	dir := public(t, 0, 0)
	path := filepath.Join(dir, "s")
	l, err := Listen(path, 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(path, 0o600, nil); !errors.Is(err, ErrInUse) {
		t.Errorf("a socket in use: %v", err)
	}
	_ = l.UnixListener.Close() // as a killed process
	next, err := Listen(path, 0o600, nil)
	if err != nil {
		t.Fatalf("a dead process's socket: %v", err)
	}
	if err := l.Close(); err == nil {
		t.Error("closed twice without an error")
	}
	if _, err := os.Lstat(path); err != nil {
		t.Errorf("the former listener removed its successor's socket: %v", err)
	}
	if err := next.Close(); err != nil {
		t.Error(err)
	}
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(path, 0o600, nil); err == nil || !strings.Contains(err.Error(), "not a socket") {
		t.Errorf("a file: %v", err)
	}
}

// TestNames: a socket with two names is one socket, with one owner. Both are replaced together after a process that was
// killed, and removed together; a file that is no socket is left alone.
func TestNames(t *testing.T) {
	dir := public(t, 0, 0)
	path, also := filepath.Join(dir, "s"), filepath.Join(dir, "sub", "t")
	if err := os.Mkdir(filepath.Dir(also), 0o755); err != nil {
		t.Fatal(err)
	}
	left := func() (names []string) {
		for _, d := range []string{dir, filepath.Dir(also)} {
			list, _ := os.ReadDir(d)
			for _, e := range list {
				if e.Name() != "sub" {
					names = append(names, e.Name())
				}
			}
		}
		return names
	}
	owner := &Owner{someone, None}
	dead, err := Listen(path, 0o660, owner, also)
	if err != nil {
		t.Fatal(err)
	}
	_ = dead.UnixListener.Close() // as a killed process
	l, err := Listen(path, 0o660, owner, also)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{path, also} {
		if _, err := visit(t, l, name, someone, noGood, nil); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := visit(t, l, name, stranger, noGood, nil); !errors.Is(err, unix.EACCES) {
			t.Errorf("%s by a stranger: %v", name, err)
		}
	}
	if err := dead.Close(); err == nil {
		t.Error("closed twice without an error")
	}
	if got := left(); !slices.Equal(got, []string{"s", "t"}) {
		t.Errorf("there are %q", got)
	}
	if err := l.Close(); err != nil || len(left()) != 0 {
		t.Errorf("%v, left behind: %q", err, left())
	}

	if err := os.WriteFile(also, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(path, 0o660, owner, also); err == nil || !strings.Contains(err.Error(), "not a socket") {
		t.Errorf("a file: %v", err)
	}
	if b, _ := os.ReadFile(also); string(b) != "x" {
		t.Error("the file was replaced")
	}
	_ = os.Remove(also)
	if _, err := Listen(path, 0o660, owner, filepath.Join(dir, "none", "t")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no directory: %v", err)
	}
	if got := left(); len(got) != 0 {
		t.Errorf("left behind after an error: %q", got)
	}
}

// TestSweep: only sockets that a process without a trace was making go.
func TestSweep(t *testing.T) {
	dir := t.TempDir()
	c := exec.Command("true")
	if err := c.Run(); err != nil {
		t.Fatal(err)
	}
	dead := fmt.Sprintf("vm.hca.%d", c.Process.Pid)
	mine, file := fmt.Sprintf("vm.hca.%d", os.Getpid()), fmt.Sprintf("file.%d", c.Process.Pid)
	for _, name := range []string{dead, mine, "vm.hca", "vm.-1", "vm.0"} {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, name)})
		if err != nil {
			t.Fatal(err)
		}
		l.SetUnlinkOnClose(false)
		_ = l.Close()
	}
	if err := os.WriteFile(filepath.Join(dir, file), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	Sweep(dir)
	for _, name := range []string{mine, file, "vm.hca", "vm.-1", "vm.0"} {
		if _, err := os.Lstat(filepath.Join(dir, name)); err != nil {
			t.Errorf("%s is gone: %v", name, err)
		}
	}
	if _, err := os.Lstat(filepath.Join(dir, dead)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s is still there: %v", dead, err)
	}
}

// TestMayOpen: the text names the users and groups that a socket was given to, in either way.
func TestMayOpen(t *testing.T) {
	for _, maker := range []int{0, another} {
		path := filepath.Join(public(t, maker, theirGroup), "s")
		for _, x := range []struct {
			owner *Owner
			want  string
		}{
			{&Owner{someone, someGroup}, fmt.Sprintf("a member of the group %d or the user %d", someGroup, someone)},
			{&Owner{None, someGroup}, fmt.Sprintf("a member of the group %d or the user %s", someGroup, UserName(maker))},
			{&Owner{None, None}, fmt.Sprintf("the user %s", UserName(maker))},
		} {
			var l *Listener
			var err error
			testutil.AsUser(t, maker, theirGroup, nil, func() { l, err = Listen(path, 0o660, x.owner) })
			if err != nil {
				t.Fatal(err)
			}
			got := MayOpen(path)
			if maker != 0 { // which keeps its own permission
				both := fmt.Sprintf("the user %d or the user %d", maker, someone)
				got = strings.Replace(got, both, fmt.Sprintf("the user %d", someone), 1)
			}
			if got != x.want {
				t.Errorf("made by %d for %v: %q, want %q", maker, x.owner, got, x.want)
			}
			var groups []int
			if x.owner.GID != None {
				groups = []int{x.owner.GID}
			}
			if g := Groups(path); !slices.Equal(g, groups) {
				t.Errorf("made by %d for %v: groups %v", maker, x.owner, g)
			}
			_ = l.Close()
		}
	}
	if g := Groups("/none"); g != nil {
		t.Errorf("groups %v of no socket", g)
	}
}
