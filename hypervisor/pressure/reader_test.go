package pressure

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const meminfo = `MemTotal:       16777216 kB
MemFree:         1048576 kB
MemAvailable:    2097152 kB
Active(anon):    3145728 kB
Inactive(anon):  1048576 kB
Unevictable:     4194304 kB
SwapTotal:       8388608 kB
SwapFree:        2097152 kB
HugePages_Total:    1024
Hugetlb:         2097152 kB
`

const psi = `some avg10=1.00 avg60=0.50 avg300=0.10 total=%d
full avg10=0.50 avg60=0.20 avg300=0.00 total=7
`

const mountV1 = `11 30 0:28 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
14 30 0:31 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory
`
const mountV2 = "25 22 0:23 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"

// tree writes files below a directory.
func tree(t *testing.T, files map[string]string) (root string) {
	t.Helper()
	root = t.TempDir()
	for name, text := range files {
		name = filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

const mib = 1 << 20

func TestRead(t *testing.T) {
	base := map[string]string{"proc/meminfo": meminfo, "proc/pressure/memory": fmt.Sprintf(psi, 1500000)}
	host := Zone{Host, 14336 * mib, 2048 * mib, 4096 * mib, 2048 * mib, 1500 * time.Millisecond}
	merge := func(a, b map[string]string) map[string]string {
		m := maps.Clone(a)
		maps.Copy(m, b)
		return m
	}
	with := func(more map[string]string) map[string]string { return merge(base, more) }
	v2 := map[string]string{
		"proc/self/cgroup":                                             "0::/system.slice/vnicd.service\n",
		"proc/self/mountinfo":                                          mountV2,
		"sys/fs/cgroup/cgroup.controllers":                             "cpu memory\n",
		"sys/fs/cgroup/system.slice/vnicd.service/memory.max":          "1073741824\n",
		"sys/fs/cgroup/system.slice/vnicd.service/memory.high":         "536870912\n",
		"sys/fs/cgroup/system.slice/vnicd.service/memory.current":      "503316480\n", // 480 MiB
		"sys/fs/cgroup/system.slice/vnicd.service/memory.swap.max":     "104857600\n", // 100 MiB
		"sys/fs/cgroup/system.slice/vnicd.service/memory.swap.current": "94371840\n",  // 90 MiB
		"sys/fs/cgroup/system.slice/vnicd.service/memory.pressure":     fmt.Sprintf(psi, 2000),
		"sys/fs/cgroup/system.slice/vnicd.service/memory.stat": "anon 1\ninactive_anon 167772160\nactive_anon 0\n" +
			"inactive_file 8388608\nactive_file 8388608\nunevictable 318767104\n",
		"sys/fs/cgroup/system.slice/memory.max":     "max\n",
		"sys/fs/cgroup/system.slice/memory.high":    "max\n",
		"sys/fs/cgroup/system.slice/memory.current": "1073741824\n",
	}
	service := Zone{"/system.slice/vnicd.service", 512 * mib, 48 * mib, 58 * mib, 10 * mib, 2 * time.Millisecond}
	v1 := map[string]string{
		"proc/self/cgroup":    "9:name=systemd:/x\n4:cpu,memory:/vnicd\n0::/\n",
		"proc/self/mountinfo": mountV1 + mountV2,
		"sys/fs/cgroup/memory/vnicd/memory.limit_in_bytes":       "268435456\n",
		"sys/fs/cgroup/memory/vnicd/memory.usage_in_bytes":       "264241152\n", // 252 MiB
		"sys/fs/cgroup/memory/vnicd/memory.stat":                 "inactive_anon 1\ntotal_inactive_anon 67108864\ntotal_active_anon 0\ntotal_inactive_file 1048576\n",
		"sys/fs/cgroup/memory/memory.limit_in_bytes":             "9223372036854771712\n",
		"sys/fs/cgroup/memory/memory.usage_in_bytes":             "1000000000\n",
		"sys/fs/cgroup/memory/memory.stat":                       "",
		"sys/fs/cgroup/memory/vnicd/memory.memsw.usage_in_bytes": "300000000\n",
	}
	group := Zone{"/vnicd", 256 * mib, 5 * mib, 69 * mib, 2048 * mib, host.Stall}
	swapless := map[string]string{ // memory and swap together are limited to 16 MiB more
		"sys/fs/cgroup/memory/vnicd/memory.memsw.usage_in_bytes": "301989888\n",
		"sys/fs/cgroup/memory/vnicd/memory.memsw.limit_in_bytes": "318767104\n",
	}
	limited := group
	limited.Reserve = 17 * mib
	inside := map[string]string{ // a container: the mount shows only its own cgroup, and it may be elsewhere
		"proc/self/cgroup":                                      "4:memory:/docker/abc\n",
		"proc/self/mountinfo":                                   strings.Replace(mountV1, "0:31 / ", "0:31 /docker/abc ", 1),
		"sys/fs/cgroup/memory/memory.limit_in_bytes":            "268435456\n",
		"sys/fs/cgroup/memory/memory.usage_in_bytes":            "134217728\n",
		"sys/fs/cgroup/memory/memory.stat":                      "total_inactive_anon 0\n",
		"sys/fs/cgroup/memory/docker/abc/memory.stat":           "",
		"sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": "1\n",
	}
	container := Zone{"/", 256 * mib, 128 * mib, 128 * mib, 2048 * mib, host.Stall}
	noPSI := host
	noPSI.Stall = -1
	for name, c := range map[string]struct {
		files map[string]string
		want  []Zone
	}{
		"host":      {base, []Zone{host}},
		"no PSI":    {map[string]string{"proc/meminfo": meminfo}, []Zone{noPSI}},
		"v2":        {with(v2), []Zone{host, service}},
		"v1":        {with(v1), []Zone{host, group}},
		"v1 memsw":  {with(merge(v1, swapless)), []Zone{host, limited}},
		"container": {with(inside), []Zone{host, container}},
		"nonsense": {with(map[string]string{"proc/self/cgroup": "x\n::::\n4:memory:/../..\n0::\n",
			"proc/self/mountinfo": "- -\n" + mountV1, "proc/pressure/memory": "some total=1500000\n"}), []Zone{host}},
	} {
		t.Run(name, func(t *testing.T) {
			r := NewReader(tree(t, c.files))
			for range 2 {
				got, err := r.Read()
				if err != nil {
					t.Fatal(err)
				}
				if !slices.Equal(got, c.want) {
					t.Errorf("got  %#v\nwant %#v", got, c.want)
				}
			}
		})
	}
	if _, err := NewReader(t.TempDir()).Read(); err == nil {
		t.Error("a host without /proc/meminfo")
	}
	if _, err := NewReader(tree(t, map[string]string{"proc/meminfo": "MemTotal: x\n"})).Read(); err == nil {
		t.Error("a host without MemTotal")
	}
}

// A limit that changes at run time counts at the next reading, and so does a move to another cgroup; cgroups that are
// mounted later count a little later.
func TestChanges(t *testing.T) {
	root := tree(t, map[string]string{
		"proc/meminfo": meminfo, "proc/self/cgroup": "4:memory:/c\n0::/a\n", "proc/self/mountinfo": mountV2,
		"sys/fs/cgroup/memory/c/memory.limit_in_bytes": "1048576\n",
		"sys/fs/cgroup/memory/c/memory.usage_in_bytes": "0\n",
		"sys/fs/cgroup/memory/c/memory.stat":           "",
		"sys/fs/cgroup/a/memory.max":                   "max\n",
		"sys/fs/cgroup/a/memory.current":               "0\n",
		"sys/fs/cgroup/a/memory.stat":                  "",
		"sys/fs/cgroup/b/memory.max":                   "1048576\n",
		"sys/fs/cgroup/b/memory.current":               "0\n",
		"sys/fs/cgroup/b/memory.stat":                  "",
	})
	r := NewReader(root)
	names := func() (s []string) {
		zones, err := r.Read()
		if err != nil {
			t.Fatal(err)
		}
		for _, z := range zones {
			s = append(s, z.Name)
		}
		return s
	}
	if got := names(); len(got) != 1 {
		t.Error(got)
	}
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(root, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("sys/fs/cgroup/a/memory.max", "4194304\n")
	if got := names(); len(got) != 2 || got[1] != "/a" {
		t.Error(got)
	}
	write("proc/self/cgroup", "4:memory:/c\n0::/b\n")
	if got := names(); len(got) != 2 || got[1] != "/b" {
		t.Error(got)
	}
	write("proc/self/mountinfo", mountV1+mountV2)
	for range refresh {
		names()
	}
	if got := names(); len(got) != 3 || got[1] != "/c" || got[2] != "/b" {
		t.Error(got)
	}
}

// A cgroup that no mount shows is named, whatever version has the memory controller.
func TestHidden(t *testing.T) {
	for name, c := range map[string]struct{ member, mounts, want string }{
		"v1":         {"4:memory:/a\n0::/b\n", mountV1, ""},
		"v1, hidden": {"4:memory:/a\n0::/b\n", mountV2, "/a"},
		"v2":         {"4:cpu:/a\n0::/b\n", mountV2, ""},
		"v2, hidden": {"4:cpu:/a\n0::/b\n", "30 1 0:9 / /sys rw - sysfs sysfs rw\n", "/b"},
		"root":       {"4:memory:/\n0::/\n", "", ""},
		"none":       {"", "", ""},
	} {
		r := NewReader(tree(t, map[string]string{"proc/self/cgroup": c.member, "proc/self/mountinfo": c.mounts}))
		if got := r.Hidden(); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

// This machine has these files, whatever it is.
func TestThisHost(t *testing.T) {
	r := NewReader("/")
	zones, err := r.Read()
	if err != nil {
		t.Fatal(err)
	}
	z := zones[0]
	if z.Name != Host || z.Total < 64*mib || z.Free > z.Total || z.Reserve < z.Free {
		t.Errorf("%+v", z)
	}
	t.Log(zones)
	if n := testing.AllocsPerRun(10, func() { _, _ = r.Read() }); n > 2000 {
		t.Errorf("%v allocations", n)
	}
}

// A Watch begins and ends, where this kernel has PSI; it needs a file that takes triggers.
func TestWatch(t *testing.T) {
	if _, err := NewWatch([]string{filepath.Join(t.TempDir(), "none")}, func() {}); err == nil {
		t.Error("a watch of nothing")
	}
	if _, err := os.Stat("/proc/pressure/memory"); err != nil {
		t.Skip("this kernel has no PSI: ", err)
	}
	w, err := NewWatch([]string{"/proc/pressure/memory", "/none"}, func() {})
	if err != nil {
		t.Fatal("this kernel takes no triggers from this user: ", err)
	}
	w.Close()
	w.Close()
}

func BenchmarkRead(b *testing.B) {
	r := NewReader("/")
	for b.Loop() {
		if _, err := r.Read(); err != nil {
			b.Fatal(err)
		}
	}
}
