package vxlan

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"net"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/gso"
	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/device/testutil"
)

// tcp4 is a segment with right checksums; the source port identifies the connection.
func tcp4(dst, src byte, port uint16, seq uint32, payload []byte) []byte {
	f := macs(dst, src, make([]byte, 54+len(payload)))
	f[12] = 8
	ip, tcp := f[14:34], f[34:]
	copy(ip, []byte{0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, header.ProtoTCP, 0, 0, 10, 0, 0, src, 10, 0, 0, dst})
	binary.BigEndian.PutUint16(ip[2:], uint16(len(f)-14))
	binary.BigEndian.PutUint16(ip[10:], header.Checksum(ip, 0))
	binary.BigEndian.PutUint16(tcp, port)
	binary.BigEndian.PutUint16(tcp[2:], 80)
	binary.BigEndian.PutUint32(tcp[4:], seq)
	tcp[12], tcp[13] = 5<<4, 0x10
	copy(tcp[20:], payload)
	binary.BigEndian.PutUint16(tcp[16:], header.Checksum(tcp,
		header.PseudoSum4([4]byte(ip[12:]), [4]byte(ip[16:]), header.ProtoTCP, uint16(len(tcp)))))
	return f
}

// sendAs sends data as one message that the kernel segments into datagrams of size bytes; over veth it arrives whole.
func (r *rig) sendAs(from *net.UDPConn, size int, data []byte) {
	r.t.Helper()
	c := make([]byte, unix.CmsgSpace(2))
	binary.NativeEndian.PutUint64(c, uint64(unix.CmsgLen(2)))
	binary.NativeEndian.PutUint32(c[8:], unix.SOL_UDP)
	binary.NativeEndian.PutUint32(c[12:], unix.UDP_SEGMENT)
	binary.NativeEndian.PutUint16(c[16:], uint16(size))
	if _, _, err := from.WriteMsgUDPAddrPort(data, c, netip.AddrPortFrom(r.vt.Local(), DefaultPort)); err != nil {
		r.t.Fatalf("%d bytes as datagrams of %d: %v", len(data), size, err)
	}
}

// inOne sends frames of equal size, of which the last may be shorter, as one message.
func (r *rig) inOne(vni uint32, frames ...[]byte) {
	r.t.Helper()
	var data []byte
	for _, f := range frames {
		data = append(data, datagram(8, vni, f)...)
	}
	r.sendAs(r.remote, HeaderLen+len(frames[0]), data)
}

func text(n, seed int) []byte {
	p := make([]byte, n)
	for i := range p {
		p[i] = byte(i*7 + i>>8 + seed)
	}
	return p
}

// One message with many segments: a port that accepts it gets one large frame, other ports get the segments. Counters
// count frames as on the wire in both cases.
func TestReceiveMerged(t *testing.T) {
	r := newRig(t, Config{}, []string{remoteIP})
	r.inject(r.loops[0], macs(9, 1, ip4(0, 1, 2, header.ProtoUDP, 7, 8))) // the sink's address becomes known
	const n, size = 40, 1300
	payload := text((n-1)*size+100, 3)
	var frames [][]byte
	wireBytes := 0
	for i := range n {
		f := tcp4(1, 2, 5000, uint32(i*size), payload[i*size:min((i+1)*size, len(payload))])
		frames = append(frames, f)
		wireBytes += len(f)
	}
	for _, takes := range []frame.Need{0, frame.NeedAll} {
		r.att.SetOffloads(takes)
		vt, in, out := r.vt.Counters.Totals(), r.vt.Attachment(100).Counters.Totals(), r.att.Counters.Totals()
		r.inOne(100, frames...)
		if takes == 0 {
			for i := range frames {
				if f := <-r.sink.frames; f != string(frames[i]) {
					t.Fatalf("frame %d: got %x", i, f)
				}
			}
		} else if f := <-r.sink.frames; len(f) != 54+len(payload) || f[54:] != string(payload) {
			t.Fatalf("a frame of %d bytes arrived", len(f))
		}
		check := func(what string, frames, bytes uint64) {
			t.Helper()
			if frames != n || bytes != uint64(wireBytes) {
				t.Errorf("takes %#x: %s: %d frames of %d bytes; want %d of %d", takes, what, frames, bytes, n, wireBytes)
			}
		}
		for _, l := range r.loops {
			l.Do(func() {}) // the frame has left the network and is counted
		}
		now := r.vt.Attachment(100).Counters.Totals()
		check("tunnel's port", now.InFrames-in.InFrames, now.InBytes-in.InBytes)
		now = r.att.Counters.Totals()
		check("sink's port", now.OutFrames-out.OutFrames, now.OutBytes-out.OutBytes)
		now = r.vt.Counters.Totals()
		check("VTEP", now.InFrames-vt.InFrames, now.InBytes-vt.InBytes-n*HeaderLen)
	}
}

