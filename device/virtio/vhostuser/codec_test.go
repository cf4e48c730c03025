package vhostuser

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"reflect"
	"strings"
	"testing"
)

// golden are payloads as sent by a little-endian QEMU.
var golden = []struct {
	name string
	hex  string
	dec  func([]byte) (any, error)
	val  any
	enc  func(any) []byte
}{
	{
		"vring state", "02000000 00010000",
		func(b []byte) (any, error) { return ParseVringState(b) },
		VringState{Index: 2, Num: 256},
		func(v any) []byte { return v.(VringState).Append(nil) },
	},
	{
		"vring address", "01000000 00000000 00300002007f0000 00500002007f0000 00400002007f0000 0000000000000000",
		func(b []byte) (any, error) { return ParseVringAddr(b) },
		VringAddr{Index: 1, Desc: 0x7f0002003000, Used: 0x7f0002005000, Avail: 0x7f0002004000},
		func(v any) []byte { return v.(VringAddr).Append(nil) },
	},
	{
		"vring descriptor", "0300000000000000",
		func(b []byte) (any, error) { return ParseVringFD(b, 1) },
		VringFD{Index: 3},
		func(v any) []byte { return v.(VringFD).Append(nil) },
	},
	{
		"no vring descriptor", "0301000000000000",
		func(b []byte) (any, error) { return ParseVringFD(b, 0) },
		VringFD{Index: 3, NoFD: true},
		func(v any) []byte { return v.(VringFD).Append(nil) },
	},
	{
		"memory table", "02000000 00000000" +
			"0000000000000000 0000008000000000 000000c0007f0000 0000000000000000" +
			"0000000001000000 0000004000000000 00000040017f0000 0000008000000000",
		func(b []byte) (any, error) { return ParseMemTable(b, 2) },
		[]Region{
			{GuestPA: 0, Size: 0x80000000, UserAddr: 0x7f00c0000000},
			{GuestPA: 0x100000000, Size: 0x40000000, UserAddr: 0x7f0140000000, Offset: 0x80000000},
		},
		func(v any) []byte { return AppendMemTable(nil, v.([]Region)) },
	},
	{
		"memory region", "0000000000000000 0000100000000000 0000200000000000 00000000007f0000 0010000000000000",
		ParseMemRegAny,
		Region{GuestPA: 0x100000, Size: 0x200000, UserAddr: 0x7f0000000000, Offset: 0x1000},
		func(v any) []byte { return AppendMemReg(nil, v.(Region)) },
	},
	{
		"configuration", "04000000 03000000 01000000 616263",
		func(b []byte) (any, error) { return ParseConfigSpace(b) },
		ConfigSpace{Offset: 4, Flags: 1, Data: []byte("abc")},
		func(v any) []byte { return v.(ConfigSpace).Append(nil) },
	},
	{
		"number", "8877665544332211",
		func(b []byte) (any, error) { return ParseU64(b) },
		uint64(0x1122334455667788),
		func(v any) []byte { return AppendU64(nil, v.(uint64)) },
	},
}

func ParseMemRegAny(b []byte) (any, error) { return ParseMemReg(b) }

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// requireLittleEndian: the protocol uses the host's byte order; the golden bytes are of a little-endian host.
func requireLittleEndian(t testing.TB) {
	if binary.NativeEndian.Uint16([]byte{1, 0}) != 1 {
		t.Skip("golden bytes are those of a little-endian host")
	}
}

func TestGoldenPayloads(t *testing.T) {
	requireLittleEndian(t)
	for _, g := range golden {
		b := unhex(t, g.hex)
		v, err := g.dec(b)
		if err != nil || !reflect.DeepEqual(v, g.val) {
			t.Errorf("%s: decoded %+v, %v; want %+v", g.name, v, err, g.val)
		}
		if e := g.enc(g.val); !bytes.Equal(e, b) {
			t.Errorf("%s: encoded %x, want %x", g.name, e, b)
		}
	}
}

