package frame

import (
	"testing"

	"github.com/vnicd/vnicd/device/frame/header"
)

// A layout is found once, travels with a copy, and is void after every change of the frame's length or start.
func TestLayout(t *testing.T) {
	p, err := NewPool(Config{Count: 2, Capacity: 2048})
	if err != nil {
		t.Fatal(err)
	}
	ethernet := func(typ ...byte) []byte { return append(make([]byte, 12), append(typ, make([]byte, 60)...)...) }
	b, c := p.Get(), p.Get()
	defer b.Free()
	defer c.Free()
	roce := ethernet(0x81, 0, 0x20, 7, 0x89, 0x15)
	b.Append(roce)
	want := header.Layout{Type: header.TypeRoCE1, VLAN: 7, L3: 18, Flags: header.IsRoCE}
	if got := *b.Layout(); got != want {
		t.Fatalf("%+v, want %+v", got, want)
	}
	copy(b.Bytes(), ethernet(8, 6)) // not looked at again
	if got := *b.Layout(); got != want {
		t.Errorf("located twice: %+v", got)
	}
	if !c.CopyFrom(b) || *c.Layout() != want {
		t.Errorf("the copy: %+v", c.Layout())
	}
	for name, change := range map[string]func(){
		"SetLen":    func() { b.SetLen(60) },
		"Append":    func() { b.Append([]byte{1}) },
		"Prepend":   func() { copy(b.Prepend(1), []byte{0}) },
		"TrimFront": func() { b.TrimFront(1) },
		"Reset":     func() { b.Reset(); b.Append(ethernet(8, 6)) },
	} {
		b.Reset()
		b.Append(ethernet(8, 6))
		b.SetLayout(&want)
		if change(); *b.Layout() == want {
			t.Errorf("%s keeps the layout", name)
		}
	}
	b.Reset()
	if b.Append(make([]byte, 13)); *b.Layout() != (header.Layout{}) {
		t.Errorf("13 bytes: %+v", b.Layout())
	}
}
