// Package rstream has stream connections over RDMA, net.Conn and net.Listener, for programs on the host (PF-4,
// MT-10). Their peers are other such programs, and programs in VMs that use librdmacm's rsockets: with the functions
// of rdma/rsocket.h, or unmodified through the library librspreload.so. net/http, gRPC and all else that takes
// a net.Listener or a net.Conn work over them:
//
//	m, err := rdmacm.New(ctx, dev, rdmacm.Config{Address: netip.MustParseAddr("10.0.0.5")})
//	l, err := rstream.Listen(m, 80, rstream.Config{})
//	err = http.Serve(l, handler)
//
//	guest: LD_PRELOAD=/usr/lib/x86_64-linux-gnu/rsocket/librspreload.so PROGRAM http://10.0.0.5/
//
// That library takes a program's sockets if their type is SOCK_STREAM alone (rdma-core 56): with SOCK_CLOEXEC or
// SOCK_NONBLOCK in it, as Python has, they stay with TCP. So do those of Debian 13's curl; Debian 12's is served.
//
// A client uses Dial, or as http.Transport.DialContext a function that calls it.
//
// # Protocol
//
// It is that of rdma-core's librdmacm/rsocket.c, which librdmacm/docs/rsocket describes, version 1. Both ends say in
// the connection manager's private data how many messages they can receive, where the first half of their receive
// buffer is, and where their target SGL is. Data goes by RDMA WRITE with immediate data into the peer's receive
// buffer; the immediate data says how much it is. When half of the receive buffer has been read, it is announced
// again by a WRITE to an entry of the peer's target SGL, whose immediate data also renews the credits. Control
// messages have no data: a direction has ended (SHUTDOWN), the connection has ended (DISCONNECT).
//
// Memory can be mapped for the peer, which then writes into it without a message (Conn.Map and Conn.WriteAt, riomap and
// riowrite of rsockets, whose program riostream is a peer). An end has room for Config.Maps mappings of the peer's.
//
// iWARP's variant with SENDs is left out. Keepalive messages are accepted, but not sent.
//
// # The end of a connection
//
// As with TCP, Close and CloseWrite let the peer read everything that was written. Unlike with TCP, Close waits until
// the peer's device has it (Config.CloseTimeout), because the queue pair ends with Close. A peer that dies is noticed
// by Write and by its connection manager's message. If it dies without one, Read waits: use deadlines, as
// http.Server's IdleTimeout does.
//
// # Errors
//
// They are *net.OpError, except io.EOF. They match os.ErrDeadlineExceeded, net.ErrClosed, ErrReset, ErrShutdown and
// ErrProtocol.
//
// # Hostile peers
//
// A peer can write to its connection's receive buffer and tables, to what is mapped for it, and to nothing else: each
// connection has a protection domain of its own, so that the keys of one mean nothing to another's peer. Lengths,
// credits, addresses and states are checked; a peer that violates the protocol ends its own connection with ErrProtocol
// and a text that says how. What a connection uses is bounded by its Config, and a Listener sets up several at once, so
// that a peer that does not complete its connection holds up no other.
//
// # Concurrency and resources
//
// All methods may be called from any goroutine. A connection has one goroutine, whatever it does, and a Listener one
// and those of connections that are being set up. Read and Write allocate nothing. A connection takes both buffers
// and some pages for queues from the device's memory, 0.3 MiB by default; guestdrv.Config.Memory must be large enough
// for all. Close Listeners and connections before their Manager.
package rstream
