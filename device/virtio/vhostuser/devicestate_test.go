package vhostuser_test

import (
	"bytes"
	"errors"
	"path/filepath"
	"testing"

	"github.com/vnicd/vnicd/device/virtio"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
)

// connectInner connects a front end within this process, with a driver's features.
func connectInner(t *testing.T, dev virtio.Device) *frontend.Client {
	t.Helper()
	s, err := vhostuser.Offer(vhostuser.Config{Path: filepath.Join(t.TempDir(), "s")}, dev, 1)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := s.Connect()
	if err != nil {
		t.Fatal(err)
	}
	c := frontend.NewClient(conn)
	t.Cleanup(func() { _ = errors.Join(c.Close(), s.Close()) })
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	offered, err := c.GetProtocolFeatures()
	check(err)
	check(c.SetOwner())
	check(c.SetProtocolFeatures(offered & (vhostuser.ProtoDeviceState | vhostuser.ProtoReplyAck | vhostuser.ProtoStatus)))
	check(c.SetFeatures(virtio.FeatureVersion1 | vhostuser.FeatureProtocolFeatures | echoFeature))
	return c
}

// A device's state passes from one connection to another, and what is no state is refused without harm (CO-5, CO-7).
func TestDeviceState(t *testing.T) {
	one, want := newLasting(), fresh()
	one.config[40], want[40] = 7, 7
	a, b := connectInner(t, one), connectInner(t, newLasting())
	has := func(c *frontend.Client, want []byte) {
		t.Helper()
		if state, err := c.SaveState(); err != nil || !bytes.Equal(state, want) {
			t.Errorf("saved %x, %v, want %x", state, err, want)
		}
	}
	has(a, want)
	refused := func(what string, err error) {
		t.Helper()
		var r *frontend.RefusedError
		if !errors.As(err, &r) || r.Request != vhostuser.ReqCheckDeviceState {
			t.Errorf("%s: %v", what, err)
		}
	}
	refused("half a state", b.LoadState(want[:20]))
	refused("a long state", b.LoadState(bytes.Repeat(want, 10000)))
	has(b, fresh())
	for _, state := range [][]byte{want, nil} {
		if err := b.LoadState(state); err != nil {
			t.Error(err)
		}
		has(b, want)
	}
	reply, err := a.Do(vhostuser.ReqCheckDeviceState, true, nil)
	if v, perr := vhostuser.ParseU64(reply); err != nil || perr != nil || v == 0 {
		t.Errorf("the result of no transfer: %x, %v", reply, err)
	}
}

// A device that cannot say its state has no such messages, nor has a front end in another process.
func TestDeviceStateRefused(t *testing.T) {
	for _, dev := range []virtio.Device{newLasting(), newEcho(1)} {
		for _, outer := range []bool{false, true} {
			path := filepath.Join(t.TempDir(), "s")
			s, err := vhostuser.Listen(vhostuser.Config{Path: path}, dev, 1)
			if err != nil {
				t.Fatal(err)
			}
			var c *frontend.Client
			if outer {
				c, err = frontend.Dial(testContext(t), path)
			} else if conn, cerr := s.Connect(); cerr == nil {
				c = frontend.NewClient(conn)
			} else {
				err = cerr
			}
			if err != nil {
				t.Fatal(err)
			}
			offered, err := c.GetProtocolFeatures()
			_, may := dev.(virtio.Continuer)
			if got := offered&vhostuser.ProtoDeviceState != 0; err != nil || got != (may && !outer) {
				t.Errorf("%T, another process: %v: offered %v, %v", dev, outer, got, err)
			}
			if _, err := c.SaveState(); err == nil {
				t.Errorf("%T, another process: %v: saved without the feature", dev, outer)
			}
			_ = errors.Join(c.Close(), s.Close())
		}
	}
	for _, body := range [][]byte{{2, 0, 0, 0, 0, 0, 0, 0}, {0, 0, 0, 0, 1, 0, 0, 0}} {
		c := connectInner(t, newLasting())
		if _, err := c.Do(vhostuser.ReqSetDeviceStateFD, true, body, 0); err == nil {
			t.Errorf("transfer %x has begun", body)
		}
	}
}
