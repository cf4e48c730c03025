package cm_test

import (
	"bytes"
	"errors"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/cm"
	"github.com/vnicd/vnicd/device/rdma/cm/cmtest"
)

var kinds = []cm.Kind{cm.REQ, cm.MRA, cm.REJ, cm.REP, cm.RTU, cm.DREQ, cm.DREP, cm.SIDRReq, cm.SIDRRep, cm.LAP, cm.APR}

// Literal bytes at the offsets of IBTA's tables 106 to 121.
func TestGolden(t *testing.T) {
	req := make([]byte, cm.MADLen)
	copy(req, []byte{1, 7, 2, 3, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0x10, 0, 0, 0, 0, 0, 0})
	copy(req[24:], []byte{0xa1, 0xa2, 0xa3, 0xa4, 0, 0, 0, 0, 0, 0, 0, 0, 1, 6, 0x1c, 0x06})
	copy(req[24+32:], []byte{0x11, 0x22, 0x33, 4})
	copy(req[24+40:], []byte{0, 0, 0, 0xa2, 0xab, 0xcd, 0xef, 0xf0, 0xff, 0xff, 0x37})
	for i := range 32 {
		req[24+56+i] = byte(i + 1)
	}
	m, err := cm.Parse(req)
	if err != nil {
		t.Fatal(err)
	}
	x := cmtest.Of(m)
	want := cmtest.Message{Kind: cm.REQ, Transaction: 0x0102030405060708, LocalID: 0xa1a2a3a4, Service: 0x01061c06,
		QPN: 0x112233, PSN: 0xabcdef, Transport: 1, PathMTU: 3, RNRRetry: 7, PKey: 0xffff}
	for i := range 16 {
		want.Local[i], want.Remote[i] = byte(i+1), byte(i+17)
	}
	if x != want {
		t.Errorf("REQ:\n%+v, want\n%+v", x, want)
	}
	for _, tc := range []struct {
		body []byte
		want cmtest.Message
	}{
		{[]byte{1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0, 0x11, 0x22, 0x33, 0, 0, 0, 0, 0, 0xab, 0xcd, 0xef, 0, 16, 16, 0xff, 0xd0},
			cmtest.Message{Kind: cm.REP, QPN: 0x112233, PSN: 0xabcdef, RNRRetry: 6}},
		{[]byte{1, 2, 3, 4, 5, 6, 7, 8, 0x40, 0, 0, 28}, cmtest.Message{Kind: cm.REJ, Reason: 28}},
		{[]byte{1, 2, 3, 4, 5, 6, 7, 8, 0x40, 20 << 3}, cmtest.Message{Kind: cm.MRA, ServiceTimeout: 20}},
		{[]byte{1, 2, 3, 4, 5, 6, 7, 8}, cmtest.Message{Kind: cm.RTU}},
		{[]byte{1, 2, 3, 4, 5, 6, 7, 8, 9, 8, 7, 0}, cmtest.Message{Kind: cm.DREQ, QPN: 0x090807}},
		{[]byte{1, 2, 3, 4, 5, 6, 7, 8}, cmtest.Message{Kind: cm.DREP}},
		{[]byte{1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0, 9, 8, 7}, cmtest.Message{Kind: cm.LAP, QPN: 0x090807}},
	} {
		b := make([]byte, cm.MADLen)
		copy(b, []byte{1, 7, 2, 3, 16: 0, byte(tc.want.Kind)})
		copy(b[24:], tc.body)
		m, err := cm.Parse(b)
		if err != nil {
			t.Fatal(err)
		}
		tc.want.LocalID, tc.want.RemoteID = 0x01020304, 0x05060708
		if x := cmtest.Of(m); x != tc.want {
			t.Errorf("%v:\n%+v, want\n%+v", tc.want.Kind, x, tc.want)
		}
	}
	sidr := make([]byte, cm.MADLen)
	copy(sidr, []byte{1, 7, 2, 3, 16: 0, 0x18})
	copy(sidr[24:], []byte{1, 2, 3, 4, 5, 0, 0, 0, 9, 8, 7, 0, 0, 0, 0, 0, 1, 0x11, 2, 3, 0x80, 1, 2, 3})
	m, err = cm.Parse(sidr)
	if err != nil {
		t.Fatal(err)
	}
	if x := cmtest.Of(m); x != (cmtest.Message{Kind: cm.SIDRRep, LocalID: 0x01020304, Status: 5, QPN: 0x090807,
		Service: 0x01110203, QKey: 0x80010203}) {
		t.Errorf("SIDR_REP: %+v", x)
	}
}

func TestParseRefuses(t *testing.T) {
	good := (&cmtest.Message{Kind: cm.RTU}).Bytes()
	for name, tc := range map[string]struct {
		mod  func([]byte) []byte
		want error
	}{
		"short":         {func(b []byte) []byte { return b[:255] }, cm.ErrMalformed},
		"empty":         {func(b []byte) []byte { return nil }, cm.ErrOther},
		"base version":  {func(b []byte) []byte { b[0] = 0x80; return b }, cm.ErrMalformed},
		"class":         {func(b []byte) []byte { b[1] = 3; return b }, cm.ErrOther},
		"class version": {func(b []byte) []byte { b[2] = 1; return b }, cm.ErrMalformed},
		"method":        {func(b []byte) []byte { b[3] = 0x81; return b }, cm.ErrMalformed},
		"attribute 0xf": {func(b []byte) []byte { b[17] = 0xf; return b }, cm.ErrMalformed},
		"attribute":     {func(b []byte) []byte { b[16] = 1; return b }, cm.ErrMalformed},
	} {
		if _, err := cm.Parse(tc.mod(bytes.Clone(good))); !errors.Is(err, tc.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzMessage(f *testing.F) {
	for _, k := range kinds {
		f.Add((&cmtest.Message{Kind: k, LocalID: 1, RemoteID: 2, QPN: 3, Service: 4}).Bytes())
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := cm.Parse(b)
		if err != nil {
			return
		}
		x := cmtest.Of(m)
		again, err := cm.Parse(x.Bytes())
		if err != nil {
			t.Fatal(err)
		}
		if y := cmtest.Of(again); y != x {
			t.Errorf("%+v became %+v", x, y)
		}
	})
}
