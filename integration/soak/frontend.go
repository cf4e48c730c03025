package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/virtio"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
)

// hostileFrontEnd is one connection of a QEMU that was taken over. It writes to its memory by descriptor, never by
// mapping: other parts of the episode truncate the files.
type hostileFrontEnd struct {
	rng    *rand.Rand
	conn   *net.UnixConn
	files  []int // memory files
	size   []int64
	mu     sync.Mutex // a blocking write of our own would stop the attack
	event  []int      // eventfds
	table  []vhostuser.Region
	shared int    // regions that the back end was told of last
	rings  uint32 // virtqueues of the device
	dead   bool
}

// With one engine: commands, events, completion events, doorbells.
const hcaRings = 4

const frontEndBase = 0x7f0000000000 // user addresses begin here

// frontEndEpisode speaks vhost-user: mostly a plausible handshake, with messages left out, repeated, in another order
// or spoilt; then messages in any order. Meanwhile a vandal truncates the memory files, punches holes, fills eventfds
// and writes to the rings.
func frontEndEpisode(ctx context.Context, s *stage, rng *rand.Rand) error {
	socket := []string{"mallory.net", "mallory.hca", "rogue.hca", "trudy.net", "trudy.hca"}[rng.IntN(5)]
	path := s.socket(s.h1, socket)
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return fmt.Errorf("%s: %w", socket, err)
	}
	defer conn.Close()
	f := &hostileFrontEnd{rng: rng, conn: conn, rings: 2}
	if strings.HasSuffix(socket, ".hca") {
		f.rings = hcaRings
	}
	defer f.close()
	if err := f.allocate(); err != nil {
		return err
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	over := make(chan struct{})
	defer close(over)
	wg.Go(func() { // replies; a back end that closes ends it
		_ = conn.SetReadDeadline(time.Now().Add(episodeLimit))
		_, _ = io.Copy(io.Discard, conn)
	})
	vandal := rand.New(rand.NewPCG(rng.Uint64(), rng.Uint64()))
	if rng.IntN(3) > 0 {
		wg.Go(func() { f.vandalise(vandal, over) })
	}
	f.handshake(socket)
	for range 20 + rng.IntN(100) {
		if f.dead || ctx.Err() != nil {
			break
		}
		f.message()
		if rng.IntN(3) == 0 {
			time.Sleep(time.Duration(rng.IntN(2000)) * time.Microsecond)
		}
	}
	if rng.IntN(2) == 0 {
		_ = conn.CloseWrite()
	}
	return conn.Close()
}

func (f *hostileFrontEnd) close() {
	for _, fd := range append(f.files, f.event...) {
		_ = unix.Close(fd)
	}
}

// allocate makes memory files: small and large ones, sparse ones of many TiB, sealed and not.
func (f *hostileFrontEnd) allocate() error {
	user := uint64(frontEndBase)
	guest := uint64(0)
	for range 1 + f.rng.IntN(4) {
		fd, err := unix.MemfdCreate("guest", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
		if err != nil {
			return err
		}
		f.files = append(f.files, fd)
		size := int64(1+f.rng.IntN(4096)) << 12
		if f.rng.IntN(8) == 0 {
			size = int64(1) << (34 + f.rng.IntN(12))
		}
		if err := unix.Ftruncate(fd, size); err != nil {
			size = 1 << 20
			if err := unix.Ftruncate(fd, size); err != nil {
				return err
			}
		}
		switch f.rng.IntN(12) {
		case 0:
			_, _ = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, f.rng.IntN(1<<5))
		case 1, 2, 3, 4:
			_, _ = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK)
		}
		f.size = append(f.size, size)
		r := vhostuser.Region{GuestPA: guest, Size: uint64(size), UserAddr: user}
		switch f.rng.IntN(40) {
		case 0:
			r.Offset = uint64(f.rng.IntN(64)) << 12
		case 1:
			r.Size = f.rng.Uint64() >> f.rng.IntN(64)
		}
		f.table = append(f.table, r)
		user += uint64(size) + uint64(f.rng.IntN(2))<<30
		guest += uint64(size) + uint64(f.rng.IntN(2))<<30
	}
	for range 4 {
		fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|f.rng.IntN(2)*unix.EFD_NONBLOCK)
		if err != nil {
			return err
		}
		f.event = append(f.event, fd)
	}
	return nil
}

// send sends a message, now and then spoilt.
func (f *hostileFrontEnd) send(req vhostuser.Request, body []byte, fds ...int) {
	h := vhostuser.Header{Request: req, Flags: vhostuser.FlagVersion, Size: uint32(len(body))}
	if f.rng.IntN(2) == 0 {
		h.Flags |= vhostuser.FlagNeedReply
	}
	raw := append(h.Append(nil), body...)
	if f.rng.IntN(200) == 0 {
		raw[f.rng.IntN(len(raw))] ^= 1 << f.rng.IntN(8)
	}
	if f.rng.IntN(300) == 0 {
		raw = raw[:f.rng.IntN(len(raw))]
	}
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	_ = f.conn.SetWriteDeadline(time.Now().Add(episodeLimit))
	if _, _, err := f.conn.WriteMsgUnix(raw, oob, nil); err != nil {
		f.dead = true
	}
}

