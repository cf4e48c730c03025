// Package vhostuser is a vhost-user back end: it offers one virtio device per Unix socket to front ends such as QEMU,
// crosvm, DPDK's virtio-user or this project's own user-space driver.
//
// The protocol is QEMU's docs/interop/vhost-user.rst. Numbers are in the host's byte order, as that document requires.
//
// A message passes these stages, in this order, and has no effect before the last:
//
//	header   version, reply bit, known request, size within the request's bounds
//	fds      as many as the request carries, none truncated
//	body     read whole, then decoded; every field checked
//	feature  was the feature that the request belongs to negotiated?
//	dispatch the request's own checks against the connection's state, then the change
//
// Files: message.go and payload.go are the codec and know no sockets;
// transport.go moves messages and descriptors; server.go listens; session.go,
// memory.go and rings.go are one connection.
package vhostuser
