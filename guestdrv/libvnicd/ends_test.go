package libvnicd_test

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/guestdrv/internal/rig"
)

// memoryBytes is the size of each end's region.
const memoryBytes = 96 << 10

// request is a send request, as testdata/peer.c reads it.
type request struct {
	opcode           guestdrv.Opcode
	flags            uint32 // of verbs, inline included
	id               uint64
	off, length      int // of the data in the own region
	remote           uint64
	rkey             uint32
	imm              [4]byte
	compareAdd, swap uint64
	keyMask          uint32 // what is wrong with the L_Key

}

// end is one end of a connection: the Go driver, or the C library in a process of its own. Answers are texts, equal
// for both.
type end interface {
	open(h *rig.Host)
	qp(kind string) (qpn uint32, addr uint64, rkey uint32)
	connect(peer *rig.Host, qpn, psn, peerPSN uint32)
	startUD(qkey uint32)
	address(peer *rig.Host, qpn, qkey uint32)
	send(r request) string
	recv(id uint64, off, length int) string
	wait() string
	describe() string
	query() string
	event() string
	load(b []byte)
	dump() []byte
	close()
}

const everyRight = guestdrv.AccessRemoteWrite | guestdrv.AccessRemoteRead | guestdrv.AccessRemoteAtomic

// goEnd is the Go driver.
type goEnd struct {
	tb  testing.TB
	ctx context.Context
	d   *guestdrv.Device
	pd  *guestdrv.PD
	cq  *guestdrv.CQ
	q   *guestdrv.QP
	buf *guestdrv.Buffer
	mr  *guestdrv.MR
	to  guestdrv.Datagram
}

func (e *goEnd) must(err error) {
	e.tb.Helper()
	if err != nil {
		e.tb.Fatal(err)
	}
}

func (e *goEnd) open(h *rig.Host) {
	var err error
	e.d, err = guestdrv.Open(e.ctx, h.Path, guestdrv.Config{Memory: 24 << 20})
	e.must(err)
	e.must(e.d.SetGID(e.ctx, 0, guestdrv.IPGID(h.Addr), guestdrv.GIDOptions{}))
	e.pd, err = e.d.AllocPD(e.ctx)
	e.must(err)
	e.cq, err = e.d.CreateCQ(e.ctx, 64, guestdrv.CQOptions{})
	e.must(err)
	e.buf, err = e.d.Alloc(memoryBytes)
	e.must(err)
	e.mr, err = e.pd.Register(e.ctx, e.buf, everyRight|guestdrv.AccessLocalWrite)
	e.must(err)
}

func (e *goEnd) qp(kind string) (qpn uint32, addr uint64, rkey uint32) {
	typ := guestdrv.QPTypeRC
	if kind == "ud" {
		typ = guestdrv.QPTypeUD
	}
	if e.q != nil {
		e.must(e.q.Close())
	}
	var err error
	e.q, err = e.pd.CreateQP(e.ctx, guestdrv.QPConfig{Type: typ, SendCQ: e.cq, RecvCQ: e.cq, MaxSendWR: 4, MaxRecvWR: 4,
		MaxSendSGE: 2, MaxRecvSGE: 2, MaxInline: 128})
	e.must(err)
	return e.q.Number(), e.mr.Addr(), e.mr.RKey()
}

func (e *goEnd) connect(peer *rig.Host, qpn, psn, peerPSN uint32) {
	p, err := e.d.Resolve(e.ctx, guestdrv.IPGID(peer.Addr), 0)
	e.must(err)
	e.must(e.q.Connect(e.ctx, guestdrv.Peer{QPN: qpn, PSN: peerPSN, Path: p},
		guestdrv.ConnectOptions{PSN: psn, Access: everyRight}))
}

func (e *goEnd) startUD(qkey uint32) { e.must(e.q.StartUD(e.ctx, qkey)) }

func (e *goEnd) address(peer *rig.Host, qpn, qkey uint32) {
	p, err := e.d.Resolve(e.ctx, guestdrv.IPGID(peer.Addr), 0)
	e.must(err)
	ah, err := e.pd.CreateAH(p)
	e.must(err)
	e.to = guestdrv.Datagram{AH: ah, QPN: qpn, QKey: qkey}
}

