/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The numbers of vhost-user, and names of statuses.
 *
 * Generated from the Go constants of the device: go test ./guestdrv/libvnicd -run TestGenerated -update
 */
#ifndef VNICD_TRANSPORT_H
#define VNICD_TRANSPORT_H

/* Requests of the front end (vhost-user, "Front-end message types"). */
#define VHOST_USER_GET_FEATURES 0x1U
#define VHOST_USER_SET_FEATURES 0x2U
#define VHOST_USER_SET_OWNER 0x3U
#define VHOST_USER_SET_MEM_TABLE 0x5U
#define VHOST_USER_SET_VRING_NUM 0x8U
#define VHOST_USER_SET_VRING_ADDR 0x9U
#define VHOST_USER_SET_VRING_BASE 0xaU
#define VHOST_USER_SET_VRING_KICK 0xcU
#define VHOST_USER_SET_VRING_CALL 0xdU
#define VHOST_USER_GET_PROTOCOL_FEATURES 0xfU
#define VHOST_USER_SET_PROTOCOL_FEATURES 0x10U
#define VHOST_USER_GET_QUEUE_NUM 0x11U
#define VHOST_USER_SET_VRING_ENABLE 0x12U
#define VHOST_USER_SET_BACKEND_REQ_FD 0x15U
#define VHOST_USER_GET_CONFIG 0x18U
#define VHOST_USER_ADD_MEM_REG 0x25U
#define VHOST_USER_REM_MEM_REG 0x26U
#define VHOST_USER_SET_STATUS 0x27U
#define VHOST_USER_GET_STATUS 0x28U
#define VHOST_USER_GET_MEMORY 0x100000U /* vnicd's own: a memory file */
#define VHOST_USER_BACKEND_CONFIG_CHANGE 0x2U /* of the back end */

/* Protocol features. */
#define VHOST_USER_PROTOCOL_F_MQ 0x1U
#define VHOST_USER_PROTOCOL_F_REPLY_ACK 0x8U
#define VHOST_USER_PROTOCOL_F_BACKEND_REQ 0x20U
#define VHOST_USER_PROTOCOL_F_CONFIG 0x200U
#define VHOST_USER_PROTOCOL_F_CONFIGURE_MEM_SLOTS 0x8000U
#define VHOST_USER_PROTOCOL_F_STATUS 0x10000U
#define VHOST_USER_PROTOCOL_F_MEMORY 0x4000000000000000ULL /* vnicd's own: GET_MEMORY */

/* Bits of a message's flags, and limits. */
#define VHOST_USER_VERSION_MASK 0x3U
#define VHOST_USER_VERSION 0x1U
#define VHOST_USER_REPLY 0x4U
#define VHOST_USER_NEED_REPLY 0x8U
#define VHOST_USER_HEADER_BYTES 0xcU
#define VHOST_USER_MAX_QUEUES 0x100U

/* Feature bits, as masks. */
#define VHOST_FEATURE_PROTOCOL_FEATURES 0x40000000U
#define VHOST_FEATURE_VERSION_1 0x100000000ULL

/* Descriptions of completion statuses, by number. */
#define VNICD_WC_STATUS_NAMES { \
	"success", \
	"local length error", \
	"local QP operation error", \
	"local EE context operation error", \
	"local protection error", \
	"work request flushed", \
	"memory window bind error", \
	"bad response", \
	"local access error", \
	"remote invalid request", \
	"remote access error", \
	"remote operation error", \
	"transport retry counter exceeded", \
	"RNR retry counter exceeded", \
	"local RDD violation", \
	"remote invalid RD request", \
	"operation aborted", \
	"invalid EE context number", \
	"invalid EE context state", \
	"fatal error", \
	"response timeout", \
	"general error", \
}

#endif
