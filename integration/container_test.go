package integration

import (
	"fmt"
	"strings"
	"testing"

	"github.com/vnicd/vnicd/integration/lab"
)

// inContainer runs a command in a root of another Debian release, with its own namespaces and with the parts that a
// container runtime provides: the RDMA device nodes and a read-only /sys. It uses the guest's network.
const inContainer = `unshare --mount --uts --ipc --pid --fork sh -ec '
mount --bind /mnt/container /mnt/container
cd /mnt/container
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t tmpfs -o mode=1777 tmpfs tmp
mount -t tmpfs tmpfs dev
mkdir dev/infiniband
cp -a /dev/infiniband/. dev/infiniband
cp -a /dev/null /dev/zero /dev/random /dev/urandom dev
exec chroot . "$@"' sh `

// TestContainer: a program in a container of another Debian release, with that release's rdma-core and none of our
// files, uses the HCA.
func TestContainer(t *testing.T) {
	l, ctx := newLab(t)
	disk := must[string](t)(l.Builder.Container(ctx))
	guest, peer := pair(ctx, t, l, "-drive", "file="+disk+",format=raw,if=none,id=container,snapshot=on", "-device",
		"virtio-blk-pci,drive=container,romfile=")
	run(ctx, t, guest.VM, "mkdir -p /mnt/container && mount /dev/vdb /mnt/container")

	const version = "cat /etc/debian_version; dpkg-query -W -f '${Version}' ibverbs-providers"
	in := run(ctx, t, guest.VM, inContainer+"sh -c \""+strings.ReplaceAll(version, "$", `\$`)+"\"")
	if out := run(ctx, t, guest.VM, version); in == out {
		t.Fatalf("the container has the same release as the guest: %s", out)
	}
	t.Log("in the container:", in)
	if out := run(ctx, t, guest.VM, inContainer+"ibv_devinfo -v -d "+lab.Device); !strings.Contains(out, "PORT_ACTIVE") {
		t.Errorf("ibv_devinfo in the container:\n%s", out)
	}
	for _, x := range []struct {
		program string
		port    int
		opts    string
	}{
		{"ibv_rc_pingpong", 18515, "-d %s -g %d -n 200"}, {"ibv_uc_pingpong", 18515, "-d %s -g %d -n 200"},
		{"ibv_ud_pingpong", 18515, "-d %s -g %d -n 200 -s 1024"},
		{"ibv_srq_pingpong", 18515, "-d %s -g %d -n 200 -e"},
		{"ib_write_bw", 18515, "-F -d %s -x %d -s 65536 -n 50"}, {"ib_send_lat", 18515, "-F -d %s -x %d -e -n 50"},
		{"ib_read_bw", 18515, "-F -d %s -x %d -s 65536 -n 50"},
		{"ib_atomic_lat", 18515, "-F -d %s -x %d -n 50"}, {"ib_send_bw", 18515, "-F -d %s -x %d -q 4 --use-srq -n 50"},
	} {
		t.Run(x.program, func(t *testing.T) {
			line := func(e lab.End) string { return x.program + " " + fmt.Sprintf(x.opts, e.Device, e.GID) }
			_, _, err := lab.Pair(ctx, peer.VM, line(peer), guest.VM, inContainer+line(guest)+" "+peer.Addr, x.port)
			check(t, err)
		})
	}
	quietKernels(ctx, t, guest.VM, peer.VM)
}
