package vnet

import (
	"bufio"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/loop"
)

var testpmdTime = flag.Duration("testpmd.duration", 200*time.Millisecond,
	"how long DPDK's driver sends in each combination of features")

// testpmd is DPDK's packet generator with two of its own virtio-net drivers (net_virtio_user), which are front ends of
// our devices.
type testpmd struct {
	t   *testing.T
	cmd *exec.Cmd
	in  io.WriteCloser
	out chan string // answers up to the prompt
	log strings.Builder
}

const testpmdPrompt = "testpmd> "

// newTestpmd starts it for two VMs. dev are options of its driver, opts those of the program.
func newTestpmd(t *testing.T, vms [2]*vm, dev string, opts ...string) *testpmd {
	t.Helper()
	if _, err := exec.LookPath("dpdk-testpmd"); err != nil {
		t.Fatal("this test needs dpdk-testpmd: apt-get install dpdk-dev")
	}
	// By default it flushes its output late. Its threads get all cores, so that several can run at a time.
	all := fmt.Sprintf("(0-%d)", runtime.NumCPU()-1)
	args := []string{"-o0", "dpdk-testpmd", "--lcores", "0@" + all + ",1@" + all, "--no-huge", "-m", "256", "--no-pci",
		"--no-telemetry", "--no-shconf"}
	for i, v := range vms {
		args = append(args, fmt.Sprintf("--vdev=net_virtio_user%d,path=%s,mac=%v,%s", i, v.path, v.mac, dev))
	}
	// By default it discards frames received before it starts.
	args = append(append(args, "--", "-i", "--no-flush-rx", "--total-num-mbufs=4096", "--forward-mode=mac"), opts...)
	for i := range vms {
		args = append(args, fmt.Sprintf("--eth-peer=%d,%v", i, vms[1-i].mac))
	}
	p := &testpmd{t: t, cmd: exec.Command("stdbuf", args...), out: make(chan string)}
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	p.cmd.Stdout, p.cmd.Stderr = w, w
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	// It ends with the thread that started it, so that thread must stay.
	started, over := make(chan error), make(chan struct{})
	t.Cleanup(func() { close(over) })
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		started <- p.cmd.Start()
		<-over
	}()
	if err := <-started; err != nil {
		t.Fatal(err)
	}
	w.Close()
	go func() {
		defer close(p.out)
		defer r.Close()
		b, text := bufio.NewReader(r), strings.Builder{}
		for {
			c, err := b.ReadByte()
			if err != nil {
				p.out <- text.String()
				return
			}
			text.WriteByte(c)
			if c == ' ' && strings.HasSuffix(text.String(), testpmdPrompt) {
				p.out <- text.String()
				text.Reset()
			}
		}
	}()
	t.Cleanup(p.kill)
	p.answer("")
	return p
}

func (p *testpmd) kill() {
	_ = p.cmd.Process.Kill() // it may have exited already
	for range p.out {
	}
	_ = p.cmd.Wait()
	if p.t.Failed() {
		p.t.Log(p.log.String())
	}
}

// answer waits for the prompt after the echo of a line, and ignores stray prompts.
func (p *testpmd) answer(to string) string {
	p.t.Helper()
	deadline := time.After(2 * time.Minute)
	for {
		select {
		case s := <-p.out:
			p.log.WriteString(s)
			if !strings.HasSuffix(s, testpmdPrompt) {
				p.t.Fatalf("testpmd ended at %q", to)
			}
			if strings.Contains(s, to) {
				return s
			}
		case <-deadline:
			p.t.Fatalf("testpmd does not answer %q", to)
		}
	}
}

func (p *testpmd) do(line string) string {
	p.t.Helper()
	if _, err := fmt.Fprintln(p.in, line); err != nil {
		p.t.Fatal(err)
	}
	return p.answer(line)
}

// quit ends it with its own command.
func (p *testpmd) quit() {
	p.t.Helper()
	fmt.Fprintln(p.in, "quit")
	for s := range p.out {
		p.log.WriteString(s)
	}
	var exit *exec.ExitError
	if err := p.cmd.Wait(); err != nil && errors.As(err, &exit) {
		p.t.Errorf("testpmd: %v", err)
	}
}

type pmdStats struct{ rx, missed, tx uint64 }

var pmdFigure = regexp.MustCompile(`(RX-packets|RX-missed|TX-packets):\s*(\d+)`)

func (p *testpmd) stats(port int) (s pmdStats) {
	p.t.Helper()
	for _, m := range pmdFigure.FindAllStringSubmatch(p.do(fmt.Sprint("show port stats ", port)), -1) {
		n, err := strconv.ParseUint(m[2], 10, 64)
		if err != nil {
			p.t.Fatal(err)
		}
		switch m[1] {
		case "RX-packets":
			s.rx = n
		case "RX-missed":
			s.missed = n
		case "TX-packets":
			s.tx = n
		}
	}
	return s
}

