// Package hca is the adapter of one virtual machine: the device that the guest's
// driver talks to through device/rdma/abi. It owns rings, tables, commands, doorbells
// and events; the transport (PSNs, acknowledgements, retries) is device/rdma/roce's.
//
// # Who runs what
//
// The data path runs on loops (device/loop). An engine is this device's share
// of one loop: the doorbell area, the QPs placed there, their run list, the
// frames that arrived for them. A QP lives on one engine for good.
//
// Commands run in one goroutine per device, fed by virtqueue 0, never on a loop.
// It alone changes the tables; loops see new objects through atomic pointers and
// are told of removals through Loop.Do, after which they hold no reference.
//
// What meets an absent page (PF-7) parks, outside of any epoch, until the host's or
// the guest's driver has served the fault: see fault.go. Their answers come from
// other goroutines and reach the loop as bits, like events.
//
// # Lock order
//
// Device.mu (tables, held for one command) before cq.mu (a leaf). cq.mu is taken
// on the data path only by a CQ that QPs of several loops share; one that serves
// a single loop is that loop's own. Nothing waits for a loop, an epoch or the
// guest while it holds cq.mu.
package hca
