package guestdrv_test

import (
	"bytes"
	"testing"

	"github.com/vnicd/vnicd/guestdrv"
)

// TestAcrossVXLAN runs between two sites (MT-1, MT-2), which share only the underlay.
func TestAcrossVXLAN(t *testing.T) {
	r := newRig(t, rigConfig{vxlan: true})
	a, b := connect(t, r.hosts[0], r.hosts[1], qpDefaults(), guestdrv.ConnectOptions{})
	src, smr := a.h.region(t, 8<<20, guestdrv.AccessLocalWrite)
	dst, dmr := b.h.region(t, 8<<20, allAccess)
	for i, n := range messageSizes {
		fill(src.Bytes(), uint64(i))
		a.post(t, &request{ID: 1, Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled,
			SGL: []guestdrv.SGE{smr.SGE(0, n)}, RemoteAddr: dst.Addr(), RKey: dmr.RKey()})
		expect(t, a.scq, 1, guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
		if !bytes.Equal(src.Bytes()[:n], dst.Bytes()[:n]) {
			t.Fatalf("WRITE of %d bytes: data differ", n)
		}
		clear(src.Bytes())
		a.post(t, &request{ID: 2, Opcode: guestdrv.WRRDMARead, Flags: guestdrv.SendSignaled,
			SGL: []guestdrv.SGE{smr.SGE(0, n)}, RemoteAddr: dst.Addr(), RKey: dmr.RKey()})
		expect(t, a.scq, 2, guestdrv.WCSuccess, guestdrv.WCOpRDMARead)
		if !bytes.Equal(src.Bytes()[:n], dst.Bytes()[:n]) {
			t.Fatalf("READ of %d bytes: data differ", n)
		}
	}
	mixedTraffic(t, b, a, 150, 1)

	ua, ub := r.hosts[0].udEnd(t, udConfig(), 5), r.hosts[1].udEnd(t, udConfig(), 5)
	ub.recv(t, 1, dmr.SGE(0, 4096))
	ua.post(t, &request{ID: 2, Opcode: guestdrv.WRSend, Flags: guestdrv.SendSignaled,
		SGL: []guestdrv.SGE{smr.SGE(0, 1000)}, AH: a.h.ah(t, b.h), RemoteQPN: ub.qp.Number(), QKey: 5})
	expect(t, ua.scq, 2, guestdrv.WCSuccess, guestdrv.WCOpSend)
	expect(t, ub.rcq, 1, guestdrv.WCSuccess, guestdrv.WCOpRecv)
}

// TestAddressing connects with every kind of address.
func TestAddressing(t *testing.T) {
	r := newRig(t, rigConfig{mtu: 1600}) // room for a VLAN tag
	v6 := func(host byte) guestdrv.GID { return guestdrv.GID{0xfd, 0, 1, 15: host} }
	linkLocal := func(host byte) guestdrv.GID {
		return guestdrv.GID{0xfe, 0x80, 8: 0, 9: 0, 10: 0, 11: 0xff, 12: 0xfe, 13: 0, 14: 0, 15: host}
	}
	v4 := func(host byte) guestdrv.GID {
		return guestdrv.GID{10: 0xff, 11: 0xff, 12: 192, 13: 168, 14: 5, 15: host}
	}
	for i, tc := range []struct {
		name string
		gid  func(byte) guestdrv.GID
		o    guestdrv.GIDOptions
	}{
		{"IPv4", v4, guestdrv.GIDOptions{}},
		{"IPv6", v6, guestdrv.GIDOptions{}},
		{"IPv6 link-local", linkLocal, guestdrv.GIDOptions{}},
		{"RoCEv1", linkLocal, guestdrv.GIDOptions{RoCEv1: true}},
		{"IPv4 in a VLAN", v4, guestdrv.GIDOptions{VLAN: 42}},
		{"RoCEv1 in a VLAN", linkLocal, guestdrv.GIDOptions{RoCEv1: true, VLAN: 43}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			index := i + 1
			path := func(k int) guestdrv.Path {
				return guestdrv.Path{GID: tc.gid(byte(k + 1)), MAC: r.hosts[k].mac, SGIDIndex: index, VLAN: tc.o.VLAN,
					TrafficClass: 0x68, FlowLabel: 0x12345}
			}
			for k, h := range r.hosts {
				if err := h.SetGID(bg, index, tc.gid(byte(k+1)), tc.o); err != nil {
					t.Fatal(err)
				}
			}
			a, b := r.hosts[0].end(t, qpDefaults(), 1), r.hosts[1].end(t, qpDefaults(), 2)
			if err := a.qp.Connect(bg, guestdrv.Peer{QPN: b.qp.Number(), PSN: 2, Path: path(1)},
				guestdrv.ConnectOptions{PSN: 1, Access: peerAccess}); err != nil {
				t.Fatal(err)
			}
			if err := b.qp.Connect(bg, guestdrv.Peer{QPN: a.qp.Number(), PSN: 1, Path: path(0)},
				guestdrv.ConnectOptions{PSN: 2, Access: peerAccess}); err != nil {
				t.Fatal(err)
			}
			src, smr := a.h.region(t, 16384, guestdrv.AccessLocalWrite)
			dst, dmr := b.h.region(t, 16384, allAccess)
			fill(src.Bytes(), uint64(i))
			a.post(t, &request{ID: 1, Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled,
				SGL: []guestdrv.SGE{smr.SGE(0, 16001)}, RemoteAddr: dst.Addr(), RKey: dmr.RKey()})
			expect(t, a.scq, 1, guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
			if !bytes.Equal(src.Bytes()[:16001], dst.Bytes()[:16001]) {
				t.Error("data differ")
			}

			ua, ub := a.h.udEnd(t, udConfig(), 5), b.h.udEnd(t, udConfig(), 5)
			ah, err := a.h.pd.CreateAH(path(1))
			if err != nil {
				t.Fatal(err)
			}
			clear(dst.Bytes())
			ub.recv(t, 1, dmr.SGE(0, 4096))
			ua.post(t, &request{ID: 2, Opcode: guestdrv.WRSend, Flags: guestdrv.SendSignaled,
				SGL: []guestdrv.SGE{smr.SGE(0, 999)}, AH: ah, RemoteQPN: ub.qp.Number(), QKey: 5})
			expect(t, ua.scq, 2, guestdrv.WCSuccess, guestdrv.WCOpSend)
			if wc := expect(t, ub.rcq, 1, guestdrv.WCSuccess, guestdrv.WCOpRecv); wc.ByteLen != 999+grhLen ||
				wc.Flags&guestdrv.WCFlagGRH == 0 {
				t.Errorf("completion %+v", wc)
			}
			grh := dst.Bytes()[:grhLen]
			from, to := tc.gid(1), tc.gid(2)
			if tc.gid(0) == v4(0) {
				if !bytes.Equal(grh[32:36], from[12:]) || !bytes.Equal(grh[36:40], to[12:]) {
					t.Errorf("IPv4 header %x", grh)
				}
			} else if grh[0]>>4 != 6 || !bytes.Equal(grh[8:24], from[:]) || !bytes.Equal(grh[24:40], to[:]) {
				t.Errorf("GRH or IPv6 header %x", grh)
			}
			if !bytes.Equal(dst.Bytes()[grhLen:][:999], src.Bytes()[:999]) {
				t.Error("UD: data differ")
			}
			ah.Close()
			destroy(t, a, b, ua, ub)
			for _, h := range r.hosts {
				if err := h.ClearGID(bg, index); err != nil {
					t.Error(err)
				}
			}
		})
	}
}
