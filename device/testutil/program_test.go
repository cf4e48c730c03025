package testutil

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// While a program is installed this process never has it open, which a process that it starts at that moment would
// inherit.
func TestInstallProgram(t *testing.T) {
	program := filepath.Join(t.TempDir(), "program")
	stop := make(chan struct{})
	looks := 0
	var looking sync.WaitGroup
	looking.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			open, _ := filepath.Glob("/proc/self/fd/*")
			for _, fd := range open {
				if file, _ := os.Readlink(fd); strings.HasPrefix(file, program) {
					t.Errorf("%s is open", file)
				}
			}
			looks++
		}
	})
	for range 5 {
		InstallProgram(t, os.Args[0], program) // takes milliseconds to copy
		if err := exec.Command(program, "-test.run=^$").Run(); err != nil {
			t.Error(err)
		}
	}
	close(stop)
	looking.Wait()
	if looks < 5 {
		t.Errorf("only looked %d times", looks)
	}
}
