package cli

import (
	"fmt"
	"io"
	"time"

	"github.com/vnicd/vnicd/hypervisor/hostdriver"
)

// showMemory prints the host level of the VM's page faults.
func showMemory(w io.Writer, m *hostdriver.Status) {
	fmt.Fprintf(w, "memory %s resident", mib(m.Resident))
	if m.Budget != 0 {
		fmt.Fprintf(w, " of %s", mib(m.Budget))
	}
	if m.Target != 0 {
		fmt.Fprintf(w, ", may keep %s while the host is short of memory", mib(m.Target))
	}
	fmt.Fprintf(w, ", %s held, %s inactive", mib(m.Held), mib(m.Inactive))
	if m.HugeTLB != 0 {
		fmt.Fprintf(w, ", %s in huge pages", mib(m.HugeTLB))
	}
	if m.Mapped != 0 {
		fmt.Fprintf(w, "; shares %s", mib(m.Mapped))
		if m.Shared != 0 {
			fmt.Fprintf(w, " of %s", mib(m.Shared))
		}
	}
	fmt.Fprintf(w, "\n    host faults %d, failed %d, served within %v (half), %v (99%%), %v (all)\n", m.HostFaults,
		m.FailedFaults, m.FaultTime.Quantile(0.5), m.FaultTime.Quantile(0.99), m.FaultTime.Max)
	fmt.Fprintf(w, "    evictions %d, second chances %d of %d, taken by balloon or unplug %d, longest drain %v\n",
		m.Evictions, m.Refaults, m.Withdrawals, m.Discarded, m.LongestDrain)
	if m.Delayed != 0 {
		fmt.Fprintf(w, "    memory was short for %d faults", m.Delayed)
		if m.Short != 0 {
			fmt.Fprintf(w, "; %d WAIT FOR MEMORY, the oldest for %v: %s", m.Short, m.ShortFor.Round(time.Millisecond),
				m.ShortReason)
		}
		fmt.Fprintln(w)
	}
	if m.Unlocked != "" {
		fmt.Fprintf(w, "    NOT LOCKED: an engine stalls on memory that the host swaps out: %s\n", m.Unlocked)
	}
}

// showHost prints the state of the host's memory.
func showHost(w io.Writer, m *hostdriver.HostStatus) {
	fmt.Fprintf(w, "host memory %s (%s): %s of %s free, %s with swapping, tasks waited %.0f%% of the time", m.Level, m.Zone,
		mib(m.Free), mib(m.Total), mib(m.Reserve), 100*m.Stalled)
	if m.Target != 0 {
		fmt.Fprintf(w, "; VMs may keep %s", mib(m.Target))
	}
	fmt.Fprintln(w)
	if m.Full != "" {
		fmt.Fprintf(w, "    FULL: operations that need new memory wait: %s\n", m.Full)
	}
}

func mib(n uint64) string { return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20)) }
