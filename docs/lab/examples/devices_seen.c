// SPDX-License-Identifier: GPL-2.0
/*
 * Built by kernel-module.sh: a client of the RDMA core that reports each device.
 */
#include <linux/module.h>
#include <rdma/ib_verbs.h>

static int devices_seen_add(struct ib_device *dev)
{
	pr_info("devices_seen: %s has %u port\n", dev_name(&dev->dev), dev->phys_port_cnt);
	return 0;
}

static struct ib_client devices_seen = {
	.name = "devices_seen",
	.add = devices_seen_add,
};

static int __init devices_seen_init(void)
{
	return ib_register_client(&devices_seen);
}
module_init(devices_seen_init);

static void __exit devices_seen_exit(void)
{
	ib_unregister_client(&devices_seen);
}
module_exit(devices_seen_exit);

MODULE_DESCRIPTION("Reports RDMA devices");
MODULE_LICENSE("GPL");
