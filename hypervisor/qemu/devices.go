package qemu

import (
	"fmt"
	"strings"
)

// device is one QEMU device: its driver, then its properties in order. The command line and hot-plug are made from the
// same list, so they cannot differ.
type device []property

type property struct {
	key   string
	value any // string, int or bool
}

// arg is the device as an argument of -device.
func (d device) arg() string {
	words := []string{escape(d[0].value.(string))}
	for _, p := range d[1:] {
		switch v := p.value.(type) {
		case bool:
			words = append(words, p.key+"="+map[bool]string{true: "on", false: "off"}[v])
		case string:
			words = append(words, p.key+"="+escape(v))
		default:
			words = append(words, fmt.Sprintf("%s=%v", p.key, v))
		}
	}
	return strings.Join(words, ",")
}

// json is the device as arguments of device_add, which needs the properties' types. bus "" leaves the choice to QEMU.
func (d device) json(bus string) map[string]any {
	m := map[string]any{}
	for _, p := range d {
		m[p.key] = p.value
	}
	if bus != "" {
		m["bus"] = bus
	}
	return m
}

// hcaDevice leaves page-per-vq off: notifications need no page each, and a window of 8 MiB does not fit behind a root
// port.
func hcaDevice(id string, vqs int) device {
	return device{{"driver", HCADevice}, {"id", id}, {"chardev", chardevID(id)}, {"virtio-id", VirtioID}, {"num_vqs", vqs},
		{"vq_size", HCAQueueSize}, {"config_size", HCAConfigSize}, {"romfile", ""}}
}

const ivshmemDriver = "ivshmem-doorbell"

// ivshmemDevice has an MSI-X interrupt for each vector. With master=on its memory goes with the VM.
func ivshmemDevice(id string, vectors int) device {
	return device{{"driver", ivshmemDriver}, {"id", id}, {"chardev", chardevID(id)}, {"vectors", vectors},
		{"master", "on"}}
}

// netDevice has an interrupt for each queue and, with several queue pairs, for the control queue and for configuration
// changes. Behind a vhost-user back end its rings have the maximal length, so that a guest without CPU time for a
// moment loses fewer frames.
func netDevice(id, mac string, mtu, queues int, vhost bool) device {
	d := device{{"driver", "virtio-net-pci"}, {"id", id}, {"netdev", netdevID(id)}, {"mac", mac}, {"romfile", ""}}
	if mtu > 0 {
		d = append(d, property{"host_mtu", mtu})
	}
	if vhost {
		d = append(d, property{"rx_queue_size", netQueueSize}, property{"tx_queue_size", netQueueSize})
	}
	if queues > 1 {
		d = append(d, property{"mq", true}, property{"vectors", 2*queues + 2})
	}
	return d
}

// netQueueSize is the number of entries of a virtio-net's rings where QEMU allows a choice; the default is 256.
const netQueueSize = 1024

// chardevID and netdevID name the host's parts of a device.
func chardevID(id string) string { return "chr-" + id }
func netdevID(id string) string  { return "net-" + id }

// NetID and HCAID are the ids of a VM's two devices in its QEMU.
func NetID(vm string) string { return vm + "-net" }

// HCAID is NetID for the HCA.
func HCAID(vm string) string { return vm + "-hca" }
