package vswitch

// Reason is why a frame was dropped. The table below has the names.
type Reason uint8

// The reasons. Those from BadHeader on are counted by the ports (vxlan, tap, vnet, hca), not by the switch.
const (
	ShortFrame Reason = iota
	TooBig
	BadSource
	Spoofed
	SpoofedIP
	SpoofedNeighbour
	StaticMoved
	Reserved
	NoPort
	SplitHorizon
	PortClosed
	TableFull // not a drop: the frame was delivered, but its source not learnt
	PortFull  // likewise, by the limit of one port
	Storm
	RateLimit
	FlapHeld
	Looped
	Misplaced
	Unwanted
	UnknownUnicast
	NoMember

	BadHeader
	UnknownVNI
	UnknownPeer
	SourcePort
	NoPeers
	Truncated
	NoBuffer
	QueueFull
	UnderlayTooBig
	Unreachable
	SendError
	NotReady
	Forbidden
	ECNDrop
	LongChain
	NumReasons
)

var reasonNames = [NumReasons]string{
	ShortFrame:       "short-frame",       // under 14 bytes
	TooBig:           "too-big",           // beyond the network's MTU
	BadSource:        "bad-source",        // source MAC is a group address or zero
	Spoofed:          "spoofed",           // source MAC is not one of the port's
	SpoofedIP:        "spoofed-ip",        // source IP address is not one of the port's
	SpoofedNeighbour: "spoofed-neighbour", // ARP or ND claims another's address, or one that the port may not use
	StaticMoved:      "static-moved",      // source MAC belongs to a static entry of another port
	Reserved:         "reserved-group",    // 01:80:c2:00:00:0x is never forwarded (IEEE 802.1Q, 8.6.3)
	NoPort:           "no-port",           // no port to send it to
	SplitHorizon:     "split-horizon",     // from a tunnel or a port to which it would be sent back
	PortClosed:       "port-closed",       // entered through a port that has been closed
	TableFull:        "table-full",        // source not learnt: the network's limit
	PortFull:         "port-table-full",   // source not learnt: the port's limit
	Storm:            "storm",             // beyond the port's limit of broadcast, multicast and unknown unicast
	RateLimit:        "rate-limit",        // beyond the port's rate
	FlapHeld:         "flapping",          // source flaps and is held at its home
	Looped:           "looped",            // a frame flooded by the network has returned from elsewhere
	Misplaced:        "misplaced-roce",    // RoCE from another place than its source's known one (MT-6)
	Unwanted:         "unwanted-roce",     // RoCE from an unknown source that its receiver would not accept
	UnknownUnicast:   "unknown-unicast",   // to an unknown address, with flooding into tunnels off (SetTunnels)
	NoMember:         "no-member",         // multicast that no other port wants (multicast snooping)
	BadHeader:        "bad-header",        // VXLAN header invalid (RFC 7348, 5)
	UnknownVNI:       "unknown-vni",       // no such network here
	UnknownPeer:      "unknown-peer",      // the sender is not a peer of that network
	SourcePort:       "source-port",       // from a peer's address, but a UDP port that any user there may use (TR-3)
	NoPeers:          "no-peers",          // no peer to flood to
	Truncated:        "truncated",         // longer than our buffers
	NoBuffer:         "no-buffer",         // buffer pool or the guest's receive queue exhausted
	QueueFull:        "queue-full",        // a queue between loops, or a socket's or device's, was full
	UnderlayTooBig:   "underlay-too-big",  // EMSGSIZE: encapsulated frame beyond the underlay's MTU
	Unreachable:      "unreachable",       // no route to the peer
	SendError:        "send-error",        // any other refusal by the kernel
	NotReady:         "not-ready",         // the device behind the port is down
	Forbidden:        "dma-forbidden",     // the VM's `dma` forbids the device to access the frame's memory (PF-3)
	ECNDrop:          "ecn-not-capable",   // congestion mark on a flow that is not ECN-capable (RFC 6040, 4.2)
	LongChain:        "long-chain",        // the guest's receive buffers have too many descriptors
}

// ofPorts are the reasons of ports themselves, by kind; any port has those of the switch besides.
var ofPorts = map[Kind][]Reason{
	KindVM:  {BadHeader, Truncated, NoBuffer, QueueFull, Unreachable, NotReady, Forbidden, LongChain},
	KindHCA: {BadHeader, NoBuffer, NotReady},
	KindTAP: {BadHeader, Truncated, NoBuffer, QueueFull, SendError, NotReady},
	KindVTEP: {UnknownPeer, SourcePort, NoPeers, NoBuffer, QueueFull, UnderlayTooBig, Unreachable, SendError, NotReady,
		ECNDrop},
}

// Reasons returns the reasons for which frames are dropped at ports of a kind, each once: those of the switch, which
// any port has, then the port's own. Of an unknown kind they are those of the switch.
func (k Kind) Reasons() []Reason {
	out := make([]Reason, 0, NumReasons)
	for r := range BadHeader {
		out = append(out, r)
	}
	return append(out, ofPorts[k]...)
}

// String returns the name that status output and metrics use.
func (r Reason) String() string {
	if r >= NumReasons {
		return "unknown"
	}
	return reasonNames[r]
}