// RoCE packets of one queue pair in one message: a port that accepts trains gets one, other ports get the packets;
// counters count frames as on the wire. Other frames between them arrive in order.
func TestReceiveTrain(t *testing.T) {
	r := newRig(t, Config{}, []string{remoteIP})
	r.inject(r.loops[0], macs(9, 1, ip4(0, 1, 2, header.ProtoUDP, 7, 8))) // the sink's address becomes known
	const n, other, at = 40, 20, 42
	var frames [][]byte
	for i := range n {
		f := append(macs(1, 2, ip4(0, 1, 2, header.ProtoUDP, 0xc123, 4791)), make([]byte, 1024)...)
		ip := f[14:34]
		binary.BigEndian.PutUint16(ip[2:], uint16(len(f)-14))
		copy(ip[10:], []byte{0, 0})
		binary.BigEndian.PutUint16(ip[10:], header.Checksum(ip, 0))
		binary.BigEndian.PutUint16(f[38:], uint16(len(f)-34))
		copy(f[40:], []byte{0, 0})
		copy(f[at:], text(len(f)-at, i))
		f[at], f[at+5], f[at+6], f[at+7] = byte(wire.OpRCWriteMiddle), 0, 0, 17
		if i == other {
			f[at+7]++
		}
		frames = append(frames, f)
	}
	for _, takes := range []frame.Need{0, frame.NeedTrain} {
		r.att.SetOffloads(takes)
		out := r.att.Counters.Totals()
		r.inOne(100, frames...)
		want := frames
		if takes != 0 {
			want = [][]byte{bytes.Clone(frames[0]), frames[other], bytes.Clone(frames[other+1])}
			for i, f := range frames {
				switch {
				case i > 0 && i < other:
					want[0] = append(want[0], f[at:]...)
				case i > other+1:
					want[2] = append(want[2], f[at:]...)
				}
			}
		}
		for i := range want {
			if f := <-r.sink.frames; f != string(want[i]) {
				t.Fatalf("takes %#x, frame %d: got %x, want %x", takes, i, f, want[i])
			}
		}
		for _, l := range r.loops {
			l.Do(func() {})
		}
		now := r.att.Counters.Totals()
		if f, b := now.OutFrames-out.OutFrames, now.OutBytes-out.OutBytes; f != n || b != uint64(n*len(frames[0])) {
			t.Errorf("takes %#x: counted %d frames of %d bytes; want %d of %d", takes, f, b, n, n*len(frames[0]))
		}
	}
}

// Datagrams that the kernel has coalesced, but that are not segments of one flow: each arrives unchanged and in order,
// wherever it lies in the buffers.
func TestReceiveSeveral(t *testing.T) {
	r := newRig(t, Config{}, []string{remoteIP})
	r.att.SetOffloads(frame.NeedAll)
	for _, size := range []int{46, 333, 1400, 1440} {
		var frames [][]byte
		for i := range min(64, 60000/(size+HeaderLen+14)) {
			f := macs(1, 2, ip4(0, 1, 2, header.ProtoUDP, uint16(i), 4791))
			f = append(f, text(14+size-len(f), i)...)
			frames = append(frames, f)
		}
		frames[len(frames)-1] = frames[len(frames)-1][:14+30]
		r.inOne(100, frames...)
		for i := range frames {
			if f := <-r.sink.frames; f != string(frames[i]) {
				t.Fatalf("size %d, frame %d of %d: got %x, want %x", size, i, len(frames), f, frames[i])
			}
		}
	}
}

