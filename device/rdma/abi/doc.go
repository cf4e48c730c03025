// Package abi is the Go mirror of guestdrv/linux/vnicd_abi.h, the contract
// between a guest driver and the device, and of the parts of Linux's RDMA user
// ABI that the device reads and writes in guest memory: the rings of rdma_rxe
// (rdma_user_rxe.h), the completions of ib_user_verbs.h, and the numbers of
// ib_verbs.h.
//
// It has two kinds of types:
//
//   - structures that are copied in or out as a whole (commands, events,
//     configuration space, address handles, completions) are Go structs with
//     Encode and Decode; Decode reports nonzero reserved fields (ErrReserved)
//     after it has decoded the others;
//   - elements of work rings, of which a reader needs a few fields, are byte
//     views (SendWQE, RecvWQE) with one accessor per field.
//
// Everything is converted to little-endian explicitly. The package does no I/O,
// never allocates on the success path and trusts no length it is given. It does
// not validate values: whether a page shift or a QP state makes sense is the
// device's business.
//
// A test compiles the C headers and compares every size, offset and constant.
package abi
