// Package vnet is a virtio-net device (virtio 1.2, 5.1) behind vhost-user: the network face of a VM's port
// (vswitch.VMPort). The guest uses its stock driver.
//
// # Pipeline
//
//	guest sends     kick ─▶ Poll: pop chain, check the virtio header, copy the frame in ─▶ InputNet ─▶ push
//	guest receives  Deliver (any loop) ─▶ mailbox if the pair is on another loop ─▶ pop buffers, copy out, push
//	both            end of the loop's iteration: flush publishes used entries and interrupts once
//
// A queue pair belongs to one loop, which alone accesses its fields. Order within a pair is kept both ways. A frame
// without a guest buffer is dropped and counted; it does not wait for the guest.
//
// Checksums and segmentation may be left undone in both directions (offload.go). The front end provides the control
// queue and the configuration space (for vhost-user network devices, QEMU itself does).
package vnet
