package guestdrv_test

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/guestdrv"
)

// TestSkew: a driver without feature bits with a device that has them, and the other way round: what both know is
// negotiated, traffic works, and it continues when the device is replaced (CO-6).
func TestSkew(t *testing.T) {
	for _, tc := range []struct {
		name string
		cfg  rigConfig
		want uint64
	}{
		{"both new", rigConfig{}, abi.Features},
		{"old driver", rigConfig{driver: guestdrv.Config{}.Without(abi.Features)}, 0},
		{"old device", rigConfig{noFeatures: true}, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newRig(t, tc.cfg)
			a, b := connect(t, r.hosts[0], r.hosts[1], qpDefaults(), guestdrv.ConnectOptions{Timeout: 14})
			for round := range uint64(2) {
				mixedTraffic(t, a, b, 100, 2*round)
				mixedTraffic(t, b, a, 100, 2*round+1)
				for _, h := range r.hosts {
					var f uint64
					if _, err := fmt.Sscanf(h.hca.Describe().Features, "0x%x", &f); err != nil || f&abi.Features != tc.want {
						t.Errorf("features %q (%v), want %#x of them", h.hca.Describe().Features, err, tc.want)
					}
					h.replace()
				}
			}
			destroy(t, a, b)
		})
	}
}

// laterDevice is a device of a later release, as a driver of this one meets it: with a feature that the driver does not
// know, a longer configuration space, and reserved bytes in use.
type laterDevice struct{ wrongDevice }

func (d laterDevice) Features() uint64 { return d.Device.Features() | 1<<23 }
func (d laterDevice) ConfigSize() int  { return abi.SizeConfig + 64 }

// SetFeatures: the driver must not have accepted what it does not know.
func (d laterDevice) SetFeatures(f uint64) error {
	if f&(1<<23) != 0 {
		return fmt.Errorf("features %#x: one is unknown to the driver", f)
	}
	return d.Device.SetFeatures(f)
}

// TestLaterDevice opens a device of a later release and uses it (CO-6).
func TestLaterDevice(t *testing.T) {
	r := newRig(t, rigConfig{hosts: 1})
	if err := r.hosts[0].Device.Close(); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "s")
	later := laterDevice{wrongDevice{r.hosts[0].hca, func(b []byte) {
		for i := range 44 {
			b[abi.SizeConfig-1-i] = 0xff
		}
	}}}
	srv, err := vhostuser.Listen(vhostuser.Config{Path: path}, later, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer srv.Close()
	d, err := guestdrv.Open(bg, path, guestdrv.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if i := d.Info(); i.MAC != guestdrv.MAC(r.hosts[0].mac) || i.Firmware != "test" {
		t.Errorf("%+v", i)
	}
	if _, err := d.Stats(bg); err != nil {
		t.Error(err)
	}
}
