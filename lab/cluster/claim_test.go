package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// labsDir gives this test a directory for labs of its own.
func labsDir(t *testing.T) (parent string) {
	t.Helper()
	dir := t.TempDir()
	t.Setenv("XDG_RUNTIME_DIR", dir)
	return filepath.Join(dir, "vnicd-lab")
}

func claim(t *testing.T, name string) *Place {
	t.Helper()
	p, err := Claim(name)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// TestClaim: a name is used once; names of others, of what has ended and of what was removed are free.
func TestClaim(t *testing.T) {
	parent := labsDir(t)
	a := claim(t, "a")
	if p, err := Claim("a"); err == nil || !strings.Contains(err.Error(), "`vnicd lab down a`, or choose another --name") {
		t.Errorf("twice: %v, %v", p, err)
	}
	b := claim(t, "b")
	for _, d := range []string{parent, a.path} {
		if info, err := os.Stat(d); err != nil || info.Mode().Perm() != 0o700 {
			t.Errorf("%s: %v, %v", d, info, err)
		}
	}
	// A killed lab leaves its files.
	socket, err := a.bind()
	if err != nil {
		t.Fatal(err)
	}
	err = errors.Join(socket.Close(), os.WriteFile(filepath.Join(a.path, logFile), nil, 0o600), a.Close())
	if err != nil {
		t.Fatal(err)
	}
	a = claim(t, "a")
	if left, err := os.ReadDir(a.path); err != nil || len(left) != 0 {
		t.Errorf("left in a: %v, %v", left, err)
	}
	if err := a.Remove(); err != nil {
		t.Error(err)
	}
	if _, err := find("a"); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "vnicd lab up --name a") {
		t.Errorf("removed: %v", err)
	}
	if err := b.Remove(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(parent); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the directory of all is left: %v", err)
	}
	for _, name := range []string{"", ".", "..", "a/b", "-a", "a b", strings.Repeat("a", 33)} {
		if _, err := Claim(name); err == nil || !strings.Contains(err.Error(), "want 1 to 32 letters") {
			t.Errorf("%q: %v", name, err)
		}
	}
}

