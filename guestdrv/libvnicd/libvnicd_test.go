package libvnicd_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/goleak"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/guestdrv/internal/rig"
)

// builds has the directories of libraries that were built, by compiler flags.
var builds = map[string]string{}

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		for _, dir := range builds {
			_ = os.RemoveAll(dir)
		}
		os.Exit(code)
	}))
}

const (
	inline    = abi.SendInline
	signaled  = abi.SendSignaled
	solicited = abi.SendSolicited
	fence     = abi.SendFence
)

// build builds the library with make, and testdata/NAME.c with it, and returns the program. Tests run one after the
// other.
func build(tb testing.TB, name, flags string) string {
	tb.Helper()
	dir, ok := builds[flags]
	if !ok {
		var err error
		if dir, err = os.MkdirTemp("", "libvnicd"); err != nil {
			tb.Fatal(err)
		}
		builds[flags] = dir
		run(tb, "make", "-s", "-j2", "OUT="+dir, "CFLAGS=-O1 -g "+flags)
	}
	program := filepath.Join(dir, name)
	args := append([]string{"-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-Iinclude", "-I../linux", "-O1",
		"-g"}, strings.Fields(flags)...)
	run(tb, "cc", append(args, "-pthread", "-o", program, "testdata/"+name+".c", filepath.Join(dir, "libvnicd.a"))...)
	return program
}

// run runs a command that must succeed.
func run(tb testing.TB, command string, args ...string) string {
	tb.Helper()
	out, err := exec.CommandContext(limit(tb), command, args...).CombinedOutput()
	if err != nil {
		tb.Fatalf("%s %v: %v\n%s", command, args, err, out)
	}
	return string(out)
}

// sanitize are compiler flags with which any error that the sanitizers find ends the program.
const sanitize = "-fsanitize=address,undefined -fno-sanitize-recover=all"

// valgrind is a command that fails with any error or leak of the program that follows.
var valgrind = []string{"valgrind", "-q", "--error-exitcode=9", "--leak-check=full", "--show-leak-kinds=all",
	"--errors-for-leak-kinds=all", "--track-fds=no"}

// operation is a row of the table: one request of the active end, and what both ends must have afterwards.
type operation struct {
	name   string
	kind   string // of the QPs: "" is RC
	req    request
	remote int  // place in the passive end's region
	denied bool // wrong R_Key
	recv   int  // bytes of the passive end's receive request at its offset 0; -1: none
	status guestdrv.WCStatus
	byPeer guestdrv.WCStatus // of the receive
	event  guestdrv.EventType
	effect func(active, passive []byte) // on the memories, without an effect after a failure
}

// word is the 8 bytes of memory at an offset, as an atomic sees them.
func word(b []byte, off int) uint64       { return binary.LittleEndian.Uint64(b[off:]) }
func setWord(b []byte, off int, v uint64) { binary.LittleEndian.PutUint64(b[off:], v) }

func sendOp(name string, op guestdrv.Opcode, flags uint32, n, room int) operation {
	return operation{name: name, req: request{opcode: op, flags: flags, id: 1 << 63, off: 1000, length: n,
		imm: [4]byte{0xde, 0xad, 0, 1}}, recv: room, effect: func(a, p []byte) { copy(p, a[1000:1000+n]) }}
}

func writeOp(name string, op guestdrv.Opcode, flags uint32, n, recv int) operation {
	return operation{name: name, req: request{opcode: op, flags: flags, id: 2, off: 3, length: n,
		imm: [4]byte{1, 2, 3, 4}}, remote: 4099, recv: recv, effect: func(a, p []byte) { copy(p[4099:], a[3:3+n]) }}
}

func readOp(name string, n int) operation {
	return operation{name: name, req: request{opcode: guestdrv.WRRDMARead, flags: fence, id: 3, off: 77, length: n},
		remote: 5, recv: -1, effect: func(a, p []byte) { copy(a[77:], p[5:5+n]) }}
}

func atomicOp(name string, op guestdrv.Opcode, compareAdd, swap uint64, after func(before uint64) uint64) operation {
	return operation{name: name, req: request{opcode: op, id: 4, off: 16, length: 8, compareAdd: compareAdd, swap: swap},
		remote: 64, recv: -1, effect: func(a, p []byte) {
			before := word(p, 64)
			setWord(a, 16, before)
			setWord(p, 64, after(before))
		}}
}

