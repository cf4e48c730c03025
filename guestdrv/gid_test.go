package guestdrv_test

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/vnicd/vnicd/guestdrv"
)

func TestGID(t *testing.T) {
	for text, want := range map[string]guestdrv.GID{
		"10.0.0.5":  {10: 0xff, 11: 0xff, 12: 10, 15: 5},
		"fd00:1::5": {0: 0xfd, 3: 1, 15: 5},
		"fe80::1":   {0: 0xfe, 1: 0x80, 15: 1},
		"::":        {},
	} {
		a := netip.MustParseAddr(text)
		g := guestdrv.IPGID(a)
		if g != want || g.Addr() != a || g.String() != text || fmt.Sprint(g) != text {
			t.Errorf("%s: GID %x, address %v, printed as %v", text, g[:], g.Addr(), g)
		}
	}
	if a := (guestdrv.GID{10: 0xff, 11: 0xff, 12: 10, 15: 5}).Addr(); !a.Is4() {
		t.Errorf("%v is no IPv4 address", a)
	}
}

// TestMAC: addresses print as in vnicd.yaml, also within other structures, and plain arrays may take their place.
func TestMAC(t *testing.T) {
	p := guestdrv.Path{MAC: [6]byte{2, 0, 0, 0xab, 1, 0xff}}
	if got := fmt.Sprint(p.MAC); got != "02:00:00:ab:01:ff" {
		t.Errorf("printed as %s", got)
	}
	h := newRig(t, rigConfig{hosts: 1}).hosts[0]
	if got := fmt.Sprintf("%v %v", h.MAC(), h.Info().MAC); got != "02:00:00:00:00:01 02:00:00:00:00:01" {
		t.Errorf("device: %s", got)
	}
}
