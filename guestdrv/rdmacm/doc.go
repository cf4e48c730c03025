// Package rdmacm connects programs on the host with VMs and with each other as librdmacm does in a VM: by IP address
// and port, through the RDMA network itself (PF-4, MT-10). It sends the messages of the InfiniBand connection manager
// (IBTA volume 1, chapter 12) with the IP addressing of annex A11 over the device's queue pair 1. It
// follows what librdmacm and the kernel's rdma_cm send and expect.
//
// A server:
//
//	m, err := rdmacm.New(ctx, dev, rdmacm.Config{Address: netip.MustParseAddr("10.0.0.5")})
//	l, err := m.Listen(7471, rdmacm.ListenConfig{})
//	req, err := l.Accept(ctx)             // req.RemoteAddr, req.PrivateData
//	conn, err := req.Accept(ctx, params)  // or req.Reject(rdmacm.RejectConsumer, reason)
//
// A client:
//
//	conn, err := m.Dial(ctx, "10.0.0.5:7471", params)
//
// Both have a Conn then, with a connected RC queue pair: Conn.QP, Conn.SendCQ and Conn.RecvCQ are used as package
// guestdrv describes. Params.Prepare is the place to post receive requests before the peer can send. Memory must be
// registered in the queue pair's protection domain: Manager.PD, unless Params.PD names another.
//
// # Datagrams
//
// Datagrams have no connections: Manager.ServeDatagrams tells peers of a UD queue pair, and Manager.Resolve finds that
// of a peer's port (RDMA_PS_UDP). The program makes its own queue pair, moves it to RTS by guestdrv.QP.StartUD with
// UDPQKey, and sends with an address handle for DatagramPeer.Path.
//
// # Errors
//
// A rejection is a *RejectError, which matches its Reason: errors.Is(err, rdmacm.RejectServiceID) if nobody listens.
// ErrTimeout is a peer that does not answer, ErrPeerDisconnected one that has ended the connection.
//
// # The end of a connection
//
// When either end disconnects, Conn.Done is closed and the queue pair goes to ERR: outstanding requests complete with
// WCWRFlushErr, so that a program that only polls notices it, too. The connection manager sends nothing while a
// connection is open. A peer that dies without a message is noticed by requests that fail. Conn.Close releases
// everything in each case.
//
// # Limits
//
// Connections, requests that wait for Accept, messages that wait for a path, and repetitions are bounded (Config,
// ListenConfig). A Manager has one address. There are no multicast groups or alternate paths.
// The peer cannot tell how long private data is: zero bytes follow it.
//
// # Concurrency and lifetime
//
// All methods may be called from any goroutine; queue pairs and CQs have their own rules. New starts two goroutines,
// whatever the number of connections, and a bounded number for a short time while addresses are resolved. Close
// interrupts Dial and Accept, closes all connections and joins the goroutines. Close the Manager before its Device, and
// stop posting and polling before. If vnicd ends the device, all connections end with its error.
package rdmacm
