package qemu

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"strconv"
	"strings"
)

// The generic vhost-user device, by QEMU's name, and the first release in which a user can create it.
const (
	HCADevice        = "vhost-user-test-device-pci"
	HCADeviceRelease = "10.2"
)

// VirtioID is the virtio device id of the HCA. 42 (RDMA in the virtio specification) makes QEMU 11.1 abort, because its
// name table has a hole there; 38 has a name and no Linux driver. The guest driver binds both and then requires its
// magic number in config space.
const VirtioID = 38

// HCA device shape shared with guestdrv/linux/vnicd_abi.h: entries per virtqueue and bytes of struct vnicd_config.
const (
	HCAQueueSize  = 256
	HCAConfigSize = 128
)

// ReconnectMS is the interval, in milliseconds, in which QEMU tries to reconnect a virtio-net to its back end. The
// HCA's generic device must not reconnect, because QEMU 11.1 then aborts. Its connection outlives vnicd instead.
const ReconnectMS = 100

// AgentPort is the virtio-serial port of QEMU's guest agent.
const AgentPort = "org.qemu.guest_agent.0"

// MemoryArgs makes guest RAM a shared memfd, which vhost-user back ends need to map it. mib is in MiB. huge uses the
// host's huge pages of default size, which must exist (vm.nr_hugepages). It needs the machine option
// memory-backend=ram; see MachineType.
func MemoryArgs(mib int, huge bool) []string {
	backend := fmt.Sprintf("memory-backend-memfd,id=ram,size=%dM,share=on", mib)
	if huge {
		backend += ",hugetlb=on"
	}
	return []string{"-m", fmt.Sprintf("%dM", mib), "-object", backend}
}

// MachineType is the argument of -M that MemoryArgs needs.
const MachineType = "q35,memory-backend=ram"

// HCAArgs attaches the paravirtual HCA on the vhost-user socket. id distinguishes devices of one VM; vqs is the number
// of virtqueues (command, events, completion queues, doorbells).
func HCAArgs(socket, id string, vqs int) []string {
	return []string{"-chardev", chardevArg(socket, id), "-device", hcaDevice(id, vqs).arg()}
}

// HCAArgsJSON is HCAArgs with the device in JSON. QEMU creates devices that are not in JSON first; the HCA would then
// take the PCI slot that libvirt, which writes JSON, has chosen for another device.
func HCAArgsJSON(socket, id string, vqs int) []string {
	return argsJSON(socket, id, hcaDevice(id, vqs))
}

func argsJSON(socket, id string, dev device) []string {
	d, err := json.Marshal(dev.json(""))
	if err != nil {
		panic(err) // strings and numbers
	}
	return []string{"-chardev", chardevArg(socket, id), "-device", string(d)}
}

// IvshmemArgs is HCAArgs for an HCA behind QEMU's ivshmem-doorbell, with that many vectors.
func IvshmemArgs(socket, id string, vectors int) []string {
	return []string{"-chardev", chardevArg(socket, id), "-device", ivshmemDevice(id, vectors).arg()}
}

// IvshmemArgsJSON is IvshmemArgs with the device in JSON, as HCAArgsJSON has it.
func IvshmemArgsJSON(socket, id string, vectors int) []string {
	return argsJSON(socket, id, ivshmemDevice(id, vectors))
}

func chardevArg(socket, id string) string {
	return fmt.Sprintf("socket,id=%s,path=%s", chardevID(id), escape(socket))
}

// MonitorArgs make QEMU serve its machine protocol at the socket, to which vnicd connects.
func MonitorArgs(socket string) []string {
	return []string{"-qmp", "unix:" + escape(socket) + ",server=on,wait=off"}
}

// NetArgs attaches a virtio-net with that many queue pairs (0: one), served on the vhost-user socket. mtu is announced
// to the guest; 0: none.
func NetArgs(socket, id, mac string, mtu, queues int) []string {
	return []string{
		"-chardev", fmt.Sprintf("%s,reconnect-ms=%d", chardevArg(socket, id), ReconnectMS),
		"-netdev", fmt.Sprintf("vhost-user,id=%s,chardev=%s,queues=%d", netdevID(id), chardevID(id), max(queues, 1)),
		"-device", netDevice(id, mac, mtu, queues, true).arg(),
	}
}

// TapArgs attaches a virtio-net to the existing TAP interface ifname.
func TapArgs(ifname, id, mac string, mtu int) []string {
	return []string{
		"-netdev", fmt.Sprintf("tap,id=%s,ifname=%s,script=no,downscript=no", netdevID(id), escape(ifname)),
		"-device", netDevice(id, mac, mtu, 1, false).arg(),
	}
}

// hostTag is the tag of Config.HostShare, which vm-images/guest/files/usr/lib/vnicd/boot mounts.
const hostTag = "host"

func shareArgs(s Share, option string) []string {
	return []string{
		"-fsdev", fmt.Sprintf("local,id=%s,path=%s,security_model=none,%s", s.Tag, escape(s.Dir), option),
		"-device", fmt.Sprintf("virtio-9p-pci,fsdev=%[1]s,mount_tag=%[1]s,romfile=", s.Tag),
	}
}

