package record

import (
	"errors"
	"math"
	"reflect"
	"testing"
)

type sample struct {
	small  uint8
	number uint64
	flag   bool
	id     [3]byte
	list   []uint32
	blob   []byte
	late   uint16
}

func (s *sample) record(c *Codec, newest uint32) {
	c.Version("SAMPLE", newest)
	Num(c, &s.small)
	Num(c, &s.number)
	c.Bool(&s.flag)
	c.Fixed(s.id[:])
	List(c, &s.list, 4, "numbers", func(x *uint32) { Max(c, x, 1000, "number") })
	c.Blob(&s.blob, 3, "bytes")
	if c.Since(2) {
		Num(c, &s.late)
	}
}

func TestRoundTrip(t *testing.T) {
	for _, x := range []sample{
		{list: []uint32{}, blob: []byte{}},
		{small: 255, number: math.MaxUint64, flag: true, id: [3]byte{1, 2, 3}, list: []uint32{1, 2, 1000},
			blob: []byte{4, 5}, late: 65535},
	} {
		w := Writer()
		x.record(w, 2)
		if w.Err() != nil {
			t.Fatal(w.Err())
		}
		var got sample
		r := Reader(w.Bytes())
		if got.record(r, 2); r.End() != nil || !reflect.DeepEqual(got, x) {
			t.Errorf("%+v, %v; want %+v", got, r.End(), x)
		}
		for i := range w.Bytes() { // cut off anywhere
			c := Reader(w.Bytes()[:i])
			if new(sample).record(c, 2); !errors.Is(c.End(), ErrInvalid) {
				t.Errorf("%d of %d bytes: %v", i, len(w.Bytes()), c.End())
			}
		}
	}
}

// Golden bytes: the encoding is what other releases read.
func TestGolden(t *testing.T) {
	w := Writer()
	(&sample{small: 7, number: 300, flag: true, id: [3]byte{1, 2, 3}, list: []uint32{128}, blob: []byte{9},
		late: 5}).record(w, 2)
	want := "SAMPLE\x02\x07\xac\x02\x01\x01\x02\x03\x01\x80\x01\x01\x09\x05"
	if string(w.Bytes()) != want {
		t.Errorf("% x\nwant % x", w.Bytes(), want)
	}
}

// A record of an older version lacks the later fields; one of a newer version is refused.
func TestVersions(t *testing.T) {
	w := Writer()
	(&sample{small: 1, list: []uint32{}, late: 9}).record(w, 1)
	var got sample
	r := Reader(w.Bytes())
	if got.record(r, 2); r.End() != nil || got.small != 1 || got.late != 0 {
		t.Errorf("%+v, %v", got, r.End())
	}
	w = Writer()
	(&sample{}).record(w, 3)
	r = Reader(w.Bytes())
	if got.record(r, 2); r.Err() == nil {
		t.Error("a newer version was accepted")
	}
}

func TestRefuses(t *testing.T) {
	for what, b := range map[string]string{
		"other magic":          "OTHERS\x01\x00\x00\x00\x00\x00\x00\x00",
		"version 0":            "SAMPLE\x00\x00\x00\x00\x00\x00\x00\x00",
		"small too large":      "SAMPLE\x01\x80\x02\x00\x00\x00\x00\x00\x00",
		"truth value 2":        "SAMPLE\x01\x00\x00\x02\x00\x00\x00\x00",
		"list too long":        "SAMPLE\x01\x00\x00\x00\x00\x00\x00\x05\x01\x01\x01\x01\x01",
		"list beyond the rest": "SAMPLE\x01\x00\x00\x00\x00\x00\x00\x03\x01",
		"element too large":    "SAMPLE\x01\x00\x00\x00\x00\x00\x00\x01\xe9\x07",
		"more than 64 bits":    "SAMPLE\x01\x00\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
		"trailing bytes":       "SAMPLE\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00",
	} {
		r := Reader([]byte(b))
		if new(sample).record(r, 2); !errors.Is(r.End(), ErrInvalid) {
			t.Errorf("%s: %v", what, r.End())
		}
	}
}

func FuzzSample(f *testing.F) {
	w := Writer()
	(&sample{small: 7, number: 300, list: []uint32{1}}).record(w, 2)
	f.Add(w.Bytes())
	f.Fuzz(func(t *testing.T, b []byte) {
		var x, y sample
		r := Reader(b)
		if x.record(r, 2); r.End() != nil || r.version != 2 {
			return
		}
		w := Writer()
		x.record(w, 2)
		r = Reader(w.Bytes())
		if y.record(r, 2); r.End() != nil || !reflect.DeepEqual(x, y) {
			t.Errorf("%+v, %v; want %+v", y, r.End(), x)
		}
	})
}
