package vxlan

import (
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/testutil"
)

// holePort copies every frame into unmapped memory, like the device of a VM whose memory file was truncated.
type holePort struct {
	mem    []byte
	owner  *loop.Owner
	tried  atomic.Int32
	faults atomic.Int32
}

func (p *holePort) Deliver(l *loop.Loop, b *frame.Buf, _ vswitch.Destination) {
	p.tried.Add(1)
	prev := l.Blame(p.owner)
	copy(p.mem[4096:], b.Bytes())
	l.Blame(prev)
}

func newHolePort(t *testing.T) *holePort {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "guest"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(8192); err != nil {
		t.Fatal(err)
	}
	p := &holePort{}
	if p.mem, err = unix.Mmap(int(f.Fd()), 0, 8192, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(p.mem) })
	if err := f.Truncate(0); err != nil {
		t.Fatal(err)
	}
	p.owner = loop.NewOwner(func(f loop.Fault) {
		if f.Foreign {
			t.Error("the owner's own fault is reported as foreign")
		}
		p.faults.Add(1)
	})
	return p
}

// One VM's memory vanishes while frames for it and for others arrive in the same batches: the fault is reported to its
// owner, every frame for the others arrives, no buffer is lost.
func TestFaultInOneVM(t *testing.T) {
	r := newRig(t, Config{}, []string{remoteIP})
	hole := newHolePort(t)
	if _, err := r.net.Attach(hole, vswitch.PortConfig{Name: "hole", Kind: vswitch.KindVM,
		MACs: []vswitch.MAC{{2, 0, 0, 0, 0, 66}}}); err != nil {
		t.Fatal(err)
	}
	// The switch learns the sink's address, so that frames for it are not flooded into the hole.
	r.inject(r.loops[0], macs(1, 1, ip4(0, 1, 2, header.ProtoUDP, 7, 8)))
	const n = 300
	// Batches form only while the loop is busy with something else.
	gate := make(chan struct{})
	for _, l := range r.loops {
		l.Post(func() { <-gate })
	}
	for i := range n {
		dst := byte(1)
		if i%3 == 0 {
			dst = 66
		}
		r.send(r.remote, datagram(8, 100, macs(dst, 2, ip4(0, 1, 2, header.ProtoUDP, uint16(i), 8))))
	}
	close(gate)
	testutil.Eventually(t, "all faults are reported", func() bool { return hole.faults.Load() == n/3 })
	for i := range n {
		if i%3 == 0 {
			continue
		}
		want := macs(1, 2, ip4(0, 1, 2, header.ProtoUDP, uint16(i), 8))
		if got := <-r.sink.frames; got != string(want) {
			t.Fatalf("frame %d: got %x", i, got)
		}
	}
	if hole.tried.Load() != n/3 {
		t.Errorf("%d frames went to the hole, want %d", hole.tried.Load(), n/3)
	}
}
