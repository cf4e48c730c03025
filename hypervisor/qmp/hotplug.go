package qmp

import (
	"context"
	"errors"
)

// Memdev is one row of query-memdev: a memory backend of the VM.
type Memdev struct {
	ID    string `json:"id"`
	Size  uint64 `json:"size"` // bytes
	Share bool   `json:"share"`
}

// PCIDevice is a device of query-pci, and the devices behind it if it is a bridge.
type PCIDevice struct {
	QdevID string `json:"qdev_id"` // "" for QEMU's built-in devices
	Bridge *struct {
		Devices []PCIDevice `json:"devices"`
	} `json:"pci_bridge"`
}

// Memdevs lists the memory backends.
func (c *Client) Memdevs(ctx context.Context) (l []Memdev, err error) {
	err = c.Run(ctx, "query-memdev", nil, &l)
	return l, err
}

// PCI lists the devices of all root buses.
func (c *Client) PCI(ctx context.Context) (l []PCIDevice, err error) {
	var buses []struct {
		Devices []PCIDevice `json:"devices"`
	}
	if err := c.Run(ctx, "query-pci", nil, &buses); err != nil {
		return nil, err
	}
	for _, b := range buses {
		l = append(l, b.Devices...)
	}
	return l, nil
}

// QOMGet returns a string property of an object.
func (c *Client) QOMGet(ctx context.Context, path, property string) (s string, err error) {
	err = c.Run(ctx, "qom-get", map[string]any{"path": path, "property": property}, &s)
	return s, err
}

// Exists reports whether QEMU has an object at path.
func (c *Client) Exists(ctx context.Context, path string) (bool, error) {
	err := c.Run(ctx, "qom-list", map[string]any{"path": path}, nil)
	var refused *CommandError
	if errors.As(err, &refused) {
		return false, nil
	}
	return err == nil, err
}

// AddUnixChardev makes a character device that connects to the unix socket at path, and reconnects at intervals of
// reconnect milliseconds; 0: never.
func (c *Client) AddUnixChardev(ctx context.Context, id, path string, reconnect int) error {
	data := map[string]any{"addr": map[string]any{"type": "unix", "data": map[string]any{"path": path}}, "server": false}
	if reconnect > 0 {
		data["reconnect-ms"] = reconnect
	}
	return c.Run(ctx, "chardev-add", map[string]any{"id": id, "backend": map[string]any{"type": "socket", "data": data}},
		nil)
}

// RemoveChardev removes a character device that nothing uses.
func (c *Client) RemoveChardev(ctx context.Context, id string) error {
	return c.Run(ctx, "chardev-remove", map[string]any{"id": id}, nil)
}

// AddVhostNetdev makes the host side of a virtio-net with that many queue pairs, served by a vhost-user back end.
func (c *Client) AddVhostNetdev(ctx context.Context, id, chardev string, queues int) error {
	return c.Run(ctx, "netdev_add", map[string]any{"type": "vhost-user", "id": id, "chardev": chardev, "queues": queues},
		nil)
}

// RemoveNetdev removes the host side of a network device.
func (c *Client) RemoveNetdev(ctx context.Context, id string) error {
	return c.Run(ctx, "netdev_del", map[string]any{"id": id}, nil)
}

// AddDevice plugs a device; the keys are its driver, its id and its properties.
func (c *Client) AddDevice(ctx context.Context, props map[string]any) error {
	return c.Run(ctx, "device_add", props, nil)
}

// RemoveDevice asks the guest to release a device and does not wait. The device no longer exists once the guest has.
func (c *Client) RemoveDevice(ctx context.Context, id string) error {
	return c.Run(ctx, "device_del", map[string]any{"id": id}, nil)
}