// TestPlaceOfOthers: a directory that others can write to, or that is a symbolic link, is not used.
func TestPlaceOfOthers(t *testing.T) {
	parent := labsDir(t)
	if err := os.Mkdir(parent, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, use := range []func() error{
		func() error { _, err := Claim("a"); return err },
		func() error { _, err := find("a"); return err },
	} {
		if err := use(); err == nil || !strings.Contains(err.Error(), parent+" belongs to user") {
			t.Errorf("mode 0755: %v", err)
		}
	}
	own := t.TempDir()
	if err := errors.Join(os.Chmod(own, 0o700), os.RemoveAll(parent), os.Symlink(own, parent)); err != nil {
		t.Fatal(err)
	}
	if _, err := Claim("a"); err == nil {
		t.Error("a symbolic link was followed")
	}
	if os.Getuid() != 0 {
		return // may not give files away
	}
	runtime := t.TempDir()
	if err := os.Chown(runtime, 1, 1); err != nil {
		t.Fatal(err)
	}
	t.Setenv("XDG_RUNTIME_DIR", runtime)
	if dirs := parents(); strings.HasPrefix(dirs[0], runtime) {
		t.Errorf("the runtime directory of another user is used: %q", dirs)
	}
}

// rig serves the door of a lab that is being made.
func rig(t *testing.T, name string) (d *door, ended chan error) {
	t.Helper()
	p := claim(t, name)
	socket, err := p.bind()
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Listen(int(socket.Fd()), 1); err != nil {
		t.Fatal(err)
	}
	l, err := net.FileListener(socket)
	if err = errors.Join(err, socket.Close()); err != nil {
		t.Fatal(err)
	}
	ended = make(chan error, 1)
	s := &Spec{Options: valid()}
	d = newDoor(s, l.(*net.UnixListener), p.dir, func(err error) { ended <- err }, nil)
	accepting := make(chan struct{})
	go func() { d.accept(); close(accepting) }()
	t.Cleanup(func() { d.close(); <-accepting })
	return d, ended
}

// TestDoor: what a lab that is being made answers, and how it is taken down.
func TestDoor(t *testing.T) {
	labsDir(t)
	d, ended := rig(t, "a")
	list, err := List()
	if err != nil || len(list) != 1 || list[0].Name != "a" || list[0].State != "starting" ||
		strings.Join(list[0].VMs, " ") != "vm1 vm2" || list[0].Directory != "/home/a/src" {
		t.Errorf("%+v, %v", list, err)
	}
	cmd := &Command{Argv: []string{"true"}}
	if _, err := Exec(t.Context(), "a", cmd, os.Stdin, os.Stdout, os.Stderr); err == nil ||
		err.Error() != errNotYet.Error() {
		t.Errorf("a command: %v", err)
	}
	p, err := find("a")
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	for _, bad := range []string{"x", "\n{]", "\n{\"Job\": {\"Argv\": [\"true\"]}}"} {
		conn, err := p.dial()
		if err != nil {
			t.Fatal(err)
		}
		_, err = conn.Write([]byte(bad))
		var r result
		if err = errors.Join(err, conn.CloseWrite(), json.NewDecoder(conn).Decode(&r), conn.Close()); err != nil ||
			!strings.Contains(r.Error, "request that is not understood") && !strings.Contains(r.Error, "want 3") {
			t.Errorf("%q: %+v, %v", bad, r, err)
		}
	}

	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := <-ended; err != errDown {
			t.Errorf("ended with %v", err)
		}
		d.finish(result{Error: errDown.Error(), Logs: "/logs"})
		if err := d.place.Close(); err != nil {
			t.Error(err)
		}
	}()
	if note, err := Down(t.Context(), "a"); note != "logs: /logs" || err != nil {
		t.Errorf("%q, %v", note, err)
	}
	<-done
	if list, err := List(); len(list) != 0 || err != nil {
		t.Errorf("%+v, %v", list, err)
	}
}

// TestDirectoryRemoved: a lab whose directory is removed with its user's login ends, as nobody could end it.
func TestDirectoryRemoved(t *testing.T) {
	parent := labsDir(t)
	d, ended := rig(t, "a")
	d.results = io.Discard
	defer func() { _ = d.place.Close() }()
	ctx, cancel := context.WithCancel(t.Context())
	attended := make(chan error, 1)
	go func() { attended <- d.attend(ctx, &cluster{}) }()
	if list, err := List(); err != nil || len(list) != 1 {
		t.Errorf("%+v, %v", list, err)
	}
	if err := os.RemoveAll(parent); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != errPlace {
		t.Errorf("ended with %v, want %v", err, errPlace)
	}
	cancel()
	if err := <-attended; err != context.Canceled {
		t.Error(err)
	}
}

// TestEndedByItself: of a lab without processes it is said what to do; `down` removes what it has left.
func TestEndedByItself(t *testing.T) {
	parent := labsDir(t)
	d, _ := rig(t, "a")
	d.close()
	if _, err := Exec(t.Context(), "a", &Command{Argv: []string{"true"}}, os.Stdin, os.Stdout, os.Stderr); !errors.Is(err,
		errBusy) {
		t.Errorf("while its processes exist: %v", err)
	}
	if err := d.place.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := Exec(t.Context(), "a", &Command{Argv: []string{"true"}}, os.Stdin, os.Stdout, os.Stderr); !errors.Is(err,
		errEnded) || !strings.Contains(err.Error(), "`vnicd lab down a`") {
		t.Errorf("a command: %v", err)
	}
	if list, err := List(); err != nil || len(list) != 1 || list[0].State != "ended" {
		t.Errorf("%+v, %v", list, err)
	}
	if note, err := Down(t.Context(), "a"); !strings.Contains(note, "killed") || err != nil {
		t.Errorf("%q, %v", note, err)
	}
	if _, err := os.Stat(parent); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("left: %v", err)
	}
	if _, err := Down(t.Context(), "a"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("again: %v", err)
	}
}
