package pressure

import (
	"bufio"
	"bytes"
	"errors"
	"math"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Host is the name of the zone of the whole machine. Others have their cgroup's path.
const Host = "host"

// Zone is one bound of this process's memory.
type Zone struct {
	Name  string
	Total uint64 // bytes: of the machine, without huge pages, or the cgroup's limit
	Free  uint64 // bytes that can be allocated without swapping: unused, or cache of files
	// Reserve is Free and the memory that the kernel can still swap out. Nothing is left when it is used up: the next
	// allocation ends in the OOM killer.
	Reserve uint64
	Swap    uint64 // bytes of swap space that the zone can still use
	// Stall is the time so far in which some task waited for memory (PSI's "some"), from the zone's own PSI or the
	// host's; -1: the kernel has no PSI.
	Stall time.Duration
}

// Reader reads the zones of this process.
type Reader struct {
	root   string // of the file system
	page   []byte // for file contents
	member string // /proc/self/cgroup, as of groups
	groups []cgroup
	reads  int
}

// refresh is the number of reads after which the process's cgroups are looked up again though it is in the same ones:
// something may have been mounted.
const refresh = 64

// NewReader returns a Reader of the files below root, "/" except in tests.
func NewReader(root string) *Reader { return &Reader{root: root, page: make([]byte, 16<<10)} }

// Read returns the host's zone, then those of the process's cgroups, the innermost first. Cgroups without a limit below
// the machine's memory are left out. It is not safe for concurrent use.
func (r *Reader) Read() ([]Zone, error) {
	host, err := r.host()
	if err != nil {
		return nil, err
	}
	member, _ := r.read("proc/self/cgroup") // without it the process is in none
	if r.reads%refresh == 0 || string(member) != r.member {
		r.member = string(member)
		r.groups = r.cgroups(r.member)
	}
	r.reads++
	zones := []Zone{host}
	for i := range r.groups {
		g := &r.groups[i]
		z, ok := g.read(r, &host)
		if ok && z.Total < host.Total {
			zones = append(zones, z)
		}
	}
	return zones, nil
}

// Stalls returns the PSI files of the zones, for Watch.
func (r *Reader) Stalls() []string {
	files := []string{filepath.Join(r.root, "proc/pressure/memory")}
	member, _ := r.read("proc/self/cgroup")
	for _, g := range r.cgroups(string(member)) {
		if !g.v1 {
			files = append(files, filepath.Join(r.root, g.dir, "memory.pressure"))
		}
	}
	return files
}

// read returns the contents of a file, at most 16 KiB of it, valid until the next read.
func (r *Reader) read(name string) ([]byte, error) {
	f, err := os.Open(filepath.Join(r.root, name))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	n := 0
	for n < len(r.page) {
		k, err := f.Read(r.page[n:])
		n += k
		if err != nil || k == 0 {
			break // at the end; a file that cannot be read counts as empty
		}
	}
	return r.page[:n], nil
}

func (r *Reader) host() (Zone, error) {
	b, err := r.read("proc/meminfo")
	if err != nil {
		return Zone{}, err
	}
	m := fields(b, ":")
	kib := func(key string) uint64 { return m[key] << 10 }
	if m["MemTotal"] == 0 {
		return Zone{}, errors.New("/proc/meminfo has no MemTotal")
	}
	free, ok := m["MemAvailable"]
	if !ok {
		free = m["MemFree"]
	}
	z := Zone{Name: Host, Total: kib("MemTotal") - min(kib("MemTotal"), kib("Hugetlb")), Free: free << 10,
		Swap: kib("SwapFree"), Stall: r.stall("proc/pressure/memory")}
	z.Reserve = z.Free + min(kib("Active(anon)")+kib("Inactive(anon)"), z.Swap)
	return z, nil
}

// stall returns the total of PSI's "some", -1 if there is none.
func (r *Reader) stall(name string) time.Duration {
	b, err := r.read(name)
	if err != nil {
		return -1
	}
	for line := range bytes.Lines(b) {
		rest, ok := bytes.CutPrefix(line, []byte("some "))
		if !ok {
			continue
		}
		if _, n, ok := bytes.Cut(rest, []byte("total=")); ok {
			if us, err := strconv.ParseUint(string(bytes.TrimSpace(n)), 10, 53); err == nil {
				return time.Duration(us) * time.Microsecond
			}
		}
	}
	return -1
}

// fields parses lines of a key and a number, perhaps with a unit; sep ends the key.
func fields(b []byte, sep string) map[string]uint64 {
	m := map[string]uint64{}
	for line := range strings.Lines(string(b)) {
		key, rest, ok := strings.Cut(strings.TrimSpace(line), sep)
		if !ok {
			continue
		}
		if v, _, _ := strings.Cut(strings.TrimSpace(rest), " "); v != "" {
			if n, err := strconv.ParseUint(v, 10, 64); err == nil && n < math.MaxUint64>>10 {
				m[key] = n
			}
		}
	}
	return m
}

// cgroup is a memory cgroup that may have a limit.
type cgroup struct {
	dir  string // in the file system, without root
	name string
	v1   bool
}

// maxDepth bounds the cgroups that are read.
const maxDepth = 16

// Hidden returns the path of a memory cgroup that this process is in, but which no mounted file system shows, so that
// Read leaves out its limit: `ip netns exec` does that, and a container may. It returns "" if there is none.
func (r *Reader) Hidden() string {
	member, _ := r.read("proc/self/cgroup")
	v1, v2 := memberships(string(member))
	at, version := v1, true
	if at == "" { // memory is a controller of either version, not of both
		at, version = v2, false
	}
	shown := slices.ContainsFunc(r.mounts(), func(m mount) bool { return m.v1 == version })
	if at == "/" || shown {
		return ""
	}
	return at
}

// memberships returns a process's memory cgroup of version 1 and its cgroup of version 2, as far as it has them. Each
// line of member is a number, controllers (none: version 2), a path.
func memberships(member string) (v1, v2 string) {
	for line := range strings.Lines(member) {
		f := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		switch {
		case len(f) != 3:
		case f[0] == "0" && f[1] == "":
			v2 = f[2]
		case has(f[1], "memory"):
			v1 = f[2]
		}
	}
	return v1, v2
}

// cgroups returns the memory cgroups of a process whose /proc/PID/cgroup is member, innermost first, without the root
// cgroup of version 2.
func (r *Reader) cgroups(member string) (out []cgroup) {
	v1, v2 := memberships(member)
	for _, m := range r.mounts() {
		at := v2
		if m.v1 {
			at = v1
		}
		if at == "" {
			continue
		}
		// A cgroup namespace or a bind mount shows only a part of the tree.
		rel, ok := strings.CutPrefix(at, strings.TrimSuffix(m.root, "/"))
		if !ok || strings.HasPrefix(at, "/..") {
			rel = "/"
		}
		for range maxDepth {
			rel = path.Clean("/" + rel)
			out = append(out, cgroup{dir: path.Join(m.at, rel), name: path.Join("/", rel), v1: m.v1})
			if rel == "/" {
				break
			}
			rel = path.Dir(rel)
		}
	}
	return out
}

func has(list, word string) bool {
	for w := range strings.SplitSeq(list, ",") {
		if w == word {
			return true
		}
	}
	return false
}

// mount is a mounted tree of cgroups with the memory controller, or that may have it.
type mount struct {
	root, at string
	v1       bool
}

// mounts reads /proc/self/mountinfo (proc_pid_mountinfo(5)).
func (r *Reader) mounts() (out []mount) {
	f, err := os.Open(filepath.Join(r.root, "proc/self/mountinfo"))
	if err != nil {
		return nil
	}
	defer f.Close()
	seen := map[bool]bool{}
	for s := bufio.NewScanner(f); s.Scan(); {
		left, right, ok := strings.Cut(s.Text(), " - ")
		l, t := strings.Fields(left), strings.Fields(right)
		if !ok || len(l) < 5 || len(t) < 3 {
			continue
		}
		v1 := t[0] == "cgroup" && has(t[2], "memory")
		if !v1 && t[0] != "cgroup2" || seen[v1] {
			continue
		}
		seen[v1] = true
		out = append(out, mount{root: l[3], at: l[4], v1: v1})
	}
	return out
}

// number reads a file with one number; "max" and what cannot be read are none.
func (r *Reader) number(name string) uint64 {
	b, err := r.read(name)
	if err != nil {
		return none
	}
	n, err := strconv.ParseUint(string(bytes.TrimSpace(b)), 10, 64)
	if err != nil {
		return none
	}
	return n
}

const none = math.MaxUint64

// left returns what a limit leaves, none without a limit.
func (r *Reader) left(limit, usage string) uint64 {
	most, have := r.number(limit), r.number(usage)
	if most == none || have == none {
		return none
	}
	return most - min(most, have)
}

// read returns the cgroup's zone, or false if it has no limit.
func (g *cgroup) read(r *Reader, host *Zone) (Zone, bool) {
	in := func(file string) string { return path.Join(g.dir, file) }
	z := Zone{Name: g.name, Total: none, Swap: host.Swap, Stall: host.Stall}
	var used uint64
	room := uint64(none) // how much the limit of memory and swap together leaves
	prefix := ""
	if g.v1 {
		z.Total, used, prefix = r.number(in("memory.limit_in_bytes")), r.number(in("memory.usage_in_bytes")), "total_"
		room = r.left(in("memory.memsw.limit_in_bytes"), in("memory.memsw.usage_in_bytes"))
	} else {
		z.Total, used = min(r.number(in("memory.max")), r.number(in("memory.high"))), r.number(in("memory.current"))
		z.Swap = min(z.Swap, r.left(in("memory.swap.max"), in("memory.swap.current")))
		if s := r.stall(in("memory.pressure")); s >= 0 {
			z.Stall = s
		}
	}
	if z.Total == none || used == none {
		return z, false
	}
	b, err := r.read(in("memory.stat"))
	if err != nil {
		return z, false
	}
	m := fields(b, " ")
	cache := m[prefix+"active_file"] + m[prefix+"inactive_file"]
	// Nothing can be swapped out that is locked: it is on another list, "unevictable".
	anon := m[prefix+"active_anon"] + m[prefix+"inactive_anon"]
	z.Free = z.Total - min(z.Total, used) + min(cache, used)
	z.Reserve = z.Free + min(anon, z.Swap)
	if room != none {
		z.Reserve = min(z.Reserve, room+cache)
	}
	return z, true
}