// pmdCombo is one combination of features.
type pmdCombo struct {
	name, dev string   // dev: options of the driver
	opts      []string // of the program
	setup     []string // commands while the ports are stopped
	queues    int
	packets   bool   // also forward TCP and UDP packets
	features  uint64 // must be negotiated
}

// pmdCombos are all combinations of the driver: ways to receive and send, numbers of queues, offloads, each with split
// and with packed rings.
func pmdCombos() (all []pmdCombo) {
	bit := func(n, i int) int { return n >> i & 1 }
	for n := range 16 {
		queues := 1 + bit(n, 3)
		c := pmdCombo{queues: queues, name: fmt.Sprintf("mrg%d-order%d-vector%d-queues%d", bit(n, 0), bit(n, 1), bit(n, 2),
			queues), dev: fmt.Sprintf("mrg_rxbuf=%d,in_order=%d,vectorized=%d,queues=%d,queue_size=%d,cq=%d", bit(n, 0),
			bit(n, 1), bit(n, 2), queues, 256>>bit(n, 1), queues-1)}
		if queues > 1 {
			c.opts, c.features = []string{"--rxq=2", "--txq=2"}, FeatureMQ
		}
		c.features |= uint64(bit(n, 1)) * FeatureInOrder
		all = append(all, c)
	}
	checksums := []string{"csum set tcp hw 0", "csum set udp hw 0", "csum set tcp hw 1", "csum set udp hw 1"}
	tso := append(checksums, "tso set 500 0", "tso set 500 1")
	for mrg := range 2 {
		for _, c := range []pmdCombo{
			{name: "sums-sent", opts: []string{"--tx-offloads=0x800c", "--forward-mode=csum"}, setup: checksums, packets: true,
				features: FeatureCsum},
			{name: "sums-received", opts: []string{"--rx-offloads=0xc", "--forward-mode=csum"}, packets: true,
				features: FeatureGuestCsum},
			{name: "sums", opts: []string{"--tx-offloads=0x800c", "--rx-offloads=0xc", "--forward-mode=csum"}, setup: checksums,
				packets: true, features: FeatureCsum | FeatureGuestCsum},
			{name: "tso", opts: []string{"--tx-offloads=0x802c", "--rx-offloads=0xc", "--forward-mode=csum"}, setup: tso,
				packets: true, features: FeatureHostTSO4 | FeatureHostTSO6},
			{name: "tso-lro", opts: []string{"--tx-offloads=0x802c", "--rx-offloads=0x1c", "--forward-mode=csum"}, setup: tso,
				packets: true, features: FeatureHostTSO4 | FeatureHostTSO6 | FeatureGuestTSO4 | FeatureGuestTSO6},
			{name: "pieces", opts: []string{"--tx-offloads=0x8000", "--txpkts=64,600,200"}},
			{name: "scatter", opts: []string{"--mbuf-size=512", "--rx-offloads=0x2000", "--tx-offloads=0x8000",
				"--txpkts=300,300,300"}},
			{name: "jumbo", opts: []string{"--mbuf-size=10240", "--max-pkt-len=9018", "--tx-offloads=0x8000",
				"--txpkts=2000,2000,2000,2000", "--total-num-mbufs=3000"}},
		} {
			if c.name == "scatter" && mrg == 0 {
				continue // the driver offers it only with mergeable buffers
			}
			c.features |= uint64(mrg) * FeatureMrgRxbuf
			c.name, c.dev, c.queues = fmt.Sprint(c.name, "-mrg", mrg), fmt.Sprintf("mrg_rxbuf=%d,in_order=0", mrg), 1
			all = append(all, c)
		}
	}
	for _, c := range all {
		c.name, c.dev, c.features = "packed-"+c.name, c.dev+",packed_vq=1", c.features|FeatureRingPacked
		all = append(all, c)
	}
	return all
}