func (f *hostileFrontEnd) eventFD() int { return f.event[f.rng.IntN(len(f.event))] }

func (f *hostileFrontEnd) sendTable() {
	n := 1 + f.rng.IntN(len(f.table))
	f.shared = n
	f.send(vhostuser.ReqSetMemTable, vhostuser.AppendMemTable(nil, f.table[:n]), f.files[:n]...)
}

// address returns a user address, mostly within the memory.
func (f *hostileFrontEnd) address(align uint64) uint64 {
	r := f.table[f.rng.IntN(max(f.shared, 1))]
	switch f.rng.IntN(100) {
	case 0:
		return f.rng.Uint64()
	case 1:
		return r.UserAddr + r.Size - uint64(f.rng.IntN(4096))
	}
	return (r.UserAddr + f.rng.Uint64N(min(max(r.Size, 1), 1<<24))) &^ (align - 1)
}

func (f *hostileFrontEnd) startRing(i uint32) {
	size := uint32(1) << f.rng.IntN(11)
	steps := []func(){
		func() { f.send(vhostuser.ReqSetVringNum, vhostuser.VringState{Index: i, Num: size}.Append(nil)) },
		func() {
			base := uint32(f.rng.IntN(2) * f.rng.IntN(1<<16))
			f.send(vhostuser.ReqSetVringBase, vhostuser.VringState{Index: i, Num: base}.Append(nil))
		},
		func() {
			f.send(vhostuser.ReqSetVringAddr, vhostuser.VringAddr{Index: i, Desc: f.address(4096), Avail: f.address(4096),
				Used: f.address(4096)}.Append(nil))
		},
		func() { f.send(vhostuser.ReqSetVringCall, vhostuser.VringFD{Index: i}.Append(nil), f.eventFD()) },
		func() { f.send(vhostuser.ReqSetVringErr, vhostuser.VringFD{Index: i}.Append(nil), f.eventFD()) },
		func() { f.send(vhostuser.ReqSetVringKick, vhostuser.VringFD{Index: i}.Append(nil), f.eventFD()) },
		func() { f.send(vhostuser.ReqSetVringEnable, vhostuser.VringState{Index: i, Num: 1}.Append(nil)) },
	}
	if f.rng.IntN(4) == 0 {
		f.rng.Shuffle(len(steps), func(a, b int) { steps[a], steps[b] = steps[b], steps[a] })
	}
	for _, step := range steps {
		switch f.rng.IntN(20) {
		case 0: // left out
		case 1:
			step()
			step()
		default:
			step()
		}
	}
}

func (f *hostileFrontEnd) handshake(socket string) {
	f.send(vhostuser.ReqGetFeatures, nil)
	proto := uint64(vhostuser.ProtoMQ | vhostuser.ProtoReplyAck | vhostuser.ProtoResetDevice |
		vhostuser.ProtoConfigureMemSlots | vhostuser.ProtoStatus)
	if strings.HasSuffix(socket, ".hca") {
		proto |= vhostuser.ProtoConfig
	}
	if f.rng.IntN(20) == 0 {
		proto ^= 1 << f.rng.IntN(20)
	}
	f.send(vhostuser.ReqSetProtocolFeatures, vhostuser.AppendU64(nil, proto))
	f.send(vhostuser.ReqSetOwner, nil)
	features := uint64(virtio.FeatureVersion1 | vhostuser.FeatureProtocolFeatures)
	if f.rng.IntN(2) == 0 {
		features |= virtio.FeatureIndirectDesc | virtio.FeatureEventIdx
	}
	if f.rng.IntN(20) == 0 {
		features |= 1 << f.rng.IntN(64)
	}
	f.send(vhostuser.ReqSetFeatures, vhostuser.AppendU64(nil, features))
	f.fillRings(f.rng)
	f.sendTable()
	for i := range f.rings {
		f.startRing(i)
	}
	f.send(vhostuser.ReqSetStatus, vhostuser.AppendU64(nil, 15))
}

// message sends any message.
func (f *hostileFrontEnd) message() {
	i := f.rng.Uint32N(f.rings)
	if f.rng.IntN(100) == 0 {
		i = f.rng.Uint32()
	}
	switch f.rng.IntN(20) {
	case 0:
		f.sendTable()
	case 1:
		k := f.rng.IntN(len(f.table))
		f.send(vhostuser.ReqAddMemReg, vhostuser.AppendMemReg(nil, f.table[k]), f.files[k])
	case 2:
		f.send(vhostuser.ReqRemMemReg, vhostuser.AppendMemReg(nil, f.table[f.rng.IntN(len(f.table))]))
	case 3, 4:
		f.startRing(i)
	case 5:
		f.send(vhostuser.ReqGetVringBase, vhostuser.VringState{Index: i}.Append(nil))
	case 6:
		f.send(vhostuser.ReqSetVringEnable, vhostuser.VringState{Index: i, Num: uint32(f.rng.IntN(2))}.Append(nil))
	case 7:
		f.send(vhostuser.ReqSetStatus, vhostuser.AppendU64(nil, uint64(f.rng.IntN(16))))
	case 8:
		f.send(vhostuser.ReqResetDevice, nil)
	case 9:
		f.rare()
	case 10:
		f.send(vhostuser.ReqGetVringBase, vhostuser.VringState{Index: i}.Append(nil))
		f.startRing(i)
	default:
		f.fillRings(f.rng)
		f.kick()
	}
}

