package main

import (
	"errors"
	"fmt"
	"math"
	"net"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"github.com/vnicd/vnicd/lab/harness"
)

// loss drops a share of the IPv4 frames that arrive at interfaces, each by chance. It is an eBPF program in the kernel:
// not every kernel has netem, and package wirefault relays in user space, which would be the bottleneck.
type loss struct {
	state   *ebpf.Map // its only entry is a lossState
	program *ebpf.Program
	links   []link.Link
}

type lossState struct {
	Threshold uint64 // frames whose random number, of 32 bits, is below it are dropped
	lossCount
}

// lossCount is what the program has counted since the share was set.
type lossCount struct{ Frames, Dropped uint64 }

const (
	tcxNext, tcxDrop = -1, 2
	skbProtocol      = 16     // offset in struct __sk_buff, linux/bpf.h
	etherIPv4        = 0x0800 // frames of other protocols (ARP) pass
)

// newLoss loads the program, which drops nothing at first.
func newLoss() (*loss, error) {
	l := &loss{}
	var err error
	if l.state, err = ebpf.NewMap(&ebpf.MapSpec{Name: "bench_loss", Type: ebpf.Array, KeySize: 4, ValueSize: 24,
		MaxEntries: 1}); err != nil {
		return nil, err
	}
	if l.program, err = ebpf.NewProgram(&ebpf.ProgramSpec{Name: "bench_loss", Type: ebpf.SchedCLS,
		Instructions: asm.Instructions{
			asm.Mov.Imm(asm.R8, tcxNext),
			asm.LoadMem(asm.R2, asm.R1, skbProtocol, asm.Word), // in network order
			asm.HostTo(asm.BE, asm.R2, asm.Half),
			asm.JNE.Imm(asm.R2, etherIPv4, "end"),
			asm.Mov.Imm(asm.R1, 0),
			asm.StoreMem(asm.RFP, -4, asm.R1, asm.Word),
			asm.LoadMapPtr(asm.R1, l.state.FD()),
			asm.Mov.Reg(asm.R2, asm.RFP),
			asm.Add.Imm(asm.R2, -4),
			asm.FnMapLookupElem.Call(),
			asm.JEq.Imm(asm.R0, 0, "end"),
			asm.Mov.Reg(asm.R7, asm.R0),
			asm.Mov.Imm(asm.R1, 1),
			asm.AddAtomic.Mem(asm.R7, asm.R1, asm.DWord, 8),
			asm.FnGetPrandomU32.Call(),
			asm.LoadMem(asm.R1, asm.R7, 0, asm.DWord),
			asm.JGE.Reg(asm.R0, asm.R1, "end"),
			asm.Mov.Imm(asm.R1, 1),
			asm.AddAtomic.Mem(asm.R7, asm.R1, asm.DWord, 16),
			asm.Mov.Imm(asm.R8, tcxDrop),
			asm.Mov.Reg(asm.R0, asm.R8).WithSymbol("end"),
			asm.Return(),
		}}); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// attach adds an interface of a namespace.
func (l *loss) attach(ns *harness.Namespace, name string) error {
	return ns.Do(func() error {
		ifi, err := net.InterfaceByName(name)
		if err != nil {
			return err
		}
		k, err := link.AttachTCX(link.TCXOptions{Interface: ifi.Index, Program: l.program, Attach: ebpf.AttachTCXIngress})
		if err != nil {
			return fmt.Errorf("%s in %s: %w", name, ns.Name, err)
		}
		l.links = append(l.links, k)
		return nil
	})
}

// set sets the share of frames that are dropped and clears the counters.
func (l *loss) set(share float64) error {
	return l.state.Put(uint32(0), lossState{Threshold: uint64(share * (1 << 32))})
}

func (l *loss) counted() (lossCount, error) {
	var s lossState
	err := l.state.Lookup(uint32(0), &s)
	return s.lossCount, err
}

// Close ends the loss.
func (l *loss) Close() (err error) {
	for _, k := range l.links {
		err = errors.Join(err, k.Close())
	}
	if l.program != nil {
		err = errors.Join(err, l.program.Close())
	}
	return errors.Join(err, l.state.Close())
}

// check compares what was dropped with the share that was set. Six standard deviations of a binomial distribution, and
// one frame more, are never exceeded by chance.
func (c lossCount) check(share float64) error {
	if c.Frames == 0 {
		return errors.New("no frame crossed the wire")
	}
	n := float64(c.Frames)
	expected, most := n*share, 6*math.Sqrt(n*share*(1-share))
	if share > 0 {
		most++
	}
	if math.Abs(float64(c.Dropped)-expected) > most {
		return fmt.Errorf("%d of %d frames were dropped, expected were %.0f +-%.0f", c.Dropped, c.Frames, expected, most)
	}
	return nil
}

// percent returns the share that was dropped.
func (c lossCount) percent() float64 { return 100 * float64(c.Dropped) / float64(c.Frames) }
