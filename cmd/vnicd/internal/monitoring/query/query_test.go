package query

import (
	"bytes"
	"encoding/hex"
	"errors"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"
)

func heap() uint8 { return uint8(slices.Index(Profiles[:], "heap")) }

// The bytes of questions.
func TestGolden(t *testing.T) {
	for _, x := range []struct {
		q    Query
		want string
	}{
		{Query{Kind: Metrics}, "01"},
		{Query{Kind: Metrics, Protobuf: true}, "010000000001"},
		{Query{Kind: Health}, "02"},
		{Query{Kind: Overview, Since: 0x0102030405060708, VM: "one"}, "0300000003000000" + "0807060504030201" + "6f6e65"},
		{Query{Kind: Profile, Profile: heap(), Seconds: 120, Debug: 2, GC: true}, "0404020100007800"},
	} {
		want, _ := hex.DecodeString(x.want)
		want = append(want, make([]byte, Size-len(want))...)
		if got := x.q.Append(nil); !bytes.Equal(got, want) {
			t.Errorf("%+v: %x, want %x", x.q, got, want)
		}
		if got, err := Parse(want); err != nil || got != x.q {
			t.Errorf("%x: %+v, %v", want, got, err)
		}
	}
}

// What the HTTP side may not ask for is refused: other kinds and profiles, arguments beyond their bounds, and any byte
// that its kind does not use.
func TestMalformed(t *testing.T) {
	good := map[string]Query{"metrics": {Kind: Metrics}, "health": {Kind: Health},
		"overview": {Kind: Overview, VM: "one"}, "profile": {Kind: Profile}}
	refused := func(what string, b []byte) {
		t.Helper()
		if q, err := Parse(b); !errors.Is(err, errMalformed) || q != (Query{}) {
			t.Errorf("%s: %+v, %v", what, q, err)
		}
	}
	for name, q := range good {
		b := q.Append(nil)
		refused(name+", short", b[:Size-1])
		refused(name+", long", append(b, 0))
		b = b[:Size]
		b[Size-1] = 1
		refused(name+", with a last byte", b)
		b[Size-1], b[5] = 0, 2
		refused(name+", with a reserved byte", b)
		b[5], b[0] = 0, 0
		refused(name+", of no kind", b)
		b[0] = 5
		refused(name+", of another kind", b)
	}
	for i := 1; i < Size; i++ {
		q := Query{Kind: Metrics}
		b := q.Append(nil)
		b[i] = 1
		if i == 5 { // protobuf
			b[i] = 2
		}
		refused("metrics with an argument", b)
		q = Query{Kind: Health}
		b = q.Append(nil)
		b[i] = 1
		refused("health with an argument", b)
	}
	profile := Query{Kind: Profile}
	for at, v := range map[int]byte{1: byte(len(Profiles)), 2: MaxDebug + 1, 3: 2, 7: 1} {
		b := profile.Append(nil)
		b[at] = v
		refused("a profile", b)
	}
	overview := Query{Kind: Overview, VM: strings.Repeat("x", MaxVM)}
	b := overview.Append(nil)
	b[4] = MaxVM + 1
	refused("a long name", b)
	b[4] = MaxVM - 1
	refused("a name that is longer than its length", b)
}

// Page and profiles have slots only if they are enabled.
func TestSlots(t *testing.T) {
	for _, page := range []bool{false, true} {
		for _, profiles := range []bool{false, true} {
			s := Slots(page, profiles)
			if slices.Contains(s, Overview) != page || slices.Contains(s, Profile) != profiles || !slices.Contains(s, Metrics) ||
				!slices.Contains(s, Health) || len(s) > 10 {
				t.Errorf("page %v, profiles %v: %v", page, profiles, s)
			}
		}
	}
}

// An answer arrives as it was written, whatever the sizes; its end, and that it is not complete, too; and the next one
// follows.
func TestAnswer(t *testing.T) {
	for _, size := range []int{0, 1, maxFrame - 1, maxFrame, maxFrame + 1, 5*maxFrame + 7} {
		for _, why := range []error{nil, errors.New("why")} {
			a, b := net.Pipe()
			text := bytes.Repeat([]byte{0xa5}, size)
			sent := make(chan error, 1)
			go func() {
				w := NewWriter(a, time.Minute)
				w.Header().Set("Content-Type", "text/x-test")
				w.WriteHeader(http.StatusTeapot)
				w.WriteHeader(http.StatusOK) // the first one counts
				for i := 0; i < size; i += 1000 {
					_, _ = w.Write(text[i:min(i+1000, size)])
				}
				err := w.Close(why)
				w = NewWriter(a, time.Minute)
				_, _ = io.WriteString(w, "next")
				sent <- errors.Join(err, w.Close(nil))
			}()
			r, err := ReadAnswer(b)
			if err != nil || r.Status != http.StatusTeapot || r.ContentType != "text/x-test" {
				t.Fatalf("%+v, %v", r, err)
			}
			want := error(nil)
			if why != nil {
				want = ErrAborted
			}
			if got, err := io.ReadAll(r); !bytes.Equal(got, text) || !errors.Is(err, want) {
				t.Errorf("%d bytes, want %d; %v", len(got), size, err)
			}
			if r, err = ReadAnswer(b); err != nil || r.Status != http.StatusOK {
				t.Fatalf("the next answer: %+v, %v", r, err)
			}
			if err := r.Drain(); err != nil {
				t.Error(err)
			}
			if err := <-sent; err != nil {
				t.Error(err)
			}
			_, _ = a.Close(), b.Close()
		}
	}
}

// An error before the answer has begun is an answer.
func TestErrorAnswer(t *testing.T) {
	a, b := net.Pipe()
	sent := make(chan error, 1)
	go func() { sent <- NewWriter(a, time.Minute).Close(errors.New("no figures")) }()
	r, err := ReadAnswer(b)
	if err != nil || r.Status != http.StatusInternalServerError {
		t.Fatalf("%+v, %v", r, err)
	}
	if text, err := io.ReadAll(r); err != nil || string(text) != "no figures\n" {
		t.Errorf("%q, %v", text, err)
	}
	if err := <-sent; err != nil {
		t.Error(err)
	}
}

// Nobody waits for a reader for ever.
func TestUnread(t *testing.T) {
	a, _ := net.Pipe()
	w := NewWriter(a, time.Millisecond)
	_, _ = io.WriteString(w, "text")
	var timeout net.Error
	if err := w.Close(nil); !errors.As(err, &timeout) || !timeout.Timeout() {
		t.Errorf("the reader does not read: %v", err)
	}
}

func FuzzParse(f *testing.F) {
	for _, q := range []Query{{Kind: Metrics}, {Kind: Metrics, Protobuf: true}, {Kind: Health},
		{Kind: Overview, Since: 1, VM: "one"},
		{Kind: Profile, Profile: heap(), Seconds: 1, GC: true}} {
		f.Add(q.Append(nil))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		q, err := Parse(b)
		if err != nil {
			return
		}
		if !bytes.Equal(q.Append(nil), b) || q.Kind < Metrics || q.Kind > Profile || len(q.VM) > MaxVM ||
			int(q.Profile) >= len(Profiles) || q.Seconds > MaxSeconds || q.Debug > MaxDebug ||
			q.Duration() > MaxSeconds*time.Second {
			t.Errorf("%x is accepted as %+v", b, q)
		}
	})
}
