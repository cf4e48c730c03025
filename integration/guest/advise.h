/* SPDX-License-Identifier: Apache-2.0 */
/* ibv_advise_mr with an rdma-core before 59, whose rxe provider does not have it: the same request to the kernel. */
#ifndef ADVISE_H
#define ADVISE_H

#include "common.h"
#include <rdma/ib_user_ioctl_cmds.h>
#include <rdma/ib_user_ioctl_verbs.h>
#include <rdma/rdma_user_ioctl_cmds.h>
#include <sys/ioctl.h>

/* advise_mr returns 0 or errno. */
static inline int advise_mr(struct ibv_pd *pd, uint64_t advice, uint32_t flags, const struct ibv_sge *sge)
{
	struct ib_uverbs_sge list = { .addr = sge->addr, .length = sge->length, .lkey = sge->lkey };
	struct {
		struct ib_uverbs_ioctl_hdr h;
		struct ib_uverbs_attr a[4];
	} c = { .h = { .length = sizeof(c), .object_id = UVERBS_OBJECT_MR, .method_id = UVERBS_METHOD_ADVISE_MR,
		       .num_attrs = 4, .driver_id = RDMA_DRIVER_RXE } };
	const uint64_t values[4][3] = {
		{ UVERBS_ATTR_ADVISE_MR_PD_HANDLE, 0, pd->handle },
		{ UVERBS_ATTR_ADVISE_MR_ADVICE, sizeof(uint64_t), advice },
		{ UVERBS_ATTR_ADVISE_MR_FLAGS, sizeof(uint32_t), flags },
		{ UVERBS_ATTR_ADVISE_MR_SGE_LIST, sizeof(list), (uintptr_t)&list },
	};
	int i;

	for (i = 0; i < 4; i++) {
		c.a[i].attr_id = values[i][0];
		c.a[i].len = values[i][1];
		c.a[i].flags = UVERBS_ATTR_F_MANDATORY;
		c.a[i].data = values[i][2];
	}
	return ioctl(pd->context->cmd_fd, RDMA_VERBS_IOCTL, &c) ? errno : 0;
}

#endif
