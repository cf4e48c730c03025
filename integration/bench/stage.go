package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

// Bench is the environment of a row: daemons, drivers connected to them, and undo functions.
type Bench struct {
	*lab.Lab
	count    int         // of hosts
	keep     bool        // the next hosts' daemons run under a keeper
	profiles string      // directory; "": none
	daemons  []*lab.Host // that serve profiles
}

func newBench(o options) (*Bench, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("daemons run in network namespaces here, which need root")
	}
	vnicd, err := filepath.Abs(o.vnicd)
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(vnicd); err != nil {
		return nil, fmt.Errorf("no daemon; run `make build` first: %w", err)
	}
	dir, err := os.MkdirTemp("", "vnicd-bench-")
	if err != nil {
		return nil, err
	}
	b := &Bench{Lab: &lab.Lab{Env: &harness.Env{Dir: dir}, VNICD: vnicd}, profiles: o.profiles}
	b.Add(func() { _ = os.RemoveAll(dir) })
	return b, nil
}

func vmName(i int) string { return fmt.Sprintf("vm%d", i) }

func hcaSocket(h *lab.Host, i int) string { return filepath.Join(h.Dir, vmName(i)+".hca") }

func vmMAC(i int) string { return fmt.Sprintf("02:00:00:00:%02x:%02x", 1+i>>8, i&0xff) }

// vmList returns the configuration of VMs first..first+n-1 on network blue.
func vmList(first, n int) string {
	if n == 0 {
		return ""
	}
	var y strings.Builder
	y.WriteString("vms:\n")
	for i := first; i < first+n; i++ {
		fmt.Fprintf(&y, "  - {name: %s, network: blue, mac: \"%s\"}\n", vmName(i), vmMAC(i))
	}
	return y.String()
}

// daemon starts a vnicd with one engine that serves VMs first..first+n-1 on one network; vtep precedes the VMs in its
// configuration.
func (b *Bench) daemon(ctx context.Context, h *lab.Host, first, n int, vtep string) error {
	if vtep == "" {
		vtep = "networks: [{name: blue, vni: 100}]\n"
	}
	return b.start(ctx, h, vtep+vmList(first, n))
}

func (b *Bench) host() (*lab.Host, error) {
	b.count++
	h, err := b.Host(fmt.Sprintf("h%d", b.count))
	if err == nil {
		h.Keep = b.keep
	}
	return h, err
}

func (b *Bench) hosts(n int) (hosts []*lab.Host, err error) {
	for range n {
		h, err := b.host()
		if err != nil {
			return nil, err
		}
		hosts = append(hosts, h)
	}
	return hosts, nil
}

// local starts one daemon with n VMs and connects a driver to each.
func (b *Bench) local(ctx context.Context, n int, memory uint64) (*lab.Host, []*node, error) {
	h, err := b.host()
	if err != nil {
		return nil, nil, err
	}
	if err := b.daemon(ctx, h, 0, n, ""); err != nil {
		return nil, nil, err
	}
	nodes, err := b.attach(h, 0, n, memory)
	return h, nodes, err
}

// attach connects drivers to VMs first..first+n-1.
func (b *Bench) attach(h *lab.Host, first, n int, memory uint64) ([]*node, error) {
	var nodes []*node
	for i := range n {
		nd, err := b.open(h, first+i, memory)
		if err != nil {
			return nil, err
		}
		nodes = append(nodes, nd)
	}
	return nodes, nil
}

// localPair calls local and connects the first two VMs.
func (b *Bench) localPair(ctx context.Context, n int, memory uint64) (nodes []*node, x, y *end, err error) {
	if _, nodes, err = b.local(ctx, n, memory); err == nil {
		x, y, err = connect(nodes[0], nodes[1])
	}
	return nodes, x, y, err
}

// kernelAddr returns the address of host i's kernel VXLAN device.
func kernelAddr(i int) string { return fmt.Sprintf("10.99.0.%d", i+1) }

// underlayAddr returns host i's address on the wire between the two hosts.
func underlayAddr(i int) netip.Addr { return netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)}) }

// peered returns the network configuration of host i of two, for daemon.
func peered(i int) string {
	return fmt.Sprintf("vtep: {local: %s}\nnetworks: [{name: blue, vni: 100, peers: [%s]}]\n", underlayAddr(i),
		underlayAddr(1-i))
}

