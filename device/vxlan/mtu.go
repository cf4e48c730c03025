package vxlan

import (
	"github.com/vishvananda/netlink"
)

// followMTU starts a goroutine that adopts changes of the underlay device's MTU, until stopWatch. If the kernel does
// not tell us of changes, the VTEP works all the same, with the MTU it found.
func (vt *VTEP) followMTU() {
	updates, done := make(chan netlink.LinkUpdate, 16), make(chan struct{})
	err := netlink.LinkSubscribeWithOptions(updates, done, netlink.LinkSubscribeOptions{
		ErrorCallback: func(err error) {
			select {
			case <-done: // our own doing
			default:
				vt.log.Warn("changes of the underlay's MTU are no longer followed", "error", err)
			}
		},
	})
	if err != nil {
		close(done)
		vt.log.Warn("changes of the underlay's MTU are not followed", "error", err)
		return
	}
	stopped := make(chan struct{})
	vt.stopWatch = func() {
		close(done)
		<-stopped
	}
	go func() {
		defer close(stopped)
		for u := range updates { // closed after done, or on an error
			vt.linkChanged(u.Attrs())
		}
	}()
}

func (vt *VTEP) linkChanged(a *netlink.LinkAttrs) {
	vt.mu.Lock()
	defer vt.mu.Unlock()
	if vt.closed || a.Index != vt.index {
		return
	}
	if err := vt.refreshMTULocked(); err != nil {
		vt.log.Warn("cannot follow a change of the underlay", "interface", vt.dev, "error", err)
	}
}
