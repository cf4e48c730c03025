package cli

import (
	"strings"

	"github.com/spf13/cobra"
)

// help is the text of a command's help besides its own description.
type help struct {
	long    string // for sub-commands only
	example string
}

const (
	addSaveHelp = `With --save it is there after a restart, too: the command writes a fragment of the
configuration with it alone, such as /etc/vnicd/vnicd.d/vm-NAME.yaml, and replaces no file.
This needs the right to write there, which the daemon does not have: run it as root.`
	delSaveHelp = `With --save the fragment that "add --save" wrote is removed, too. What another file defines
is refused: remove it there, then run "vnicd reload".`
)

// helps is indexed by the command's path without "vnicd". A test checks that every command is in it.
var helps = map[string]help{
	"run":     {"", "vnicd run -c vnicd.yaml --log-level debug\nvnicd run --keep"},
	"reload":  {"", "vnicd reload"},
	"upgrade": {"", "apt-get install ./vnicd_1.1.0_amd64.deb && vnicd upgrade\nvnicd upgrade -j | jq .continued"},
	"check":   {"", "vnicd check -c vnicd.yaml && systemctl reload vnicd\nvnicd check -j | jq '.mistakes[]'"},
	"schema":  {"", "vnicd schema >vnicd.schema.json"},
	"status":  {"", "vnicd status\nvnicd status vm1\nvnicd status -j | jq '.vms[].name'"},
	"top":     {"", "vnicd top\nvnicd top -n 10 -d 1s >rates.txt"},
	"qemu-args": {"",
		"qemu-system-x86_64 $(vnicd qemu-args vm1) -accel kvm -drive file=disk.qcow2\nvnicd qemu-args --lines vm1"},
	"vmm-args": {"",
		"cloud-hypervisor $(vnicd vmm-args cloud-hypervisor vm1) --kernel vmlinux --disk path=disk.raw\n" +
			"vnicd vmm-args --lines cloud-hypervisor vm1"},
	"libvirt-xml": {"", "vnicd libvirt-xml vm1"},
	"cdi": {"",
		"vnicd cdi\nvnicd cdi -o /etc/cdi/vnicd.json && podman run --device vnicd.io/application=app image"},
	"device-plugin": {"",
		"vnicd device-plugin\nsystemd-run --unit vnicd-device-plugin vnicd device-plugin"},
	"attach": {"", "vnicd attach --qmp /run/vm1.qmp vm1"},
	"detach": {"", "vnicd detach --qmp /run/vm1.qmp vm1"},
	"migrate": {"", "vnicd migrate --qmp /run/vm1.qmp vm1 tcp:192.0.2.2:4444\n" +
		"ssh host2 vnicd vm capabilities vm1 -j |\n\tvnicd migrate --qmp /run/vm1.qmp --destination - vm1 tcp:host2:4444\n" +
		"vnicd migrate --qmp /run/vm1.qmp vm1 file:/srv/vm1.saved"},
	"backend": {"", "vnicd backend hca --vm vm1 --socket-path /run/vm1-hca.sock"},
	"capture": {"", "vnicd capture vm1 -w - | wireshark -k -i -\nvnicd capture vtep -n 1000 -w tunnels.pcapng"},

	"lab": {"", "vnicd lab run -- ibv_devinfo"},
	"lab run": {`The current directory is mounted in all VMs under the same path, where CMD runs as root. The
VMs reach each other by name (vm1, vm2, ...) and by ssh without a password. Their programs are
those of Debian with rdma-core, perftest, libfabric and UCX; --packages adds others.

CMD and what it starts by ssh have in their environment:

VNICD_LAB_HOSTS      the VMs' names, separated by commas
VNICD_LAB_ADDRESSES  their IP addresses, likewise
VNICD_LAB_SIZE       their number
VNICD_LAB_RANK       number of this VM, from 0
VNICD_LAB_DIR        the directory; ssh begins in the home directory

The first run builds the VMs' images, for minutes and with the network; they are kept in
$VNICD_CACHE [~/.cache/vnicd]. An ordinary user needs user namespaces and Debian's uidmap.

If CMD or the lab fails, --logs DIR gets the daemons' logs, the VMs' kernel logs and consoles,
and the beginning of each host's traffic on the underlay as pcapng.

Exit status: that of CMD; with --each the first one that is not 0; 125 if the lab fails, 2 if
the command line is wrong, 128 plus the signal's number after an interrupt.`,
		"vnicd lab run -- sh -c 'ib_write_bw & sleep 1; ssh vm2 ib_write_bw vm1'\n" +
			"vnicd lab run --packages openmpi-bin -- mpirun --allow-run-as-root --host vm1,vm2 hostname\n" +
			"vnicd lab run --each --loss 1% --delay 1ms --logs lab-logs -- ./run-tests"},
	"lab shell": {`Like "vnicd lab run", with a login shell in place of CMD. The lab ends with the shell. With
--name the shell is in a lab that is up, which stays, and like "vnicd lab exec" otherwise.`,
		"vnicd lab shell --vms-per-host 2\nvnicd lab shell --name default --vm vm2"},
	"lab up": {`Returns when all VMs are ready. The lab, with the VMs' memory, stays until "vnicd lab down",
also after a logout unless the system ends the user's processes then or removes the user's
runtime directory. After ^C, or if "up" fails, nothing stays.

The directory in which "up" is run is mounted in all VMs under the same path, for the whole
life of the lab. What the VMs have and what commands find there: see vnicd-lab-run(8). -e
sets variables of all commands.

Labs of different names stand beside each other. Only the user that has made a lab can use
it: its socket is in a directory of mode 0700 below $XDG_RUNTIME_DIR, /run/user/UID or
/tmp/vnicd-labs-UID.

With --logs DIR "down" leaves logs and captures there. Without, it leaves them in a new
directory if a VM has ended by itself.

Exit status: 0 if the lab is up, 125 if it failed or the name is taken, 2 if the command line
is wrong, 128 plus the signal's number after an interrupt.`,
		"vnicd lab up && vnicd lab exec -- ibv_devinfo && vnicd lab down\n" +
			"vnicd lab up --name slow --hosts 3 --delay 1ms"},
	"lab exec": {`CMD runs as root in the VM, in the current directory if that is in the directory in which
"vnicd lab up" was run, otherwise in the latter. stdin, stdout and stderr are those of this
command; with --each there is no stdin. Several commands may run at the same time. After ^C
the processes of CMD get SIGTERM.

Exit status: that of CMD; with --each the first one that is not 0; 125 if there is no such
lab, or a VM has ended, 2 if the command line is wrong, 128 plus the signal's number after
an interrupt.`,
		"vnicd lab exec -- ibv_devinfo\nvnicd lab exec --vm vm2 -- sh -c 'dmesg | tail'\n" +
			"vnicd lab exec --name slow --each -- ./run-tests"},
	"lab list": {`States:

starting  being made, or being removed
up        commands can run
failed    a VM has ended
ended     the lab was killed; "vnicd lab down" removes what it has left`,
		"vnicd lab list\nvnicd lab list -j | jq '.[].name'"},
	"lab down": {`Commands that run there are ended. Also for a lab of which a VM, or all, has ended by itself
or was killed. Without NAME: "default".`, "vnicd lab down\nvnicd lab down slow"},

	"network":      {"", "vnicd network\nvnicd network add green vni 200 peer 192.0.2.2"},
	"network show": {"Without NAME: all networks.", "vnicd network show blue"},
	"network add": {`vni          VXLAN network identifier, 1 to 16777215
mtu          bytes [that of the narrowest path to a peer, less overhead]
peer         underlay address of another host of the network; may be repeated
learn-peers  accept tunnels from hosts that are not listed
ageing       lifetime of a learnt address, such as 300s [300s]
max-entries  size of the forwarding table [16384]
storm        broadcast, multicast and unknown-unicast frames per second and port;
             0: unlimited [10000]
multicast    snoop: to members only; flood: to all ports [flood]

` + addSaveHelp, "vnicd network add green vni 200 peer 192.0.2.2 peer 192.0.2.3\nvnicd network add --save red vni 300"},
	"network del": {"The network's tunnels and host port are removed with it.\n\n" + delSaveHelp,
		"vnicd network del green\nvnicd network del --save red"},
	"network add-peer": {"The address is IPv4 or IPv6, as the VTEP's own. Adding a listed peer changes nothing.",
		"vnicd network add-peer blue 192.0.2.3"},
	"network del-peer": {"Addresses learnt from this peer are forgotten.", "vnicd network del-peer blue 192.0.2.3"},
	"network add-tap": {`Creates the TAP interface INTERFACE on the host.

address   address of the interface with prefix length; may be repeated
bridge    bridge that the interface joins, in place of addresses
rate      bits per second in each direction, such as 10G [no limit]
offloads  checksum and segmentation offloads [on]`, "vnicd network add-tap blue blue0 address 10.0.0.254/24"},
	"network del-tap": {"", "vnicd network del-tap blue"},

	"vm":      {"", "vnicd vm\nvnicd vm move vm1 network green"},
	"vm show": {"", "vnicd vm show -j"},
	"vm capabilities": {`What vnicd migrate compares: the VM's network and addresses here, whether a QEMU waits, and what
the HCA can continue. A VM keeps its connections where each is the same, or at least as large.`,
		"vnicd vm capabilities vm1\nvnicd vm capabilities vm1 -j >vm1.json"},
	"vm add": {`Creates the sockets RUN-DIR/NAME.net and RUN-DIR/NAME.hca.

network        name of the VM's network
mac            MAC of both virtio-net and HCA
ip             an address that the VM may use; may be repeated [any]
queues         queue pairs of virtio-net [1]
rate           bits per second in each direction, such as 10G [no limit]
storm          broadcast, multicast and unknown-unicast frames per second; 0: unlimited
memory-budget  limit of the VM's memory that the device keeps resident, such as 256MiB
memory-weight  share of memory under pressure, 1 to 10000 [100]
dma            what the devices may do to the VM's memory: rw, ro, blocked [rw]
qmp            monitor socket of QEMU, which reports memory ballooning
user, group    who may open the sockets, by name or number [whom socket-mode permits]

` + addSaveHelp,
		"vnicd vm add vm3 network blue mac 02:00:00:00:00:03 memory-budget 1GiB\n" +
			"vnicd vm add --save vm4 network blue mac 02:00:00:00:00:04"},
	"vm del": {"A QEMU that uses the sockets loses both devices.\n\n" + delSaveHelp,
		"vnicd vm del vm3\nvnicd vm del --save vm4"},
	"vm move": {"", "vnicd vm move vm1 network green"},
	"vm quarantine": {`From then on no device reads or writes data of the VM (dma blocked). Its RDMA connections
end, its HCA's port is down, and frames from it and to it are dropped. With --read-only the
devices still read the memory (dma ro): the VM sends, and what it would receive ends with
protection errors, or is dropped. Rings, commands and events work in both cases.

The command returns when the last access that began before has ended. It may be repeated. A
VM that is not attached is restricted from the moment it attaches. "vnicd reload" leaves the
quarantine, unless ` + "`dma`" + ` has changed in the file; a restart of the daemon applies the file.
Host applications can be quarantined as well.`, "vnicd vm quarantine vm1\nvnicd vm quarantine --read-only vm1"},
	"vm release": {`The devices read and write the VM's memory again (dma rw), and the HCA's port comes up.
Connections that have ended stay so; new ones work.`, "vnicd vm release vm1"},

	"port":      {"", "vnicd port"},
	"port show": {"Without NETWORK: the ports of all networks.", "vnicd port show blue"},

	"fdb":      {"", "vnicd fdb\nvnicd fdb add 02:00:00:00:00:09 network blue vtep 192.0.2.2"},
	"fdb show": {"Without NETWORK: the tables of all networks.", "vnicd fdb show blue"},
	"fdb add": {"The address is behind the tunnel to ADDRESS or at the port NAME. vlan is 1 to 4094 [all].",
		"vnicd fdb add 02:00:00:00:00:09 network blue vtep 192.0.2.2"},
	"fdb del": {"vlan is 1 to 4094 [all].", "vnicd fdb del 02:00:00:00:00:09 network blue"},

	"neigh":      {"", "vnicd neigh\nvnicd neigh add 10.0.0.9 network blue mac 02:00:00:00:00:09"},
	"neigh show": {"Without NETWORK: the addresses of all networks.", "vnicd neigh show blue"},
	"neigh add":  {"vlan is 1 to 4094 [untagged].", "vnicd neigh add 10.0.0.9 network blue mac 02:00:00:00:00:09"},
	"neigh del":  {"vlan is 1 to 4094 [untagged].", "vnicd neigh del 10.0.0.9 network blue"},

	"connection":      {"", "vnicd connection"},
	"connection show": {"Without VM: the connections of all VMs.", "vnicd connection show vm1"},

	"evpn":        {"", "vnicd evpn"},
	"evpn show":   {"", "vnicd evpn show -j"},
	"evpn routes": {"Without NETWORK: the routes of all networks.", "vnicd evpn routes blue"},
	"evpn clear": {"For a MAC that was at two places, once one of them is gone.",
		"vnicd evpn clear 02:00:00:00:00:09 network blue"},
}

// addHelp fills in the help of c's sub-commands.
func addHelp(c *cobra.Command, path string) {
	for _, sub := range c.Commands() {
		p := strings.TrimSpace(path + " " + sub.Name())
		h := helps[p]
		if h.example != "" {
			sub.Example = "  " + strings.ReplaceAll(h.example, "\n", "\n  ")
		}
		if h.long != "" && sub.Long == "" {
			sub.Long = sub.Short + ".\n\n" + h.long
		}
		addHelp(sub, p)
	}
}
