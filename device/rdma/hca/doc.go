// Side: both

// Package hca is the adapter of one virtual machine: the device that the guest's
// driver uses through device/rdma/abi. It owns rings, tables, commands, doorbells
// and events; device/rdma/roce owns the transport (PSNs, acknowledgements, retries).
//
// # Threads
//
// The data side (dataSide) runs on loops (device/loop). An engine is this device's share
// of one loop: the doorbell area, the QPs placed there, their run list, and the
// frames received for them. A QP belongs to one engine. It may move to another
// once, when it becomes ready to receive (RTR): see place.go.
//
// The control side (Device) runs commands in one goroutine per device, fed by virtqueue 0, never
// on a loop. Only this goroutine changes the tables. Loops find new objects through
// atomic pointers. An object is removed on its loop through Loop.Do, after which the
// loop holds no reference to it.
//
// The first line of each file names its side. The data side uses nothing of the control
// side; TestSides checks it.
//
// An operation that meets an absent page (PF-7) waits, outside of any epoch, until the
// host's or the guest's driver has served the fault: see fault.go. Answers come from
// other goroutines and reach the loop as bits, like events.
//
// # Lock order
//
// Device.mu (tables, held for one command) before cq.mu (a leaf). The data path takes
// cq.mu only for a CQ that QPs of several loops share; any other CQ belongs to its
// loop. A holder of cq.mu never waits for a loop, an epoch or the guest.
package hca
