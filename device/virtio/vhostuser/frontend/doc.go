// Package frontend is the front end's side of vhost-user, the twin of package
// vhostuser: it owns a guest memory (a memfd), connects to a back end, hands
// memory, rings and eventfds over and drives split virtqueues. The user-space
// driver stands on it, and so do tests that need a device without a VM.
//
// Memory is the guest's memory, Client speaks single messages, Device goes
// through the whole negotiation and keeps the queues, Queue is the driver's
// side of one ring. Nothing here trusts the back end's indices: a wrong one is
// an error, not a panic.
package frontend
