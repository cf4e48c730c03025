// Package frontend is the front end's side of vhost-user, the counterpart of package vhostuser: it owns a guest memory
// (a memfd), connects to a back end, passes memory, rings and eventfds, and drives virtqueues. The user-space driver
// and tests that need a device without a VM use it.
//
// Memory is the guest's memory, Client sends single messages, Device does the whole negotiation and owns the queues,
// Queue is the driver's side of one ring. The back end's indices are not trusted: a wrong one is an error, not a panic.
package frontend
