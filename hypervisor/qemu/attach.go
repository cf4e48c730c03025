package qemu

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/vnicd/vnicd/hypervisor/qmp"
)

// Errors of hot-plug.
var (
	ErrPrivateMemory = errors.New("the VM's memory is not shared, so vnicd cannot reach it")
	ErrAttached      = errors.New("already attached")
	ErrNotAttached   = errors.New("not attached")
	ErrNoBus         = errors.New("no free place on the PCI bus")
	ErrGuestHolds    = errors.New("the guest has not released the device")
)

// Attachment is a VM's NIC: both of its faces.
type Attachment struct {
	VM                   string
	NetSocket, HCASocket string // vhost-user sockets on which vnicd listens
	MAC                  string
	MTU                  int // announced to the guest; 0: none
	NetQueues            int // queue pairs
	HCAQueues            int
	// Buses to plug into. "": free PCIe root ports, or on a machine without root ports, QEMU's choice.
	NetBus, HCABus string
}

// poll is the interval between checks of the guest's progress.
const poll = 100 * time.Millisecond

// undoTime bounds the undoing after a failure, which must work when the caller's context has ended. A guest takes 5 s
// to release a PCIe device (during which a second press of the slot's button would cancel).
const undoTime = 60 * time.Second

// Attach plugs both faces into the running VM behind c. It returns when QEMU has them; the guest's drivers may still be
// initialising. On an error everything is undone, or the error names what is left.
func Attach(ctx context.Context, c *qmp.Client, a Attachment) error {
	if err := checkVM(ctx, c, a.VM); err != nil {
		return err
	}
	if a.NetBus == "" || a.HCABus == "" {
		if err := a.chooseBuses(ctx, c); err != nil {
			return err
		}
	}
	err := a.plug(ctx, c)
	if err == nil {
		return nil
	}
	err = explain(err)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()
	if uerr := Detach(ctx, c, a.VM); uerr != nil && !errors.Is(uerr, ErrNotAttached) {
		return fmt.Errorf("%w; and undoing it failed: %w", err, uerr)
	}
	return err
}

// checkVM finds problems that would otherwise show later and less clearly.
func checkVM(ctx context.Context, c *qmp.Client, vm string) error {
	for _, id := range []string{NetID(vm), HCAID(vm)} {
		if there, err := c.Exists(ctx, "/machine/peripheral/"+id); err != nil {
			return err
		} else if there {
			return fmt.Errorf("%w: QEMU has a device %s", ErrAttached, id)
		}
	}
	mem, err := c.Memdevs(ctx)
	if err != nil {
		return err
	}
	if len(mem) == 0 {
		return ErrPrivateMemory
	}
	for _, m := range mem {
		if !m.Share {
			return fmt.Errorf("%w: memory backend %q has no share=on", ErrPrivateMemory, m.ID)
		}
	}
	return nil
}

// chooseBuses fills in the missing buses with free PCIe root ports. On machines without such ports QEMU chooses.
func (a *Attachment) chooseBuses(ctx context.Context, c *qmp.Client) error {
	devices, err := c.PCI(ctx)
	if err != nil {
		return err
	}
	ports, free := 0, []string{}
	for _, d := range devices {
		if d.Bridge == nil || d.QdevID == "" {
			continue
		}
		if kind, err := c.QOMGet(ctx, "/machine/peripheral/"+d.QdevID, "type"); err != nil || kind != "pcie-root-port" &&
			kind != "ioh3420" {
			continue
		}
		ports++
		if len(d.Bridge.Devices) == 0 && d.QdevID != a.NetBus && d.QdevID != a.HCABus {
			free = append(free, d.QdevID)
		}
	}
	for _, bus := range []*string{&a.NetBus, &a.HCABus} {
		switch {
		case *bus != "" || ports == 0:
		case len(free) == 0:
			return fmt.Errorf("%w: all %d PCIe root ports are in use; two are needed", ErrNoBus, ports)
		default:
			*bus, free = free[0], free[1:]
		}
	}
	return nil
}

func (a *Attachment) plug(ctx context.Context, c *qmp.Client) error {
	net, hca := NetID(a.VM), HCAID(a.VM)
	for _, step := range []func() error{
		func() error { return c.AddUnixChardev(ctx, chardevID(net), a.NetSocket, ReconnectMS) },
		func() error { return c.AddVhostNetdev(ctx, netdevID(net), chardevID(net), a.NetQueues) },
		func() error { return c.AddDevice(ctx, netDevice(net, a.MAC, a.MTU, a.NetQueues, true).json(a.NetBus)) },
		func() error { return c.AddUnixChardev(ctx, chardevID(hca), a.HCASocket, 0) },
		func() error { return c.AddDevice(ctx, hcaDevice(hca, a.HCAQueues).json(a.HCABus)) },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// explain adds advice for the usual refusals.
func explain(err error) error {
	var refused *qmp.CommandError
	if !errors.As(err, &refused) {
		return err
	}
	switch {
	case strings.Contains(refused.Desc, "does not support hotplugging"):
		return fmt.Errorf("%w: %w", ErrNoBus, err)
	case strings.Contains(refused.Desc, HCADevice):
		return fmt.Errorf("%w; QEMU %s or newer has it", err, HCADeviceRelease)
	}
	return err
}

// Detach removes both faces from the running VM behind c. It returns when the guest has released them and QEMU has
// removed them. Absent parts are skipped; ErrNotAttached means that all were absent.
func Detach(ctx context.Context, c *qmp.Client, vm string) error {
	found := false
	var devices []string
	for _, id := range []string{HCAID(vm), NetID(vm)} {
		there, err := c.Exists(ctx, "/machine/peripheral/"+id)
		if err != nil {
			return err
		}
		if !there {
			continue
		}
		found = true
		devices = append(devices, id)
		// QEMU refuses a second request while the first is pending; then only the wait remains.
		if err := c.RemoveDevice(ctx, id); err != nil && !isPending(err) {
			return explain(err)
		}
	}
	for _, id := range devices {
		if err := waitGone(ctx, c, id); err != nil {
			return err
		}
	}
	for _, remove := range []func() error{
		func() error { return c.RemoveNetdev(ctx, netdevID(NetID(vm))) },
		func() error { return c.RemoveChardev(ctx, chardevID(NetID(vm))) },
		func() error { return c.RemoveChardev(ctx, chardevID(HCAID(vm))) },
	} {
		var refused *qmp.CommandError
		switch err := remove(); {
		case err == nil:
			found = true
		case errors.As(err, &refused) && strings.Contains(refused.Desc, "not found"):
		default:
			return err
		}
	}
	if !found {
		return fmt.Errorf("%w: QEMU has no device %s or %s", ErrNotAttached, NetID(vm), HCAID(vm))
	}
	return nil
}

func isPending(err error) bool {
	var refused *qmp.CommandError
	return errors.As(err, &refused) && strings.Contains(refused.Desc, "already in the process of unplug")
}

// waitGone waits until a device that is being unplugged is gone.
func waitGone(ctx context.Context, c *qmp.Client, id string) error {
	t := time.NewTicker(poll)
	defer t.Stop()
	for {
		if there, err := c.Exists(ctx, "/machine/peripheral/"+id); err != nil || !there {
			if ctx.Err() != nil {
				break
			}
			return err
		}
		select {
		case <-t.C:
			continue
		case <-ctx.Done():
		}
		break
	}
	return fmt.Errorf("%w %s; it is unplugged as soon as it does (%w)", ErrGuestHolds, id, ctx.Err())
}
