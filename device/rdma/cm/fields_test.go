package cm_test

import (
	"bytes"
	"reflect"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/cm"
)

// described are the kinds that cm.Fields describes.
var described = []cm.Kind{cm.REQ, cm.MRA, cm.REJ, cm.REP, cm.RTU, cm.DREQ, cm.DREP, cm.SIDRReq, cm.SIDRRep}

// at returns a message with bytes at the given offsets behind the header of the datagram.
func at(kind cm.Kind, parts map[int][]byte) []byte {
	b := make([]byte, cm.MADLen)
	copy(b, []byte{1, 7, 2, 3, 8: 1, 2, 3, 4, 5, 6, 7, 8, 0, byte(kind)})
	for off, p := range parts {
		copy(b[24+off:], p)
	}
	return b
}

// Literal bytes at the offsets of IBTA's tables 106 to 116, in both directions.
func TestFields(t *testing.T) {
	fill := func(n int, first byte) []byte {
		b := make([]byte, n)
		for i := range b {
			b[i] = first + byte(i)
		}
		return b
	}
	for _, tc := range []struct {
		x     cm.Fields
		parts map[int][]byte
	}{
		{cm.Fields{Kind: cm.REQ, LocalID: 0xa1a2a3a4, Service: 0x01061d2f, GUID: 0x0102030405060708, QPN: 0x112233,
			ResponderResources: 4, InitiatorDepth: 5, RemoteTimeout: 20, LocalTimeout: 21, Transport: 1, FlowControl: true,
			PSN: 0xabcdef, RetryCount: 6, PKey: 0xffff, PathMTU: 3, RNRRetry: 7, MaxRetries: 15, SRQ: true, LocalLID: 0xfffe,
			RemoteLID: 0xfffd, Local: [16]byte(fill(16, 1)), Remote: [16]byte(fill(16, 17)), FlowLabel: 0xfedcb,
			PacketRate: 0x2a, TrafficClass: 0x60, HopLimit: 64, SL: 9, SubnetLocal: true, LocalACKTimeout: 18,
			Private: fill(cm.PrivateREQ, 100)},
			map[int][]byte{0: {0xa1, 0xa2, 0xa3, 0xa4}, 8: {0, 0, 0, 0, 1, 6, 0x1d, 0x2f}, 16: {1, 2, 3, 4, 5, 6, 7, 8},
				32: {0x11, 0x22, 0x33, 4, 0, 0, 0, 5, 0, 0, 0, 20<<3 | 1<<1 | 1, 0xab, 0xcd, 0xef, 21<<3 | 6, 0xff, 0xff, 0x37,
					0xf8},
				52: {0xff, 0xfe, 0xff, 0xfd}, 56: fill(32, 1), 88: {0xfe, 0xdc, 0xb0, 0x2a, 0x60, 64, 0x98, 18 << 3},
				140: fill(cm.PrivateREQ, 100)}},
		{cm.Fields{Kind: cm.REP, LocalID: 1, RemoteID: 2, QPN: 0x112233, PSN: 0xabcdef, ResponderResources: 16,
			InitiatorDepth: 15, TargetACKDelay: 13, Failover: 2, FlowControl: true, RNRRetry: 6, SRQ: true, GUID: 9,
			Private: fill(cm.PrivateREP, 3)},
			map[int][]byte{0: {0, 0, 0, 1, 0, 0, 0, 2}, 12: {0x11, 0x22, 0x33}, 20: {0xab, 0xcd, 0xef, 0, 16, 15,
				13<<3 | 2<<1 | 1, 6<<5 | 1<<4, 0, 0, 0, 0, 0, 0, 0, 9}, 36: fill(cm.PrivateREP, 3)}},
		{cm.Fields{Kind: cm.REJ, LocalID: 1, RemoteID: 2, Answers: cm.AnswersREP, Reason: 28, Info: fill(8, 60),
			Private: fill(cm.PrivateREJ, 4)},
			map[int][]byte{0: {0, 0, 0, 1, 0, 0, 0, 2, 0x40, 8 << 1, 0, 28}, 12: fill(8, 60), 84: fill(cm.PrivateREJ, 4)}},
		{cm.Fields{Kind: cm.MRA, LocalID: 1, RemoteID: 2, Answers: cm.AnswersOther, ServiceTimeout: 24,
			Private: fill(cm.PrivateMRA, 5)},
			map[int][]byte{0: {0, 0, 0, 1, 0, 0, 0, 2, 0x80, 24 << 3}, 10: fill(cm.PrivateMRA, 5)}},
		{cm.Fields{Kind: cm.RTU, LocalID: 1, RemoteID: 2, Private: fill(cm.PrivateRTU, 6)},
			map[int][]byte{0: {0, 0, 0, 1, 0, 0, 0, 2}, 8: fill(cm.PrivateRTU, 6)}},
		{cm.Fields{Kind: cm.DREQ, LocalID: 1, RemoteID: 2, QPN: 0x010203, Private: fill(cm.PrivateDREQ, 7)},
			map[int][]byte{0: {0, 0, 0, 1, 0, 0, 0, 2, 1, 2, 3}, 12: fill(cm.PrivateDREQ, 7)}},
		{cm.Fields{Kind: cm.DREP, LocalID: 1, RemoteID: 2, Private: fill(cm.PrivateDREP, 8)},
			map[int][]byte{0: {0, 0, 0, 1, 0, 0, 0, 2}, 8: fill(cm.PrivateDREP, 8)}},
		{cm.Fields{Kind: cm.SIDRReq, LocalID: 1, PKey: 0xffff, Service: 0x01111d2f, Private: fill(cm.PrivateSIDRReq, 9)},
			map[int][]byte{0: {0, 0, 0, 1, 0xff, 0xff}, 8: {0, 0, 0, 0, 1, 0x11, 0x1d, 0x2f}, 16: fill(cm.PrivateSIDRReq, 9)}},
		{cm.Fields{Kind: cm.SIDRRep, LocalID: 1, Status: cm.SIDRNoQP, QPN: 0x010203, Service: 0x01111d2f, QKey: 0x01234567,
			Private: fill(cm.PrivateSIDRRep, 10)},
			map[int][]byte{0: {0, 0, 0, 1, 3, 0, 0, 0, 1, 2, 3}, 12: {0, 0, 0, 0, 1, 0x11, 0x1d, 0x2f, 0x01, 0x23, 0x45, 0x67},
				96: fill(cm.PrivateSIDRRep, 10)}},
	} {
		tc.x.Transaction = 0x0102030405060708
		want := at(tc.x.Kind, tc.parts)
		b, err := tc.x.Encode()
		if err != nil || !bytes.Equal(b, want) {
			t.Errorf("%v: %v\n%x, want\n%x", tc.x.Kind, err, b, want)
		}
		m, err := cm.Parse(want)
		if err != nil {
			t.Fatal(err)
		}
		if x, ok := m.Decode(); !ok || !reflect.DeepEqual(normal(x), normal(tc.x)) {
			t.Errorf("%v:\n%+v, want\n%+v", tc.x.Kind, x, tc.x)
		}
	}
}

