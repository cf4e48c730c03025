// Package fastpath carries TCP between host ports and tunnels inside the kernel, by two small programs at the host port's egress
// and the underlay's ingress. Who decides what may go that way is elsewhere (vswitch, vxlan): here an entry says that
// frames from one MAC to another, of one network, go from a host port to a far end or back, for as long as the network's generation is the
// one that the entry was made in. Frames without such an entry, and all that the programs do not know for sure, go on to
// vnicd as if there were no programs.
//
// The programs are attached by links that end with the process, however it ends.
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

// Bounds of the tables, for each direction. What does not fit goes through vnicd.
const (
	MaxEntries  = 8192
	MaxNetworks = 4096
	MaxHosts    = 1024
)

// tickShift makes nanoseconds ticks of about a second, in which the use of an entry is noted.
const tickShift = 30

// momentShift makes them moments of 67 ms, of which an entry rests for two, less up to one: longer than vnicd has a frame in hand.
const (
	momentShift = 26
	restMoments = 2
)

// Now is the tick in which an entry that is used now notes it: the programs have the kernel's monotonic clock, not that of our loops.
func Now() uint32 { return uint32(monotonic() >> tickShift) }

func monotonic() int64 {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) // it is always there
	return ts.Nano()
}

// TickSeconds is how long ticks are.
func TickSeconds(ticks uint32) uint32 { return uint32(uint64(ticks) << tickShift / 1e9) }

// Where things are in entries' values; see values.
const (
	valueGen   = 0
	valueUsed  = 8
	valueNet   = 12
	valueIf    = 16
	valueMax   = 20
	valueHost  = 24
	valueRests = 28 // when it began to rest, or went on to
	valueOuter = 32

	countSent     = 0
	countReceived = 16
)

// MAC is an Ethernet address.
type MAC = [6]byte

// Config describes a tunnel end.
type Config struct {
	Local       netip.Addr // without zone
	Port        uint16
	SourcePorts []uint16 // that its datagrams leave by
}

// maps are what the programs know.
type maps struct {
	send, receive *ebpf.Map
	generations   *ebpf.Map // by network
	counters      *ebpf.Map // by host port
	ports         *ebpf.Map
}

func (m *maps) all() []**ebpf.Map {
	return []**ebpf.Map{&m.send, &m.receive, &m.generations, &m.counters, &m.ports}
}

// Table is a tunnel end's programs and entries. Not for use by several goroutines at once.
type Table struct {
	cfg         Config
	maps        maps
	send        *ebpf.Program
	receive     *ebpf.Program
	generations []atomic.Uint64 // shared with the programs
	networks    numbers
	hosts       numbers
	underlay    map[int]link.Link
}

// numbers gives out numbers below max, a returned one as late as may be.
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

// Open loads the programs. An error says what this kernel, or who runs this, lacks.
func Open(c Config) (*Table, error) {
	if len(c.SourcePorts) == 0 {
		return nil, errors.New("shortpath: no source ports")
	}
	t := &Table{cfg: c, networks: numbers{max: MaxNetworks}, hosts: numbers{max: MaxHosts}, underlay: map[int]link.Link{}}
	if err := t.open(); err != nil {
		t.Close()
		if errors.Is(err, unix.EPERM) {
			return nil, errors.New("shortpath: it needs CAP_BPF and CAP_NET_ADMIN")
		}
		return nil, fmt.Errorf("shortpath: %w", err)
	}
	return t, nil
}

func (t *Table) open() (err error) {
	for i, s := range []ebpf.MapSpec{
		{Name: "vnicd_send", Type: ebpf.Hash, KeySize: sendKeyLen, ValueSize: sendValueLen, MaxEntries: MaxEntries},
		{Name: "vnicd_receive", Type: ebpf.Hash, KeySize: receiveKeyLen, ValueSize: valueOuter, MaxEntries: MaxEntries},
		{Name: "vnicd_gens", Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: MaxNetworks, Flags: mmapable},
		{Name: "vnicd_counters", Type: ebpf.PerCPUArray, KeySize: 4, ValueSize: 32, MaxEntries: MaxHosts},
		{Name: "vnicd_ports", Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: uint32(len(t.cfg.SourcePorts))},
	} {
		if *t.maps.all()[i], err = ebpf.NewMap(&s); err != nil {
			return err
		}
	}
	for i, p := range t.cfg.SourcePorts {
		if err := t.maps.ports.Put(uint32(i), [4]byte{byte(p >> 8), byte(p)}); err != nil {
			return err
		}
	}
	if t.generations, err = shared(t.maps.generations.FD(), MaxNetworks); err != nil {
		return err
	}
	if t.send, err = ebpf.NewProgram(&ebpf.ProgramSpec{Name: "vnicd_send", Type: ebpf.SchedCLS, License: license,
		Instructions: sending(&t.maps, t.cfg.Local.Is6())}); err != nil {
		return err
	}
	if t.receive, err = ebpf.NewProgram(&ebpf.ProgramSpec{Name: "vnicd_receive", Type: ebpf.SchedCLS, License: license,
		Instructions: receiving(&t.maps, &t.cfg)}); err != nil {
		return err
	}
	// Kernels before 6.6 do not know what this asks for.
	if _, err := link.QueryPrograms(link.QueryOptions{Target: loopback, Attach: ebpf.AttachTCXIngress}); err != nil {
		return fmt.Errorf("it needs tcx, of Linux 6.6: %w", err)
	}
	return nil
}