func TestGoldenHeader(t *testing.T) {
	requireLittleEndian(t)
	b := unhex(t, "0c000000 09000000 08000000")
	want := Header{Request: ReqSetVringKick, Flags: FlagVersion | FlagNeedReply, Size: 8}
	h, err := ParseHeader(b)
	if err != nil || h != want || !h.NeedReply() {
		t.Fatalf("decoded %+v, %v", h, err)
	}
	if e := want.Append(nil); !bytes.Equal(e, b) {
		t.Fatalf("encoded %x", e)
	}
	if s := h.Request.String(); s != "SET_VRING_KICK" {
		t.Fatal(s)
	}
}

// TestNumFDs: a message says itself how many descriptors it has.
func TestNumFDs(t *testing.T) {
	for _, tc := range []struct {
		req   Request
		flags uint32
		body  []byte
		want  int
	}{
		{ReqGetFeatures, 0, nil, 0},
		{ReqAddMemReg, 0, AppendMemReg(nil, Region{}), 1},
		{ReqAddMemReg, FlagReply, AppendU64(nil, 0), 0},
		{ReqRemMemReg, 0, AppendMemReg(nil, Region{}), 0},
		{ReqSetBackendReqFD, 0, nil, 1},
		{ReqSetMemTable, 0, AppendMemTable(nil, nil), 0},
		{ReqSetMemTable, 0, AppendMemTable(nil, make([]Region, 3)), 3},
		{ReqSetMemTable, 0, bytes.Repeat([]byte{255}, 8), MaxTableRegions},
		{ReqSetVringKick, 0, VringFD{Index: 3}.Append(nil), 1},
		{ReqSetVringCall, 0, VringFD{Index: 3, NoFD: true}.Append(nil), 0},
		{ReqSetVringErr, FlagReply, VringFD{Index: 3}.Append(nil), 0},
	} {
		h := Header{Request: tc.req, Flags: FlagVersion | tc.flags}
		if got := h.NumFDs(tc.body); got != tc.want {
			t.Errorf("%v, flags %d, body %x: %d descriptors, want %d", tc.req, tc.flags, tc.body, got, tc.want)
		}
	}
}

// TestHeaderCheck: requests that the allow-list refuses, and the messages.
func TestHeaderCheck(t *testing.T) {
	ok := Header{Flags: FlagVersion}
	for _, tc := range []struct {
		req  Request
		mod  func(*Header)
		want string // "" means accepted
	}{
		{ReqGetFeatures, nil, ""},
		{ReqGetFeatures, func(h *Header) { h.Size = 8 }, "payload of 8 bytes, want 0"},
		{ReqSetFeatures, func(h *Header) { h.Size = 4 }, "payload of 4 bytes, want 8"},
		{ReqSetMemTable, func(h *Header) { h.Size = 8 + 8*32 }, ""},
		{ReqSetMemTable, func(h *Header) { h.Size = 8 + 9*32 }, "want 8 to 264"},
		{ReqAddMemReg, func(h *Header) { h.Size = 40 }, ""},
		{ReqAddMemReg, func(h *Header) { h.Size = 32 }, "payload of 32 bytes, want 40"},
		{ReqRemMemReg, func(h *Header) { h.Size = 40 }, ""},
		{ReqSetBackendReqFD, nil, ""},
		{ReqGetConfig, func(h *Header) { h.Size = 12 + 257 }, "want 12 to 268"},
		{ReqGetStatus, func(h *Header) { h.Flags |= FlagReply }, "reply bit"},
		{0, nil, "request 0 is unknown"},
		{ReqSetLogBase, nil, "payload of 0 bytes, want 16"},
		{7, nil, "request 7 is unknown"},   // SET_LOG_FD
		{31, nil, "request 31 is unknown"}, // GET_INFLIGHT_FD
		{0xffffffff, func(h *Header) { h.Size = 0xffffffff }, "is unknown"},
	} {
		h := ok
		h.Request = tc.req
		if tc.mod != nil {
			tc.mod(&h)
		}
		err := h.Check()
		switch {
		case tc.want == "" && err != nil:
			t.Errorf("%v: %v", tc.req, err)
		case tc.want != "" && (!errors.Is(err, ErrProtocol) || !strings.Contains(err.Error(), tc.want)):
			t.Errorf("%v: %v, want %q", tc.req, err, tc.want)
		}
	}
	if _, err := ParseHeader(make([]byte, HeaderSize)); !errors.Is(err, ErrProtocol) {
		t.Errorf("version 0: %v", err)
	}
	if _, err := ParseHeader(make([]byte, 5)); !errors.Is(err, ErrProtocol) {
		t.Errorf("short header: %v", err)
	}
}

