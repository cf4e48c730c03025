package fastpath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// Bounds of the tables, for each direction. Flows in excess go through the switch.
const (
	maxEntries  = 8192
	maxNetworks = 4096
	maxHosts    = 1024
)

// tickShift turns nanoseconds into ticks of about a second, the unit in which the programs note an entry's use.
const tickShift = 30

// momentShift turns nanoseconds into units of 67 ms. An entry is suspended for suspendMoments of them, less up to one:
// longer than vnicd holds a frame.
const (
	momentShift    = 26
	suspendMoments = 2
)

// now returns the current tick, by the kernel's monotonic clock, which the programs also read. The loops use another
// clock.
func now() uint32 { return uint32(monotonic() >> tickShift) }

func monotonic() int64 {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) // cannot fail
	return ts.Nano()
}

// tickSeconds converts ticks to seconds.
func tickSeconds(ticks uint32) uint32 { return uint32(uint64(ticks) << tickShift / 1e9) }

// Offsets in the value of an entry; see value.
const (
	valueGen       = 0
	valueUsed      = 8
	valueNet       = 12
	valueIf        = 16
	valueMax       = 20
	valueHost      = 24
	valueSuspended = 28 // when it was last suspended
	valueOuter     = 32 // out only
	valuePort      = 32 // back only: highest source port

	countSent     = 0
	countReceived = 16
)

// mac is an Ethernet address.
type mac = [6]byte

// tableConfig describes a tunnel end.
type tableConfig struct {
	local       netip.Addr // without zone
	port        uint16
	sourcePorts []uint16 // of the datagrams that the tunnel end sends
}

// maps are the programs' maps.
type maps struct {
	send, receive *ebpf.Map
	generations   *ebpf.Map // by network
	counters      *ebpf.Map // by host port
	ports         *ebpf.Map
}

func (m *maps) all() []**ebpf.Map {
	return []**ebpf.Map{&m.send, &m.receive, &m.generations, &m.counters, &m.ports}
}

// table has the programs and entries of a tunnel end. Only one goroutine may use it at a time.
type table struct {
	cfg         tableConfig
	maps        maps
	send        *ebpf.Program
	receive     *ebpf.Program
	generations []atomic.Uint64 // shared with the programs
	networks    numbers
	hosts       numbers
	underlay    map[int]link.Link
}

// numbers allocates numbers below max. A freed one is reused as late as possible.
type numbers struct {
	next, max int
	free      []int
}

func (n *numbers) take() (i int, ok bool) {
	switch {
	case n.next < n.max:
		n.next++
		return n.next - 1, true
	case len(n.free) == 0:
		return 0, false
	}
	i, n.free = n.free[0], n.free[1:]
	return i, true
}

func (n *numbers) give(i int) { n.free = append(n.free, i) }

// openTable loads the programs. The error says what the kernel or the process lacks.
func openTable(c tableConfig) (*table, error) {
	if len(c.sourcePorts) == 0 {
		return nil, errors.New("no source ports")
	}
	t := &table{cfg: c, networks: numbers{max: maxNetworks}, hosts: numbers{max: maxHosts}, underlay: map[int]link.Link{}}
	if err := t.open(); err != nil {
		t.close()
		if errors.Is(err, unix.EPERM) {
			return nil, errors.New("vnicd lacks CAP_BPF and CAP_NET_ADMIN")
		}
		return nil, err
	}
	return t, nil
}

func (t *table) open() (err error) {
	for i, s := range []ebpf.MapSpec{
		{Name: "vnicd_send", Type: ebpf.Hash, KeySize: sendKeyLen, ValueSize: sendValueLen, MaxEntries: maxEntries},
		{Name: "vnicd_receive", Type: ebpf.Hash, KeySize: receiveKeyLen, ValueSize: receiveValLen, MaxEntries: maxEntries},
		{Name: "vnicd_gens", Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: maxNetworks, Flags: mmapable},
		{Name: "vnicd_counters", Type: ebpf.PerCPUArray, KeySize: 4, ValueSize: 32, MaxEntries: maxHosts},
		{Name: "vnicd_ports", Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: uint32(len(t.cfg.sourcePorts))},
	} {
		if *t.maps.all()[i], err = ebpf.NewMap(&s); err != nil {
			return err
		}
	}
	for i, p := range t.cfg.sourcePorts {
		if err := t.maps.ports.Put(uint32(i), [4]byte{byte(p >> 8), byte(p)}); err != nil {
			return err
		}
	}
	if t.generations, err = shared(t.maps.generations.FD(), maxNetworks); err != nil {
		return err
	}
	if t.send, err = ebpf.NewProgram(&ebpf.ProgramSpec{Name: "vnicd_send", Type: ebpf.SchedCLS, License: license,
		Instructions: sending(&t.maps, t.cfg.local.Is6())}); err != nil {
		return err
	}
	if t.receive, err = ebpf.NewProgram(&ebpf.ProgramSpec{Name: "vnicd_receive", Type: ebpf.SchedCLS, License: license,
		Instructions: receiving(&t.maps, &t.cfg)}); err != nil {
		return err
	}
	// Kernels before 6.6 refuse this query.
	if _, err := link.QueryPrograms(link.QueryOptions{Target: loopback, Attach: ebpf.AttachTCXIngress}); err != nil {
		return fmt.Errorf("tcx needs Linux 6.6 or later: %w", err)
	}
	return nil
}

