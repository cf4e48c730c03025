/* SPDX-License-Identifier: Apache-2.0 */
/*
 * odpstress: RDMA into and out of memory that its owner keeps releasing. README.md describes the protocol; this file
 * declares what the parts share.
 */
#ifndef STRESS_H
#define STRESS_H

#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <infiniband/verbs.h>

/* Exit statuses. */
enum {
	EXIT_SETUP = 1,		/* wrong usage, or a resource could not be created */
	EXIT_DATA = 2,		/* wrong bytes: lost, stale or misplaced */
	EXIT_HANG = 3,		/* an operation or a system call did not complete */
	EXIT_VERBS = 4,		/* a completion with an unexpected status */
	EXIT_PEER = 5,		/* the other side exited early and printed the reason */
	EXIT_PINNED = 6,	/* memory was pinned or locked */
};

#define SECTOR		512u	/* unit of bookkeeping; each has a generation */
#define PAGE		4096u
#define MAX_QPS		16
#define COUNTERS	512u	/* 64-bit counters per queue pair, for atomics */

enum memory { PINNED, ON_DEMAND, IMPLICIT };

/* Kinds of memory operations by an owner. */
enum {
	CHAOS_KEEP = 1,		/* contents stay */
	CHAOS_RELEASE = 2,	/* contents are lost and replaced by zero pages at once */
	CHAOS_HOLE = 4,		/* for a while nothing is mapped: remote access errors */
};

struct options {
	const char *device, *server;
	int gid_index, port;
	enum memory memory, local;
	size_t region;		/* bytes, multiple of chunk */
	size_t chunk;		/* unit of the protocol between owner and hammer */
	unsigned long chaos;	/* bits of chaos_ops[] */
	int pager_ms;		/* userfaultfd: delay per fault, or PAGER_* */
	int patience;		/* seconds after which an operation counts as hung */
	int rnr_retry;
	int watch;		/* seconds for which an ending side watches memory that it released */
	/* The client chooses the rest. */
	unsigned seconds, qps, depth, seed;
	uint32_t message;	/* maximum, in bytes */
	bool rdma, atomics, send, ud, cover;
};

enum { PAGER_NONE = -1, PAGER_NEVER = -2, PAGER_ELSEWHERE = -3 };

extern struct options opt;
extern volatile sig_atomic_t enough;	/* SIGINT: the time is over */

/* util.c */
__attribute__((noreturn, format(printf, 2, 3))) void fail(int status, const char *fmt, ...);
__attribute__((format(printf, 1, 2))) void say(const char *fmt, ...);
uint64_t now_ms(void);
void nap_us(unsigned us);
uint64_t rnd(uint64_t *state);				/* splitmix64 */
uint64_t below(uint64_t *state, uint64_t n);		/* 0 .. n-1 */
uint64_t meminfo(const char *file, const char *key);	/* number after KEY in a /proc file, 0 if absent */
void *map_pages(size_t n);				/* private anonymous memory, page-aligned */
char *carry_pages(char *p, size_t n, int how, char *to);	/* mremap to a given address; how: further flags */

/*
 * A sector's contents are a function of seed, sector and generation, word by word, so that any word found identifies
 * itself. Generation 0: zeros.
 */
void pattern_fill(void *p, uint64_t seed, uint32_t sector, uint32_t gen);
bool pattern_is(const void *p, uint64_t seed, uint32_t sector, uint32_t gen);
/* Every word is zero or belongs to a generation up to newest. */
bool pattern_upto(const void *p, uint64_t seed, uint32_t sector, uint32_t newest);
/* Reports the contents of a wrong sector and exits. */
__attribute__((noreturn)) void pattern_blame(const char *who, const void *p, uint64_t seed, uint32_t sector,
					     uint32_t gen);
uint64_t checksum(const void *p, size_t n);

/* A thread's current operation, for the watchdog in main(). */
struct pulse {
	const char *what;	/* NULL: nothing that can hang */
	uint64_t since;
	struct pulse *next;
};
void pulse_add(struct pulse *p);
void pulse_begin(struct pulse *p, const char *what);
void pulse_end(struct pulse *p);
void pulse_watch(void);		/* exits if an operation hangs */