// TestRulesMatchSizes keeps the allow-list's bounds within the receive buffer.
func TestRulesMatchSizes(t *testing.T) {
	for req, r := range rules {
		if r.maxSize > maxPayload || r.minSize > r.maxSize || r.fds >= maxRecvFDs || r.name == "" {
			t.Errorf("%v: %+v", req, r)
		}
	}
}

func TestPayloadRefusals(t *testing.T) {
	region := func(pa, n, user, off uint64) []byte {
		return AppendMemReg(nil, Region{pa, n, user, off})
	}
	table := func(rs ...Region) []byte { return AppendMemTable(nil, rs) }
	page := uint64(4096)
	for _, tc := range []struct {
		name string
		err  error
		want string
	}{
		{"empty region", second(ParseMemReg(region(0, 0, 0, 0))), "empty"},
		{"ragged size", second(ParseMemReg(region(0, 100, 0, 0))), "multiples of 4096"},
		{"ragged offset", second(ParseMemReg(region(0, page, 0, 8))), "multiples of 4096"},
		{"ragged address", second(ParseMemReg(region(8, page, 0, 0))), "multiples of 4096"},
		{"ragged user address", second(ParseMemReg(region(0, page, 8, 0))), "multiples of 4096"},
		{"guest wrap", second(ParseMemReg(region(^uint64(0)-page+1, 2*page, 0, 0))), "wraps"},
		{"user wrap", second(ParseMemReg(region(0, 2*page, ^uint64(0)-page+1, 0))), "wraps"},
		{"offset wrap", second(ParseMemReg(region(0, 2*page, 0, ^uint64(0)-page+1))), "wraps"},
		{"short region", second(ParseMemReg(make([]byte, 39))), "39 bytes"},
		{"overlap in guest", second(ParseMemTable(table(Region{0, 2 * page, 0, 0}, Region{page, page, 8 * page, 0}), 2)),
			"0 and 1 overlap"},
		{"overlap in user", second(ParseMemTable(table(Region{0, 2 * page, 0, 0}, Region{8 * page, page, page, 0}), 2)),
			"overlap"},
		{"nine regions", second(ParseMemTable(AppendMemTable(nil, make([]Region, 9)), 9)), "9 regions"},
		{"truncated table", second(ParseMemTable(table(Region{0, page, 0, 0})[:20], 1)), "too short"},
		{"no table", second(ParseMemTable(nil, 0)), "0 bytes"},
		{"fds missing", second(ParseMemTable(table(Region{0, page, 0, 0}), 0)), "1 regions and 0 file"},
		{"fds too many", second(ParseMemTable(table(Region{0, page, 0, 0}), 2)), "1 regions and 2 file"},
		{"unknown flag", second(ParseVringAddr(VringAddr{Flags: 2}.Append(nil))), "address flags"},
		{"ragged desc", second(ParseVringAddr(VringAddr{Desc: 8}.Append(nil))), "multiple of 16"},
		{"ragged avail", second(ParseVringAddr(VringAddr{Avail: 1}.Append(nil))), "multiple of 2"},
		{"ragged used", second(ParseVringAddr(VringAddr{Used: 2}.Append(nil))), "multiple of 4"},
		{"fd bits", second(ParseVringFD(AppendU64(nil, 1<<9), 1)), "above bit 8"},
		{"fd missing", second(ParseVringFD(AppendU64(nil, 1), 0)), "want 1"},
		{"fd too many", second(ParseVringFD(AppendU64(nil, 1<<8), 1)), "want 0"},
		{"config size", second(ParseConfigSpace(append(ConfigSpace{Data: []byte{1}}.Append(nil), 2))), "room for 2"},
		{"config end", second(ParseConfigSpace(ConfigSpace{Offset: 250, Data: make([]byte, 7)}.Append(nil))), "at most 256"},
		{"config offset", second(ParseConfigSpace(ConfigSpace{Offset: ^uint32(0), Data: []byte{1}}.Append(nil))),
			"at most 256"},
		{"config short", second(ParseConfigSpace(make([]byte, 11))), "11 bytes"},
		{"state short", second(ParseVringState(make([]byte, 7))), "7 bytes"},
		{"number short", second(ParseU64(make([]byte, 7))), "7 bytes"},
	} {
		if !errors.Is(tc.err, ErrProtocol) || !strings.Contains(tc.err.Error(), tc.want) {
			t.Errorf("%s: %v, want %q", tc.name, tc.err, tc.want)
		}
	}
	// Room for eight regions with only one: some front ends send that.
	padded := append(table(Region{0, page, 0, 0}), make([]byte, 7*regionSize)...)
	if rs, err := ParseMemTable(padded, 1); err != nil || len(rs) != 1 {
		t.Errorf("padded table: %v, %v", rs, err)
	}
	// The last page of the address space is a valid region.
	if _, err := ParseMemReg(region(^uint64(0)-page+1, page, ^uint64(0)-page+1, 0)); err != nil {
		t.Error(err)
	}
}