// initial is the memory of an end before an operation.
func initial(active bool) []byte {
	b := make([]byte, memoryBytes)
	for i := range b {
		if b[i] = byte(i*7 + i>>8*13 + 1); active {
			b[i] = ^b[i] + byte(i>>11)
		}
	}
	return b
}

func operations() []operation {
	at64 := word(initial(false), 64)
	denied := writeOp("WRITE with a wrong R_Key", guestdrv.WRRDMAWrite, 0, 100, -1)
	denied.denied, denied.status = true, guestdrv.WCRemAccessErr
	denied.event = guestdrv.EventQPAccessErr
	outside := readOp("READ beyond the region", 100)
	outside.remote, outside.status, outside.event = memoryBytes-50, guestdrv.WCRemAccessErr, guestdrv.EventQPAccessErr
	local := sendOp("SEND with a wrong L_Key", guestdrv.WRSend, 0, 100, -1)
	local.req.keyMask, local.status = 0xffffff00, guestdrv.WCLocProtErr
	long := sendOp("SEND longer than the receive", guestdrv.WRSend, 0, 5000, 4999)
	long.status, long.byPeer = guestdrv.WCRemInvReqErr, guestdrv.WCLocLenErr
	ud := func(name string, op guestdrv.Opcode, flags uint32, n int) operation {
		o := sendOp(name, op, flags, n, 2000)
		o.kind = "ud"
		o.effect = func(a, p []byte) { copy(p[40:], a[1000:1000+n]) } // behind the GRH, which varies
		return o
	}
	return []operation{
		sendOp("SEND 0", guestdrv.WRSend, 0, 0, 0),
		sendOp("SEND 1", guestdrv.WRSend, 0, 1, 100),
		sendOp("SEND 64 KiB", guestdrv.WRSend, solicited, 65536, 65536),
		sendOp("SEND inline", guestdrv.WRSend, inline, 128, 128),
		sendOp("SEND_WITH_IMM", guestdrv.WRSendWithImm, 0, 3000, 4096),
		writeOp("WRITE 1", guestdrv.WRRDMAWrite, 0, 1, -1),
		writeOp("WRITE 70001", guestdrv.WRRDMAWrite, 0, 70001, -1),
		writeOp("WRITE inline", guestdrv.WRRDMAWrite, inline, 111, -1),
		writeOp("WRITE_WITH_IMM", guestdrv.WRRDMAWriteWithImm, 0, 9999, 0),
		readOp("READ 0", 0),
		readOp("READ 1", 1),
		readOp("READ 65537", 65537),
		atomicOp("CMP_AND_SWP that is equal", guestdrv.WRAtomicCmpAndSwp, at64, 42, func(uint64) uint64 { return 42 }),
		atomicOp("CMP_AND_SWP that differs", guestdrv.WRAtomicCmpAndSwp, at64+1, 42, func(v uint64) uint64 { return v }),
		atomicOp("FETCH_AND_ADD", guestdrv.WRAtomicFetchAndAdd, 1<<40+5, 0, func(v uint64) uint64 { return v + 1<<40 + 5 }),
		{name: "ATOMIC_WRITE", req: request{opcode: guestdrv.WRAtomicWrite, id: 5, off: 24, length: 8}, remote: 128, recv: -1,
			effect: func(a, p []byte) { setWord(p, 128, word(a, 24)) }},
		denied, outside, local, long,
		ud("UD SEND", guestdrv.WRSend, 0, 1000),
		ud("UD SEND_WITH_IMM", guestdrv.WRSendWithImm, inline, 100),
	}
}

// pair connects new QPs of two ends and returns the passive end's region.
func pair(kind string, n *rig.Network, active, passive end) (addr uint64, rkey uint32) {
	if kind == "" {
		kind = "rc"
	}
	aq, _, _ := active.qp(kind)
	pq, addr, rkey := passive.qp(kind)
	if kind == "ud" {
		active.startUD(7)
		passive.startUD(0x12345)
		active.address(n.Hosts[1], pq, 0x12345)
		return addr, rkey
	}
	active.connect(n.Hosts[1], pq, 0xfffffe, 100)
	passive.connect(n.Hosts[0], aq, 100, 0xfffffe)
	return addr, rkey
}