// escape protects a value in QEMU's comma-separated options by doubling its commas.
func escape(s string) string { return strings.ReplaceAll(s, ",", ",,") }

// Accel is the way in which the guest's instructions run.
type Accel string

// Accelerators; see ProbeAccel.
const (
	TCG Accel = "tcg"
	KVM Accel = "kvm"
)

func (a Accel) args() []string {
	if a == KVM {
		return []string{"-accel", "kvm", "-cpu", "host"}
	}
	return []string{"-accel", "tcg,thread=multi", "-cpu", "max"}
}

// HCA is the paravirtual HCA of a VM.
type HCA struct {
	Socket string // vhost-user socket on which vnicd listens
	Queues int    // number of virtqueues
}

// NIC is one virtio-net of a VM: exactly one of Socket and Tap is set.
type NIC struct {
	Socket string // vhost-user socket
	Tap    string // existing TAP interface, in the namespace that QEMU runs in
	MAC    string // 52:54:00:...
	MTU    int    // announced and set in the guest; 0: the driver's default
	Queues int    // queue pairs behind Socket; 0: one

	// Settings that the guest applies at boot; all optional.
	IfName    string // name of the interface in the guest
	Addresses []netip.Prefix
	Gateway   netip.Addr
}

// Share is a host directory that the guest may read and write, as a 9p file system with the tag. The guest acts with
// the rights of QEMU's user; ownership that QEMU may not set is ignored (security_model=none).
type Share struct {
	Tag string // 1 to 31 letters, digits and '-', unique in the VM; not "host"
	Dir string // absolute path
}

// Config describes a VM. This package does not change it.
type Config struct {
	Images *Images
	Name   string // VM and host name: letters, digits and '-'
	Dir    string // existing directory for sockets, the console log and the throw-away disk overlay

	MemoryMiB int   // default 1024
	CPUs      int   // default 1
	HugePages bool  // memory from the host's huge pages
	Accel     Accel // default TCG

	HCA  *HCA // nil: none
	NICs []NIC

	HostShare  string   // host directory that the guest sees read-only as /host; "": none
	Shares     []Share  // directories that the guest may mount
	Netns      string   // named network namespace in which QEMU runs; "": the caller's
	KernelArgs []string // more words for the kernel command line
	ExtraArgs  []string // more arguments for QEMU
}

func (c *Config) memory() int {
	if c.MemoryMiB == 0 {
		return 1024
	}
	return c.MemoryMiB
}

func (c *Config) console() string { return filepath.Join(c.Dir, "console.log") }
func (c *Config) qmp() string     { return filepath.Join(c.Dir, "qmp.sock") }
func (c *Config) agent() string   { return filepath.Join(c.Dir, "agent.sock") }

// maxSocketPath is the size of sun_path without its terminator.
const maxSocketPath = 107

// Validate reports every mistake in the configuration; it does not check the host.
func (c *Config) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if c.Images == nil {
		bad("no images")
	}
	if !validName(c.Name) {
		bad("name %q: expected 1 to 63 letters, digits and '-'", c.Name)
	}
	if !filepath.IsAbs(c.Dir) {
		bad("directory %q: expected an absolute path", c.Dir)
	} else if p := c.agent(); len(p) > maxSocketPath {
		bad("directory %q: the socket path %q has %d bytes, at most %d fit", c.Dir, p, len(p), maxSocketPath)
	}
	if m := c.memory(); m < 128 || m > 1<<20 {
		bad("memory of %d MiB: expected 128 to 1048576", m)
	}
	if c.CPUs < 0 || c.CPUs > 255 {
		bad("%d CPUs: expected 1 to 255 (0: 1)", c.CPUs)
	}
	switch c.Accel {
	case "", TCG, KVM:
	default:
		bad("accelerator %q: expected %q or %q", c.Accel, TCG, KVM)
	}
	if h := c.HCA; h != nil {
		if h.Socket == "" {
			bad("HCA: no socket")
		}
		if h.Queues < 1 || h.Queues > 1024 {
			bad("HCA: %d queues: expected 1 to 1024", h.Queues)
		}
	}
	if c.Netns != "" && !validNetns(c.Netns) {
		bad("network namespace %q: expected a name under /run/netns", c.Netns)
	}
	macs := map[string]bool{}
	for i, n := range c.NICs {
		if (n.Socket == "") == (n.Tap == "") {
			bad("NIC %d: expected either a socket or a TAP interface", i)
		}
		hw, err := net.ParseMAC(n.MAC)
		switch {
		case err != nil || len(hw) != 6:
			bad("NIC %d: MAC %q: expected six bytes in hexadecimal", i, n.MAC)
		case hw[0]&1 != 0:
			bad("NIC %d: MAC %q is a group address", i, n.MAC)
		case macs[hw.String()]:
			bad("NIC %d: MAC %q is used twice", i, n.MAC)
		default:
			macs[hw.String()] = true
		}
		if n.MTU != 0 && (n.MTU < 68 || n.MTU > 65535) {
			bad("NIC %d: MTU %d: expected 68 to 65535", i, n.MTU)
		}
		if strings.ContainsAny(n.IfName, ", /\t\n") || len(n.IfName) > 15 {
			bad("NIC %d: interface name %q", i, n.IfName)
		}
		for _, a := range n.Addresses {
			if !a.IsValid() {
				bad("NIC %d: invalid address", i)
			}
		}
	}
	tags := map[string]bool{hostTag: true}
	for _, s := range c.Shares {
		switch {
		case !validName(s.Tag) || len(s.Tag) > 31:
			bad("share %q: expected a tag of 1 to 31 letters, digits and '-'", s.Tag)
		case tags[s.Tag]:
			bad("share %q: the tag is used twice", s.Tag)
		case !filepath.IsAbs(s.Dir):
			bad("share %q: directory %q: expected an absolute path", s.Tag, s.Dir)
		}
		tags[s.Tag] = true
	}
	for _, w := range c.KernelArgs {
		if strings.ContainsAny(w, " \t\n\"") {
			bad("kernel argument %q: expected one word", w)
		}
	}
	if len(errs) == 0 {
		if n := len(c.cmdline()); n > 2047 {
			bad("kernel command line of %d bytes: at most 2047 fit", n)
		}
	}
	if len(errs) > 0 {
		return fmt.Errorf("qemu: VM %q: %w", c.Name, errors.Join(errs...))
	}
	return nil
}

