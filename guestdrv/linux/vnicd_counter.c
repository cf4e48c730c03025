// SPDX-License-Identifier: GPL-2.0
/*
 * Counters of the device and of queue pairs ("rdma statistic"). A queue pair that is
 * bound to an rdma_counter counts apart from the device. The device gives its counts
 * away when they are read, so that they are summed here, and ib_core adds the counters
 * that there are and were to those of the device.
 */
#include <linux/jiffies.h>
#include <linux/list.h>
#include <linux/slab.h>
#include <linux/xarray.h>
#include <rdma/ib_verbs.h>
#include <rdma/rdma_counter.h>

#include "vnicd.h"

/* The counters' names, in the order of enum vnicd_stat. */
static const struct rdma_stat_desc vnicd_stat_descs[VNICD_NUM_STATS] = {
	[VNICD_STAT_TX_PACKETS].name = "tx_packets",
	[VNICD_STAT_TX_BYTES].name = "tx_bytes",
	[VNICD_STAT_RX_PACKETS].name = "rx_packets",
	[VNICD_STAT_RX_BYTES].name = "rx_bytes",
	[VNICD_STAT_TX_ACKS].name = "tx_acks",
	[VNICD_STAT_TX_NAKS].name = "tx_naks",
	[VNICD_STAT_TX_RNR].name = "tx_rnr_naks",
	[VNICD_STAT_RX_RNR].name = "rx_rnr_naks",
	[VNICD_STAT_RETRANSMITS].name = "retransmits",
	[VNICD_STAT_TIMEOUTS].name = "timeouts",
	[VNICD_STAT_OUT_OF_SEQUENCE].name = "out_of_sequence",
	[VNICD_STAT_DUPLICATES].name = "duplicates",
	[VNICD_STAT_ICRC_ERRORS].name = "icrc_errors",
	[VNICD_STAT_RX_DROPPED].name = "rx_dropped",
	[VNICD_STAT_ACCESS_ERRORS].name = "access_errors",
	[VNICD_STAT_GUEST_FAULTS].name = "guest_faults",
	[VNICD_STAT_HOST_FAULTS].name = "host_faults",
	[VNICD_STAT_INVALIDATIONS].name = "invalidations",
	[VNICD_STAT_FAULTS_RESUMED].name = "faults_resumed",
	[VNICD_STAT_FAULTS_FAILED].name = "faults_failed",
	[VNICD_STAT_FAULT_DROPS].name = "fault_drops",
};

struct rdma_hw_stats *vnicd_alloc_hw_port_stats(struct ib_device *ibdev, u32 port)
{
	return rdma_alloc_hw_stats_struct(vnicd_stat_descs, VNICD_NUM_STATS,
					  RDMA_HW_STATS_DEFAULT_LIFESPAN);
}

int vnicd_get_hw_stats(struct ib_device *ibdev, struct rdma_hw_stats *stats, u32 port, int index)
{
	int err;

	if (port != VNICD_PORT || !stats)
		return -EINVAL;
	err = vnicd_cmd_query_stats(to_vd(ibdev), stats->value,
				    min_t(unsigned int, stats->num_counters, VNICD_NUM_STATS));
	return err ? err : stats->num_counters;
}

/* What is bound to an rdma_counter; in vd->counters by its id. Protected by counter->lock. */
struct vnicd_bound {
	struct list_head qps;
};

static struct rdma_hw_stats *vnicd_counter_alloc_stats(struct rdma_counter *counter)
{
	return vnicd_alloc_hw_port_stats(counter->device, counter->port);
}