// loopback is the index of the loopback interface, in every network namespace.
const loopback = 1

// license of the programs; none of their helpers requires the GPL.
const license = "Apache-2.0"

// mmapable is BPF_F_MMAPABLE.
const mmapable = 1 << 10

// close detaches the programs. The networks' generations may still be advanced.
func (t *table) close() {
	for _, l := range t.underlay {
		_ = l.Close()
	}
	for _, p := range []*ebpf.Program{t.receive, t.send} {
		if p != nil {
			_ = p.Close()
		}
	}
	for _, m := range t.maps.all() {
		if *m != nil {
			_ = (*m).Close()
		}
	}
}

// takeNetwork allocates a number for a network and returns its generation: an entry is valid while that equals the
// entry's own. It never decreases, not even when another network gets the number. ok is false if there are too many
// networks.
func (t *table) takeNetwork() (number int, generation *atomic.Uint64, ok bool) {
	if number, ok = t.networks.take(); !ok {
		return 0, nil, false
	}
	g := &t.generations[number]
	g.Add(1)
	return number, g, true
}

// giveNetwork frees a network's number.
func (t *table) giveNetwork(number int) {
	t.generations[number].Add(1)
	t.networks.give(number)
}

// attachUnderlay attaches the receiving program to an interface, unless it is attached already.
func (t *table) attachUnderlay(index int) error {
	if t.underlay[index] != nil {
		return nil
	}
	if len(t.underlay) >= maxUnderlay {
		return errors.New("short path: too many underlay interfaces")
	}
	l, err := link.AttachTCX(link.TCXOptions{Interface: index, Program: t.receive, Attach: ebpf.AttachTCXIngress})
	if err != nil {
		return fmt.Errorf("short path: underlay interface %d: %w", index, err)
	}
	t.underlay[index] = l
	return nil
}

// maxUnderlay bounds the underlay interfaces with the receiving program.
const maxUnderlay = 16

// detachUnderlay detaches the program from unused interfaces.
func (t *table) detachUnderlay(used func(index int) bool) {
	for i, l := range t.underlay {
		if !used(i) {
			_ = l.Close()
			delete(t.underlay, i)
		}
	}
}

// hostPort is a host port with the sending program attached.
type hostPort struct {
	t      *table
	index  int
	number int
	link   link.Link
	before totals // counters when the port got its number
}

// totals counts the frames that took the short path, as frames on a wire.
type totals struct{ sentFrames, sentBytes, receivedFrames, receivedBytes uint64 }

// attachHost attaches the sending program to a host port's interface.
func (t *table) attachHost(index int) (*hostPort, error) {
	n, ok := t.hosts.take()
	if !ok {
		return nil, errors.New("short path: too many host ports")
	}
	l, err := link.AttachTCX(link.TCXOptions{Interface: index, Program: t.send, Attach: ebpf.AttachTCXEgress})
	if err != nil {
		t.hosts.give(n)
		return nil, fmt.Errorf("short path: host port %d: %w", index, err)
	}
	h := &hostPort{t: t, index: index, number: n, link: l}
	h.before = h.raw()
	return h, nil
}

// close detaches the program. The host port's entries must have been removed or be void.
func (h *hostPort) close() {
	_ = h.link.Close()
	h.t.hosts.give(h.number)
}

// totals sums the counters of all processors.
func (h *hostPort) totals() totals {
	now := h.raw()
	return totals{now.sentFrames - h.before.sentFrames, now.sentBytes - h.before.sentBytes,
		now.receivedFrames - h.before.receivedFrames, now.receivedBytes - h.before.receivedBytes}
}

func (h *hostPort) raw() (s totals) {
	var each [][32]byte
	if h.t.maps.counters.Lookup(uint32(h.number), &each) != nil {
		return s // closed
	}
	for _, c := range each {
		s.sentFrames += binary.NativeEndian.Uint64(c[countSent:])
		s.sentBytes += binary.NativeEndian.Uint64(c[countSent+8:])
		s.receivedFrames += binary.NativeEndian.Uint64(c[countReceived:])
		s.receivedBytes += binary.NativeEndian.Uint64(c[countReceived+8:])
	}
	return s
}
