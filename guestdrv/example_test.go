package guestdrv_test

import (
	"context"
	"fmt"
	"log"
	"net/netip"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/guestdrv"
)

// exchange stands for whatever the two programs use to tell each other where they
// are: a TCP connection, a file, a connection manager.
func exchange(mine guestdrv.Peer) (theirs guestdrv.Peer) { return mine }

// A program that sends one message to a peer.
func Example() {
	dev, err := guestdrv.Open("/run/vnicd/app.hca", guestdrv.Config{})
	if err != nil {
		log.Fatal(err)
	}
	defer dev.Close()
	gid := guestdrv.IPGID(netip.MustParseAddr("10.0.0.5"))
	if err := dev.SetGID(0, gid, guestdrv.GIDOptions{}); err != nil {
		log.Fatal(err)
	}
	pd, err := dev.AllocPD()
	if err != nil {
		log.Fatal(err)
	}
	buf, err := dev.Alloc(1 << 20)
	if err != nil {
		log.Fatal(err)
	}
	mr, err := pd.Register(buf, abi.AccessLocalWrite)
	if err != nil {
		log.Fatal(err)
	}
	cq, err := dev.CreateCQ(256, guestdrv.CQOptions{})
	if err != nil {
		log.Fatal(err)
	}
	qp, err := pd.CreateQP(guestdrv.QPConfig{Type: abi.QPTypeRC, SendCQ: cq, RecvCQ: cq, MaxSendWR: 64, MaxRecvWR: 64})
	if err != nil {
		log.Fatal(err)
	}
	peer := exchange(guestdrv.Peer{QPN: qp.Number(), Path: guestdrv.Path{GID: gid, MAC: dev.MAC()}})
	if err := qp.Connect(peer, guestdrv.ConnectOptions{}); err != nil {
		log.Fatal(err)
	}
	n := copy(buf.Bytes(), "hello")
	if err := qp.PostSend(&guestdrv.SendWR{ID: 1, Opcode: abi.WRSend, Flags: abi.SendSignaled, SGL: []abi.SGE{mr.SGE(0, n)}}); err != nil {
		log.Fatal(err)
	}
	wcs := make([]abi.WC, 16)
	got, err := cq.PollWait(context.Background(), wcs)
	if err != nil {
		log.Fatal(err)
	}
	for _, wc := range wcs[:got] {
		fmt.Println(wc.ID, abi.WCStatusString(wc.Status))
	}
}
