package cli

import (
	"fmt"
	"io"

	"github.com/vnicd/vnicd/hypervisor/hostdriver"
)

// showMemory prints the host level of the VM's page faults.
func showMemory(w io.Writer, m *hostdriver.Status) {
	fmt.Fprintf(w, "memory %s resident", mib(m.Resident))
	if m.Budget != 0 {
		fmt.Fprintf(w, " of %s", mib(m.Budget))
	}
	fmt.Fprintf(w, ", %s held, %s inactive", mib(m.Held), mib(m.Inactive))
	if m.HugeTLB != 0 {
		fmt.Fprintf(w, ", %s in huge pages", mib(m.HugeTLB))
	}
	fmt.Fprintf(w, "\n    host faults %d, failed %d, served within %v (half), %v (99%%), %v (all)\n", m.HostFaults,
		m.FailedFaults, m.FaultTime.Quantile(0.5), m.FaultTime.Quantile(0.99), m.FaultTime.Max)
	fmt.Fprintf(w, "    evictions %d, second chances %d of %d, taken by balloon or unplug %d, longest drain %v\n",
		m.Evictions, m.Refaults, m.Withdrawals, m.Discarded, m.LongestDrain)
	if m.Unlocked != "" {
		fmt.Fprintf(w, "    NOT LOCKED: an engine stalls on memory that the host swaps out: %s\n", m.Unlocked)
	}
}

func mib(n uint64) string { return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20)) }
