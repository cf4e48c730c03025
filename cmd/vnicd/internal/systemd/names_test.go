package systemd

import (
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// noStore stores the table nowhere: the test has it.
func noStore(int) error { return nil }

// successor is the next process's view of the table, as it is now.
func successor(tb testing.TB, n *names) *names {
	tb.Helper()
	next := &names{}
	if n.file == nil {
		next.adopt(nil)
		return next
	}
	table, err := io.ReadAll(io.NewSectionReader(n.file, 0, maxNames*entrySize))
	if err != nil {
		tb.Fatal(err)
	}
	fd, err := unix.MemfdCreate("copy", unix.MFD_CLOEXEC)
	if err != nil {
		tb.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), namesFile)
	tb.Cleanup(func() { _ = f.Close() })
	if _, err := f.Write(table); err != nil {
		tb.Fatal(err)
	}
	next.adopt(f)
	return next
}

func mustAdd(tb testing.TB, n *names, name string) string {
	tb.Helper()
	as, err := n.add(name, noStore)
	if err != nil {
		tb.Fatal(err)
	}
	return as
}

// TestNamesFit: a store that is full says so, and Linux starts the next process with all that it has.
func TestNamesFit(t *testing.T) {
	for _, older := range []int{0, 100} {
		n := &names{}
		n.adopt(nil)
		var all []string
		for i := range older {
			as := fmt.Sprintf("hca/%032d/kick/0123456789abcdef/17", i)
			if _, err := n.passed(as); err != nil {
				t.Fatal(err)
			}
			all = append(all, as)
		}
		n.settle()
		var err error
		for i := 0; err == nil; i++ {
			var as string
			if as, err = n.add(fmt.Sprintf("hca/%032d/kick/0123456789abcdef/18", i), noStore); err == nil {
				all = append(all, as)
			}
			if i > 1<<20 {
				t.Fatal("the store does not become full")
			}
		}
		if !strings.Contains(err.Error(), "the store is full") {
			t.Fatal(err)
		}
		if older == 0 && len(all) != maxNames {
			t.Errorf("%d descriptors, want %d", len(all), maxNames)
		}
		sockets := strings.Repeat("status:", 1000) // of the units vnicd-*.socket
		c := exec.Command("/bin/true")
		c.Env = []string{"LISTEN_FDNAMES=" + sockets + namesFile + ":" + strings.Join(all, ":")}
		if err := c.Run(); err != nil {
			t.Errorf("%d names: %v", len(all), err)
		}
		first := "hca/" + strings.Repeat("0", 32) + "/kick/0123456789abcdef/18"
		if err := n.remove(first, func(string) error { return nil }); err != nil {
			t.Fatal(err)
		}
		n.confirmed(n.removed())
		mustAdd(t, n, "hca/other")
	}
}

// TestNamesKilled: whenever the process is killed, and whichever of its last messages the manager has not read then,
// the next process gets each descriptor by its own name, and all whose storing was confirmed.
func TestNamesKilled(t *testing.T) {
	const seed = 24
	rnd := rand.New(rand.NewPCG(seed, seed))
	type message struct {
		store    bool
		as, name string
	}
	for range 20 {
		n := &names{}
		n.adopt(nil)
		has := map[string]string{} // what the manager has read and confirmed: names by what they are stored as
		var sent []message         // what it may not have read
		read := func(has map[string]string, m message) {
			if delete(has, m.as); m.store {
				has[m.as] = m.name
			}
		}
		check := func() {
			t.Helper()
			got := map[string]string{}
			for as, name := range has {
				got[as] = name
			}
			for _, m := range sent[:rnd.IntN(len(sent)+1)] {
				read(got, m)
			}
			next := successor(t, n)
			for as, name := range got {
				if is, err := next.passed(as); err != nil || is != name {
					t.Fatalf("%s is %q, want %q: %v", as, is, name, err)
				}
			}
			next.settle()
			if as := mustAdd(t, next, "hca/new"); got[as] != "" {
				t.Fatalf("%s is taken again, it is that of %q", as, got[as])
			}
		}
		for range 60 {
			name := fmt.Sprintf("hca/vm%d", rnd.IntN(8))
			switch _, stored := n.number[name]; {
			case rnd.IntN(4) == 0: // a barrier
				removals := n.removed()
				for _, m := range sent {
					read(has, m)
				}
				sent = nil
				n.confirmed(removals)
			case stored:
				if err := n.remove(name, func(as string) error {
					sent = append(sent, message{false, as, name})
					return nil
				}); err != nil {
					t.Fatal(err)
				}
			default:
				as := mustAdd(t, n, name)
				check()
				sent = append(sent, message{true, as, name})
			}
			check()
		}
		if n.file != nil {
			_ = n.file.Close()
		}
	}
}

