package guestdrv_test

import (
	"context"
	"fmt"
	"log"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/guestdrv"
	testrig "github.com/vnicd/vnicd/guestdrv/internal/rig"
)

// Application 1 writes a message into the memory of application 2.
//
// Both are in one program here. Two programs exchange the GID, the QP number and the Remote by other means first, for
// instance over TCP as guestdrv/examples/pingpong does.
func Example() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	// A program has fixed paths: "/run/vnicd/app1.hca" for the application named app1 in vnicd.yaml.
	sockets, stop := testrig.Applications(2)
	defer stop()

	app1, err := openApplication(ctx, sockets[0], "10.0.0.5")
	if err != nil {
		log.Fatal(err)
	}
	defer app1.dev.Close()
	app2, err := openApplication(ctx, sockets[1], "10.0.0.6")
	if err != nil {
		log.Fatal(err)
	}
	defer app2.dev.Close()
	if err := app1.connect(ctx, app2.gid, app2.qp.Number()); err != nil {
		log.Fatal(err)
	}
	if err := app2.connect(ctx, app1.gid, app1.qp.Number()); err != nil {
		log.Fatal(err)
	}

	// Post the request. Without SendSignaled only a failure would raise a completion.
	n := copy(app1.buf.Bytes(), "hello from application 1")
	wr := guestdrv.NewWrite(1, app2.mr.Remote(0), app1.mr.SGE(0, n)).With(guestdrv.SendSignaled)
	if err := app1.qp.PostSend(wr); err != nil {
		log.Fatal(err)
	}
	// Wait for its completion, and check that: PollWait fails only if there is none.
	wcs := make([]guestdrv.Completion, 1)
	if _, err := app1.cq.PollWait(ctx, wcs); err != nil {
		log.Fatal(err)
	}
	if err := wcs[0].Err(); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("request %d: %v complete\n", wcs[0].ID, wcs[0].Opcode)
	// The WRITE has been acknowledged, so the data is in the memory of application 2.
	fmt.Printf("application 2 has %q\n", app2.buf.Bytes()[:n])
	// Output:
	// request 1: RDMA_WRITE complete
	// application 2 has "hello from application 1"
}

// application is one end of a connection.
type application struct {
	dev *guestdrv.Device // closing it destroys everything below
	gid guestdrv.GID
	buf *guestdrv.Buffer
	mr  *guestdrv.MR
	cq  *guestdrv.CQ
	qp  *guestdrv.QP
}

// openApplication opens the device at socket and makes what a connection needs.
func openApplication(ctx context.Context, socket, address string) (_ *application, err error) {
	a := &application{gid: guestdrv.IPGID(netip.MustParseAddr(address))}
	if a.dev, err = guestdrv.Open(ctx, socket, guestdrv.Config{}); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = a.dev.Close()
		}
	}()
	if err = a.dev.SetGID(ctx, 0, a.gid, guestdrv.GIDOptions{}); err != nil {
		return nil, err
	}
	pd, err := a.dev.AllocPD(ctx)
	if err != nil {
		return nil, err
	}
	if a.buf, err = a.dev.Alloc(4096); err != nil {
		return nil, err
	}
	if a.mr, err = pd.Register(ctx, a.buf, guestdrv.AccessLocalWrite|guestdrv.AccessRemoteWrite); err != nil {
		return nil, err
	}
	if a.cq, err = a.dev.CreateCQ(ctx, 16, guestdrv.CQOptions{}); err != nil {
		return nil, err
	}
	a.qp, err = pd.CreateQP(ctx, guestdrv.QPConfig{Type: guestdrv.QPTypeRC, SendCQ: a.cq, RecvCQ: a.cq, MaxSendWR: 8})
	return a, err
}

// connect connects the application's QP with QP number qpn of the application at gid.
func (a *application) connect(ctx context.Context, gid guestdrv.GID, qpn uint32) error {
	path, err := a.dev.Resolve(ctx, gid, 0) // 0: from the address that SetGID wrote to index 0
	if err != nil {
		return err
	}
	// Without Access the peer could only send messages.
	o := guestdrv.ConnectOptions{Access: guestdrv.AccessRemoteWrite}
	return a.qp.Connect(ctx, guestdrv.Peer{QPN: qpn, Path: path}, o)
}

// A program that keeps its data in a memory file has it sent from where it is.
func ExampleDevice_Share() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	sockets, stop := testrig.Applications(1)
	defer stop()
	dev, err := guestdrv.Open(ctx, sockets[0], guestdrv.Config{})
	if err != nil {
		log.Fatal(err)
	}
	defer dev.Close()

	// The program's memory, made before and without guestdrv.
	fd, err := unix.MemfdCreate("cache", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		log.Fatal(err)
	}
	file := os.NewFile(uintptr(fd), "cache")
	defer file.Close()
	const size = 1 << 20
	if err := file.Truncate(size); err != nil {
		log.Fatal(err)
	}
	cache, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		log.Fatal(err)
	}

	buf, err := dev.Share(file, 0, cache)
	if err != nil {
		log.Fatal(err)
	}
	pd, err := dev.AllocPD(ctx)
	if err != nil {
		log.Fatal(err)
	}
	mr, err := pd.Register(ctx, buf, guestdrv.AccessLocalWrite|guestdrv.AccessRemoteRead)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("registered in place:", &buf.Bytes()[0] == &cache[0], mr.Remote(0).Addr == buf.Addr())
	// Output: registered in place: true true
}

// The device asks for the pages that it uses; the program has the others for itself.
func ExampleBuffer_Pager() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	sockets, stop := testrig.Applications(1)
	defer stop()
	dev, err := guestdrv.Open(ctx, sockets[0], guestdrv.Config{})
	if err != nil {
		log.Fatal(err)
	}
	defer dev.Close()
	buf, err := dev.Alloc(1 << 20)
	if err != nil {
		log.Fatal(err)
	}
	pd, err := dev.AllocPD(ctx)
	if err != nil {
		log.Fatal(err)
	}
	mr, err := pd.RegisterOnDemand(ctx, buf.Addr(), uint64(buf.Len()), guestdrv.AccessRemoteRead, buf.Pager())
	if err != nil {
		log.Fatal(err)
	}
	defer mr.Close()
	// A peer could read any part now. These pages are there before it does.
	if err := mr.Prefetch(ctx, buf.Addr(), 8192, false); err != nil {
		log.Fatal(err)
	}
	fmt.Println("pages in the device's table:", mr.Stats().Pages)
	// Output: pages in the device's table: 2
}
