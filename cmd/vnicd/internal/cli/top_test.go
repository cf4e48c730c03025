package cli

import (
	"bytes"
	"strings"
	"testing"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/rdma/hca"
)

func TestTop(t *testing.T) {
	view := func(uptime float64, idle, busy uint64) *daemon.Status {
		s := &daemon.Status{Uptime: uptime, Networks: []vswitch.Status{{Name: "blue"}}}
		for _, v := range []struct {
			name string
			n    uint64
		}{{"idle", idle}, {"busy", busy}} {
			s.VMs = append(s.VMs, daemon.VMStatus{Name: v.name, HCA: hca.Status{
				Stats: map[string]uint64{"rx_bytes": v.n, "tx_bytes": 3 * v.n, "local_bytes": v.n, "guest_faults": v.n / 1000,
					"retransmits": v.n / 2000}, Drops: map[string]uint64{"icrc": v.n / 4000},
			}})
			s.Networks[0].Ports = append(s.Networks[0].Ports,
				vswitch.PortStatus{Name: v.name, Kind: "vm", Totals: vswitch.Totals{InBytes: 4 * v.n, OutBytes: 5 * v.n}})
		}
		// A tunnel with the VM's name is not the VM's port.
		s.Networks[0].Ports = append(s.Networks[0].Ports,
			vswitch.PortStatus{Name: "busy", Kind: "vtep", Totals: vswitch.Totals{InBytes: 1 << 50 * uint64(uptime)}})
		return s
	}
	var out bytes.Buffer
	showTop(&out, view(10, 77, 1000), view(12, 77, 8_001_000))
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if len(lines) != 4 {
		t.Fatalf("%s", out.String())
	}
	if got, want := strings.Join(strings.Fields(lines[2]), " "),
		"busy down down 0 4.0M 12M 20M 16M 4.0k 0 2.0k 1.0k 0.0 MiB"; strings.ReplaceAll(got, ".0",
		"") != strings.ReplaceAll(want, ".0", "") {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if !strings.HasPrefix(lines[3], "idle") {
		t.Errorf("the busiest VM is not first:\n%s", out.String())
	}
	// Counters that restarted count from 0.
	if l := loads(view(10, 500, 1000), view(1, 200, 3000)); l[1].VM.Name != "idle" || l[1].RDMAInBytes != 200 {
		t.Errorf("after a restart: %+v", l)
	}
	for v, want := range map[float64]string{0: "0", 1.25: "1.2", 42: "42", 999.4: "999", 999.6: "1.0", 1500: "1.5k",
		123456789: "123M", 5e12: "5T"} {
		if got := amount(v); strings.TrimSuffix(got, "k") != want && got != want {
			t.Errorf("amount(%v) = %s, want %s", v, got, want)
		}
	}
}

// top shows a running daemon, and ends.
func TestTopLive(t *testing.T) {
	l := newLab(t)
	if out := l.ok("top -d 100ms -n 2"); strings.Count(out, "\none ") != 2 || strings.Contains(out, clearScreen) {
		t.Errorf("got\n%s", out)
	}
	if status, _, err := l.run("top -d 1ms"); status != 2 || !strings.Contains(err, "--delay must be") {
		t.Errorf("status %d: %s", status, err)
	}
}
