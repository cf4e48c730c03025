package access

import (
	"slices"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/testutil/testca"
)

// TestExpires: of the certificates that are sent, the end of the first counts, whichever it is.
func TestExpires(t *testing.T) {
	ca := testca.New(t) // for an hour
	for life, want := range map[time.Duration]time.Duration{time.Minute: time.Minute, 3 * time.Hour: time.Hour} {
		ca.Life = life
		pair := ca.Issue(t, "x")
		r := Rules{TLS: &TLS{Cert: slices.Concat(pair.Cert, ca.Cert), Key: pair.Key}}
		at, ok := r.Expires()
		if off := time.Until(at) - want; !ok || off.Abs() > 10*time.Minute {
			t.Errorf("a certificate for %v by an authority for an hour: %v, %t", life, at, ok)
		}
	}
	if at, ok := (&Rules{}).Expires(); ok {
		t.Errorf("without TLS: %v", at)
	}
}
