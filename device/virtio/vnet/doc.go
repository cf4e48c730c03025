// Package vnet is a virtio-net device (virtio 1.2, 5.1) behind vhost-user: the
// network face of a VM's port (vswitch.VMPort). The guest runs its stock driver.
//
// # Pipeline
//
//	guest sends   kick ─▶ Poll: pop chain, check the virtio header, copy the frame in ─▶ InputNet ─▶ push
//	guest receives  Deliver (any loop) ─▶ mailbox if the pair lives elsewhere ─▶ pop buffers, copy out, push
//	both          end of the loop's iteration: flush publishes used entries and interrupts once
//
// A queue pair belongs to one loop for good; its fields are touched there only.
// Order within a pair is kept both ways. A frame that finds no guest buffer is
// dropped and counted: nothing waits for a guest.
//
// Checksums and segmentation may be left undone in both directions (offload.go).
// The control queue and the configuration space are the front end's (QEMU keeps
// them itself for vhost-user network devices).
package vnet
