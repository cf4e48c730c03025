// SPDX-License-Identifier: Apache-2.0
/* A user-space pager that is slow, or never answers. */
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "stress.h"

static int uffd;
static int delay;

static void *pager(void *arg)
{
	unsigned long long served = 0;
	struct uffd_msg m;

	(void)arg;
	while (read(uffd, &m, sizeof(m)) == sizeof(m)) {
		struct uffdio_zeropage z = { .range = { m.arg.pagefault.address & ~(uint64_t)(PAGE - 1), PAGE } };

		if (m.event != UFFD_EVENT_PAGEFAULT)
			continue;
		if (delay < 0) {
			if (!served++)
				say("the pager received its first fault and will not answer");
			continue;
		}
		nap_us(delay * 1000);
		if (ioctl(uffd, UFFDIO_ZEROPAGE, &z) && errno != EEXIST)
			fail(EXIT_SETUP, "UFFDIO_ZEROPAGE: %m");
		if (!(++served % 256))
			say("the pager served %llu faults", served);
	}
	return NULL;
}

int pager_parse(const char *s)
{
	return !strcmp(s, "never") ? PAGER_NEVER : !strcmp(s, "elsewhere") ? PAGER_ELSEWHERE : atoi(s);
}

/* Another program, in a session of its own, keeps the descriptor and nothing else of this process. */
static void pager_away(void)
{
	pid_t pid = fork();
	int i;

	if (pid < 0)
		fail(EXIT_SETUP, "fork: %m");
	if (pid)
		return;
	setsid();
	for (i = 0; i < 1024; i++)
		if (i != uffd)
			close(i);
	fcntl(uffd, F_SETFD, 0);
	execlp("sleep", "sleep", "1000", NULL);
	_exit(1);
}

void pager_start(char *p, size_t n, int delay_ms)
{
	struct uffdio_api api = { .api = UFFD_API };
	struct uffdio_register reg = { .range = { (uint64_t)p, n }, .mode = UFFDIO_REGISTER_MODE_MISSING };
	pthread_t t;

	delay = delay_ms;
	uffd = syscall(SYS_userfaultfd, O_CLOEXEC);
	if (uffd < 0 || ioctl(uffd, UFFDIO_API, &api) || ioctl(uffd, UFFDIO_REGISTER, &reg))
		fail(EXIT_SETUP, "userfaultfd: %m");
	if (delay == PAGER_ELSEWHERE) {
		pager_away();
		return;
	}
	if (pthread_create(&t, NULL, pager, NULL))
		fail(EXIT_SETUP, "no thread");
	pthread_detach(t);
}
