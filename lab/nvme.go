package lab

import (
	"context"
	"fmt"

	"github.com/vnicd/vnicd/hypervisor/qemu"
)

// nvmeSubsystem is the name of the subsystem that ExportNVMe makes.
const nvmeSubsystem = "vnicd"

// nvmePort is the port of the first way; the others follow.
const nvmePort = 4420

const nvmeTarget = `set -e
modprobe brd rd_nr=1 rd_size=65536
modprobe nvmet
mountpoint -q /sys/kernel/config || mount -t configfs none /sys/kernel/config
cd /sys/kernel/config/nvmet
mkdir -p subsystems/vnicd/namespaces/1
echo 1 > subsystems/vnicd/attr_allow_any_host
echo /dev/ram0 > subsystems/vnicd/namespaces/1/device_path
echo 1 > subsystems/vnicd/namespaces/1/enable
`

// nvmeListen has the arguments port, transport and address.
const nvmeListen = `modprobe nvmet-%[2]s
mkdir ports/%[1]d
echo %[2]s > ports/%[1]d/addr_trtype
echo ipv4 > ports/%[1]d/addr_adrfam
echo %[3]s > ports/%[1]d/addr_traddr
echo %[1]d > ports/%[1]d/addr_trsvcid
ln -s /sys/kernel/config/nvmet/subsystems/vnicd ports/%[1]d/subsystems/vnicd
`

const nvmeTargetEnd = `set -e
cd /sys/kernel/config/nvmet
for port in ports/*; do
	modules="nvmet-$(cat $port/addr_trtype) $modules"
	rm $port/subsystems/vnicd
	rmdir $port
done
echo 0 > subsystems/vnicd/namespaces/1/enable
rmdir subsystems/vnicd/namespaces/1 subsystems/vnicd
cd /
for m in $modules; do until rmmod $m; do sleep 0.1; done; done
rmmod nvmet brd`

// NVMe is a way to a guest's NVMe target.
type NVMe struct {
	Transport string // "rdma" or "tcp"
	Addr      string
}

// ExportNVMe makes a guest an NVMe target: it exports a RAM disk of 64 MiB in these ways. The returned function ends
// that.
func ExportNVMe(ctx context.Context, target *qemu.Machine, ways ...NVMe) (end func() error, err error) {
	script := nvmeTarget
	for i, w := range ways {
		script += fmt.Sprintf(nvmeListen, nvmePort+i, w.Transport, w.Addr)
	}
	_, err = target.Run(ctx, script)
	return func() error {
		_, err := target.Run(ctx, nvmeTargetEnd)
		return err
	}, err
}

// Connect returns the shell command by which a guest connects to a target whose n-th way this is. Its disk is then
// /dev/nvme0n1, if it had none before.
func (w NVMe) Connect(n int) string {
	return fmt.Sprintf("modprobe nvme-%s && nvme connect -t %[1]s -a %s -s %d -n %s -i 2 -Q 32 "+
		"--hostid=6b9a2f80-0000-4000-8000-000000000001 "+
		"--hostnqn=nqn.2014-08.org.nvmexpress:uuid:6b9a2f80-0000-4000-8000-000000000001 && "+
		"until [ -b /dev/nvme0n1 ]; do sleep 0.05; done", w.Transport, w.Addr, nvmePort+n, nvmeSubsystem)
}

// Disconnect returns the shell command that ends such a connection.
func (w NVMe) Disconnect() string {
	return fmt.Sprintf("nvme disconnect -n %s >/dev/null && rmmod nvme-%s", nvmeSubsystem, w.Transport)
}