/* net.c: messages over TCP. */
enum msg_type {
	MSG_WILD = 1,	/* owner: chunk A may lose its contents at any time */
	MSG_SETTLE,	/* owner: no further releases in chunk A; write it, read it back, then leave it alone */
	MSG_VERIFY,	/* owner: chunk A has generation B everywhere; read it and confirm */
	MSG_THAW,	/* owner: chunk A is normal again */
	MSG_DONE_OK,	/* owner: the whole region is correct */
	MSG_WILD_OK, MSG_SETTLED /* generation B */, MSG_VERIFIED,
	MSG_RECONNECT,	/* hammer: queue pair A is reconnected with PSN B */
	MSG_RECONNECTED,
	MSG_DONE,	/* hammer: finished; generations and counters follow */
};
struct msg {
	uint32_t type, a;
	uint64_t b;
};
int net_listen(int port);
int net_accept(int listener);
int net_connect(const char *host, int port);
void net_send(int fd, const void *p, size_t n);
void net_recv(int fd, void *p, size_t n);
bool net_readable(int fd, int timeout_ms);
void msg_send(int fd, uint32_t type, uint32_t a, uint64_t b);
struct msg msg_recv(int fd);

/* rdma.c */
struct nic {
	struct ibv_context *ctx;
	struct ibv_pd *pd;
	struct ibv_mr *implicit;	/* created on first use */
	struct ibv_port_attr port;
	union ibv_gid gid;
};
struct remote {			/* address of a queue pair's peer */
	union ibv_gid gid;
	uint32_t qpn, psn, mtu;
};
void nic_open(struct nic *n);
struct ibv_mr *nic_register(struct nic *n, enum memory kind, void *p, size_t len, int access);
struct ibv_qp *nic_qp(struct nic *n, enum ibv_qp_type type, struct ibv_cq *cq, unsigned depth);
struct remote nic_self(struct nic *n, struct ibv_qp *qp, uint32_t psn);
void qp_connect(struct nic *n, struct ibv_qp *qp, const struct remote *to, uint32_t psn);	/* from RESET to RTS */
void qp_reset(struct ibv_qp *qp);
struct ibv_ah *nic_ah(struct nic *n, const struct remote *to);

/* Exchanged by owner and hammer of one direction at the start. */
struct target {
	uint64_t addr, length, chunk, counters;
	uint32_t rkey, counter_key, chaos, reserved;
};

struct owner;
struct owner *owner_make(struct nic *n);
struct target owner_target(struct owner *o);
struct ibv_qp *owner_qp(struct owner *o, unsigned i);
void owner_connect(struct owner *o, unsigned i, const struct remote *to, uint32_t psn);
void *owner_run(void *o);	/* thread; the socket is set before */
void owner_socket(struct owner *o, int fd);
void owner_report(struct owner *o);

struct hammer;
struct hammer *hammer_make(struct nic *n);
struct ibv_qp *hammer_qp(struct hammer *h, unsigned i);
void hammer_connect(struct hammer *h, unsigned i, const struct remote *to, uint32_t psn);
void hammer_aim(struct hammer *h, const struct target *t, int fd);
void *hammer_run(void *h);
void hammer_report(struct hammer *h);

/* chaos.c */
struct chaos {
	char *base;		/* the region */
	size_t length;
	uint64_t random;
	struct pulse pulse;
	unsigned long long done[32];
	/* Memory that has left the region and must not change. */
	struct parked {
		char *p;
		size_t n;
		uint64_t sum;
	} parked[32];
	unsigned parked_next;
	unsigned long long parked_checked;
	uint64_t longest;	/* ms of an operation */
};
struct chaos_op {
	const char *name;
	int kind;
	void (*run)(struct chaos *c, char *p, size_t n);
};
extern const struct chaos_op chaos_ops[];
extern const unsigned chaos_count;
unsigned long chaos_parse(const char *list);
void chaos_do(struct chaos *c, unsigned op, char *p, size_t n);
void chaos_park(struct chaos *c, char *p, size_t n);
void chaos_start(struct chaos *c);
void chaos_finish(struct chaos *c);	/* checks the memory still parked */
/* Fails if it changes within opt.watch seconds. No operation begins any more. */
void chaos_watch(void);
void chaos_list(char *buf, size_t len);

/* pager.c */
int pager_parse(const char *s);
void pager_start(char *p, size_t n, int delay_ms);

/* talk.c: SEND and RECV */
struct talk;
struct talk *talk_make(struct nic *n, bool ud);
struct ibv_qp *talk_qp(struct talk *t);
void talk_connect(struct talk *t, const struct remote *to, uint32_t psn);
void talk_socket(struct talk *t, int fd);
void *talk_run(void *t);
void talk_report(struct talk *t);

/* access.c */
int access_client(struct nic *n, int fd);
int access_server(struct nic *n, int fd);

#endif