// normal makes fields comparable: no bytes are an empty slice.
func normal(x cm.Fields) cm.Fields {
	x.Info, x.Private = bytes.Clone(append([]byte{}, x.Info...)), bytes.Clone(append([]byte{}, x.Private...))
	return x
}

// Data that is too long is refused, and so are kinds without an encoding; numbers are cut to their fields.
func TestEncodeLimits(t *testing.T) {
	for _, k := range described {
		n := map[cm.Kind]int{cm.REQ: 92, cm.REP: 196, cm.REJ: 148, cm.MRA: 222, cm.RTU: 224, cm.DREQ: 220, cm.DREP: 224,
			cm.SIDRReq: 216, cm.SIDRRep: 136}[k]
		if _, err := (&cm.Fields{Kind: k, Private: make([]byte, n)}).Encode(); err != nil {
			t.Errorf("%v: %v", k, err)
		}
		if _, err := (&cm.Fields{Kind: k, Private: make([]byte, n+1)}).Encode(); err == nil {
			t.Errorf("%v: %d bytes accepted", k, n+1)
		}
	}
	if _, err := (&cm.Fields{Kind: cm.REJ, Info: make([]byte, 73)}).Encode(); err == nil {
		t.Error("73 bytes of information accepted")
	}
	for _, k := range []cm.Kind{0, cm.LAP, cm.APR} {
		if b, err := (&cm.Fields{Kind: k}).Encode(); err == nil {
			t.Errorf("%v: %x", k, b)
		}
		if x, ok := cm.Message(at(k, nil)).Decode(); ok {
			t.Errorf("%v: %+v", k, x)
		}
	}
	long := make(cm.Message, cm.MADLen)
	copy(long, at(cm.REJ, map[int][]byte{9: {0xff}}))
	if x, ok := long.Decode(); !ok || len(x.Info) != cm.InfoREJ {
		t.Errorf("information of 127 bytes: %d", len(x.Info))
	}
}

func FuzzFields(f *testing.F) {
	for _, k := range kinds {
		f.Add(at(k, map[int][]byte{0: {0xff, 1, 2, 3}, 8: {0x40, 0x11}, 88: {1, 2, 3}}))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := cm.Parse(b)
		if err != nil {
			return
		}
		x, ok := m.Decode()
		if !ok {
			return
		}
		again, err := x.Encode()
		if err != nil {
			t.Fatal(err)
		}
		if m, err = cm.Parse(again); err != nil {
			t.Fatal(err)
		}
		if y, ok := m.Decode(); !ok || !reflect.DeepEqual(normal(x), normal(y)) {
			t.Errorf("%+v became %+v", x, y)
		}
	})
}