// perform executes o between two ends, checks the memories of both, and returns what they report.
func perform(t *testing.T, o operation, n *rig.Network, active, passive end) []string {
	t.Helper()
	addr, rkey := pair(o.kind, n, active, passive)
	if o.denied {
		rkey ^= 0xffffff00
	}
	wantA, wantP := initial(true), initial(false)
	active.load(wantA)
	passive.load(wantP)
	var report []string
	if o.kind == "" {
		report = append(report, active.query())
	}
	if o.recv >= 0 {
		report = append(report, passive.recv(99, 0, o.recv))
	}
	r := o.req
	r.flags |= signaled
	r.remote, r.rkey = addr+uint64(o.remote), rkey
	report = append(report, active.send(r), active.wait())
	last := func() string { return report[len(report)-1] }
	if want := fmt.Sprintf("ok %d %v", r.id, o.status); !strings.HasPrefix(last(), want) {
		t.Errorf("active end: %s, expected %s", last(), want)
	}
	if o.recv >= 0 {
		report = append(report, passive.wait())
		if want := fmt.Sprintf("ok 99 %v", o.byPeer); !strings.HasPrefix(last(), want) {
			t.Errorf("passive end: %s, expected %s", last(), want)
		}
	}
	if o.event != 0 {
		report = append(report, passive.event())
		if want := fmt.Sprintf("ok type %d own 1", uint32(o.event)); last() != want {
			t.Errorf("passive end: %s, expected %s", last(), want)
		}
	}
	if o.status == guestdrv.WCSuccess {
		o.effect(wantA, wantP)
	}
	gotA, gotP := active.dump(), passive.dump()
	if o.kind == "ud" {
		copy(gotP[:40], wantP)
	}
	if o.byPeer != guestdrv.WCSuccess { // a part of the message may have arrived
		copy(gotP[:o.recv], wantP)
	}
	if !bytes.Equal(gotA, wantA) {
		t.Errorf("active end's memory differs from byte %d on", firstDifference(gotA, wantA))
	}
	if !bytes.Equal(gotP, wantP) {
		t.Errorf("passive end's memory differs from byte %d on", firstDifference(gotP, wantP))
	}
	return report
}

func firstDifference(a, b []byte) int {
	for i := range a {
		if i >= len(b) || a[i] != b[i] {
			return i
		}
	}
	return len(a)
}

// performAll executes all operations, and returns the reports of each.
func performAll(t *testing.T, n *rig.Network, active, passive end) map[string][]string {
	t.Helper()
	active.open(n.Hosts[0])
	passive.open(n.Hosts[1])
	reports := map[string][]string{"describe": {active.describe(), passive.describe()}}
	for _, o := range operations() {
		t.Run(o.name, func(t *testing.T) { reports[o.name] = perform(t, o, n, active, passive) })
	}
	active.close()
	passive.close()
	for i, h := range n.Hosts {
		if o := h.Objects(); o != (rig.Objects{}) {
			t.Errorf("device %d still has %+v", i, o)
		}
	}
	return reports
}

// TestLikeGo executes the same operations between the Go driver and the C library, in all combinations on the same
// devices: the memory is as expected, and the completions, attributes and events are equal (PF-4, MT-10).
func TestLikeGo(t *testing.T) {
	program := build(t, "peer", "")
	n := rig.New(t, 2)
	inGo := func() end { return &goEnd{tb: t, ctx: limit(t)} }
	inC := func() end { return newCEnd(t, program) }
	ofItsOwn := func() end { return newCEnd(t, program, "share") } // memory
	var want map[string][]string
	for _, c := range []struct {
		name            string
		active, passive func() end
	}{{"Go to Go", inGo, inGo}, {"C to C", inC, inC}, {"C to Go", inC, inGo}, {"Go to C", inGo, inC},
		{"shared to shared", ofItsOwn, ofItsOwn}} {
		t.Run(c.name, func(t *testing.T) {
			got := performAll(t, n, c.active(), c.passive())
			if want == nil {
				want = got
			}
			for name := range want {
				if !reflect.DeepEqual(got[name], want[name]) {
					t.Errorf("%s: %q, between Go drivers %q", name, got[name], want[name])
				}
			}
		})
	}
}

