// SPDX-License-Identifier: GPL-2.0
/*
 * Pairing with the VM's virtio-net, which shares our MAC, and the state of the
 * port that follows from it.
 *
 * ib_core's GID table for RoCE has the netdev's addresses. The core gets the
 * netdev through .get_netdev. ib_device_set_netdev() would also enter us in the
 * table by which rdma_rxe finds "its" device of a netdev and casts it to its
 * own type, because we have its driver id. So the core does not know by itself
 * when our netdev comes, and we have the GIDs scanned. When it goes, the core's
 * own notifier clears them. A core that derives port events from netdev events
 * does not find us either; we raise our own.
 */
#include <linux/etherdevice.h>
#include <linux/if_arp.h>
#include <linux/rtnetlink.h>
#include <rdma/ib_addr.h>
#include <rdma/ib_cache.h>
#include <rdma/ib_mad.h>

#include "vnicd.h"

/*
 * VLANs, bridges, bonds and the like on top of it have the same MAC, but no
 * device underneath. The permanent address decides, so that an administrator
 * can change the interface's address.
 */
static bool vnicd_netdev_matches(struct vnicd_dev *vd, struct net_device *ndev)
{
	const u8 *mac = ndev->perm_addr;

	if (ndev->type != ARPHRD_ETHER || ndev->addr_len != ETH_ALEN ||
	    !ndev->dev.parent)
		return false;
	if (!is_valid_ether_addr(mac))
		mac = ndev->dev_addr;
	return ether_addr_equal(mac, vd->mac);
}

struct net_device *vnicd_get_netdev(struct ib_device *ibdev, u32 port)
{
	struct vnicd_dev *vd = to_vd(ibdev);
	struct net_device *ndev;
	unsigned long flags;

	if (port != VNICD_PORT)
		return NULL;
	spin_lock_irqsave(&vd->netdev_lock, flags);
	ndev = vd->netdev;
	if (ndev)
		dev_hold(ndev);
	spin_unlock_irqrestore(&vd->netdev_lock, flags);
	return ndev;
}

static void vnicd_netdev_pair(struct vnicd_dev *vd, struct net_device *ndev)
{
	unsigned long flags;
	bool paired = false;

	spin_lock_irqsave(&vd->netdev_lock, flags);
	if (!vd->netdev) {
		dev_hold(ndev);
		vd->netdev = ndev;
		vd->netdev_changed = true;
		paired = true;
	}
	spin_unlock_irqrestore(&vd->netdev_lock, flags);
	if (paired)
		dev_info(&vd->vdev->dev, "paired with %s (%pM)\n",
			 netdev_name(ndev), vd->mac);
}

/* True if it was paired. */
static bool vnicd_netdev_unpair(struct vnicd_dev *vd, struct net_device *ndev)
{
	unsigned long flags;
	bool ours;

	spin_lock_irqsave(&vd->netdev_lock, flags);
	ours = vd->netdev && (!ndev || vd->netdev == ndev);
	if (ours) {
		ndev = vd->netdev;
		vd->netdev = NULL;
	}
	spin_unlock_irqrestore(&vd->netdev_lock, flags);
	if (ours)
		dev_put(ndev);
	return ours;
}

static bool vnicd_netdev_is_ours(struct vnicd_dev *vd, struct net_device *ndev)
{
	unsigned long flags;
	bool ours;

	spin_lock_irqsave(&vd->netdev_lock, flags);
	ours = vd->netdev == ndev;
	spin_unlock_irqrestore(&vd->netdev_lock, flags);
	return ours;
}

/* Under rtnl_lock. Registration replays events of present netdevs. */
static int vnicd_netdev_event(struct notifier_block *nb, unsigned long event,
			      void *ptr)
{
	struct vnicd_dev *vd = container_of(nb, struct vnicd_dev, netdev_nb);
	struct net_device *ndev = netdev_notifier_info_to_dev(ptr);

	switch (event) {
	case NETDEV_REGISTER:
		if (!vnicd_netdev_matches(vd, ndev))
			return NOTIFY_DONE;
		vnicd_netdev_pair(vd, ndev);
		break;
	case NETDEV_UNREGISTER:
		if (!vnicd_netdev_unpair(vd, ndev))
			return NOTIFY_DONE;
		if (!READ_ONCE(vd->removing))
			dev_info(&vd->vdev->dev,
				 "%s is going away: port down until it returns\n",
				 netdev_name(ndev));
		break;
	case NETDEV_UP:
	case NETDEV_DOWN:
	case NETDEV_CHANGE:
	case NETDEV_CHANGEMTU:
		if (!vnicd_netdev_is_ours(vd, ndev))
			return NOTIFY_DONE;
		break;
	default:
		return NOTIFY_DONE;
	}
	queue_work(vd->wq, &vd->port_work);
	return NOTIFY_DONE;
}

