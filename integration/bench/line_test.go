package main

import (
	"testing"
	"time"
)

func TestLineTime(t *testing.T) {
	for range 50 { // other load can hide it
		if d := lineTime(); d > 0 {
			if d > time.Millisecond {
				t.Errorf("a cache line took %v", d)
			}
			return
		}
	}
	t.Error("no time of a cache line was found")
}

// A figure counts for a state only if the cores were in it before and after.
func TestDistance(t *testing.T) {
	const near, away = 110 * time.Nanosecond, 540 * time.Nanosecond
	for _, tc := range []struct {
		before, after time.Duration
		near, far     float64
	}{{near, near, 7, 0}, {away, away, 0, 7}, {near, away, 0, 0}, {away, near, 0, 0}, {0, near, 0, 0}, {away, 0, 0, 0}} {
		s := Sample{Value: 7}
		addDistance(&s, tc.before, tc.after)
		if s.Extra[coresNear] != tc.near || s.Extra[coresFar] != tc.far ||
			s.Extra[lineFigure] != float64(tc.before+tc.after)/2 && tc.before != 0 && tc.after != 0 {
			t.Errorf("%v, %v: %v", tc.before, tc.after, s.Extra)
		}
	}
}
