package cli

import (
	"encoding/xml"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
	"github.com/vnicd/vnicd/device/virtio/ivshmem"
	"github.com/vnicd/vnicd/hypervisor/qemu"
)

// libvirtDomain has the parts of a libvirt domain that concern vnicd, in the schema's order.
type libvirtDomain struct {
	XMLName xml.Name `xml:"domain"`
	Type    string   `xml:"type,attr"`
	QEMU    string   `xml:"xmlns:qemu,attr"`
	Memory  struct {
		Source struct {
			Type string `xml:"type,attr"`
		} `xml:"source"`
		Access struct {
			Mode string `xml:"mode,attr"`
		} `xml:"access"`
	} `xml:"memoryBacking"`
	Interface libvirtInterface `xml:"devices>interface"`
	Args      []libvirtArg     `xml:"qemu:commandline>qemu:arg"`
	Override  *libvirtOverride `xml:"qemu:override>qemu:device"`
}

type libvirtInterface struct {
	Type string `xml:"type,attr"`
	MAC  struct {
		Address string `xml:"address,attr"`
	} `xml:"mac"`
	Source struct {
		Type string `xml:"type,attr"`
		Path string `xml:"path,attr"`
		Mode string `xml:"mode,attr"`

		Reconnect struct {
			Enabled string `xml:"enabled,attr"`
			Timeout int    `xml:"timeout,attr"` // seconds
		} `xml:"reconnect"`
	} `xml:"source"`
	Model struct {
		Type string `xml:"type,attr"`
	} `xml:"model"`
	Driver *libvirtDriver `xml:"driver"`
	Alias  struct {
		Name string `xml:"name,attr"`
	} `xml:"alias"`
	ROM struct {
		Enabled string `xml:"enabled,attr"`
	} `xml:"rom"`
}

type libvirtDriver struct {
	Queues int `xml:"queues,attr"`
}

// libvirtOverride sets a property of QEMU's device. libvirt would also set a <mtu> on the host's end, but a vhostuser
// interface has no interface there.
type libvirtOverride struct {
	Alias    string `xml:"alias,attr"`
	Property struct {
		Name  string `xml:"name,attr"`
		Type  string `xml:"type,attr"`
		Value int    `xml:"value,attr"`
	} `xml:"qemu:frontend>qemu:property"`
}

type libvirtArg struct {
	Value string `xml:"value,attr"`
}

func newLibvirtDomain(vm, netSocket, mac string, mtu, queues int, hca []string) *libvirtDomain {
	d := &libvirtDomain{Type: "kvm", QEMU: "http://libvirt.org/schemas/domain/qemu/1.0"}
	d.Memory.Source.Type, d.Memory.Access.Mode = "memfd", "shared"
	i := &d.Interface
	i.Type, i.MAC.Address, i.Model.Type, i.ROM.Enabled = "vhostuser", mac, "virtio", "no"
	i.Source.Type, i.Source.Path, i.Source.Mode = "unix", netSocket, "client"
	if queues > 1 {
		i.Driver = &libvirtDriver{queues}
	}
	i.Source.Reconnect.Enabled, i.Source.Reconnect.Timeout = "yes", 1
	// libvirt reserves names with this prefix for its users; they may not contain dots.
	i.Alias.Name = "ua-" + strings.ReplaceAll(qemu.NetID(vm), ".", "_")
	if mtu > 0 {
		d.Override = &libvirtOverride{Alias: i.Alias.Name}
		p := &d.Override.Property
		p.Name, p.Type, p.Value = "host_mtu", "unsigned", mtu
	}
	for _, arg := range hca {
		d.Args = append(d.Args, libvirtArg{arg})
	}
	return d
}

func (a *app) libvirtCmd() *cobra.Command {
	var binary string
	var migratable bool
	c := &cobra.Command{
		Use:   "libvirt-xml VM",
		Short: "Print the libvirt domain elements that attach a VM",
		Long: `Prints the parts of a libvirt domain (virsh edit) that attach the VM to vnicd: shared
guest memory, the virtio-net as a vhostuser interface, and the HCA as arguments that
libvirt passes on to QEMU.

Place <memoryBacking> and <qemu:commandline> below <domain>, which also needs the
attribute xmlns:qemu, and <interface> below <devices>.

libvirt's QEMU must be able to open the sockets: see socket-mode, the owner of the
run-dir, and AppArmor or SELinux where they confine QEMU.

` + whichSocket,
		Args:              args(cobra.ExactArgs(1)),
		ValidArgsFunction: a.complete(nil, a.names(guests)),
		RunE: func(c *cobra.Command, argv []string) error {
			cfg, running, vm, err := a.knownVM(c, argv[0])
			if err != nil {
				return err
			}
			kind, err := chooseHCA(c.Context(), vm, binary, migratable)
			if err != nil {
				return err
			}
			hca := qemu.HCAArgsJSON(cfg.HCASocket(vm), qemu.HCAID(vm.Name), daemon.HCAQueues(cfg))
			if kind == config.Ivshmem {
				hca = qemu.IvshmemArgsJSON(cfg.IvshmemSocket(vm), qemu.HCAID(vm.Name), ivshmem.Vectors(daemon.HCAQueues(cfg)))
			}
			e := xml.NewEncoder(a.out)
			e.Indent("", "  ")
			if err := e.Encode(newLibvirtDomain(vm.Name, cfg.NetSocket(vm), vm.MAC.String(),
				networkMTU(cfg, running, vm.Network), vm.Queues, hca)); err != nil {
				return err
			}
			_, err = fmt.Fprintln(a.out)
			return err
		},
	}
	c.Flags().StringVar(&a.control, "control", "", "control socket `path`")
	c.Flags().StringVar(&binary, "qemu", "", whichQEMU)
	c.Flags().BoolVar(&migratable, "migratable", false, whichMigrates)
	return c
}
