package roce

// Stats are counters, written on the QP's loop only. Several QPs of one loop may
// share one Stats (Config.Stats).
type Stats struct {
	TxPackets, TxBytes               uint64 // bytes of whole frames
	RxPackets, RxBytes               uint64
	TxAcks, TxNaks                   uint64 // NAKs without RNR
	TxRNR, RxRNR                     uint64
	Retransmits                      uint64 // packets sent again
	Timeouts                         uint64
	ECNMarked                        uint64 // packets received that met congestion
	TxCNP, RxCNP                     uint64 // congestion notifications
	OutOfSequence                    uint64 // requests ahead of the expected PSN
	Duplicates                       uint64
	Kept                             uint64 // requests and responses put in a reorder queue
	TxSelectiveAcks, RxSelectiveAcks uint64
	RxDropped                        uint64           // packets with a wrong state, address, key, opcode or size
	Drops                            [NumDrops]uint64 // those of RxDropped that Drop counts by reason
	AccessErrors                     uint64           // R_Key violations as responder
	LocalErrors                      uint64           // local protection and length errors
	Flushed                          uint64           // WQEs of either side flushed because of the state
	Faults                           uint64           // accesses that met an absent page
	FaultDrops                       uint64           // packets dropped because of an absent page
	Resumed, Invalid                 uint64           // faults served; faults whose address was invalid
	// Requests on the local path, and their bytes, which the packet counters include.
	LocalMessages, LocalBytes uint64
}

// Add adds o to s.
func (s *Stats) Add(o *Stats) {
	s.TxPackets += o.TxPackets
	s.TxBytes += o.TxBytes
	s.RxPackets += o.RxPackets
	s.RxBytes += o.RxBytes
	s.TxAcks += o.TxAcks
	s.TxNaks += o.TxNaks
	s.TxRNR += o.TxRNR
	s.RxRNR += o.RxRNR
	s.Retransmits += o.Retransmits
	s.Timeouts += o.Timeouts
	s.ECNMarked += o.ECNMarked
	s.TxCNP += o.TxCNP
	s.RxCNP += o.RxCNP
	s.OutOfSequence += o.OutOfSequence
	s.Duplicates += o.Duplicates
	s.Kept += o.Kept
	s.TxSelectiveAcks += o.TxSelectiveAcks
	s.RxSelectiveAcks += o.RxSelectiveAcks
	s.RxDropped += o.RxDropped
	for i, n := range o.Drops {
		s.Drops[i] += n
	}
	s.AccessErrors += o.AccessErrors
	s.LocalErrors += o.LocalErrors
	s.Flushed += o.Flushed
	s.Faults += o.Faults
	s.FaultDrops += o.FaultDrops
	s.Resumed += o.Resumed
	s.Invalid += o.Invalid
	s.LocalMessages += o.LocalMessages
	s.LocalBytes += o.LocalBytes
}

// Drop is the reason why a packet was dropped: a header does not match the QP (IBTA 9.6; MT-6). Such packets get no
// answer.
type Drop uint8

// The reasons.
const (
	DropState     Drop = iota // the QP is not in a state to receive
	DropTransport             // opcode of another service
	DropPKey
	DropMAC     // not from the peer's MAC
	DropAddress // not between the connection's two GIDs, in its VLAN
	DropQKey
	NumDrops
)

var dropNames = [NumDrops]string{"qp-state", "transport", "p-key", "peer-mac", "peer-address", "q-key"}

// String returns the name that status output uses.
func (d Drop) String() string { return dropNames[d] }

// drop counts a packet dropped for reason d.
func (q *QP) drop(d Drop) {
	q.stats.RxDropped++
	q.stats.Drops[d]++
}