// remote starts two daemons with a VM each, joined by a veth pair of that MTU, which also carries a kernel VXLAN.
func (b *Bench) remote(ctx context.Context, mtu int, memory uint64) (hosts []*lab.Host, nodes [2]*node, err error) {
	return b.remoteWith(ctx, mtu, memory, func(_ *lab.Host, i int) (string, error) { return peered(i), nil })
}

// remoteWith is remote with that configuration of host i's underlay and network.
func (b *Bench) remoteWith(ctx context.Context, mtu int, memory uint64,
	underlay func(h *lab.Host, i int) (string, error)) (hosts []*lab.Host, nodes [2]*node, err error) {
	if hosts, err = b.hosts(2); err != nil {
		return
	}
	if err = harness.AddVeth(hosts[0].NS, "ul", hosts[1].NS, "ul", mtu); err != nil {
		return
	}
	for i, h := range hosts {
		if err = h.NS.AddAddress("ul", netip.PrefixFrom(underlayAddr(i), 24)); err != nil {
			return
		}
		// Port 4789 belongs to vnicd.
		if _, err = h.NS.Shell(ctx,
			fmt.Sprintf("ip link add kvx type vxlan id 4242 dev ul local %s remote %s dstport 4790 && ip addr add %s/24 dev kvx && ip link set kvx up",
				underlayAddr(i), underlayAddr(1-i), kernelAddr(i))); err != nil {
			return
		}
		var network string
		if network, err = underlay(h, i); err != nil {
			return
		}
		if err = b.daemon(ctx, h, i, 1, network); err != nil {
			return
		}
		if nodes[i], err = b.open(h, i, memory); err != nil {
			return
		}
	}
	return
}

// node is a driver connected to VM i's HCA.
type node struct {
	*guestdrv.Device
	host *lab.Host
	path guestdrv.Path
	pd   *guestdrv.PD
}

func (b *Bench) open(h *lab.Host, i int, memory uint64) (*node, error) {
	return b.openAt(h, hcaSocket(h, i), i, memory)
}

// openAt is open with another socket.
func (b *Bench) openAt(h *lab.Host, socket string, i int, memory uint64) (*node, error) {
	d, err := guestdrv.Open(context.Background(), socket, guestdrv.Config{Memory: memory})
	if err != nil {
		return nil, err
	}
	b.Add(func() { _ = d.Close() })
	n := &node{Device: d, host: h,
		path: guestdrv.Path{GID: guestdrv.IPGID(netip.AddrFrom4([4]byte{10, 0, byte((i + 1) >> 8), byte(i + 1)})),
			MAC: d.MAC()}}
	if err := d.SetGID(context.Background(), 0, n.path.GID, guestdrv.GIDOptions{}); err != nil {
		return nil, err
	}
	n.pd, err = d.AllocPD(context.Background())
	return n, err
}

const allAccess = guestdrv.AccessLocalWrite | guestdrv.AccessRemoteWrite | guestdrv.AccessRemoteRead |
	guestdrv.AccessRemoteAtomic

// region allocates and registers size bytes.
func (n *node) region(size int) (*guestdrv.Buffer, *guestdrv.MR, error) {
	buf, err := n.Alloc(size)
	if err != nil {
		return nil, nil, err
	}
	mr, err := n.pd.Register(context.Background(), buf, allAccess)
	return buf, mr, err
}

// end is a QP with one CQ.
type end struct {
	*node
	qp  *guestdrv.QP
	cq  *guestdrv.CQ
	wcs [32]guestdrv.Completion

	streamed int  // requests completed by the last stream
	worked   work // in messages, by the last stream that proved ran

	// With events the end sleeps until there are completions. A polling end occupies a core, which two busy daemons on
	// two cores would lack; the anchors' programs do not poll.
	events bool
}

const depth = 256 // work requests of a queue

// connect creates a connected pair of RC QPs of processes.
func connect(x, y *node) (a, b *end, err error) { return connectAs(x, y, depth, false) }