// Messages with invalid contents are dropped, counted by datagrams, and the next message is processed.
func TestReceiveSeveralHostile(t *testing.T) {
	r := newRig(t, Config{}, []string{remoteIP})
	good := macs(1, 2, ip4(0, 1, 2, header.ProtoUDP, 7, 8))
	two, err := vswitch.NewNetwork(vswitch.Config{VNI: 200, Name: "two hundred"})
	if err != nil {
		t.Fatal(err)
	}
	secret := &sink{frames: make(chan string, 10)}
	if _, err := two.Attach(secret, vswitch.PortConfig{Name: "other tenant", Kind: vswitch.KindTAP}); err != nil {
		t.Fatal(err)
	}
	if err := r.vt.AddNetwork(two, addrs([]string{remoteIP})); err != nil {
		t.Fatal(err)
	}
	d := func(vni uint32) []byte { return datagram(8, vni, good) }
	for _, c := range []struct {
		name    string
		size    int
		data    []byte
		why     vswitch.Reason
		drops   uint64
		arrives int
	}{
		{"datagrams without room for a header", 5, bytes.Repeat([]byte{8}, 50), vswitch.BadHeader, 10, 0},
		{"datagrams of headers only", 8, bytes.Repeat(datagram(8, 100, nil), 10), vswitch.BadHeader, 10, 0},
		{"the second has no VNI", len(d(0)), slicesConcat(d(100), datagram(0, 100, good), d(100)), vswitch.BadHeader, 1, 2},
		{"the second is of another network", len(d(0)), slicesConcat(d(100), d(200), d(100)), vswitch.BadHeader, 1, 2},
		{"unknown network", len(d(0)), slicesConcat(d(77), d(77), d(77)), vswitch.UnknownVNI, 3, 0},
	} {
		before := r.vt.Counters.Dropped(c.why)
		r.sendAs(r.remote, c.size, c.data)
		for range c.arrives {
			if f := <-r.sink.frames; f != string(good) {
				t.Errorf("%s: %x arrived", c.name, f)
			}
		}
		testutil.Eventually(t, c.name+" is counted", func() bool { return r.vt.Counters.Dropped(c.why) == before+c.drops })
		r.send(r.remote, d(100))
		if f := <-r.sink.frames; f != string(good) {
			t.Errorf("%s: got %x next", c.name, f)
		}
	}
	if len(secret.frames) != 0 {
		t.Error("a datagram hidden after one of another network arrived")
	}
}

func slicesConcat(s ...[]byte) []byte { return bytes.Join(s, nil) }

