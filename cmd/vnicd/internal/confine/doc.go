// Package confine gives up rights of this process, for good and on all of its threads: capabilities and system calls
// that it needs only to start.
package confine
