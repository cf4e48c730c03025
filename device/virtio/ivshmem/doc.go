// Package ivshmem serves a virtio device behind QEMU's ivshmem-doorbell (CO-5), a device with an interrupt for each
// queue, which may migrate, and which older QEMUs have, too.
//
// A Server is to QEMU what ivshmem calls a server: it gives it the memory of BAR 2, and the eventfds of doorbells and
// interrupts. To the device it is a vhost-user front end: what the guest's driver asks for by the registers in BAR 2
// becomes messages to the device's own vhostuser.Server, so that device and rings have nothing new. Guest memory, and
// whether the VM runs, come from the session of the VM's network card (vhostuser.Follower).
//
//	guest driver ── registers (BAR 2), vector 0 ──► Server ── vhost-user ──► vhostuser.Server ── virtio.Device
//	     └───────── doorbells of queues (eventfds) ─────────────────────────────────────────────────►┘
//	QEMU's virtio-net ── memory, "rings run" ──► its vhostuser.Server ──► Server
//
// The registers are described in guestdrv/linux/vnicd_ivshmem.h, QEMU's protocol in its docs/specs/ivshmem-spec.rst.
// The guest can write all of BAR 2: the driver's part is copied once for each request, and of the device's part only
// the generation of config space is read, once, by the next process.
//
// With a Keeper the device outlives the process (keep.go).
package ivshmem