// TestValgrind executes all operations and all misuse under valgrind, which finds neither errors nor leaks.
func TestValgrind(t *testing.T) {
	n := rig.New(t, 2)
	peer := append(valgrind, build(t, "peer", ""))
	t.Run("operations", func(t *testing.T) { performAll(t, n, newCEnd(t, peer...), newCEnd(t, peer...)) })
	misuse := append(valgrind, build(t, "errors", ""), n.Hosts[0].Path)
	run(t, misuse[0], misuse[1:]...)
}

// TestSanitizers is TestValgrind with the compiler's address and undefined behaviour sanitizers.
func TestSanitizers(t *testing.T) {
	n := rig.New(t, 2)
	peer := build(t, "peer", sanitize)
	t.Run("operations", func(t *testing.T) { performAll(t, n, newCEnd(t, peer), newCEnd(t, peer, "share")) })
	run(t, build(t, "errors", sanitize), n.Hosts[0].Path)
}

// TestMisuse: bad arguments, limits and orders of destruction give errors.
func TestMisuse(t *testing.T) {
	n := rig.New(t, 1)
	run(t, build(t, "errors", ""), n.Hosts[0].Path)
	if o := n.Hosts[0].Objects(); o != (rig.Objects{}) {
		t.Errorf("the device still has %+v", o)
	}
}

// TestDaemonEnds: a program that waits notices the end of vnicd, every call fails then, and it can end in good order.
func TestDaemonEnds(t *testing.T) {
	command := append(valgrind, build(t, "peer", ""))
	n := rig.New(t, 1)
	e := newCEnd(t, command...)
	e.open(n.Hosts[0])
	e.qp("rc")
	done := make(chan string)
	go func() { done <- e.ask("stopped") }()
	n.Hosts[0].Stop()
	gone := -int(syscall.ENODEV)
	if got, want := <-done, fmt.Sprintf("ok %[1]d %[1]d %[1]d %[1]d %[1]d %[1]d", gone); got != want {
		t.Errorf("%s, expected %s", got, want)
	}
	if got := e.ask("wait"); !strings.HasPrefix(got, fmt.Sprintf("err %d the device is unusable: vnicd has ended", gone)) {
		t.Error(got)
	}
	if got := e.ask("dereg"); got != "ok" {
		t.Errorf("deregistration after the end of vnicd: %s", got)
	}
	e.close()
}

// TestProgramEnds: a program that is killed loses its objects, and the next one finds the device as new.
func TestProgramEnds(t *testing.T) {
	program := build(t, "peer", "")
	n := rig.New(t, 1)
	e := &cEnd{tb: t, cmd: exec.Command(program)}
	e.cmd.Stderr = &e.log
	in, err := e.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	if err := e.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Fprintf(in, "open %s %v %d\nqp rc\n", n.Hosts[0].Path, n.Hosts[0].Addr, memoryBytes); err != nil {
		t.Fatal(err)
	}
	rig.Until(t, "the program has a QP", func() bool { return n.Hosts[0].Objects().QPs == 1 })
	if err := e.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	var exit *exec.ExitError
	if err := e.cmd.Wait(); !errors.As(err, &exit) {
		t.Fatal(err)
	}
	rig.Until(t, "its objects are gone", func() bool { return n.Hosts[0].Objects() == (rig.Objects{}) })
	next := newCEnd(t, program)
	next.open(n.Hosts[0])
	next.qp("ud")
	next.close()
}

// TestNotVNICD: what listens on the socket is something else, or says nothing.
func TestNotVNICD(t *testing.T) {
	program := build(t, "peer", "")
	for name, c := range hostileServers() {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "s")
			c.serve(t, path)
			got := newCEnd(t, program).ask("open %s 10.0.0.1 4096", path)
			if !strings.HasPrefix(got, fmt.Sprintf("err %d ", c.code)) || !strings.Contains(got, c.text) {
				t.Errorf("%s, expected %d and %q", got, c.code, c.text)
			}
		})
	}
}
