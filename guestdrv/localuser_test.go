package guestdrv_test

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/rdma/cm/cmtest"
	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/guestdrv"
)

// A user without rights on the peer host, who knows all numbers of a connection of a tenant there, sends its WRITEs
// from the VTEP's address. They are refused for their source port and counted, and the memory is as it was (TR-3,
// TR-4). The same packets from a reserved port, which only root can send, show that nothing else was wrong with them.
func TestForgedByLocalUser(t *testing.T) {
	for _, typ := range []guestdrv.QPType{guestdrv.QPTypeRC, guestdrv.QPTypeUC} {
		t.Run(fmt.Sprint(typ), func(t *testing.T) {
			r := newRig(t, rigConfig{vxlan: true})
			ha, hb := r.hosts[0], r.hosts[1]
			c := qpDefaults()
			c.Type = typ
			a, b := connect(t, ha, hb, c, guestdrv.ConnectOptions{})
			src, smr := ha.region(t, 4096, guestdrv.AccessLocalWrite)
			dst, dmr := hb.region(t, 4096, allAccess)
			// Any port of a peer is believed until a datagram comes from a reserved one. A WRITE of UC is complete once it
			// is sent, so the forged packets, which come by another socket, must wait until it has arrived.
			copy(src.Bytes(), bytes.Repeat([]byte{0x22}, 64))
			a.write(t, 1, 64, smr, dst, dmr)
			testutil.Eventually(t, "the connection's first WRITE arrives", func() bool { return dst.Bytes()[0] == 0x22 })

			f := &forger{t, ha.site}
			forge := func(port int) {
				t.Helper()
				attr, err := a.qp.Query(bg)
				if err != nil {
					t.Fatal(err)
				}
				p := &forgery{from: "192.0.2.1", port: port, Packet: cmtest.Packet{VNI: 7, Path: wire.Path{SMAC: ha.mac,
					DMAC: hb.mac, VLAN: header.NoVLAN, SrcIP: ha.gid, DstIP: hb.gid, SrcPort: 0xc001}}}
				p.Write(b.qp.Number(), attr.SQPSN, dmr.RKey(), dst.Addr(), bytes.Repeat([]byte{0xee}, 64))
				if typ == guestdrv.QPTypeUC {
					p.BTH.Opcode = wire.OpUCWriteOnly
				}
				f.send(p)
			}
			forged := func() bool { return bytes.IndexByte(dst.Bytes(), 0xee) >= 0 }
			refused := func() uint64 { return hb.site.net.Status().Drops["source-port"] }
			for i, port := range []int{1024, 32768, 65535} {
				before := refused()
				forge(port)
				deadline := time.Now().Add(patience)
				for refused() == before && !forged() && time.Now().Before(deadline) {
					time.Sleep(time.Millisecond)
				}
				if forged() {
					t.Fatalf("a WRITE from port %d reached the memory; refused: %d", port, refused())
				}
				if refused() != before+1 {
					t.Fatalf("%d: port %d: %d refused, before %d", i, port, refused(), before)
				}
			}
			named := false
			for _, x := range hb.site.vt.Status().Refused {
				named = named || x.From.String() == "192.0.2.1" && x.VNI == 7 && x.Reason == "source-port" && x.Count == 3
			}
			if !named {
				t.Errorf("status does not name the sender: %+v", hb.site.vt.Status().Refused)
			}
			// The connection is not affected. Without the wait this WRITE could hide the forged packet.
			copy(src.Bytes(), bytes.Repeat([]byte{0x11}, 64))
			a.write(t, 2, 64, smr, dst, dmr)
			testutil.Eventually(t, "the connection's next WRITE arrives", func() bool { return dst.Bytes()[0] == 0x11 })
			forge(0)
			testutil.Eventually(t, "the same packet from a reserved port arrives", forged)
		})
	}
}