// pieces describes a request's data in two SGEs where possible, as testdata/peer.c does.
func (e *goEnd) pieces(r request) []guestdrv.SGE {
	key := e.mr.LKey() ^ r.keyMask
	at := e.mr.Addr() + uint64(r.off)
	atomic := r.opcode == guestdrv.WRAtomicCmpAndSwp || r.opcode == guestdrv.WRAtomicFetchAndAdd ||
		r.opcode == guestdrv.WRAtomicWrite
	switch half := r.length / 2; {
	case r.length == 0:
		return nil
	case r.length >= 2 && !atomic:
		return []guestdrv.SGE{{Addr: at, Length: uint32(half), LKey: key},
			{Addr: at + uint64(half), Length: uint32(r.length - half), LKey: key}}
	}
	return []guestdrv.SGE{{Addr: at, Length: uint32(r.length), LKey: key}}
}

func (e *goEnd) send(r request) string {
	remote := guestdrv.Remote{Addr: r.remote, RKey: r.rkey}
	sgl := e.pieces(r)
	var wr *guestdrv.SendWR
	switch r.opcode {
	case guestdrv.WRSend:
		if wr = guestdrv.NewSend(r.id, sgl...); e.q.Type() == guestdrv.QPTypeUD {
			wr = guestdrv.NewDatagram(r.id, e.to, sgl...)
		}
	case guestdrv.WRSendWithImm:
		if wr = guestdrv.NewSendImm(r.id, r.imm, sgl...); e.q.Type() == guestdrv.QPTypeUD {
			wr = guestdrv.NewDatagramImm(r.id, e.to, r.imm, sgl...)
		}
	case guestdrv.WRRDMAWrite:
		wr = guestdrv.NewWrite(r.id, remote, sgl...)
	case guestdrv.WRRDMAWriteWithImm:
		wr = guestdrv.NewWriteImm(r.id, remote, r.imm, sgl...)
	case guestdrv.WRRDMARead:
		wr = guestdrv.NewRead(r.id, remote, sgl...)
	case guestdrv.WRAtomicCmpAndSwp:
		wr = guestdrv.NewCompareSwap(r.id, remote, r.compareAdd, r.swap, sgl...)
	case guestdrv.WRAtomicFetchAndAdd:
		wr = guestdrv.NewFetchAdd(r.id, remote, r.compareAdd, sgl...)
	case guestdrv.WRAtomicWrite:
		wr = guestdrv.NewAtomicWrite(r.id, remote, sgl...)
	default:
		e.tb.Fatalf("operation %v", r.opcode)
	}
	if r.flags&inline != 0 {
		wr.Inline = e.buf.Bytes()[r.off : r.off+r.length]
	}
	if err := e.q.PostSend(wr.With(guestdrv.SendFlags(r.flags &^ inline))); err != nil {
		return err.Error()
	}
	return "ok"
}

func (e *goEnd) recv(id uint64, off, length int) string {
	wr := guestdrv.NewRecv(id)
	if length > 0 {
		wr = guestdrv.NewRecv(id, e.mr.SGE(off, length))
	}
	if err := e.q.PostRecv(wr); err != nil {
		return err.Error()
	}
	return "ok"
}

func (e *goEnd) wait() string {
	var wc [1]guestdrv.Completion
	_, err := e.cq.PollWait(e.ctx, wc[:])
	e.must(err)
	c := wc[0]
	if c.Status != guestdrv.WCSuccess {
		return fmt.Sprintf("ok %d %v", c.ID, c.Status)
	}
	if c.Flags&guestdrv.WCFlagWithImm == 0 {
		c.Imm = [4]byte{}
	}
	own := 0
	if c.QPN == e.q.Number() {
		own = 1
	}
	return fmt.Sprintf("ok %d %v opcode %d bytes %d flags %d imm %x own %d", c.ID, c.Status, uint32(c.Opcode), c.ByteLen,
		uint32(c.Flags), c.Imm[:], own)
}

func (e *goEnd) describe() string {
	a, i := e.d.Attr(), e.d.Info()
	p, err := e.d.Port(e.ctx)
	e.must(err)
	return fmt.Sprintf("ok %s mtu %d qps %d wrs %d sges %d inline %d cqes %d ahs %d caps %d state %d active %d mac %x",
		i.Name, i.PortMTU, a.MaxQP, a.MaxQPWR, a.MaxSGE, a.MaxInline, a.MaxCQE, a.MaxAH, uint64(a.Caps), uint32(p.State),
		p.ActiveMTU, i.MAC[:])
}

func (e *goEnd) query() string {
	a, err := e.q.Query(e.ctx)
	e.must(err)
	return fmt.Sprintf("ok state %d mtu %d timeout %d retry %d rnr %d timer %d rd %d %d access %d rq %d sq %d",
		uint8(a.State), uint8(a.PathMTU), a.Timeout, a.RetryCnt, a.RNRRetry, a.MinRNRTimer, a.MaxRdAtomic, a.MaxDestRdAtomic,
		uint32(a.Access), a.RQPSN, a.SQPSN)
}

