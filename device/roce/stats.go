package roce

// Stats are counters, written on the QP's loop only. Several QPs of one loop may
// share one Stats (Config.Stats).
type Stats struct {
	TxPackets, TxBytes uint64 // bytes of whole frames
	RxPackets, RxBytes uint64
	TxAcks, TxNaks     uint64 // NAKs without RNR
	TxRNR, RxRNR       uint64
	Retransmits        uint64 // packets sent again
	Timeouts           uint64
	OutOfSequence      uint64 // requests ahead of the expected PSN
	Duplicates         uint64
	RxDropped          uint64 // wrong state, address, key, opcode or size
	AccessErrors       uint64 // R_Key violations as responder
	LocalErrors        uint64 // local protection and length errors
	Faults             uint64 // accesses that met an absent page
	FaultDrops         uint64 // packets dropped for one
	Resumed, Invalid   uint64 // faults served; those whose address was not valid
}
