// Package keeper is a small process in front of the daemon for hosts and containers without systemd (`vnicd run
// --keep`). It does for one daemon what systemd does for vnicd.service: it stores the descriptors of VMs' connections
// (sd_notify(3), FDSTORE) and passes them to the next daemon, so that connections outlive the daemon (CO-1, CO-2); it
// starts the daemon again when that has crashed; and it replaces the daemon by the program that is installed now, or by
// the old one again if the new one does not come up.
//
// The keeper handles no foreign input: only its child may send to its socket. It is meant to outlive all daemons, so it
// does little.
package keeper
