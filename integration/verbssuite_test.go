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

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/integration/lab"
)

// suiteDriver runs one module of rdma-core's tests and prints a line for each result.
//
//go:embed testdata/verbssuite.py
var suiteDriver []byte

// foreign are the modules of the suite that are about other vendors' devices or graphics cards.
var foreign = regexp.MustCompile(`^test_(mlx5|efa|efadv|hns|hnsdv|hbl|hbldv|irdma|mana|bnxt|cuda)(_|$)`)

// debian12 is the guest whose suite is that of rdma-core 44; the others' is that of 56.
const debian12 = "bookworm"

// backports are guests with the newest kernel that Debian has for its stable release.
const backports = "trixie-backports"

type suite int

const (
	bothSuites suite = iota
	suite44
	suite56
)

// skipReason is why a suite may leave out a test, and what that stands for.
type skipReason struct {
	reason, why string
	in          suite
}

// maySkip lists those. Every one must occur, so that none outlives its cause.
var maySkip = []skipReason{
	{"Create XRCD is not supported", "XRC: neither the provider nor rxe have it", bothSuites},
	{"Device memory is not supported", "nor memory on the device", bothSuites},
	{"Create QP type 8 is not supported", "nor raw packets", bothSuites},
	{"Create Raw Packet QP ", "the same", bothSuites},
	{"Extended CQ is not supported", "tag matching: of InfiniBand cards", bothSuites},
	{"Rereg MR is not supported", "the provider does not have it", bothSuites},
	{"Parent Domain is not supported", "nor this", bothSuites},
	{"Importing a device is not supported", "nor this", bothSuites},
	{"Advise MR with flags", "the provider has it since rdma-core 59", bothSuites},
	{"Device /dev/dri/renderD128 is not present", "there is no graphics card", suite56},
	{"Allocating dmabuf is not supported", "the same", suite44},
	{"doesn't have net interface",
		"it looks for one below the RDMA device's virtio device; ours is that of the network card", suite44},
}

// mayFail are tests of Debian 12's suite that expect what no specification says.
var mayFail = map[string]string{
	"tests.test_cq.CQTest.test_resize_cq": "30 completions may not fit into a CQ that is asked for one entry: ours has 31 then, and newer suites agree",
}

// TestVerbsSuite: rdma-core's own tests of every verb, as Debian ships them, in one VM.
// Client and server of a test are one process with two queue pairs of one device.
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
	// Debian compresses what it takes for documentation.
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
			out := must[qemu.Result](t)(vm.Shell(ctx, fmt.Sprintf("exec timeout -k 5 300 python3 /tmp/suite.py /tmp %s %s",
				lab.Device, name)))
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