// Many connections at once, with segments in any order, in messages of one or several: the frames of each connection,
// merged ones segmented again, are those sent, in that order.
func TestReceiveMergedModel(t *testing.T) {
	r := newRig(t, Config{}, []string{remoteIP})
	r.inject(r.loops[0], macs(9, 1, ip4(0, 1, 2, header.ProtoUDP, 7, 8)))
	r.att.SetOffloads(frame.NeedAll)
	pool, err := frame.NewPool(frame.Config{Count: 1, Big: 1})
	if err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(5, 6))
	const flows = 2 * mergeFlows
	var seq [flows]uint32
	var want, got [flows][]string
	large := 0
	take := func(f string) {
		fl := binary.BigEndian.Uint16([]byte(f[34:])) - 6000
		if len(f) == 154 {
			got[fl] = append(got[fl], f)
			return
		}
		large++
		// Offloads as a TAP accepts them.
		b := pool.GetFor(len(f))
		defer b.Free()
		b.Append([]byte(f))
		size := 100 // of every segment here but a last one
		b.Offload = frame.Offload{Need: frame.NeedCsum | frame.NeedTSO4, CsumOff: 16, GSOSize: uint16(size),
			Payload: 54}
		var s gso.Segmenter
		dst := make([]byte, 2000)
		for s.Start(b); s.Left() > 0; {
			n := s.Next(dst)
			got[fl] = append(got[fl], string(dst[:n]))
		}
	}
	for range 60 {
		gate := make(chan struct{})
		for _, l := range r.loops {
			l.Post(func() { <-gate })
		}
		sent := 0
		for range 20 {
			active := rng.IntN(flows) + 1
			var run [][]byte
			for range 1 + rng.IntN(30) {
				fl := rng.IntN(active)
				if rng.IntN(3) == 0 {
					fl = 0
				}
				if rng.IntN(10) == 0 {
					seq[fl] += 100 // a segment lost on the way
				}
				f := tcp4(1, 2, uint16(6000+fl), seq[fl], text(100, int(seq[fl])))
				seq[fl] += 100
				run = append(run, f)
				want[fl] = append(want[fl], string(f))
				sent += len(f)
			}
			r.inOne(100, run...)
		}
		close(gate)
		for sent > 0 {
			f := <-r.sink.frames
			n := len(f) - 54
			sent -= len(f) + (n/100-1)*54
			take(f)
		}
	}
	for fl := range flows {
		if len(got[fl]) != len(want[fl]) {
			t.Fatalf("connection %d: %d segments of %d", fl, len(got[fl]), len(want[fl]))
		}
		for i := range want[fl] {
			if plainID(got[fl][i]) != want[fl][i] {
				t.Fatalf("connection %d, segment %d:\n%x\nwant\n%x", fl, i, got[fl][i], want[fl][i])
			}
		}
	}
	if large < 100 {
		t.Errorf("%d large frames", large)
	}
}

// plainID sets a segment's IPv4 ID to the one used here; it has no meaning (RFC 6864).
func plainID(s string) string {
	f := []byte(s)
	copy(f[18:], []byte{0, 0})
	copy(f[24:], []byte{0, 0})
	binary.BigEndian.PutUint16(f[24:], header.Checksum(f[14:34], 0))
	return string(f)
}

// Guests' memory vanishes during large frames and in the middle of a message of datagrams: frames for others arrive, no
// buffer is lost.
func TestFaultInMessage(t *testing.T) {
	r := newRig(t, Config{}, []string{remoteIP})
	hole := newHolePort(t)
	att, err := r.net.Attach(hole, vswitch.PortConfig{Name: "hole", Kind: vswitch.KindVM,
		MACs: []vswitch.MAC{{2, 0, 0, 0, 0, 66}}})
	if err != nil {
		t.Fatal(err)
	}
	att.SetOffloads(frame.NeedAll)
	r.inject(r.loops[0], macs(1, 1, ip4(0, 1, 2, header.ProtoUDP, 7, 8)))
	const rounds, n = 20, 30
	for k := range rounds {
		var frames [][]byte
		for i := range n {
			dst := byte(1)
			if i%3 == 0 {
				dst = 66
			}
			// Segments of one connection in even rounds, of many in odd ones.
			frames = append(frames, tcp4(dst, 2, uint16(7000+k+k%2*i*100), uint32(i/3*50), text(50, i)))
		}
		r.inOne(100, frames...)
	}
	// Frames of different connections may overtake each other.
	missing := map[string]int{}
	for k := range rounds {
		for i := range n {
			if i%3 != 0 {
				missing[string(tcp4(1, 2, uint16(7000+k+k%2*i*100), uint32(i/3*50), text(50, i)))]++
			}
		}
	}
	for range rounds * n * 2 / 3 {
		f := <-r.sink.frames
		if missing[f]--; missing[f] < 0 {
			t.Fatalf("got %x", f)
		}
	}
	testutil.Eventually(t, "all faults are reported", func() bool { return hole.faults.Load() == hole.tried.Load() })
	if want := int32(rounds/2 + rounds/2*n/3); hole.tried.Load() != want {
		t.Errorf("%d frames went to the hole, want %d", hole.tried.Load(), want)
	}
}
