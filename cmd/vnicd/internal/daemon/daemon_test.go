package daemon

import "testing"

// What is already kept of HCAs is not set aside for them once more.
func TestRoomForCard(t *testing.T) {
	for _, tc := range []struct {
		what                          string
		stored, ofHCAs, most, forHCAs int
		want                          bool
	}{
		{"nothing is stored", 0, 0, 100, 60, true},
		{"the cards have all that is not for HCAs", 40, 0, 100, 60, false},
		{"one less", 39, 0, 100, 60, true},
		{"half of the HCAs' are stored, and many cards'", 69, 30, 100, 60, true},
		{"one more", 70, 30, 100, 60, false},
		{"all of them are stored", 99, 60, 100, 60, true},
		{"they took more than was planned", 99, 80, 100, 60, true},
		{"the store is full", 100, 60, 100, 60, false},
	} {
		if got := roomForCard(tc.stored, tc.ofHCAs, tc.most, tc.forHCAs); got != tc.want {
			t.Errorf("%s: %v", tc.what, got)
		}
	}
}
