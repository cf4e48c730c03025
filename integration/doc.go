// Package integration holds tests that boot VMs and create network namespaces. They exercise the whole path from a
// guest's application to the wire. Packages lab, harness (hosts, guests) and wirefault (a wire that loses packets) hold
// the code that the tests share with `make demo`.
package integration