// rare sends what usually ends the connection.
func (f *hostileFrontEnd) rare() {
	switch f.rng.IntN(12) {
	case 0:
		f.send(vhostuser.ReqSetFeatures, vhostuser.AppendU64(nil, virtio.FeatureVersion1|f.rng.Uint64()&f.rng.Uint64()))
	case 1:
		body := make([]byte, 12+f.rng.IntN(64))
		binary.NativeEndian.PutUint32(body[4:], uint32(len(body)-12))
		f.send(vhostuser.ReqGetConfig+vhostuser.Request(f.rng.IntN(2)), body)
	case 2:
		f.send(vhostuser.Request(f.rng.IntN(48)), f.noise(f.rng.IntN(64)), f.someFDs()...)
	case 3:
		f.send(vhostuser.ReqSetBackendReqFD, nil, f.someFDs()...)
	}
}

func (f *hostileFrontEnd) noise(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(f.rng.Uint32())
	}
	return b
}

func (f *hostileFrontEnd) someFDs() []int {
	switch f.rng.IntN(4) {
	case 0:
		return nil
	case 1:
		return []int{f.files[f.rng.IntN(len(f.files))]}
	case 2:
		return f.event
	}
	return []int{f.eventFD()}
}

func (f *hostileFrontEnd) kick() { f.add(f.eventFD(), 1) }

// add adds to an eventfd without waiting, and leaves it blocking or not, as it was or the other way round.
func (f *hostileFrontEnd) add(fd int, n uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
	if err != nil {
		return
	}
	_, _ = unix.FcntlInt(uintptr(fd), unix.F_SETFL, flags|unix.O_NONBLOCK)
	_, _ = unix.Write(fd, binary.NativeEndian.AppendUint64(nil, n))
	if n > 1 {
		flags ^= unix.O_NONBLOCK
	}
	_, _ = unix.FcntlInt(uintptr(fd), unix.F_SETFL, flags)
}

// empty makes an eventfd's count 0.
func (f *hostileFrontEnd) empty(fd int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFL, unix.O_NONBLOCK); err == nil {
		_, _ = unix.Read(fd, make([]byte, 8))
	}
}

// fillRings writes descriptors and indices, plausible and not, to the first pages of a memory file.
func (f *hostileFrontEnd) fillRings(rng *rand.Rand) {
	k := rng.IntN(len(f.files))
	page := make([]byte, 4096)
	for i := 0; i+16 <= len(page); i += 16 {
		binary.LittleEndian.PutUint64(page[i:], f.table[k].GuestPA+rng.Uint64N(1<<24))
		binary.LittleEndian.PutUint32(page[i+8:], rng.Uint32()>>rng.IntN(32))
		binary.LittleEndian.PutUint16(page[i+12:], uint16(rng.IntN(8)))
		binary.LittleEndian.PutUint16(page[i+14:], uint16(rng.IntN(300)))
	}
	if rng.IntN(2) == 0 { // as an available ring
		binary.LittleEndian.PutUint32(page, rng.Uint32()&0x01ff0001)
		for i := 4; i+2 <= len(page); i += 2 {
			binary.LittleEndian.PutUint16(page[i:], uint16(rng.IntN(300)))
		}
	}
	_, _ = unix.Pwrite(f.files[k], page, int64(rng.IntN(512))<<12)
}

// vandalise damages what the back end uses until the episode is over.
func (f *hostileFrontEnd) vandalise(rng *rand.Rand, over <-chan struct{}) {
	files, events, sizes := f.files, f.event, f.size
	for {
		select {
		case <-over:
			return
		default:
		}
		k := rng.IntN(len(files))
		switch rng.IntN(8) {
		case 0:
			_ = unix.Ftruncate(files[k], int64(rng.IntN(64))<<12)
		case 1, 2:
			_ = unix.Ftruncate(files[k], sizes[k])
		case 3:
			_ = unix.Fallocate(files[k], unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(rng.IntN(512))<<12,
				int64(1+rng.IntN(64))<<12)
		case 4: // full, and perhaps blocking
			f.add(events[rng.IntN(len(events))], 1<<64-2)
		case 5:
			f.empty(events[rng.IntN(len(events))])
		default:
			f.fillRings(rng)
		}
		time.Sleep(time.Duration(rng.IntN(500)) * time.Microsecond)
	}
}
