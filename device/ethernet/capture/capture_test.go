package capture

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/vnicd/vnicd/device/loop"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// The format, block by block.
func TestGolden(t *testing.T) {
	var b bytes.Buffer
	w := NewWriter(&b, "vnicd")
	w.Interface(LinkEthernet, 65535, "vm1")
	w.Packet(0, 0x0102030405060708, true, 9, []byte{1, 2, 3}, []byte{4, 5})
	w.Stats(0, 1, 7, 2)
	want := strings.Join([]string{
		"0a0d0d0a 2c000000 4d3c2b1a 01000000 ffffffffffffffff 04000500 766e696364000000 00000000 2c000000",
		"01000000 28000000 01000000 ffff0000 02000300 766d3100 09000100 09000000 00000000 28000000",
		"06000000 34000000 00000000 04030201 08070605 05000000 09000000 0102030405000000 02000400 02000000 00000000 34000000",
		"05000000 34000000 00000000 00000000 01000000 04000800 0700000000000000 05000800 0200000000000000 00000000 34000000",
	}, "")
	if got := hex.EncodeToString(b.Bytes()); got != strings.ReplaceAll(want, " ", "") {
		t.Errorf("got\n%s\nwant\n%s", got, strings.ReplaceAll(want, " ", ""))
	}
}

// The ring against a model queue: random packets in and out, in pieces, truncated, dropped when full.
func TestRingModel(t *testing.T) {
	r := newRing(4096)
	rng := rand.New(rand.NewPCG(3, 4))
	type packet struct {
		rec  record
		data string
	}
	var model []packet
	used, dropped := 0, uint64(0)
	for i := range 50000 {
		if rng.IntN(5) < 3 {
			data := make([]byte, rng.IntN(700))
			for k := range data {
				data[k] = byte(rng.Uint32())
			}
			cut := rng.IntN(len(data) + 1)
			snap := rng.IntN(600)
			r.put(record{time: int64(i), out: i%2 == 0}, snap, data[:cut], data[cut:])
			kept := min(len(data), snap)
			if used+recordLen+kept > 4096 {
				dropped++
			} else {
				used += recordLen + kept
				model = append(model, packet{record{int64(i), uint32(len(data)), uint32(kept), i%2 == 0}, string(data[:kept])})
			}
		} else {
			rec, a, b, ok := r.peek()
			if ok != (len(model) > 0) {
				t.Fatalf("step %d: packet %v, model has %d", i, ok, len(model))
			}
			if !ok {
				continue
			}
			if m := model[0]; rec != m.rec || string(a)+string(b) != m.data {
				t.Fatalf("step %d: %+v, want %+v", i, rec, m.rec)
			}
			r.next(rec)
			used -= recordLen + int(rec.kept)
			model = model[1:]
		}
		if r.dropped.Load() != dropped {
			t.Fatalf("step %d: %d dropped, want %d", i, r.dropped.Load(), dropped)
		}
	}
	if dropped == 0 {
		t.Error("the ring was never full")
	}
}

func testLoops(t *testing.T, n int) (loops []*loop.Loop) {
	t.Helper()
	for i := range n {
		l, err := loop.New(loop.Config{ID: i})
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(l.Close)
		loops = append(loops, l)
	}
	return loops
}

// Several loops at once and a reader that is slow at first: every packet is either written or counted as dropped.
func TestRun(t *testing.T) {
	loops := testLoops(t, 3)
	k := New(Config{Name: "x", Link: LinkEthernet, SnapLen: 1000}, loops)
	const each = 3000
	var wg sync.WaitGroup
	for i, l := range loops {
		wg.Go(func() {
			f := make([]byte, 1200)
			f[0] = byte(i)
			for n := range each {
				f[1], f[2] = byte(n>>8), byte(n)
				l.Do(func() { k.Frame(l, true, f) })
			}
		})
	}
	wg.Wait()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	var out bytes.Buffer
	if err := k.Run(ctx, &out, nil); err != nil {
		t.Fatal(err)
	}
	if k.Taken()+k.Dropped() != 3*each || k.Dropped() == 0 || k.Taken() < 3*(ringSize/1100) {
		t.Errorf("%d taken, %d dropped of %d", k.Taken(), k.Dropped(), 3*each)
	}
	if n := out.Len(); uint64(n) < k.Taken()*1000 {
		t.Errorf("%d bytes", n)
	}
}

type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, os.ErrClosed }

