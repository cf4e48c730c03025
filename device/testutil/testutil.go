// Package testutil has what tests of several packages need. It imports no package of the product, so that every test may
// import it; its sub-packages make network namespaces (nstest), logs (testlog) and settings of the data path (ways).
package testutil

import (
	"testing"
	"time"
)

// patience is generous: no test waits that long unless something is broken.
const patience = time.Minute

// Eventually polls cond, first every 50 us and then more rarely, until it returns true. After a minute the test fails, with
// what as the condition that did not come true.
func Eventually(tb testing.TB, what string, cond func() bool) {
	tb.Helper()
	pause := 50 * time.Microsecond
	for end := time.Now().Add(patience); !cond(); time.Sleep(pause) {
		if time.Now().After(end) {
			tb.Fatalf("waited %v in vain: %s", patience, what)
		}
		pause = min(2*pause, 10*time.Millisecond)
	}
}
