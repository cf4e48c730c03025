package rig

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/vnicd/vnicd/lab/harness"
)

// Container is a container with its own init (systemd), processes, mounts, control groups and host name, in a network
// namespace. It shares this machine's kernel. Closing it discards everything written inside.
type Container struct {
	ns     *harness.Namespace
	proc   *harness.Process
	init   string // process id of its first process
	cgroup string // below the mount point of cgroup2
}

// containerInit runs in new namespaces: "$1" is the root, "$2" the scratch directory over which everything is mounted,
// "$3" the control group. Further arguments FROM=TO are directories and files that appear read-only inside.
const containerInit = `
root=$1 dir=$2 group=$3
shift 3
mount -t tmpfs -o mode=755 tmpfs "$dir"
mkdir "$dir/upper" "$dir/work" "$dir/root" "$dir/cgroup"
mount -t cgroup2 cgroup2 "$dir/cgroup"
mkdir -p "$dir/cgroup/$group"
echo $$ >"$dir/cgroup/$group/cgroup.procs"
umount "$dir/cgroup"
mount -t overlay -o "lowerdir=$root,upperdir=$dir/upper,workdir=$dir/work" overlay "$dir/root"
cd "$dir/root"
for x; do
	to=.${x#*=}
	if [ -d "${x%%=*}" ]; then mkdir -p "$to"; else mkdir -p "${to%/*}" && : >"$to"; fi
	mount --bind "${x%%=*}" "$to"
	mount -o remount,bind,ro "$to"
done
mount -t sysfs sysfs sys
mount -o remount,bind,ro sys
mount -t tmpfs -o mode=755 tmpfs dev
mkdir dev/net dev/pts dev/shm
mknod dev/net/tun c 10 200
mknod dev/null c 1 3; mknod dev/zero c 1 5; mknod dev/full c 1 7; mknod dev/random c 1 8; mknod dev/urandom c 1 9; mknod dev/tty c 5 0
chmod 666 dev/net/tun dev/null dev/zero dev/full dev/random dev/urandom dev/tty
mknod dev/console c 1 3
mount -t devpts -o newinstance,ptmxmode=666,mode=620,gid=5 devpts dev/pts
ln -s pts/ptmx dev/ptmx
ln -s /dev/null etc/systemd/system/console-getty.service
echo host >etc/hostname
echo 127.0.1.1 host >>etc/hosts
ln -s /proc/self/fd dev/fd
ln -s fd/0 dev/stdin
ln -s fd/1 dev/stdout
ln -s fd/2 dev/stderr
exec unshare --pid --cgroup --fork --kill-child --mount-proc="$dir/root/proc" sh -ec '
mount -t cgroup2 cgroup2 sys/fs/cgroup
# The kernel is shared: only the settings of the network namespace may be changed.
mount --bind proc/sys proc/sys
mount --bind proc/sys/net proc/sys/net
mount -o remount,bind,ro proc/sys
[ ! -e proc/sysrq-trigger ] || { mount --bind proc/sysrq-trigger proc/sysrq-trigger; mount -o remount,bind,ro proc/sysrq-trigger; }
pivot_root . mnt
umount -l /mnt
exec env -i container=vnicd TERM=dumb PATH=/usr/sbin:/usr/bin:/sbin:/bin /sbin/init'
`

// NewContainer starts the system in the directory root, which is not changed. dir is an existing empty directory; binds
// (FROM=TO) make files of this machine visible inside, read-only. It returns when systemd reports that start-up is
// complete.
func NewContainer(ctx context.Context, ns *harness.Namespace, root, dir string, binds ...string) (*Container, error) {
	c := &Container{ns: ns, cgroup: ns.Name}
	argv := append([]string{"unshare", "--mount", "--uts", "--ipc", "sh", "-ec", containerInit, "sh", root, dir, c.cgroup},
		binds...)
	var err error
	if c.proc, err = ns.Start(dir+".log", nil, argv...); err != nil {
		return nil, err
	}
	if err := c.boot(ctx); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

func (c *Container) boot(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	for {
		select {
		case <-c.proc.Done():
			return fmt.Errorf("the container exited: %s", c.proc.LogTail())
		case <-ctx.Done():
			return fmt.Errorf("the container does not come up: %s", c.proc.LogTail())
		case <-time.After(50 * time.Millisecond):
		}
		if c.init == "" {
			b, _ := os.ReadFile(fmt.Sprintf("/proc/%[1]d/task/%[1]d/children", c.proc.PID()))
			// The first process is a shell until it execs the init.
			name, _ := os.ReadFile(fmt.Sprintf("/proc/%s/comm", strings.TrimSpace(string(b))))
			if string(name) != "systemd\n" {
				continue
			}
			c.init = strings.TrimSpace(string(b))
		}
		// The caller judges "degraded".
		if out, _ := c.Run(ctx, "systemctl is-system-running --wait"); out == "running\n" || out == "degraded\n" {
			return nil
		}
	}
}

// Command returns a shell command that runs as root in the container.
func (c *Container) Command(ctx context.Context, line string) *exec.Cmd {
	return exec.CommandContext(ctx, "nsenter", "--target", c.init, "--mount", "--uts", "--ipc", "--net", "--pid",
		"--cgroup", "--wdns=/root", "env", "-i",
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LANG=C.UTF-8", "sh", "-c", line)
}

// Run runs a shell command as root in the container and returns its standard output.
func (c *Container) Run(ctx context.Context, line string) (string, error) {
	var out, errOut bytes.Buffer
	cmd := c.Command(ctx, line)
	cmd.Stdout, cmd.Stderr = &out, &errOut
	cmd.WaitDelay = 5 * time.Second
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("%s: %w: %s%s", line, err, out.String(), errOut.String())
	}
	return out.String(), nil
}

// Path returns the path by which this machine reaches a file of the container.
func (c *Container) Path(file string) string { return filepath.Join("/proc", c.init, "root", file) }

// Close kills the container's processes and removes it. Idempotent.
func (c *Container) Close() error {
	c.proc.Kill()
	// The control groups' processes have ended or are about to.
	const clean = `t=$(mktemp -d) && mount -t cgroup2 cgroup2 "$t" && cd "$t" && [ ! -d "$0" ] || {
	i=0
	until find "$0" -depth -type d -exec rmdir {} + 2>/dev/null; do i=$((i + 1)); [ $i -lt 100 ] || exit 1; sleep 0.1; done
}
cd / && umount "$t" && rmdir "$t"`
	_, err := (&harness.Namespace{}).Run(context.Background(), "unshare", "--mount", "sh", "-c", clean, c.cgroup)
	return err
}
