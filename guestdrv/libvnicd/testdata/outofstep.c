/* SPDX-License-Identifier: Apache-2.0 */
/* A wrong reply to what vnicd_share asks makes the device unusable: outofstep SOCKET. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <vnicd.h>

#define SIZE 16384

int main(int argc, char **argv)
{
	struct vnicd_options o = { .memory = 16 << 20, .timeout_ms = 60000 };
	struct vnicd_device *dev;
	int fd[2], err[2];
	void *p[2];

	if (argc != 2 || vnicd_open(argv[1], &o, &dev)) {
		printf("opening: %s\n", vnicd_error());
		return 1;
	}
	for (int i = 0; i < 2; i++) {
		fd[i] = memfd_create("own", MFD_ALLOW_SEALING);
		if (fd[i] < 0 || ftruncate(fd[i], SIZE))
			return 1;
		p[i] = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd[i], 0);
		err[i] = vnicd_share(dev, fd[i], 0, p[i], SIZE);
		printf("share: %d %s\n", err[i], vnicd_error());
	}
	if (err[0] != -EPROTO || err[1] != -EPROTO || vnicd_device_status(dev) != -EPROTO ||
	    !strstr(vnicd_error(), "in place of") || vnicd_unshare(dev, p[0]) != -EINVAL)
		return 1;
	vnicd_close(dev);
	return 0;
}