// connectAs is connect with queues of that many work requests; privileged QPs are a kernel's (RA-2).
func connectAs(x, y *node, queue int, privileged bool) (a, b *end, err error) {
	var ends [2]*end
	for i, n := range []*node{x, y} {
		e := &end{node: n}
		ends[i] = e
		if e.cq, err = n.CreateCQ(context.Background(), 2*queue, guestdrv.CQOptions{}); err != nil {
			return
		}
		if e.qp, err = n.pd.CreateQP(context.Background(), guestdrv.QPConfig{
			Type: guestdrv.QPTypeRC, SendCQ: e.cq, RecvCQ: e.cq, MaxSendWR: queue, MaxRecvWR: queue, MaxInline: 128,
			Privileged: privileged,
		}); err != nil {
			return
		}
	}
	a, b = ends[0], ends[1]
	o := guestdrv.ConnectOptions{Access: guestdrv.AccessRemoteWrite | guestdrv.AccessRemoteRead |
		guestdrv.AccessRemoteAtomic}
	for _, p := range [][2]*end{{a, b}, {b, a}} {
		if err = p[0].qp.Connect(context.Background(), guestdrv.Peer{QPN: p[1].qp.Number(), Path: p[1].path},
			o); err != nil {
			return
		}
	}
	return
}

// poll takes available completions and checks them.
func (e *end) poll() (int, error) {
	n := e.cq.Poll(e.wcs[:])
	return n, e.check(n)
}

func (e *end) check(n int) error {
	for i := range n {
		if wc := &e.wcs[i]; wc.Status != guestdrv.WCSuccess {
			return fmt.Errorf("completion: %s", wc.Status)
		}
	}
	return nil
}

// next is poll, but waits for events if the end uses them.
func (e *end) next(ctx context.Context) (int, error) {
	if !e.events {
		return e.poll()
	}
	n, err := e.cq.PollWait(ctx, e.wcs[:])
	if err != nil {
		return n, err
	}
	return n, e.check(n)
}

// errStuck ends a spinning loop whose context has ended.
var errStuck = errors.New("no completion arrived")

// spin polls until at least n completions arrived.
func (e *end) spin(ctx context.Context, n int) error { return e.wait(ctx, n, func() {}) }

// spinIdly is spin that yields the processor to other threads, such as the driver that serves a fault.
func (e *end) spinIdly(ctx context.Context, n int) error {
	return e.wait(ctx, n, func() { _, _, _ = unix.Syscall(unix.SYS_SCHED_YIELD, 0, 0, 0) })
}

func (e *end) wait(ctx context.Context, n int, idle func()) error {
	for i := 0; n > 0; i++ {
		got, err := e.poll()
		if err != nil {
			return err
		}
		n -= got
		if got == 0 {
			idle()
		}
		if i%4096 == 4095 && ctx.Err() != nil {
			return errStuck
		}
	}
	return nil
}

// stream keeps up to window requests in flight for d and returns how many completed
// per second. next prepares request i; one in every is signalled.
func (e *end) stream(ctx context.Context, d time.Duration, window, every int, wr *guestdrv.SendWR,
	next func(i int)) (float64, error) {
	start := time.Now()
	end := start.Add(d)
	posted, done := 0, 0
	for stop := false; !stop || done < posted; {
		for !stop && posted-done <= window-every {
			for range every {
				if next != nil {
					next(posted)
				}
				posted++
				wr.Flags &^= guestdrv.SendSignaled
				if posted%every == 0 {
					wr.Flags |= guestdrv.SendSignaled
				}
				if err := e.qp.QueueSend(wr); err != nil {
					return 0, err
				}
			}
			e.qp.Ring()
		}
		n, err := e.next(ctx)
		if err != nil {
			return 0, err
		}
		done += n * every
		if n > 0 || !stop {
			stop = stop || !time.Now().Before(end)
		}
		if stop && ctx.Err() != nil {
			return 0, errStuck
		}
	}
	e.streamed = done
	return float64(done) / time.Since(start).Seconds(), nil
}

// proved is a stream that prepares the memory before it and compares it afterwards. A message takes that many requests.
func (e *end) proved(p *proof, requests int, stream func() (float64, error)) (float64, error) {
	p.prepare()
	begun, err := begin()
	if err != nil {
		return 0, err
	}
	rate, err := stream()
	if err != nil {
		return 0, err
	}
	if e.worked, err = begun.end("message", float64(e.streamed/requests)); err != nil {
		return 0, err
	}
	return rate, p.verify(e.streamed / requests)
}
