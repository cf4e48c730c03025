// Package cloudhypervisor makes arguments for Cloud Hypervisor, another VMM for KVM. Its generic vhost-user device is
// the front end of the HCA. It was not run with them here, since it needs KVM; the order in which it sends vhost-user's
// messages is tried in device/virtio/vhostuser/frontend.
package cloudhypervisor

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
)

const (
	// Oldest is the first version with the generic vhost-user device.
	Oldest = 52
	// deviceType is the first version in which the device's VIRTIO ID is called so, and virtio_id is deprecated.
	deviceType = 53
	// Newest stands for a version that is not known.
	Newest = deviceType

	rdmaDevice   = 42 // VIRTIO ID of an RDMA device
	hcaQueueSize = 256
	netQueueSize = 1024
)

// ErrOld is the error of a version without the generic vhost-user device.
var ErrOld = errors.New("it has no generic vhost-user device")

// MemoryArgs are options for so many MiB of guest memory that vnicd can map.
func MemoryArgs(mib int, huge bool) []string {
	v := fmt.Sprintf("size=%dM,shared=on", mib)
	if huge {
		v += ",hugepages=on"
	}
	return []string{"--memory", v}
}

// NetArgs attach the virtio-net at the vhost-user socket. mtu 0 leaves it to the guest; pairs of queues, 0: one.
func NetArgs(socket, id, mac string, mtu, pairs int) []string {
	v := fmt.Sprintf("id=%s,vhost_user=true,socket=%s,mac=%s,num_queues=%d,queue_size=%d", id, quote(socket), mac,
		2*max(pairs, 1), netQueueSize)
	if mtu != 0 {
		v += fmt.Sprintf(",mtu=%d", mtu)
	}
	return []string{"--net", v}
}

// HCAArgs attach the HCA at the vhost-user socket, with that many virtqueues, for a major version of the VMM.
func HCAArgs(socket, id string, queues, version int) []string {
	key := "device_type"
	if version < deviceType {
		key = "virtio_id"
	}
	return []string{"--generic-vhost-user", fmt.Sprintf("id=%s,socket=%s,%s=%d,queue_sizes=[%s]", id, quote(socket), key,
		rdmaDevice, strings.TrimSuffix(strings.Repeat(strconv.Itoa(hcaQueueSize)+",", queues), ","))}
}

// quote puts a value in double quotes if it has characters that separate options.
func quote(v string) string {
	if !strings.ContainsAny(v, `",=[]`) {
		return v
	}
	return `"` + strings.ReplaceAll(v, `"`, `""`) + `"`
}

var versionLine = regexp.MustCompile(`^cloud-hypervisor v(\d+)\.`)

// Version returns the major version of a binary. The error wraps ErrOld if that does not have the HCA's device.
func Version(ctx context.Context, binary string) (int, error) {
	out, err := exec.CommandContext(ctx, binary, "--version").Output()
	if err != nil {
		return 0, fmt.Errorf("%s --version: %w", binary, err)
	}
	m := versionLine.FindSubmatch(out)
	if m == nil {
		return 0, fmt.Errorf("%s --version: found %.40q, want \"cloud-hypervisor vN.…\"", binary, out)
	}
	n, err := strconv.Atoi(string(m[1]))
	if err == nil && n < Oldest {
		err = fmt.Errorf("%s is version %d: %w, which version %d has", binary, n, ErrOld, Oldest)
	}
	return n, err
}
