package cli

import (
	"context"
	"encoding/json"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
	"github.com/vnicd/vnicd/guestdrv"
)

// TestConnection shows a connection that a program set up without a connection manager, and how its tuple follows the
// operator's changes (MT-3, MT-5).
func TestConnection(t *testing.T) {
	l := newLab(t)
	says := func(line string, want ...string) {
		t.Helper()
		out := strings.Join(strings.Fields(l.ok(line)), " ")
		for _, w := range want {
			if !strings.Contains(out, w) {
				t.Errorf("vnicd %s: %q is missing in\n%s", line, w, out)
			}
		}
	}
	if out := strings.TrimSpace(l.ok("connection -j")); out != "[]" {
		t.Errorf("without connections: %s", out)
	}
	if status, _, err := l.run("connection show none"); status != 1 ||
		!strings.Contains(err, `no VM "none"; there are: one`) {
		t.Errorf("status %d: %s", status, err)
	}
	d, err := guestdrv.Open(context.Background(), filepath.Join(l.dir, "one.hca"), guestdrv.Config{Memory: 8 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	gid := func(n byte) guestdrv.GID { return guestdrv.IPGID(netip.AddrFrom4([4]byte{10, 0, 0, n})) }
	if err := d.SetGID(context.Background(), 0, gid(1), guestdrv.GIDOptions{}); err != nil {
		t.Fatal(err)
	}
	pd, err := d.AllocPD(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	cq, err := d.CreateCQ(context.Background(), 16, guestdrv.CQOptions{})
	if err != nil {
		t.Fatal(err)
	}
	qp, err := pd.CreateQP(context.Background(), guestdrv.QPConfig{Type: guestdrv.QPTypeRC, SendCQ: cq, RecvCQ: cq,
		MaxSendWR: 4, MaxRecvWR: 4, MaxSendSGE: 1, MaxRecvSGE: 1})
	if err != nil {
		t.Fatal(err)
	}
	peer := guestdrv.Peer{QPN: 0x77, Path: guestdrv.Path{GID: gid(2), MAC: [6]byte{2, 0, 0, 0, 0, 0x99}}}
	if err := qp.Connect(context.Background(), peer, guestdrv.ConnectOptions{}); err != nil {
		t.Fatal(err)
	}
	says("connection show one", "vm one type RC state direct", "rqpn 0x000077 qp-state RTS",
		"dst 10.0.0.2 02:00:00:00:00:99", "destination unknown: flooded")
	l.ok("fdb add 02:00:00:00:00:99 network blue vtep 192.0.2.2")
	says("connection", "network blue vni 100 vtep 192.0.2.2 from 192.0.2.1 port 4789 dscp 26 mtu 1450 moves 0")
	l.ok("network add-peer blue 192.0.2.3")
	l.ok("fdb add 02:00:00:00:00:99 network blue vtep 192.0.2.3")
	says("connection", "vtep 192.0.2.3 from 192.0.2.1", "moves 1")
	var list []daemon.VMConnection
	if err := json.Unmarshal([]byte(l.ok("connection show one -j")), &list); err != nil || len(list) != 1 {
		t.Fatalf("%v: %+v", err, list)
	}
	c := list[0]
	if c.VM != "one" || c.LocalQPN != qp.Number() || c.Tuple == nil || c.Tuple.VNI != 100 ||
		c.Tuple.VTEP != netip.MustParseAddr("192.0.2.3") || c.Tuple.Moves != 1 {
		t.Errorf("%+v, tuple %+v", c, c.Tuple)
	}
	l.ok("fdb del 02:00:00:00:00:99 network blue")
	says("connection", "destination unknown: flooded")
}
