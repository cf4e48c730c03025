package harness

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/vnicd/vnicd/hypervisor/qemu"
)

// The values of RELEASE whose guests run a debugging kernel (vm-images/kernel).
const (
	Debug = "trixie-debug" // KASAN, lockdep, kmemleak, UBSAN, DEBUG_OBJECTS, fault injection
	KCSAN = "trixie-kcsan" // KCSAN
)

// Debugging reports whether the guests of this process run such a kernel.
func Debugging() bool {
	r := os.Getenv("RELEASE")
	return r == Debug || r == KCSAN
}

// Patience returns the limit for an operation that ends within d in guests with Debian's kernel. The checks of the
// debugging kernels make guests several times slower.
func Patience(d time.Duration) time.Duration {
	if Debugging() {
		return 5 * d
	}
	return d
}

// MemoryMiB returns the RAM of a guest that needs mib with Debian's kernel. KASAN's shadow takes an eighth of it, its
// red zones and quarantine and kmemleak's records more.
func MemoryMiB(mib int) int {
	if Debugging() {
		return mib + mib/4 + 384
	}
	return mib
}

// CPUs returns the number of a guest's processors. KCSAN finds races between two; one only races with its interrupts.
func CPUs(n int) int {
	if os.Getenv("RELEASE") == KCSAN {
		return max(n, 2)
	}
	return n
}

// KernelArgs are the words for the kernel command line of every guest. On a busy machine a guest may stand still for
// longer than its kernel's watchdogs allow.
func KernelArgs() []string {
	args := []string{"rcupdate.rcu_cpu_stall_timeout=300", "watchdog_thresh=60"}
	if Debugging() {
		args = append(args, "sysctl.kernel.hung_task_timeout_secs=600", "workqueue.watchdog_thresh=300")
	}
	if os.Getenv("RELEASE") == Debug {
		args = append(args, "kasan_multi_shot") // by default KASAN falls silent after its first report
	}
	return args
}

// lastChecks asks lockdep whether it still works, and kmemleak for memory that nothing refers to. kmemleak reports
// what two scans in a row find, and nothing younger than five seconds.
const lastChecks = `set -e
if [ -e /proc/lockdep_stats ] && ! grep -q 'debug_locks: *1$' /proc/lockdep_stats; then
	echo "lockdep is turned off"
fi
leaks=/sys/kernel/debug/kmemleak
if [ -e $leaks ]; then
	sleep 6
	echo scan >$leaks
	echo scan >$leaks
	cat $leaks
fi`

// LastComplaints returns what the checks of a debugging kernel report only when they are asked. It is for the end of a
// VM, because a scan for leaks takes long.
func LastComplaints(ctx context.Context, m *qemu.Machine) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, Patience(3*time.Minute))
	defer cancel()
	out, err := m.Run(ctx, lastChecks)
	if err != nil {
		return nil, fmt.Errorf("asking the kernel's checks: %w", err)
	}
	if out = strings.TrimSpace(out); out == "" {
		return nil, nil
	}
	return strings.Split(out, "\n"), nil
}
