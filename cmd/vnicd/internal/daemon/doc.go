// Package daemon assembles vnicd on one host: loops, frame buffers, networks with their tunnels and host ports, and
// each VM's two vhost-user devices. Nothing else imports all of them.
//
// Start builds from the bottom up, and each part registers how it is undone. Close, or a Start that fails half-way,
// undoes the parts in reverse order. Sockets are created last, so that no guest sees a half-built host, and removed
// first.
package daemon
