package cluster

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// pty returns both ends of a new terminal.
func pty(t *testing.T) (ours, theirs *os.File) {
	t.Helper()
	ours, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ours.Close() })
	n, err := unix.IoctlGetInt(int(ours.Fd()), unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(int(ours.Fd()), unix.TIOCSPTLCK, 0)
	}
	if err == nil {
		theirs, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = theirs.Close() })
	return ours, theirs
}

// TestBackground: only a process in the background of its own terminal is in the background. This process plays those
// with a terminal of their own, too: the one that a shell is, in the foreground, and a job of it.
func TestBackground(t *testing.T) {
	const role = "VNICD_TEST_ROLE"
	again := func(as string, attr *syscall.SysProcAttr, stdin *os.File) *exec.Cmd {
		c := exec.Command(os.Args[0], "-test.run=^TestBackground$")
		c.Env, c.SysProcAttr, c.Stdin = append(os.Environ(), role+"="+as), attr, stdin
		return c
	}
	switch os.Getenv(role) {
	case "job":
		fmt.Println("job:", background(os.Stdin))
		return
	case "shell":
		fmt.Println("shell:", background(os.Stdin))
		out, err := again("job", &syscall.SysProcAttr{Setpgid: true}, os.Stdin).Output()
		fmt.Println(string(out), err)
		return
	}
	_, theirs := pty(t)
	if background(theirs) {
		t.Error("of a terminal that is not its own, this process is said to be in the background")
	}
	if null, err := os.Open(os.DevNull); err != nil || background(null) {
		t.Errorf("without a terminal: in the background, or %v", err)
	}
	out, err := again("shell", &syscall.SysProcAttr{Setsid: true, Setctty: true}, theirs).Output()
	if err != nil || !strings.Contains(string(out), "shell: false\n") || !strings.Contains(string(out), "job: true\n") {
		t.Errorf("%v, want \"shell: false\" and \"job: true\": %s", err, out)
	}
}
