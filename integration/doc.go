// Package integration boots VMs and makes network namespaces: the whole path from a
// guest's application to the wire. Only tests are here; what they share with
// `make demo` is in lab, harness (hosts, guests) and wirefault (a wire that loses
// packets).
package integration
