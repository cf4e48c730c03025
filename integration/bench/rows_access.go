package main

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/vnicd/vnicd/guestdrv"
)

// The ways in which memory is named: by a key in a VM, by a key in a program of the host (PF-4), by real addresses
// (RA-1).

// blocks is a stream of WRITEs of blocks between two drivers, of which the first may use real addresses if it is
// privileged.
type blocks struct {
	*end
	src   *guestdrv.Buffer
	dst   *guestdrv.MR
	proof *proof
	wr    guestdrv.SendWR
	sgl   [1]guestdrv.SGE
}

const blockSize, blockCount = 4096, 64

func newBlocks(from, to *node, privileged bool) (*blocks, error) {
	x := &blocks{}
	var err error
	if x.end, _, err = connectAs(from, to, depth, privileged); err != nil {
		return nil, err
	}
	if x.src, err = from.Alloc(blockCount * blockSize); err != nil {
		return nil, err
	}
	dst, mr, err := to.region(blockCount * blockSize)
	if err != nil {
		return nil, err
	}
	x.dst, x.proof = mr, proofOf(slots(x.src.Bytes(), dst.Bytes(), blockSize)...)
	return x, nil
}

// set makes wr the next request.
func (x *blocks) set(next *guestdrv.SendWR) { x.wr = *next.With(x.wr.Flags) }

// write makes a WRITE of block i the next request; the blocks begin at addr, by that key.
func (x *blocks) write(i int, addr uint64, key uint32) {
	x.sgl[0] = guestdrv.SGE{Addr: addr + uint64(i*blockSize), Length: blockSize, LKey: key}
	x.set(guestdrv.NewWrite(0, x.dst.Remote(i*blockSize), x.sgl[:]...))
}

// sample measures the rate of WRITEs.
func (x *blocks) sample(ctx context.Context, d time.Duration, addr uint64, key uint32) (Sample, error) {
	rate, err := x.proved(x.proof, 1, func() (float64, error) {
		return x.stream(ctx, d, blockCount, 1, &x.wr, func(i int) { x.write(i%blockCount, addr, key) })
	})
	return Sample{Value: rate, Work: x.worked}, err
}

// realAddresses streams WRITEs of 4 KiB as a guest kernel's block or file driver does, from memory named by real
// addresses (RA-1). The anchor registers each buffer, writes and invalidates it, in the same queue.
func realAddresses(ctx context.Context, b *Bench) (m Meter, err error) {
	_, nodes, err := b.local(ctx, 2, 32<<20)
	if err != nil {
		return m, err
	}
	x, err := newBlocks(nodes[0], nodes[1], true)
	if err != nil {
		return m, err
	}
	var regs [blockCount]*guestdrv.Registration
	for i := range regs {
		f, err := nodes[0].pd.AllocFast(context.Background(), 1)
		if err != nil {
			return m, err
		}
		if regs[i], err = f.Map(x.src, i*blockSize, blockSize, 1, guestdrv.AccessLocalWrite); err != nil {
			return m, err
		}
	}
	m.Ours = func(ctx context.Context, d time.Duration) (Sample, error) {
		return x.sample(ctx, d, x.src.PA(), guestdrv.DMALKey)
	}
	m.Anchor = func(ctx context.Context, d time.Duration) (Sample, error) {
		const requests = 3
		rate, err := x.proved(x.proof, requests, func() (float64, error) {
			return x.stream(ctx, d, blockCount*requests, requests, &x.wr, func(n int) {
				i := n / requests % blockCount
				switch n % requests {
				case 0:
					x.set(guestdrv.NewRegister(0, regs[i]))
				case 1:
					x.write(i, x.src.Addr(), regs[i].RKey)
				case 2:
					x.set(guestdrv.NewLocalInvalidate(0, regs[i].RKey))
				}
			})
		})
		return Sample{Value: rate / requests, Work: x.worked}, err
	}
	return m, nil
}

// applicationWrites streams the same WRITEs between two programs of the host, by keys. The anchor does so between two
// VMs of the same daemon; beside it stand those that name their memory by real addresses.
func applicationWrites(ctx context.Context, b *Bench) (m Meter, err error) {
	h, err := b.host()
	if err != nil {
		return m, err
	}
	const vms = 2
	var list strings.Builder
	for i := range 2 {
		fmt.Fprintf(&list, "  - {name: app%d, network: blue, mac: %q}\n", i, vmMAC(vms+i))
	}
	if err := b.daemon(ctx, h, 0, vms, "networks: [{name: blue, vni: 100}]\napplications:\n"+list.String()); err != nil {
		return m, err
	}
	nodes, err := b.attach(h, 0, vms, 32<<20)
	if err != nil {
		return m, err
	}
	for i := range 2 {
		n, err := b.openAt(h, filepath.Join(h.Dir, fmt.Sprintf("app%d.hca", i)), vms+i, 32<<20)
		if err != nil {
			return m, err
		}
		nodes = append(nodes, n)
	}
	var streams [2]*blocks // of the VMs, of the programs
	var keys [2]*guestdrv.MR
	for i := range streams {
		from := nodes[2*i]
		if streams[i], err = newBlocks(from, nodes[2*i+1], i == 0); err != nil {
			return m, err
		}
		if keys[i], err = from.pd.Register(ctx, streams[i].src, guestdrv.AccessLocalWrite); err != nil {
			return m, err
		}
	}
	keyed := func(i int) sampler {
		return func(ctx context.Context, d time.Duration) (Sample, error) {
			return streams[i].sample(ctx, d, keys[i].Addr(), keys[i].LKey())
		}
	}
	m.Ours = keyed(1)
	m.Anchor = func(ctx context.Context, d time.Duration) (Sample, error) {
		s, err := keyed(0)(ctx, d)
		if err != nil {
			return s, err
		}
		r, err := streams[0].sample(ctx, d, streams[0].src.PA(), guestdrv.DMALKey)
		s.Extra = map[string]float64{"VMs, by real addresses, msg/s": r.Value}
		return s, err
	}
	return m, nil
}