/* State and largest MTU (enum ib_mtu, 0 without netdev) of the netdev. */
static int vnicd_netdev_port_state(struct vnicd_dev *vd, enum ib_mtu *mtu)
{
	struct net_device *ndev;
	unsigned long flags;
	bool up;

	spin_lock_irqsave(&vd->netdev_lock, flags);
	ndev = vd->netdev;
	*mtu = ndev ? iboe_get_mtu(READ_ONCE(ndev->mtu)) : 0;
	up = ndev && netif_running(ndev) && netif_carrier_ok(ndev);
	spin_unlock_irqrestore(&vd->netdev_lock, flags);
	return up && READ_ONCE(vd->link_up) && !vnicd_dead(vd) ?
	       IB_PORT_ACTIVE : IB_PORT_DOWN;
}

int vnicd_query_port(struct ib_device *ibdev, u32 port, struct ib_port_attr *attr)
{
	struct vnicd_dev *vd = to_vd(ibdev);
	enum ib_mtu ndev_mtu, dev_mtu;
	struct vnicd_port_attr dattr = {};
	u32 speed, width;
	int err;

	if (port != VNICD_PORT)
		return -EINVAL;

	attr->state = vnicd_netdev_port_state(vd, &ndev_mtu);
	/* A dead device's port is down: the core still queries it. */
	if (!vnicd_dead(vd)) {
		err = vnicd_cmd_query_port(vd, &dattr);
		if (err && !vnicd_dead(vd))
			return err;
	}
	if (le32_to_cpu(dattr.state) != IB_PORT_ACTIVE)
		attr->state = IB_PORT_DOWN;

	attr->max_mtu = ib_mtu_int_to_enum(le32_to_cpu(dattr.max_mtu));
	dev_mtu = ib_mtu_int_to_enum(le32_to_cpu(dattr.active_mtu));
	/* Packets must fit the tenant's network, as the netdev does. */
	attr->active_mtu = ndev_mtu ? min(dev_mtu, ndev_mtu) : dev_mtu;
	attr->phys_state = attr->state == IB_PORT_ACTIVE ?
			   IB_PORT_PHYS_STATE_LINK_UP : IB_PORT_PHYS_STATE_DISABLED;

	speed = le32_to_cpu(dattr.active_speed);
	width = le32_to_cpu(dattr.active_width);
	/* ib_core warns unless it is exactly one known bit. NDR stands for all faster ones. */
	attr->active_speed = is_power_of_2(speed) ? min_t(u32, speed, IB_SPEED_NDR) :
						    IB_SPEED_SDR;
	attr->active_width = is_power_of_2(width) && width <= IB_WIDTH_2X ?
			     width : IB_WIDTH_1X;

	attr->gid_tbl_len = vd->lim.max_gid;
	attr->pkey_tbl_len = 1;
	attr->max_msg_sz = VNICD_MAX_MSG;
	attr->port_cap_flags = IB_PORT_CM_SUP;
	attr->ip_gids = true;
	attr->max_vl_num = 1;
	return 0;
}

static void vnicd_port_work(struct work_struct *work)
{
	struct vnicd_dev *vd = container_of(work, struct vnicd_dev, port_work);
	struct ib_device *ibdev = &vd->ib->base;
	struct ib_event ev = { .device = ibdev, .element.port_num = VNICD_PORT };
	enum ib_mtu mtu;
	unsigned long flags;
	bool changed;
	int state;

	/* Fails before registration and after any unregistration. */
	if (!ib_device_try_get(ibdev))
		return;

	spin_lock_irqsave(&vd->netdev_lock, flags);
	changed = vd->netdev_changed;
	vd->netdev_changed = false;
	spin_unlock_irqrestore(&vd->netdev_lock, flags);
	if (changed)
		rdma_roce_rescan_device(ibdev);

	state = vnicd_netdev_port_state(vd, &mtu);
	if (state != vd->port_state) {
		vd->port_state = state;
		ev.event = state == IB_PORT_ACTIVE ? IB_EVENT_PORT_ACTIVE :
						     IB_EVENT_PORT_ERR;
		ib_dispatch_event(&ev);
	}
	ib_device_put(ibdev);
}

/* Notifies ib_core if the port has changed. Any context. */
void vnicd_port_update(struct vnicd_dev *vd)
{
	queue_work(vd->wq, &vd->port_work);
}

void vnicd_netdev_init(struct vnicd_dev *vd)
{
	spin_lock_init(&vd->netdev_lock);
	INIT_WORK(&vd->port_work, vnicd_port_work);
	vd->port_state = IB_PORT_DOWN;
}

int vnicd_netdev_start(struct vnicd_dev *vd)
{
	int err;

	vd->netdev_nb.notifier_call = vnicd_netdev_event;
	err = register_netdevice_notifier(&vd->netdev_nb);
	if (!err)
		vd->netdev_nb_registered = true;
	return err;
}

void vnicd_netdev_stop(struct vnicd_dev *vd)
{
	/* Replays NETDEV_UNREGISTER for all netdevs, which releases ours. */
	if (vd->netdev_nb_registered)
		unregister_netdevice_notifier(&vd->netdev_nb);
	vd->netdev_nb_registered = false;
	vnicd_netdev_unpair(vd, NULL);
}