func (e *goEnd) event() string {
	ev, err := e.d.NextEvent(e.ctx)
	e.must(err)
	own := 0
	if ev.Handle == e.q.Number() {
		own = 1
	}
	return fmt.Sprintf("ok type %d own %d", uint32(ev.Type), own)
}

func (e *goEnd) load(b []byte) { copy(e.buf.Bytes(), b) }

func (e *goEnd) dump() []byte { return append([]byte(nil), e.buf.Bytes()...) }

func (e *goEnd) close() { e.must(e.d.Close()) }

// cEnd is the C library in a process of its own.
type cEnd struct {
	tb  testing.TB
	in  io.WriteCloser
	out *bufio.Reader
	cmd *exec.Cmd
	log strings.Builder
}

// limit returns a context for processes that valgrind may slow down; only a failing test waits that long.
func limit(tb testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	tb.Cleanup(cancel)
	return ctx
}

func newCEnd(tb testing.TB, command ...string) *cEnd {
	tb.Helper()
	e := &cEnd{tb: tb, cmd: exec.CommandContext(limit(tb), command[0], command[1:]...)}
	e.cmd.Stderr = &e.log
	var err error
	if e.in, err = e.cmd.StdinPipe(); err != nil {
		tb.Fatal(err)
	}
	out, err := e.cmd.StdoutPipe()
	if err != nil {
		tb.Fatal(err)
	}
	e.out = bufio.NewReader(out)
	if err := e.cmd.Start(); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		_ = e.in.Close()
		if err := e.cmd.Wait(); err != nil {
			tb.Errorf("%v: %v\n%s", command, err, e.log.String())
		}
	})
	return e
}

// ask sends a command and returns the answer.
func (e *cEnd) ask(format string, args ...any) string {
	e.tb.Helper()
	if _, err := fmt.Fprintf(e.in, format+"\n", args...); err != nil {
		e.tb.Fatalf("the process has ended: %v\n%s", err, e.log.String())
	}
	s, err := e.out.ReadString('\n')
	if err != nil {
		e.tb.Fatalf("no answer to %.40q: %v\n%s", format, err, e.log.String())
	}
	return strings.TrimSuffix(s, "\n")
}

// ok is ask for commands that must succeed.
func (e *cEnd) ok(format string, args ...any) {
	e.tb.Helper()
	if s := e.ask(format, args...); s != "ok" {
		e.tb.Fatalf("%.40q: %s", fmt.Sprintf(format, args...), s)
	}
}

func (e *cEnd) open(h *rig.Host) { e.ok("open %s %v %d", h.Path, h.Addr, memoryBytes) }

func (e *cEnd) qp(kind string) (qpn uint32, addr uint64, rkey uint32) {
	s := e.ask("qp %s", kind)
	if _, err := fmt.Sscanf(s, "ok %d %d %d", &qpn, &addr, &rkey); err != nil {
		e.tb.Fatal(s)
	}
	return qpn, addr, rkey
}

func (e *cEnd) connect(peer *rig.Host, qpn, psn, peerPSN uint32) {
	e.ok("connect %v %d %d %d", peer.Addr, qpn, psn, peerPSN)
}

func (e *cEnd) startUD(qkey uint32) { e.ok("startud %d", qkey) }

func (e *cEnd) address(peer *rig.Host, qpn, qkey uint32) {
	e.ok("address %v %d %d", peer.Addr, qpn, qkey)
}

func (e *cEnd) send(r request) string {
	return e.ask("send %d %d %d %d %d %d %d %x %d %d %d", uint32(r.opcode), r.flags, r.id, r.off, r.length, r.remote,
		r.rkey, binary.BigEndian.Uint32(r.imm[:]), r.compareAdd, r.swap, r.keyMask)
}

func (e *cEnd) recv(id uint64, off, length int) string {
	return e.ask("recv %d %d %d", id, off, length)
}
func (e *cEnd) wait() string     { return e.ask("wait") }
func (e *cEnd) describe() string { return e.ask("describe") }
func (e *cEnd) query() string    { return e.ask("query") }
func (e *cEnd) event() string    { return e.ask("event") }
func (e *cEnd) load(b []byte)    { e.ok("load %x", b) }

func (e *cEnd) dump() []byte {
	b, err := hex.DecodeString(strings.TrimPrefix(e.ask("dump"), "ok "))
	if err != nil {
		e.tb.Fatal(err)
	}
	return b
}

func (e *cEnd) close() { e.ok("close") }
