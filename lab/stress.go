package lab

import (
	"context"
	"fmt"
	"time"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab/harness"
)

// StressPort is odpstress's TCP port.
const StressPort = 18600

// InstallPrograms copies the programs of integration/guest into the guest's file system; under memory pressure the
// guest would read them over 9p again and again. Lab.Programs puts them into Share.
func InstallPrograms(ctx context.Context, m *qemu.Machine) error {
	_, err := m.Run(ctx, "cp /host/odpstress /usr/bin/")
	return err
}

// StressCommand returns odpstress's command line for one end; to is "" for the server.
func StressCommand(e End, opts, to string) string {
	return fmt.Sprintf("odpstress -d %s -x %d -H %d %s %s", e.Device, e.GID, int(harness.Patience(time.Minute).Seconds()),
		opts, to)
}

// Stress runs odpstress for d between two ends with options for each (see its README: the client's options choose the
// operations, each side's its memory and what its owner does). With -C it runs until all of a large region was seen,
// which may take many times d. It returns both outputs. A non-zero status is an error that says what was wrong.
func Stress(ctx context.Context, d time.Duration, client End, clientOpts string, server End, serverOpts string) (string,
	error) {
	sout, cout, err := PairFor(ctx, 20*d+10*time.Minute, server.VM, StressCommand(server, serverOpts, ""),
		client.VM, StressCommand(client, fmt.Sprintf("-t %d %s", int(d.Seconds()), clientOpts), server.Addr), StressPort)
	return sout + cout, err
}
