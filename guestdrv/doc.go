// Package guestdrv is a user-space driver for the vnicd HCA. It does for programs on the host what the kernel module in
// guestdrv/linux does in a guest (PF-4, MT-10). It uses the same device ABI (guestdrv/linux/vnicd_abi.h) over the same
// vhost-user socket, as the front end, with a memfd in place of guest memory.
//
// The daemon offers a socket for each entry of `applications` in its configuration. A program that may open it acts as
// that application: one program at a time, within the application's limits.
//
// The interface resembles verbs. An RC sender, without its error checks:
//
//	dev, err := guestdrv.Open(ctx, "/run/vnicd/app.hca", guestdrv.Config{})
//	err = dev.SetGID(ctx, 0, guestdrv.IPGID(netip.MustParseAddr("10.0.0.5")), guestdrv.GIDOptions{})
//	pd, err := dev.AllocPD(ctx)
//	buf, err := dev.Alloc(1 << 20)
//	mr, err := pd.Register(ctx, buf, guestdrv.AccessLocalWrite)
//	cq, err := dev.CreateCQ(ctx, 256, guestdrv.CQOptions{})
//	qp, err := pd.CreateQP(ctx, guestdrv.QPConfig{Type: guestdrv.QPTypeRC, SendCQ: cq, RecvCQ: cq, MaxSendWR: 64})
//	path, err := dev.Resolve(ctx, peerGID, 0) // ARP or ND
//	err = qp.Connect(ctx, guestdrv.Peer{QPN: peerQPN, Path: path}, guestdrv.ConnectOptions{})
//	err = qp.PostSend(guestdrv.NewSend(1, mr.SGE(0, 4096)).With(guestdrv.SendSignaled))
//	wcs := make([]guestdrv.Completion, 16)
//	n, err := cq.PollWait(ctx, wcs) // then wcs[i].Err() for i < n
//
// The peer does the same with its own device. An end whose memory the other accesses grants that twice: in the
// region (PD.Register) and in the connection (ConnectOptions.Access), which grants nothing by default. Package
// guestdrv/rdmacm connects queue pairs by IP address and port, as librdmacm does. Without it the two exchange GID, QP
// number and first PSN by other means such as TCP. For WRITE, READ and atomics the peer also needs the Remote. The
// package's example (guestdrv/example_test.go) has both ends of a connection, with error checks;
// guestdrv/examples/pingpong is a complete program.
//
// # Errors
//
// The sentinels are for errors.Is: ErrClosed and others; each Status, with which the device refuses a command; and each
// WCStatus, with which a work request fails. A posting method fails only if the request cannot be queued. The outcome
// of the request is in its Completion, see Completion.Err.
//
// # Commands
//
// A method with a context issues a command and waits for the answer. If its context ends or Config.Timeout passes
// first, only that command fails; the device remains usable. The command may still be executed: its buffers stay with
// the device until the answer arrives, and an object that it made is destroyed again.
//
// Close releases an object. It waits for at most Config.Timeout, may be repeated after an error, and returns nil once
// the object is closed. Device.Close releases everything.
//
// # Memory
//
// Data that the device accesses must be in a Buffer from Device.Alloc. Its VA, which work requests use, is the address
// of its bytes in this process; its PA is its place in the memfd. They differ on purpose, as they do in a guest. A
// Buffer's bytes must not be used after Device.Close.
//
// # Concurrency
//
// Commands (creation, modification, queries, destruction) may be issued from any goroutine, several at once. Posting
// and polling take no lock: at most one goroutine at a time posts sends on a QP, one posts receives on it (or on an
// SRQ), one polls a CQ. They never allocate and never block.
//
// # Lifetime
//
// Open starts one goroutine per command, event and completion event queue, and two more; Device.Close stops and joins
// them, and unmaps the memory: stop posting, polling and using buffers first. Pending commands and waits fail with
// ErrClosed. If vnicd ends the connection, they fail with ErrDisconnected. Posting methods and Poll do not notice it:
// see Device.Done.
//
// # When vnicd is restarted
//
// Under systemd or `vnicd run --keep` a device outlives the vnicd that serves it, also one that is killed: the next one
// continues all objects and connections, and each request completes once (CO-1, CO-2). The program notices a pause.
// Requests that it posts meanwhile, and commands, wait for the next vnicd; contexts and Config.Timeout apply as always,
// and end one command, not the device. Device.Close waits for up to ten seconds then. Peers repeat what they miss for
// as long as ConnectOptions.Timeout and RetryCnt say: vnicd for 1.8 s by default, up to 2.1 s if the device was slow to
// answer within the last ten seconds, and twice as long with a Timeout that is higher by one. Open fails while no vnicd
// runs. The device ends with ErrDisconnected if vnicd is run otherwise or lacks CAP_LINUX_IMMUTABLE, and if the next
// vnicd does not accept what the device has or does not offer its socket.
package guestdrv
