// Package query is the protocol between the daemon and the process that serves its monitoring over HTTP: the few
// questions that the process may ask, and their answers.
//
// A slot is a connection that carries one question and its answer at a time, all of one kind. So the number of slots
// bounds what the daemon works on, a reader that does not take its answer delays that slot only, and a kind without
// slots cannot be asked.
//
// The daemon does not trust the process: questions have a fixed size, and Parse accepts those that Append makes and no
// others. The process trusts the daemon.
package query

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"
)

// Kind is a kind of question.
type Kind uint8

// The kinds.
const (
	Metrics  Kind = 1 + iota // all metrics, in a format of Prometheus
	Health                   // whether the engines answer
	Overview                 // the page's data, as JSON
	Profile                  // one of Go's profiles
)

func (k Kind) String() string {
	if int(k) >= len(kinds) || k == 0 {
		return fmt.Sprintf("kind %d", uint8(k))
	}
	return kinds[k].name
}

// kinds has each kind's number of slots. A second one for Profile allows a look at the goroutines during a profile.
var kinds = [...]struct {
	name  string
	slots int
}{Metrics: {"metrics", 2}, Health: {"health", 2}, Overview: {"overview", 4}, Profile: {"profile", 2}}

// Slots returns the kind of each slot of a daemon with or without page and profiles.
func Slots(page, profiles bool) (out []Kind) {
	for _, k := range []Kind{Metrics, Health, Overview, Profile} {
		if k == Overview && !page || k == Profile && !profiles {
			continue
		}
		out = append(out, slices.Repeat([]Kind{k}, kinds[k].slots)...)
	}
	return out
}

// Profiles are the names of the profiles that may be asked for.
var Profiles = [...]string{
	"allocs", "block", "cmdline", "goroutine", "heap", "mutex", "profile", "threadcreate", "trace",
}

// Query is a question.
type Query struct {
	Kind Kind
	// Of Metrics: whether they are wanted as delimited protocol buffers, which have native histograms, in place of text.
	Protobuf bool
	// Of Overview: only samples after that one; the VM whose detail is wanted, "" for none.
	Since uint64
	VM    string
	// Of Profile: an index of Profiles; the duration, 0 for the profile's default; the form, 0 for the binary one; and
	// whether garbage is collected first.
	Profile uint8
	Seconds uint16
	Debug   uint8
	GC      bool
}

// Limits of a question.
const (
	MaxVM      = 32  // as in the configuration
	MaxSeconds = 120 // of a profile, which goes on if its client leaves
	MaxDebug   = 2
)

// Size is that of an encoded question: kind, profile, debug, gc, the name's length, protobuf; seconds, of two bytes;
// since; the name, with zeros behind it.
const Size = 16 + MaxVM

var errMalformed = errors.New("malformed question")

// Append encodes q, which must be valid.
func (q *Query) Append(b []byte) []byte {
	b = append(b, byte(q.Kind), q.Profile, q.Debug, bit(q.GC), byte(len(q.VM)), bit(q.Protobuf))
	b = binary.LittleEndian.AppendUint16(b, q.Seconds)
	b = binary.LittleEndian.AppendUint64(b, q.Since)
	return append(append(b, q.VM...), make([]byte, MaxVM-len(q.VM))...)
}

func bit(v bool) byte {
	if v {
		return 1
	}
	return 0
}

// Parse decodes a question of Size bytes and validates it.
func Parse(b []byte) (q Query, err error) {
	if len(b) != Size {
		return q, fmt.Errorf("%w: %d bytes, want %d", errMalformed, len(b), Size)
	}
	q.Kind = Kind(b[0])
	switch q.Kind {
	case Metrics:
		q.Protobuf = b[5] != 0
	case Health:
	case Overview:
		n := int(b[4])
		if n > MaxVM {
			return Query{}, fmt.Errorf("%w: a name of %d bytes, want at most %d", errMalformed, n, MaxVM)
		}
		q.Since, q.VM = binary.LittleEndian.Uint64(b[8:]), string(b[16:16+n])
	case Profile:
		q.Profile, q.Debug, q.GC, q.Seconds = b[1], b[2], b[3] != 0, binary.LittleEndian.Uint16(b[6:])
		if int(q.Profile) >= len(Profiles) || q.Seconds > MaxSeconds || q.Debug > MaxDebug {
			return Query{}, fmt.Errorf("%w: profile %d, %d seconds, debug %d, want at most %d, %d, %d", errMalformed,
				q.Profile, q.Seconds, q.Debug, len(Profiles)-1, MaxSeconds, MaxDebug)
		}
	default:
		return Query{}, fmt.Errorf("%w: %v", errMalformed, q.Kind)
	}
	// Every byte that the kind does not use is 0.
	if !bytes.Equal(q.Append(make([]byte, 0, Size)), b) {
		return Query{}, fmt.Errorf("%w: %v with arguments of another kind", errMalformed, q.Kind)
	}
	return q, nil
}

// ReadTime is the time that the process has to read an answer, from its first byte on; a profile's duration is added.
// The process gives its own clients SendTime, after which it discards the rest.
const (
	ReadTime = time.Minute
	SendTime = 30 * time.Second
)

// Duration is how long a profile lasts.
func (q *Query) Duration() time.Duration {
	switch {
	case q.Kind != Profile:
		return 0
	case q.Seconds == 0 && Profiles[q.Profile] == "profile":
		return 30 * time.Second // net/http/pprof
	case q.Seconds == 0 && Profiles[q.Profile] == "trace":
		return time.Second // likewise
	}
	return time.Duration(q.Seconds) * time.Second
}
