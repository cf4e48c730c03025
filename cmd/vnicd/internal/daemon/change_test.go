package daemon

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/translate"
)

// TestRemovalThatDoesNotEnd: a VM's memory stays in use, so its removal waits (EP-3). Nothing else does: the VM has
// left its network, other requests and changes are served, and only its name is taken until it is gone.
func TestRemovalThatDoesNotEnd(t *testing.T) {
	d := applications(t)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	open(t, d, "a", "10.0.0.10")
	was := d.cfg.VMs[0]
	epochs := d.gvms.Spaces(0)[0].Epochs()
	token := epochs.Enter(translate.ByLoop(15))
	left := false
	leave := func() {
		if !left {
			left = true
			epochs.Leave(15, token)
		}
	}
	t.Cleanup(leave) // otherwise the daemon's Close waits, too

	removed := make(chan error, 1)
	go func() { removed <- d.RemoveVM("a") }()

	// With a time limit: a removal must not block other changes.
	others := make(chan struct{})
	go func() {
		defer close(others)
		for !d.application(t, "a").Going {
			if ctx.Err() != nil {
				t.Error("not listed as being removed")
				return
			}
			time.Sleep(time.Millisecond)
		}
		if n := d.Status().Networks[0]; len(n.Ports) != 1 || n.Ports[0].Name != "b" {
			t.Errorf("ports of the network: %+v", n.Ports)
		}
		sameName, sameMAC := *was, *was
		sameMAC.Name = "c"
		if err := d.AddVM(&sameName); !errors.Is(err, errConflict) || !strings.Contains(err.Error(), "is being removed") {
			t.Errorf("a VM of that name: %v", err)
		}
		if err := d.RemoveVM("a"); !errors.Is(err, errNotFound) || !strings.Contains(err.Error(), "is being removed") {
			t.Errorf("removed twice: %v", err)
		}
		if err := errors.Join(
			d.AddVM(&sameMAC), d.AddNetwork(&config.Network{Name: "m", VNI: 2, MTU: 1500}), d.MoveVM("c", "m"), d.RemoveVM("b"),
			d.RemoveVM("c"), d.RemoveNetwork("m"), d.RemoveNetwork("n"),
			d.AddNetwork(&config.Network{Name: "n", VNI: 1, MTU: 1500}),
		); err != nil {
			t.Error(err)
		}
	}()
	select {
	case <-others:
	case <-ctx.Done():
		t.Fatal("other requests wait for the removal")
	}
	select {
	case err := <-removed:
		t.Fatalf("removed while its memory is in use: %v", err)
	default:
	}
	leave()
	select {
	case err := <-removed:
		if err != nil {
			t.Error(err)
		}
	case <-ctx.Done():
		t.Fatal("its memory is unused, but it is not removed")
	}
	if len(d.Status().VMs) != 0 {
		t.Errorf("VMs are left: %+v", d.Status().VMs)
	}
	if _, err := os.Stat(d.cfg.HCASocket(was)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its socket: %v", err)
	}
	if err := d.AddVM(was); err != nil {
		t.Error(err)
	}
}

// TestCloseDuringRemoval: Close waits for the removal, and does not undo it a second time.
func TestCloseDuringRemoval(t *testing.T) {
	d := applications(t)
	open(t, d, "a", "10.0.0.10")
	epochs := d.gvms.Spaces(0)[0].Epochs()
	token := epochs.Enter(translate.ByLoop(15))
	removed, closed := make(chan error, 1), make(chan struct{})
	go func() { removed <- d.RemoveVM("a") }()
	for !d.application(t, "a").Going {
		time.Sleep(time.Millisecond)
	}
	go func() { _ = d.Close(); close(closed) }()
	select {
	case <-closed:
		t.Error("closed while a VM's memory is in use")
	case <-time.After(50 * time.Millisecond):
	}
	epochs.Leave(15, token)
	if err := <-removed; err != nil {
		t.Error(err)
	}
	<-closed
}