func validName(s string) bool {
	if len(s) == 0 || len(s) > 63 {
		return false
	}
	return strings.IndexFunc(s, func(r rune) bool {
		return r != '-' && (r < '0' || r > '9') && (r < 'a' || r > 'z') && (r < 'A' || r > 'Z')
	}) < 0
}

func validNetns(s string) bool { return s != "." && s != ".." && !strings.ContainsAny(s, "/\x00") }

// cmdline is the guest's kernel command line; vm-images/guest/files/usr/lib/vnicd/boot reads the vnicd.* words.
func (c *Config) cmdline() string {
	words := []string{"console=ttyS0", "quiet", "loglevel=5", "panic=-1", "net.ifnames=0", "vnicd.hostname=" + c.Name}
	for _, n := range c.NICs {
		hw, _ := net.ParseMAC(n.MAC)
		w := "vnicd.net=" + hw.String()
		if n.IfName != "" {
			w += ",name=" + n.IfName
		}
		if n.MTU != 0 {
			w += ",mtu=" + strconv.Itoa(n.MTU)
		}
		for _, a := range n.Addresses {
			w += "," + a.String()
		}
		if n.Gateway.IsValid() {
			w += ",gw=" + n.Gateway.String()
		}
		words = append(words, w)
	}
	return strings.Join(append(words, c.KernelArgs...), " ")
}

// Args is QEMU's command line without the program name. It is a pure function of a valid configuration.
func (c *Config) Args() []string {
	accel := c.Accel
	if accel == "" {
		accel = TCG
	}
	a := []string{"-name", c.Name, "-nodefaults", "-no-user-config", "-display", "none", "-M", MachineType}
	a = append(a, accel.args()...)
	a = append(a, "-smp", strconv.Itoa(max(c.CPUs, 1)))
	a = append(a, MemoryArgs(c.memory(), c.HugePages)...)
	a = append(a,
		"-kernel", c.Images.Kernel, "-initrd", c.Images.Initrd, "-append", c.cmdline(),
		// All VMs share the image, which is never written: changes go to an unlinked overlay in Dir.
		"-drive", fmt.Sprintf("file=%s,format=raw,if=none,id=disk,snapshot=on,cache=unsafe", escape(c.Images.Rootfs)),
		"-device", "virtio-blk-pci,drive=disk,romfile=",
		"-chardev", "file,id=console,path="+escape(c.console()),
		"-serial", "chardev:console",
		"-chardev", fmt.Sprintf("socket,id=qmp,path=%s,server=on,wait=off", escape(c.qmp())),
		"-mon", "chardev=qmp,mode=control",
		"-device", "virtio-serial-pci,romfile=",
		"-chardev", fmt.Sprintf("socket,id=agent,path=%s,server=on,wait=off", escape(c.agent())),
		"-device", "virtserialport,chardev=agent,name="+AgentPort,
	)
	if c.HostShare != "" {
		a = append(a, shareArgs(Share{Tag: hostTag, Dir: c.HostShare}, "readonly=on")...)
	}
	for _, s := range c.Shares {
		// The directory may have file systems mounted in it.
		a = append(a, shareArgs(s, "multidevs=remap")...)
	}
	for i, n := range c.NICs {
		id := fmt.Sprintf("nic%d", i)
		hw, _ := net.ParseMAC(n.MAC)
		if n.Tap != "" {
			a = append(a, TapArgs(n.Tap, id, hw.String(), n.MTU)...)
		} else {
			a = append(a, NetArgs(n.Socket, id, hw.String(), n.MTU, n.Queues)...)
		}
	}
	if c.HCA != nil {
		a = append(a, HCAArgs(c.HCA.Socket, "hca0", c.HCA.Queues)...)
	}
	return append(a, c.ExtraArgs...)
}
