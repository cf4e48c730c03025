package lab

import (
	"context"
	"fmt"
	"time"

	"github.com/vnicd/vnicd/hypervisor/qemu"
)

// StressPort is odpstress's TCP port.
const StressPort = 18600

// InstallPrograms copies the programs of integration/guest to where memory pressure
// does not mean reading them over 9p again and again. Lab.Programs puts them into Share.
func InstallPrograms(ctx context.Context, m *qemu.Machine) error {
	_, err := m.Run(ctx, "cp /host/odpstress /usr/bin/")
	return err
}

// StressCommand is the command line of odpstress at one end; to is "" for the server.
func StressCommand(e End, opts, to string) string {
	return fmt.Sprintf("odpstress -d %s -x %d %s %s", e.Device, e.GID, opts, to)
}

// Stress runs odpstress for d between two ends; each has options of its own (see its
// README: what is done is the client's say, memory and chaos each side's). To go on until
// all of a large region was seen (-C) it may take many times d. It returns what both
// printed. A status other than 0 is an error that says what was wrong.
func Stress(ctx context.Context, d time.Duration, client End, clientOpts string, server End, serverOpts string) (string,
	error) {
	sout, cout, err := PairFor(ctx, 20*d+10*time.Minute, server.VM, StressCommand(server, serverOpts, ""),
		client.VM, StressCommand(client, fmt.Sprintf("-t %d %s", int(d.Seconds()), clientOpts), server.Addr), StressPort)
	return sout + cout, err
}
