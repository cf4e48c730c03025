package integration

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
)

// suiteDriver runs one module of rdma-core's tests and prints a line for each result.
//
//go:embed testdata/verbssuite.py
var suiteDriver []byte

// foreign matches the suite's modules for other vendors' devices and for graphics cards.
var foreign = regexp.MustCompile(`^test_(mlx5|efa|efadv|hns|hnsdv|hbl|hbldv|irdma|mana|bnxt|cuda)(_|$)`)

// debian12 is the release whose suite is rdma-core 44's; the other releases have 56's.
const debian12 = "bookworm"

// backports is the release with the newest kernel that Debian has for its stable release.
const backports = "trixie-backports"

type suite int

const (
	bothSuites suite = iota
	suite44
	suite56
)

// skipReason is a reason for which the suite may skip a test, and what it means here.
type skipReason struct {
	reason, why string
	in          suite
}

// maySkip lists those reasons. Each must occur, so that obsolete entries are removed.
var maySkip = []skipReason{
	{"Create XRCD is not supported", "XRC: neither the provider nor rxe support it", bothSuites},
	{"Device memory is not supported", "device memory: likewise", bothSuites},
	{"Create QP type 8 is not supported", "raw packets: likewise", bothSuites},
	{"Create Raw Packet QP ", "raw packets: likewise", bothSuites},
	{"Extended CQ is not supported", "tag matching: InfiniBand cards only", bothSuites},
	{"Rereg MR is not supported", "the provider does not support it", bothSuites},
	{"Parent Domain is not supported", "the provider does not support it", bothSuites},
	{"Importing a device is not supported", "the provider does not support it", bothSuites},
	{"Advise MR with flags", "the provider has it since rdma-core 59", bothSuites},
	{"Device /dev/dri/renderD128 is not present", "the VM has no graphics card", suite56},
	{"Allocating dmabuf is not supported", "the VM has no graphics card", suite44},
	{"doesn't have net interface",
		"it looks below the RDMA device's virtio device; our interface belongs to the network card", suite44},
}

// mayFail are tests of Debian 12's suite whose expectations no specification requires.
var mayFail = map[string]string{
	"tests.test_cq.CQTest.test_resize_cq": "the test expects fewer than 30 entries in a CQ created with one; ours has 31, which newer suites accept",
}

// TestVerbsSuite runs rdma-core's tests of every verb, as Debian ships them, in one VM. A test's client and server are
// one process with two queue pairs of one device.
func TestVerbsSuite(t *testing.T) {
	l, ctx := newLab(t)
	h := must[*lab.Host](t)(l.Host("h1"))
	check(t, h.Run(ctx, `networks: [{name: blue, vni: 100, mtu: 4500}]
vms: [{name: vm1, network: blue, mac: "02:00:00:00:00:01"}]
`))
	a := vmA
	a.MTU = 4500
	ms := must[[]*qemu.Machine](t)(l.Boot(ctx, must[qemu.Config](t)(h.Config(ctx, a))))
	dumpOnFailure(t, []*lab.Host{h}, &ms)
	vm := ms[0]
	check(t, lab.LoadModule(ctx, vm))
	check(t, vm.WriteFile(ctx, "/tmp/suite.py", suiteDriver))
	run(ctx, t, vm, "echo 16 >/proc/sys/vm/nr_hugepages")
	// Debian compresses files in its documentation directories.
	run(ctx, t, vm, "cp -r /usr/share/doc/rdma-core/tests /tmp/tests && find /tmp/tests -name '*.gz' -exec gunzip {} +")
	have, least := suite56, 100
	if l.Images.Release == debian12 {
		have, least = suite44, 95
	}
	expected := slices.DeleteFunc(slices.Clone(maySkip),
		func(s skipReason) bool { return s.in != bothSuites && s.in != have })
	passed, skipped := 0, make([]int, len(expected))
	for name := range strings.FieldsSeq(run(ctx, t, vm, "cd /tmp/tests && ls test_*.py")) {
		name = strings.TrimSuffix(name, ".py")
		if foreign.MatchString(name) {
			continue
		}
		t.Run(name, func(t *testing.T) {
			out := must[qemu.Result](t)(vm.Shell(ctx, lab.Limited(5*time.Minute,
				fmt.Sprintf("python3 /tmp/suite.py /tmp %s %s", lab.Device, name))))
			ended := false
			for line := range bytes.Lines([]byte(out.Stdout)) {
				var r struct{ What, Test, Why string }
				if rest, ok := bytes.CutPrefix(line, []byte("RESULT ")); !ok {
					continue
				} else if err := json.Unmarshal(rest, &r); err != nil {
					t.Fatalf("%v: %s", err, line)
				}
				switch r.What {
				case "passed":
					passed++
				case "ended":
					ended = true
				case "skipped":
					i := slices.IndexFunc(expected, func(m skipReason) bool { return strings.Contains(r.Why, m.reason) })
					if i < 0 {
						t.Errorf("%s was skipped: %s", r.Test, r.Why)
						continue
					}
					skipped[i]++
				default:
					if why := mayFail[r.Test]; why != "" && have == suite44 {
						t.Logf("%s fails: %s", r.Test, why)
						continue
					}
					t.Errorf("%s %s\n%s", r.Test, r.What, tail(r.Why, 3000))
				}
			}
			if out.ExitCode != 0 || !ended {
				t.Errorf("exit status %d\n%s%s", out.ExitCode, tail(out.Stdout, 2000), tail(out.Stderr, 2000))
			}
		})
	}
	if passed < least {
		t.Errorf("only %d tests passed, expected %d", passed, least)
	}
	for i, n := range skipped {
		if n == 0 {
			t.Errorf("nothing was skipped for %q: %s", expected[i].reason, expected[i].why)
		}
	}
	t.Logf("%d tests passed, skipped: %v", passed, skipped)
	quietKernels(ctx, t, ms...)
}
