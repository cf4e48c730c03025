package cli

import (
	"context"
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/translate"
)

// The answer of `vnicd vm quarantine` and `release`, for a VM that is not attached and for one that is.
func TestQuarantine(t *testing.T) {
	l := newLab(t)
	if out := l.ok("vm quarantine one"); out != "one: dma blocked, was rw; not attached: it applies as soon as it attaches\n" {
		t.Errorf("not attached: %q", out)
	}
	guest, err := guestdrv.Open(context.Background(), filepath.Join(l.dir, "one.hca"), guestdrv.Config{Memory: 8 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer guest.Close()
	if i, err := guest.ReadInfo(context.Background()); err != nil || i.LinkUp {
		t.Errorf("attached while blocked: link %v, %v", i.LinkUp, err)
	}
	if out := l.ok("vm release one"); !strings.HasPrefix(out,
		"one: dma rw, was blocked; no access under blocked is in progress any more, after ") {
		t.Errorf("released: %q", out)
	}
	var c daemon.DMAChange
	if err := json.Unmarshal([]byte(l.ok("vm quarantine one --read-only -j")), &c); err != nil ||
		c.VM != "one" || c.DMA != translate.UplinkReadOnly || c.Was != translate.UplinkReadWrite || !c.Attached ||
		c.Took <= 0 {
		t.Errorf("%+v, %v", c, err)
	}
	status, _, said := l.run("vm quarantine none")
	if status != 1 || !strings.Contains(said, `no VM "none"; there are: one`) {
		t.Errorf("an unknown VM: status %d, %s", status, said)
	}
	status, _, said = l.run("vm release")
	if status != 2 || !strings.Contains(said, "usage: vnicd vm release VM") {
		t.Errorf("no VM: status %d, %s", status, said)
	}
}
