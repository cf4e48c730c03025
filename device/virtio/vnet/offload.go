package vnet

import (
	"github.com/vnicd/vnicd/device/frame"
)

// Feature bits of offloads (virtio 1.2, 5.1.3). HOST: work that the guest may leave undone in frames that it sends;
// GUEST: in frames that it receives. If the destination does not accept it, it is done before delivery.
const (
	FeatureCsum      = 1 << 0  // VIRTIO_NET_F_CSUM
	FeatureGuestCsum = 1 << 1  // VIRTIO_NET_F_GUEST_CSUM
	FeatureGuestTSO4 = 1 << 7  // VIRTIO_NET_F_GUEST_TSO4
	FeatureGuestTSO6 = 1 << 8  // VIRTIO_NET_F_GUEST_TSO6
	FeatureGuestECN  = 1 << 9  // VIRTIO_NET_F_GUEST_ECN
	FeatureHostTSO4  = 1 << 11 // VIRTIO_NET_F_HOST_TSO4
	FeatureHostTSO6  = 1 << 12 // VIRTIO_NET_F_HOST_TSO6
	FeatureHostECN   = 1 << 13 // VIRTIO_NET_F_HOST_ECN
	FeatureGuestUSO4 = 1 << 54 // VIRTIO_NET_F_GUEST_USO4
	FeatureGuestUSO6 = 1 << 55 // VIRTIO_NET_F_GUEST_USO6
	FeatureHostUSO   = 1 << 56 // VIRTIO_NET_F_HOST_USO
)

// offloads maps features to the offloads that they allow.
var offloads = []struct {
	host, guest uint64
	need        frame.Need
}{
	{FeatureCsum, FeatureGuestCsum, frame.NeedCsum},
	{FeatureHostTSO4, FeatureGuestTSO4, frame.NeedTSO4},
	{FeatureHostTSO6, FeatureGuestTSO6, frame.NeedTSO6},
	{FeatureHostECN, FeatureGuestECN, frame.NeedECN},
	{FeatureHostUSO, FeatureGuestUSO4, frame.NeedUSO4},
	{FeatureHostUSO, FeatureGuestUSO6, frame.NeedUSO6},
}

// offered returns the features for which a pool has the buffers: without big ones there are no large frames.
func offered(pool *frame.Pool) (f uint64) {
	for _, o := range offloads {
		if o.need == frame.NeedCsum || pool.Largest() >= frame.BigCapacity {
			f |= o.host | o.guest
		}
	}
	return f
}

// hostTakes and guestTakes translate a driver's features. All others require checksum offload (5.1.3.1); without it a
// driver gets none.
func hostTakes(f uint64) (n frame.Need) {
	for _, o := range offloads {
		if f&o.host != 0 && f&FeatureCsum != 0 {
			n |= o.need
		}
	}
	return n
}

func guestTakes(f uint64) (n frame.Need) {
	for _, o := range offloads {
		if f&o.guest != 0 && f&FeatureGuestCsum != 0 {
			n |= o.need
		}
	}
	return n
}