// feed is a port that sends complete TCP and UDP packets from one VM to the other.
func feed(t *testing.T, h *host, vms [2]*vm) {
	t.Helper()
	var port *vswitch.Attachment
	if _, err := h.net.Attach(nowhere{}, vswitch.PortConfig{Name: "feed", Kind: vswitch.KindTAP,
		Attached: func(a *vswitch.Attachment) { port = a }}); err != nil {
		t.Fatal(err)
	}
	defer port.Close()
	for i, v := range vms {
		for k := range 32 {
			head, f := ipPacket(v.mac, vswitch.MAC{2, 0, 0, 0, 9, byte(i)}, k&1 != 0, k&2 != 0, 1400, 0)
			l4 := binary.LittleEndian.Uint16(head[6:])
			binary.BigEndian.PutUint16(f[l4+binary.LittleEndian.Uint16(head[8:]):], header.Checksum(f[l4:], 0))
			check(t, f)
			b := h.pool.Get()
			if b == nil || !b.Append(f) {
				t.Fatal("no buffer")
			}
			h.loops[0].Do(func() { port.Input(h.loops[0], b, vswitch.Source{}) })
			b.Free()
		}
	}
}

type nowhere struct{}

func (nowhere) Deliver(*loop.Loop, *frame.Buf, vswitch.Destination) {}

var badSum = regexp.MustCompile(`Bad-(?:ip|l4)csum: [1-9]\d*`)

// whole counts a port's frames as testpmd does: a large frame is one.
type whole struct{ in, out atomic.Uint64 }

func (w *whole) Frame(_ *loop.Loop, in bool, _ []byte) {
	if in {
		w.in.Add(1)
	} else {
		w.out.Add(1)
	}
}

// TestTestpmd lets a foreign native front end drive two devices, with every combination of its driver's features, in
// both directions. Frames are forwarded between two ports of a network, then a flood makes receive rings
// overflow. Every frame sent is either received or counted as dropped. Combinations run in parallel, each with its own
// devices and driver; -parallel sets their number.
func TestTestpmd(t *testing.T) {
	for _, c := range pmdCombos() {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			h := newHost(t, 2, true)
			vms := [2]*vm{h.vm(1, c.queues), h.vm(2, c.queues)}
			var frames [2]whole
			for i, v := range vms {
				if err := v.port.Attachment().SetMonitor(&frames[i]); err != nil {
					t.Fatal(err)
				}
			}
			p := newTestpmd(t, vms, c.dev, c.opts...)
			if c.setup != nil {
				p.do("port stop all")
				for _, line := range c.setup {
					p.do(line)
				}
				p.do("port start all")
			}
			if c.packets {
				feed(t, h, vms)
			}
			for _, v := range vms {
				if f := v.dev.features.Load(); f&c.features != c.features || (f^c.features)&FeatureRingPacked != 0 {
					t.Errorf("features %#x, want %#x", f, c.features)
				}
			}
			p.do("start tx_first 2")
			time.Sleep(*testpmdTime)
			goes := func() bool {
				for i := range vms {
					if s := p.stats(i); s.rx < 64 || s.tx < 128 {
						return false
					}
				}
				return true
			}
			for deadline := time.Now().Add(time.Minute); !goes(); time.Sleep(10 * time.Millisecond) {
				if time.Now().After(deadline) {
					t.Errorf("frames are not forwarded both ways: %+v, %+v", p.stats(0), p.stats(1))
					break
				}
			}
			if m := badSum.FindString(p.do("stop")); m != "" {
				t.Error(m)
			}
			between := [2]pmdStats{p.stats(0), p.stats(1)}
			p.do("set fwd txonly")
			p.do("start")
			time.Sleep(*testpmdTime)
			p.do("stop")
			// Frames still in the rings are received now.
			p.do("set fwd rxonly")
			p.do("start")
			var now [2]pmdStats
			balanced := func() bool {
				for i, v := range vms {
					now[i] = p.stats(i)
					c := v.port.Attachment().Counters.Totals()
					if frames[i].in.Load() != now[i].tx ||
						frames[i].out.Load() != now[i].rx+now[i].missed+c.Drops[vswitch.QueueFull.String()] {
						return false
					}
				}
				return true
			}
			for deadline := time.Now().Add(time.Minute); !balanced(); time.Sleep(10 * time.Millisecond) {
				if time.Now().After(deadline) {
					t.Errorf("testpmd's counters and ours differ: %+v", now)
					for _, v := range vms {
						t.Logf("%+v, %+v", v.port.Attachment().Counters.Totals(), v.dev.Describe())
					}
					break
				}
			}
			p.do("stop")
			p.quit()
			for i, v := range vms {
				// Our counters count a large frame's segments.
				cut := v.port.Attachment().Counters.Totals().InFrames > frames[i].in.Load()
				if cut != (c.features&FeatureHostTSO4 != 0) {
					t.Errorf("port %d: large frames: %v", i, cut)
				}
				for r, n := range vms[i].port.Attachment().Counters.Totals().Drops {
					if r != vswitch.QueueFull.String() {
						t.Errorf("port %d: %d dropped as %s", i, n, r)
					}
				}
			}
			t.Logf("forwarded %+v, in all %+v", between, now)
		})
	}
}
