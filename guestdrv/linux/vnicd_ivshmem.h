/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * A virtio device behind QEMU's ivshmem-doorbell (CO-5): registers in BAR 2, which is
 * memory that the guest and the device share, and doorbells by BAR 0. The rings are in
 * guest memory, as with any virtio device. The Go mirror is device/virtio/ivshmem; a
 * test compares it with this header.
 *
 * Doorbells. A register of BAR 0 (VNICD_IVSHMEM_DOORBELL) takes peer << 16 | vector.
 * Vector 0 of the device's peer announces a request, vector 1 + i is the kick of queue i.
 * In the other direction vector 0 (an MSI-X interrupt) says that config space has
 * changed, and vector 1 + i is the interrupt of queue i.
 *
 * Requests. The driver writes its part of the registers, adds 1 to request (release), and
 * rings vector 0. The device copies the driver's part once, brings itself into line with
 * it, writes status and result, then answer = request (release). Nothing but status
 * tells the device what to do:
 *	0			reset: the device accesses no memory any more once it
 *				has answered
 *	FEATURES_OK set		driver_features are final. If the device cannot work
 *				with them, FEATURES_OK is missing in device_status
 *	DRIVER_OK set		the queues whose size is not 0 run. They, and the
 *				features, stay as they are until the next reset
 * A device that is not there at the moment (vnicd is being replaced) answers later, and
 * looks at request when it comes back: no doorbell is lost by that.
 * A device that has ended for good sets answer to VNICD_IVSHMEM_ENDED, once it accesses
 * no memory any more. It stays so until the VM gets another device.
 *
 * The guest can write all of BAR 2. What it writes to the device's part harms only itself:
 * the device never reads it, except once when it comes back (as the VM's own request).
 *
 * Everything is little-endian.
 */
#ifndef VNICD_IVSHMEM_H
#define VNICD_IVSHMEM_H

#include <linux/types.h>

/* PCI: vendor and device of ivshmem; revision 1 */
#define VNICD_IVSHMEM_VENDOR	0x1af4
#define VNICD_IVSHMEM_DEVICE	0x1110
#define VNICD_IVSHMEM_REVISION	1

/* BAR 0: registers of ivshmem, 32 bits each */
#define VNICD_IVSHMEM_POSITION	8	/* read: the guest's own peer number; < 0: none yet */
#define VNICD_IVSHMEM_DOORBELL	12	/* write: peer << 16 | vector */

#define VNICD_IVSHMEM_MAGIC	0x6873766963696e76ULL	/* "vnicivsh" as bytes in memory */
#define VNICD_IVSHMEM_VERSION	1
#define VNICD_IVSHMEM_BAR_SIZE	65536	/* of BAR 2, at least; what follows is the device's */
#define VNICD_IVSHMEM_QUEUES	32	/* largest number of queues */
#define VNICD_IVSHMEM_CONFIG	256	/* largest config space in bytes */
#define VNICD_IVSHMEM_ENDED	0xffffffffU	/* as answer; no request has this number */

struct vnicd_ivshmem_queue {
	/* the driver's: guest physical addresses, as in virtio's split ring */
	__le64 desc;
	__le64 avail;
	__le64 used;
	__le16 size;		/* 0: the queue is not used; otherwise a power of two, at most max_size */
	__u8   reserved[6];
};	/* 32 bytes */

/* At offset 0 of BAR 2. */
struct vnicd_ivshmem {
	/* The device's part: constant, but for the last line. */
	__le64 magic;		/* VNICD_IVSHMEM_MAGIC; written last, when all the rest is valid */
	__le32 version;		/* of this layout */
	__le32 virtio_id;	/* of the virtio device: 38 or 42, see VNICD_VIRTIO_ID */
	__le32 peer;		/* the device's peer number, for doorbells */
	__le32 num_queues;
	__le32 num_vectors;	/* of each peer: 1 + num_queues */
	__le32 config_size;	/* bytes of config space that are valid */
	__le64 device_features;
	__le16 max_size;	/* of each queue */
	__u8   reserved[22];
	/* offset 64: answers */
	__le32 answer;		/* the last request that was handled */
	__le32 result;		/* of it: 0, or an errno (22: EINVAL) that says that nothing was changed */
	__le32 device_status;	/* virtio's device status after it */
	__le32 config_generation;	/* odd while config space changes; read it before and after */
	__u8   reserved2[48];
	/* offset 128: the driver's part */
	__le32 request;
	__le32 status;		/* virtio's device status, as the driver wants it */
	__le64 driver_features;
	__u8   reserved3[48];
	/* offset 192 */
	struct vnicd_ivshmem_queue queue[VNICD_IVSHMEM_QUEUES];	/* to offset 1216 */
	__u8   reserved4[64];
	/* offset 1280 */
	__u8   config[VNICD_IVSHMEM_CONFIG];	/* virtio's device-specific config space; read-only */
};	/* 1536 bytes; the rest of BAR 2 is reserved */

#endif /* VNICD_IVSHMEM_H */
