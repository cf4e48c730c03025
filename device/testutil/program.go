package testutil

import (
	"os"
	"os/exec"
	"testing"
)

// InstallProgram makes the file to, which may be running, a copy of the program from, as a package does. Another
// process writes it: what this one starts at that moment, in a parallel test, would inherit a file that is open for
// writing, and as long as it has that, nobody can run the program ("text file busy").
func InstallProgram(tb testing.TB, from, to string) {
	tb.Helper()
	fresh := to + ".new"
	if out, err := exec.Command("install", "--mode=755", from, fresh).CombinedOutput(); err != nil {
		tb.Fatalf("install %s: %v: %s", from, err, out)
	}
	if err := os.Rename(fresh, to); err != nil {
		tb.Fatal(err)
	}
}