func TestRunEnds(t *testing.T) {
	l := testLoops(t, 1)[0]
	k := New(Config{Name: "x"}, []*loop.Loop{l})
	if err := k.Run(context.Background(), failing{}, nil); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Run with a failing writer: %v", err)
	}
	k = New(Config{Name: "x", Count: 5}, []*loop.Loop{l})
	l.Do(func() {
		for range 9 {
			k.Frame(l, false, []byte("abc"))
		}
	})
	if err := k.Run(context.Background(), &bytes.Buffer{}, nil); err != nil || k.Taken() != 5 {
		t.Errorf("%v, %d packets of 5", err, k.Taken())
	}
}

// busy is a port that gets another frame for every write of the stream.
type busy struct {
	l *loop.Loop
	k *Capture
	n int
}

func (b *busy) Write(p []byte) (int, error) {
	if b.n++; b.n < 10000 { // so that the test fails instead of hanging
		b.l.Do(func() { b.k.Frame(b.l, true, []byte("abc")) })
	}
	return len(p), nil
}

// A cancelled capture ends even if packets arrive as fast as they are written.
func TestRunEndsUnderTraffic(t *testing.T) {
	l := testLoops(t, 1)[0]
	w := &busy{l: l, k: New(Config{Name: "x"}, []*loop.Loop{l})}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := w.k.Run(ctx, w, nil); err != nil {
		t.Fatal(err)
	}
	if w.n > 100 {
		t.Errorf("%d packets were written after the end", w.n)
	}
}

// tshark decodes the packets that were captured.
func TestTshark(t *testing.T) {
	if _, err := exec.LookPath("tshark"); err != nil {
		t.Fatal("this test needs tshark: apt-get install tshark")
	}
	l := testLoops(t, 1)[0]
	inner, _ := hex.DecodeString("02000000000202000000000108004500002100004000401126ca0a0000010a000002c0001389000d0000" +
		"68656c6c6f")
	vx, _ := hex.DecodeString("0800000000006400")
	for _, c := range []struct {
		name       string
		link       uint16
		feed       func(*Capture)
		fields     []string
		wantByLine []string
	}{
		{"frames", LinkEthernet, func(k *Capture) { k.Frame(l, true, inner); k.Frame(l, false, inner) },
			[]string{"frame.interface_name", "eth.src", "ip.dst", "udp.dstport", "frame.packet_flags_direction"},
			[]string{"port,02:00:00:00:00:01,10.0.0.2,5001,0x00000002", "port,02:00:00:00:00:01,10.0.0.2,5001,0x00000001"}},
		{"datagrams over IPv4", LinkRaw, func(k *Capture) {
			k.Datagram(l, true, netip.MustParseAddrPort("192.0.2.1:50000"), netip.MustParseAddrPort("192.0.2.2:4789"), 0x68, vx,
				inner)
		}, []string{"ip.src", "ip.dsfield.dscp", "ip.checksum.status", "udp.srcport", "vxlan.vni"},
			[]string{"192.0.2.1|10.0.0.1,26|0,1|1,50000|49152,100"}},
		{"datagrams over IPv6", LinkRaw, func(k *Capture) {
			k.Datagram(l, false, netip.MustParseAddrPort("[2001:db8::2]:50000"), netip.MustParseAddrPort("[2001:db8::1]:4789"),
				0x68, nil, append(vx, inner...))
		}, []string{"ipv6.src", "ipv6.tclass.dscp", "vxlan.vni", "ip.src"}, []string{"2001:db8::2,26,100,10.0.0.1"}},
	} {
		k := New(Config{Name: "port", Link: c.link}, []*loop.Loop{l})
		l.Do(func() { c.feed(k) })
		file := filepath.Join(t.TempDir(), "x.pcapng")
		f, err := os.Create(file)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		if err := k.Run(ctx, f, nil); err != nil {
			t.Fatal(err)
		}
		f.Close()
		args := []string{"-r", file, "-T", "fields", "-E", "separator=,", "-E", "aggregator=|", "-o",
			"ip.check_checksum:TRUE"}
		for _, x := range c.fields {
			args = append(args, "-e", x)
		}
		out, err := exec.Command("tshark", args...).Output()
		if got := strings.TrimSpace(string(out)); err != nil || got != strings.Join(c.wantByLine, "\n") {
			t.Errorf("%s: %v\n%s\nwant\n%s", c.name, err, got, strings.Join(c.wantByLine, "\n"))
		}
	}
}

func BenchmarkFrame(b *testing.B) {
	l, err := loop.New(loop.Config{})
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	for _, n := range []int{64, 1500} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			k := New(Config{}, []*loop.Loop{l})
			f := make([]byte, n)
			b.ReportAllocs()
			for b.Loop() {
				k.Frame(l, true, f)
				if rec, _, _, ok := k.rings[0].peek(); ok {
					k.rings[0].next(rec)
				}
			}
		})
	}
}