// TestNamesOfKinds: names are counted by what they begin with, also those that the previous process left.
func TestNamesOfKinds(t *testing.T) {
	n := &names{}
	n.adopt(nil)
	var as []string
	for _, name := range []string{"hca/a", "hca/b", "net/a", "app/x", "hca/c"} {
		as = append(as, mustAdd(t, n, name))
	}
	mustAdd(t, n, "hca/a") // once more
	for range 2 {          // the second time there is nothing to remove
		if err := n.remove("hca/c", func(string) error { return nil }); err != nil {
			t.Fatal(err)
		}
	}
	next := successor(t, n)
	for _, a := range as[:4] {
		if _, err := next.passed(a); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := next.passed("hca/of-an-older-vnicd"); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		n       *names
		kinds   []string
		all, of int
	}{
		{n, nil, 4, 0}, {n, []string{"hca/"}, 4, 2}, {n, []string{"hca/", "app/", "other/"}, 4, 3},
		{next, []string{"hca/", "app/"}, 5, 4}, {&names{}, []string{"hca/"}, 0, 0},
	} {
		if all, of, _ := tc.n.count(tc.kinds...); all != tc.all || of != tc.of {
			t.Errorf("%v: %d of %d, want %d of %d", tc.kinds, of, all, tc.of, tc.all)
		}
	}
}

// TestNamesDamaged: what has no name, or another's, is refused.
func TestNamesDamaged(t *testing.T) {
	n := &names{}
	n.adopt(nil)
	first, second := mustAdd(t, n, "hca/one"), mustAdd(t, n, "hca/two")
	for _, bad := range []string{"/2", "/zzzz", "/-1", "/", "/00", "/A", "/" + strings.Repeat("1", 100)} {
		if name, err := successor(t, n).passed(bad); err == nil {
			t.Errorf("%s is %q", bad, name)
		}
	}
	if name, err := successor(t, &names{}).passed(first); err == nil {
		t.Errorf("without a table, %s is %q", first, name)
	}
	twice := successor(t, n)
	for i, as := range []string{first, second, first} {
		if _, err := twice.passed(as); (err != nil) != (i == 2) {
			t.Errorf("%d, %s: %v", i, as, err)
		}
	}
	for _, damage := range []struct {
		what string
		at   int64
		b    byte
		want bool
	}{{"a length behind the end", entrySize, 255, false}, {"the name of another", entrySize + 5, 'o', true}} {
		if _, err := n.file.WriteAt([]byte{damage.b}, damage.at); err != nil {
			t.Fatal(err)
		}
		if _, err := successor(t, n).passed(second); (err == nil) != damage.want {
			t.Errorf("%s: %v", damage.what, err)
		}
		if _, err := n.file.WriteAt([]byte{byte(len("hca/two"))}, entrySize); err != nil {
			t.Fatal(err)
		}
	}
	long := strings.Repeat("x", entrySize-1)
	last := mustAdd(t, n, long)
	if name, err := successor(t, n).passed(last); err != nil || name != long {
		t.Errorf("the longest name is %q, %v", name, err)
	}
	for _, bad := range []string{"", "hca:one", "hca/\n", strings.Repeat("x", entrySize)} {
		if _, err := n.add(bad, noStore); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
}

// TestNamesRefused: the entry of a descriptor that was refused, because the table is damaged, is not used again before
// the manager has removed the descriptor. Otherwise, if this process is killed before, the next one gets it by the
// name of another.
func TestNamesRefused(t *testing.T) {
	m := newKeepingManager(t)
	n := &names{}
	n.adopt(nil)
	var all []Descriptor
	for _, name := range []string{"hca/one", "hca/two", "hca/three", "hca/four"} {
		fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, Descriptor{mustAdd(t, n, name), fd})
	}
	for _, entry := range []int64{1, 3} {
		if _, err := n.file.WriteAt([]byte{255}, entry*entrySize); err != nil {
			t.Fatal(err)
		}
	}
	again, err := unix.FcntlInt(uintptr(all[1].FD), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	all = append(all, Descriptor{all[1].Name, again}) // a second one of the same name
	table, err := unix.FcntlInt(n.file.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var s Store
	kept, err := s.take(table, all)
	if len(kept) != 2 || err == nil || strings.Count(err.Error(), "has no name") != 3 {
		t.Fatalf("kept %v, %v", kept, err)
	}
	for _, fd := range kept {
		_ = unix.Close(fd)
	}
	refused := map[string]bool{all[1].Name: true, all[3].Name: true}
	for i := range 4 {
		if as := mustAdd(t, &s.names, fmt.Sprintf("hca/before%d", i)); refused[as] {
			t.Errorf("%s is used again before its removal is confirmed", as)
		}
	}
	m.open()
	if err := s.Keep("hca/confirms", int(n.file.Fd())); err != nil {
		t.Fatal(err)
	}
	for i := range 2 {
		as := mustAdd(t, &s.names, fmt.Sprintf("hca/after%d", i))
		if !refused[as] {
			t.Errorf("%s is used, want one of those that were removed", as)
		}
		delete(refused, as)
	}
}