static int vnicd_counter_bind(struct rdma_counter *counter, struct ib_qp *ibqp)
{
	struct vnicd_dev *vd = to_vd(ibqp->device);
	struct vnicd_qp *qp = to_vqp(ibqp);
	struct vnicd_bound *bound, *made = NULL;
	u64 before[VNICD_NUM_STATS];
	int err;

	if (counter->id) {
		bound = xa_load(&vd->counters, counter->id);
	} else {
		bound = made = kzalloc(sizeof(*made), GFP_KERNEL);
		if (!made)
			return -ENOMEM;
		INIT_LIST_HEAD(&made->qps);
		err = xa_alloc(&vd->counters, &counter->id, made, xa_limit_31b, GFP_KERNEL);
		if (err)
			goto failed;
	}
	/* It does not count apart yet. */
	err = vnicd_cmd_count_qp(vd, qp->qpn, VNICD_COUNT_APART, before);
	if (err)
		goto failed;
	list_add(&qp->counter_node, &bound->qps);
	ibqp->counter = counter;
	return 0;

failed:
	if (made) {
		xa_erase(&vd->counters, counter->id);
		counter->id = 0;
		kfree(made);
	}
	return err;
}

/* Adds what a queue pair has counted since the last call. */
static int vnicd_counter_take(struct rdma_counter *counter, struct vnicd_qp *qp, u32 flags)
{
	u64 values[VNICD_NUM_STATS];
	unsigned int i;
	int err;

	err = vnicd_cmd_count_qp(to_vd(counter->device), qp->qpn, flags, values);
	if (err)
		return err;
	for (i = 0; i < VNICD_NUM_STATS; i++)
		counter->stats->value[i] += values[i];
	return 0;
}

/* Must succeed. What a dead device has counted is lost. */
static int vnicd_unbind_qp(struct ib_qp *ibqp)
{
	struct vnicd_qp *qp = to_vqp(ibqp);

	vnicd_counter_take(ibqp->counter, qp, 0);
	list_del(&qp->counter_node);
	ibqp->counter = NULL;
	return 0;
}

/*
 * ib_core asks again for each value that it shows, and each time there is a command for
 * each queue pair: hence the lifespan.
 */
static int vnicd_counter_update_stats(struct rdma_counter *counter)
{
	struct vnicd_bound *bound = xa_load(&to_vd(counter->device)->counters, counter->id);
	struct rdma_hw_stats *stats = counter->stats;
	struct vnicd_qp *qp;
	int err;

	if (stats->timestamp && time_is_after_jiffies(stats->timestamp + stats->lifespan))
		return 0;
	list_for_each_entry(qp, &bound->qps, counter_node) {
		err = vnicd_counter_take(counter, qp, VNICD_COUNT_APART);
		if (err)
			return err;
	}
	stats->timestamp = jiffies;
	return 0;
}

static int vnicd_counter_dealloc(struct rdma_counter *counter)
{
	kfree(xa_erase(&to_vd(counter->device)->counters, counter->id));
	return 0;
}

#ifdef VNICD_HAVE_COUNTER_PORT
static int vnicd_counter_bind_qp(struct rdma_counter *counter, struct ib_qp *ibqp, u32 port)
{
	return vnicd_counter_bind(counter, ibqp);
}

static int vnicd_counter_unbind_qp(struct ib_qp *ibqp, u32 port)
{
	return vnicd_unbind_qp(ibqp);
}
#else
#define vnicd_counter_bind_qp vnicd_counter_bind
#define vnicd_counter_unbind_qp vnicd_unbind_qp
#endif

#ifdef VNICD_HAVE_COUNTER_OBJECT
struct vnicd_counter {
	struct rdma_counter base;
};

/* ib_core wants one. */
static void vnicd_counter_init(struct rdma_counter *counter)
{
}
#endif

const struct ib_device_ops vnicd_counter_ops = {
	.counter_alloc_stats = vnicd_counter_alloc_stats,
	.counter_bind_qp = vnicd_counter_bind_qp,
	.counter_dealloc = vnicd_counter_dealloc,
	.counter_unbind_qp = vnicd_counter_unbind_qp,
	.counter_update_stats = vnicd_counter_update_stats,
#ifdef VNICD_HAVE_COUNTER_OBJECT
	.counter_init = vnicd_counter_init,
	INIT_RDMA_OBJ_SIZE(rdma_counter, vnicd_counter, base),
#endif
};
