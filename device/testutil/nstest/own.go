package nstest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"
)

// isolated marks a process started by Isolate.
const isolated = "VNICD_TEST_NETNS"

// Isolate runs the test binary again in its own network namespace and returns its exit status; in that process it
// returns false. It is for TestMain of packages whose code under test creates interfaces on its own goroutines, which
// Do cannot reach.
func Isolate() (status int, done bool) {
	if os.Getenv(isolated) != "" || os.Geteuid() != 0 { // without root New reports what is missing
		return 0, false
	}
	c := exec.Command(os.Args[0], os.Args[1:]...)
	c.Env = append(os.Environ(), isolated+"=1")
	c.Stdin, c.Stdout, c.Stderr = os.Stdin, os.Stdout, os.Stderr
	c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	err := c.Run()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0, true
	case errors.As(err, &exit):
		return exit.ExitCode(), true
	}
	fmt.Fprintln(os.Stderr, "nstest:", err)
	return 1, true
}

// Own names the namespace that Isolate created, until the test ends.
func Own(tb testing.TB, hint string) *NS {
	tb.Helper()
	if os.Getenv(isolated) == "" {
		tb.Fatal("nstest.Own needs nstest.Isolate in TestMain, and root")
	}
	ns := &NS{tb: tb, Name: fmt.Sprintf("vnicd-%s-%d-%d", hint, os.Getpid(), serial.Add(1))}
	Run(tb, "ip", "netns", "attach", ns.Name, fmt.Sprint(os.Getpid()))
	tb.Cleanup(func() { Run(tb, "ip", "netns", "del", ns.Name) })
	ns.IP("link", "set", "lo", "up")
	return ns
}
