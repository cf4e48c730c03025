package integration

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/vnicd/vnicd/lab"
)

// inContainer runs a command in a root of another Debian release, at %[1]s, with its own namespaces and with the parts
// that a container runtime provides: the RDMA device nodes, a read-only /sys, and the guest's /host as a volume. It
// uses the guest's network.
const inContainer = `unshare --mount --uts --ipc --pid --fork sh -ec '
mount --bind %[1]s %[1]s
cd %[1]s
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t tmpfs -o mode=1777 tmpfs tmp
mount -t tmpfs tmpfs dev
mount --bind /host mnt
mkdir dev/infiniband
cp -a /dev/infiniband/. dev/infiniband
cp -a /dev/null /dev/zero /dev/random /dev/urandom dev
exec chroot . "$@"' sh `

// TestContainer: programs in containers of other Debian releases, with those releases' rdma-core, older and newer than
// the guest's, and with none of our files, use the HCA.
func TestContainer(t *testing.T) {
	l, ctx := newLab(t)
	releases := []string{"bookworm", "forky"}
	var disks []string
	for _, release := range releases {
		disks = append(disks, "-drive", fmt.Sprintf("file=%s,format=raw,if=none,id=%s,snapshot=on",
			must[string](t)(l.Builder.Container(ctx, release)), release),
			"-device", "virtio-blk-pci,romfile=,drive="+release)
	}
	guest, peer := pair(ctx, t, l, disks...)
	check(t, l.Programs(ctx, l.Share))
	for i, release := range releases {
		t.Run(release, func(t *testing.T) {
			root := "/run/" + release
			run(ctx, t, guest.VM, fmt.Sprintf("mkdir -p %[1]s && mount /dev/vd%[2]c %[1]s", root, 'b'+i))
			containerPrograms(ctx, t, guest, peer, fmt.Sprintf(inContainer, root))
			if release == "forky" {
				// No guest's rdma-core has ibv_advise_mr for this device (ODP-8).
				t.Run("prefetch", func(t *testing.T) {
					t.Log(run(ctx, t, guest.VM, lab.Limited(4*time.Minute, fmt.Sprintf("%s/mnt/prefetch %s %d library",
						fmt.Sprintf(inContainer, root), guest.Device, guest.GID))))
				})
			}
		})
	}
	quietKernels(ctx, t, guest.VM, peer.VM)
}

func containerPrograms(ctx context.Context, t *testing.T, guest, peer lab.End, in string) {
	const version = "cat /etc/debian_version; dpkg-query -W -f '${Version}' ibverbs-providers"
	inside := run(ctx, t, guest.VM, in+"sh -c \""+strings.ReplaceAll(version, "$", `\$`)+"\"")
	if out := run(ctx, t, guest.VM, version); inside == out {
		t.Fatalf("the container has the same release as the guest: %s", out)
	}
	t.Log("in the container:", inside)
	if out := run(ctx, t, guest.VM, in+"ibv_devinfo -v -d "+lab.Device); !strings.Contains(out, "PORT_ACTIVE") {
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
			_, _, err := lab.Pair(ctx, peer.VM, line(peer), guest.VM, in+line(guest)+" "+peer.Addr, x.port)
			check(t, err)
		})
	}
}