// loopback is the number of the loopback interface, in every network namespace.
const loopback = 1

// license of the programs; none of what they call asks for the GPL.
const license = "Apache-2.0"

// mmapable is BPF_F_MMAPABLE.
const mmapable = 1 << 10

// Close detaches the programs. The networks' generations may be counted on.
func (t *Table) Close() {
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

// TakeNetwork gives out a network's number and its generation: entries hold only as long as it stands still. It never goes back,
// also when another network gets the number. False: there are too many networks.
func (t *Table) TakeNetwork() (number int, generation *atomic.Uint64, ok bool) {
	if number, ok = t.networks.take(); !ok {
		return 0, nil, false
	}
	g := &t.generations[number]
	g.Add(1)
	return number, g, true
}

// GiveNetwork takes the number back.
func (t *Table) GiveNetwork(number int) {
	t.generations[number].Add(1)
	t.networks.give(number)
}

// Underlay has the program look at what arrives at an interface; again is harmless.
func (t *Table) Underlay(index int) error {
	if t.underlay[index] != nil {
		return nil
	}
	if len(t.underlay) >= maxUnderlay {
		return errors.New("shortpath: too many underlay interfaces")
	}
	l, err := link.AttachTCX(link.TCXOptions{Interface: index, Program: t.receive, Attach: ebpf.AttachTCXIngress})
	if err != nil {
		return fmt.Errorf("shortpath: underlay interface %d: %w", index, err)
	}
	t.underlay[index] = l
	return nil
}

// maxUnderlay bounds the interfaces that the tunnels' datagrams arrive by.
const maxUnderlay = 16

// LeaveUnderlay ends that for interfaces that are not used any more.
func (t *Table) LeaveUnderlay(used func(index int) bool) {
	for i, l := range t.underlay {
		if !used(i) {
			_ = l.Close()
			delete(t.underlay, i)
		}
	}
}

// Host is a host port with the program.
type Host struct {
	t      *Table
	index  int
	number int
	link   link.Link
	before Totals // when it got its number
}

// Totals counts what went the short way, as frames on a wire.
type Totals struct{ SentFrames, SentBytes, ReceivedFrames, ReceivedBytes uint64 }

// Host has the program look at what the host sends by a host port.
func (t *Table) Host(index int) (*Host, error) {
	n, ok := t.hosts.take()
	if !ok {
		return nil, errors.New("shortpath: too many host ports")
	}
	l, err := link.AttachTCX(link.TCXOptions{Interface: index, Program: t.send, Attach: ebpf.AttachTCXEgress})
	if err != nil {
		t.hosts.give(n)
		return nil, fmt.Errorf("shortpath: host port %d: %w", index, err)
	}
	h := &Host{t: t, index: index, number: n, link: l}
	h.before = h.raw()
	return h, nil
}

// Index is the interface's.
func (h *Host) Index() int { return h.index }

// Close takes the program off the host port, whose entries must be gone or of an older generation.
func (h *Host) Close() {
	_ = h.link.Close()
	h.t.hosts.give(h.number)
}

// Totals adds up what all processors have counted.
func (h *Host) Totals() Totals {
	now := h.raw()
	return Totals{now.SentFrames - h.before.SentFrames, now.SentBytes - h.before.SentBytes,
		now.ReceivedFrames - h.before.ReceivedFrames, now.ReceivedBytes - h.before.ReceivedBytes}
}

func (h *Host) raw() (s Totals) {
	var each [][32]byte
	if h.t.maps.counters.Lookup(uint32(h.number), &each) != nil {
		return s // closed
	}
	for _, c := range each {
		s.SentFrames += binary.NativeEndian.Uint64(c[countSent:])
		s.SentBytes += binary.NativeEndian.Uint64(c[countSent+8:])
		s.ReceivedFrames += binary.NativeEndian.Uint64(c[countReceived:])
		s.ReceivedBytes += binary.NativeEndian.Uint64(c[countReceived+8:])
	}
	return s
}
