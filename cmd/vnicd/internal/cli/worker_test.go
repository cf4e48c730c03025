package cli

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/vnicd/vnicd/device/testutil"
)

// parent returns the parent of a process; 0: there is no such process.
func parent(pid int) int {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	n, _ := strconv.Atoi(fields[1])
	return n
}

// bgpProcess returns the process that runs a daemon's BGP.
func bgpProcess(t *testing.T, d *daemonProcess) int {
	return process(t, "bgp", func(pid int) bool { return parent(parent(pid)) == d.cmd.Process.Pid })
}

// spawnerProcess returns the process that starts a daemon's workers.
func spawnerProcess(t *testing.T, daemon int) int {
	return process(t, "spawner", func(pid int) bool { return parent(pid) == daemon })
}

// process finds a worker.
func process(t *testing.T, kind string, is func(pid int) bool) (pid int) {
	t.Helper()
	testutil.Eventually(t, "the process "+kind, func() bool {
		lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range lines {
			b, _ := os.ReadFile(l) // it may have ended
			n, err := strconv.Atoi(filepath.Base(filepath.Dir(l)))
			if err == nil && bytes.HasPrefix(b, []byte("vnicd\x00worker\x00"+kind+"\x00")) && is(n) {
				pid = n
				return true
			}
		}
		return false
	})
	return pid
}
