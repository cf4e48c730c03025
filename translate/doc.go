// Package translate turns the addresses that guests name into host memory:
// stage one from memory key and VA to PA (VM, Region), stage two from PA to host
// address (Space), and epochs, which determine when memory is no longer in use.
//
// It does no I/O and imports nothing else of vnicd. Lock order: VM.mu before
// Epochs.mu; Space.mu, Epochs.mu and GVMTable.mu are never held together
// except that each may be taken alone.
package translate
