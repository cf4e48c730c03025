// Package daemon puts the rooms of vnicd together for one host: loops, frame
// buffers, networks with their tunnels and host ports, and each VM's two
// vhost-user devices. Nothing else imports all of them.
//
// Start builds from the bottom up and every part registers how it is undone;
// Close, and a Start that fails half-way, undo in reverse order. Sockets come
// last, so that no guest sees a half-made host, and go first.
package daemon
