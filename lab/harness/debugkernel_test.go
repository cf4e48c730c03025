package harness

import (
	"slices"
	"testing"
	"time"
)

// TestDebugKernel: only guests with a debugging kernel get more time, memory and processors.
func TestDebugKernel(t *testing.T) {
	for _, x := range []struct {
		release string
		slow    bool
		cpus    int
	}{{"", false, 1}, {"bookworm", false, 1}, {"trixie-backports", false, 1}, {Debug, true, 1}, {KCSAN, true, 2}} {
		t.Setenv("RELEASE", x.release)
		if got := Patience(time.Minute) > time.Minute; got != x.slow {
			t.Errorf("%q: Patience(1m) is %v", x.release, Patience(time.Minute))
		}
		if got := MemoryMiB(768) > 768; got != x.slow {
			t.Errorf("%q: MemoryMiB(768) is %d", x.release, MemoryMiB(768))
		}
		if got := CPUs(1); got != x.cpus {
			t.Errorf("%q: CPUs(1) is %d", x.release, got)
		}
		if got := slices.Contains(KernelArgs(), "sysctl.kernel.hung_task_timeout_secs=600"); got != x.slow {
			t.Errorf("%q: kernel arguments %q", x.release, KernelArgs())
		}
	}
	if CPUs(0) != 2 || CPUs(4) != 4 {
		t.Errorf("CPUs: %d for the default, %d for 4", CPUs(0), CPUs(4))
	}
}