func second[T any](_ T, err error) error { return err }

// FuzzPayloads: decoders do not panic, and accept only what the encoders would write.
func FuzzPayloads(f *testing.F) {
	for i, g := range golden {
		f.Add(uint8(i), unhex(f, g.hex), 2)
	}
	f.Fuzz(func(t *testing.T, kind uint8, b []byte, fds int) {
		again := func(enc []byte, err error) {
			if err == nil && !bytes.Equal(enc, b) {
				t.Fatalf("kind %d: %x decodes and encodes to %x", kind%8, b, enc)
			}
		}
		switch kind % 8 {
		case 0:
			v, err := ParseVringState(b)
			again(v.Append(nil), err)
		case 1:
			v, err := ParseVringAddr(b)
			again(v.Append(nil), err)
		case 2, 3:
			v, err := ParseVringFD(b, fds)
			again(v.Append(nil), err)
		case 4:
			v, err := ParseMemTable(b, fds)
			if err != nil {
				return
			}
			w, err := ParseMemTable(AppendMemTable(nil, v), fds)
			if err != nil || !reflect.DeepEqual(v, w) {
				t.Fatalf("%+v is decoded as %+v, %v", v, w, err)
			}
		case 5:
			v, err := ParseMemReg(b)
			if err != nil {
				return
			}
			if w, err := ParseMemReg(AppendMemReg(nil, v)); err != nil || v != w {
				t.Fatalf("%+v is decoded as %+v, %v", v, w, err)
			}
		case 6:
			v, err := ParseConfigSpace(b)
			again(v.Append(nil), err)
		case 7:
			h, err := ParseHeader(b)
			again(h.Append(nil), err)
			_ = h.Check()
			if n := h.NumFDs(b); n < 0 || n > MaxTableRegions {
				t.Fatalf("%+v: %d descriptors", h, n)
			}
		}
	})
}
