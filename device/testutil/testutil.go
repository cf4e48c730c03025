// Package testutil holds what tests of several packages need. It imports no package of the product, so that every test
// may import it. Its sub-packages create network namespaces (nstest), logs (testlog) and settings of the data path
// (ways).
package testutil

import (
	"testing"
	"time"
)

// patience is generous: a wait this long means that something is broken.
const patience = time.Minute

// Eventually polls cond, first every 50 us and then more rarely, until it returns true. After a minute it fails the
// test with what, the condition that was waited for.
func Eventually(tb testing.TB, what string, cond func() bool) {
	tb.Helper()
	pause := 50 * time.Microsecond
	for end := time.Now().Add(patience); !cond(); time.Sleep(pause) {
		if time.Now().After(end) {
			tb.Fatalf("timed out after %v waiting for: %s", patience, what)
		}
		pause = min(2*pause, 10*time.Millisecond)
	}
}
