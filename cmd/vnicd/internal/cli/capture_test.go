package cli

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/testutil/nstest"
	"github.com/vnicd/vnicd/device/testutil/testlog"
)

// tshark returns the fields of every packet that matches a filter.
func tshark(t *testing.T, file, filter string, fields ...string) []string {
	t.Helper()
	args := []string{"-r", file, "-Y", filter, "-T", "fields", "-E", "separator=,", "-E", "aggregator=|"}
	for _, f := range fields {
		args = append(args, "-e", f)
	}
	out, err := exec.Command("tshark", args...).Output()
	if err != nil {
		t.Fatalf("tshark %v: %v", args, err)
	}
	return strings.Fields(string(out))
}

// A capture of a host port and of the VTEP has both directions, and ends after the given number of packets or at an
// interrupt.
func TestCapture(t *testing.T) {
	nstest.Require(t, "tshark", "tshark")
	l := newLab(t)
	l.far.Addr("under", "192.0.2.2/24")
	l.far.NoOffload("under")
	l.far.IP("link", "add", "vx", "type", "vxlan", "id", "100", "dstport", "4789", "local", "192.0.2.2", "remote",
		"192.0.2.1", "dev", "under")
	l.far.IP("link", "set", "vx", "address", "02:00:00:00:00:77", "up")
	l.far.Addr("vx", "10.0.0.2/24")
	l.ok("network add-tap blue blue0 address 10.0.0.3/24")
	l.ns.Ping("10.0.0.2")

	begin := func(ctx context.Context, args ...string) (wait func() string) {
		var out testlog.Log
		done := make(chan int)
		a := &app{out: &out, err: &out}
		go func() {
			if ctx == nil {
				done <- Main("test", append([]string{"-c", l.config}, args...), &out, &out)
				return
			}
			if err := a.capture(ctx, daemon.NewClient(filepath.Join(l.dir, "vnicd.sock")), daemon.CaptureOptions{Port: args[0]},
				&out); err != nil {
				done <- 1
				return
			}
			done <- 0
		}()
		testutil.Eventually(t, "the capture runs", func() bool { return strings.Contains(out.String(), "capturing") })
		return func() string {
			select {
			case status := <-done:
				if status != 0 {
					t.Errorf("capture %v: status %d: %s", args, status, out.String())
				}
			case <-time.After(30 * time.Second):
				t.Fatalf("capture %v did not end", args)
			}
			return out.String()
		}
	}
	inner, outer := filepath.Join(l.dir, "inner.pcapng"), filepath.Join(l.dir, "outer.pcapng")
	waitInner := begin(nil, "capture", "blue0", "-w", inner, "-n", "8")
	waitOuter := begin(nil, "capture", "vtep", "-w", outer, "-n", "8", "-s", "100")
	if status, _, err := l.run("capture blue0 -w /dev/null"); status != 1 || !strings.Contains(err, "captured already") {
		t.Errorf("a second capture of a port: %d %s", status, err)
	}
	l.ns.Ping("10.0.0.2", "-s", "500")
	for _, wait := range []func() string{waitInner, waitOuter} {
		if out := wait(); !strings.Contains(out, "8 packets, 0 dropped") {
			t.Errorf("%s", out)
		}
	}
	seen := map[string]bool{}
	for _, x := range tshark(t, inner, "icmp && frame.len > 500", "frame.interface_name", "eth.addr",
		"frame.packet_flags_direction", "icmp.type") {
		seen[x] = true
	}
	var out, in bool
	for x := range seen {
		out = out || strings.HasPrefix(x, "blue0,02:00:00:00:00:77|") && strings.HasSuffix(x, ",0x00000002,8")
		in = in || strings.HasPrefix(x, "blue0,") && strings.HasSuffix(x, "|02:00:00:00:00:77,0x00000001,0")
	}
	if !out || !in {
		t.Errorf("at the host port: %v", seen)
	}
	dirs := map[string]int{}
	for _, x := range tshark(t, outer, "vxlan.vni == 100 && icmp", "ip.src", "udp.dstport", "frame.cap_len") {
		dirs[x]++
	}
	if dirs["192.0.2.1|10.0.0.3,4789,100"] == 0 || dirs["192.0.2.2|10.0.0.2,4789,100"] == 0 {
		t.Errorf("at the VTEP: %v", dirs)
	}

	ctx, cancel := context.WithCancel(context.Background())
	wait := begin(ctx, "blue0")
	l.ns.Ping("10.0.0.2")
	cancel()
	if out := wait(); !strings.Contains(out, " packets, 0 dropped") || strings.Contains(out, "\n0 packets") {
		t.Errorf("interrupted: %q", out)
	}
	for args, want := range map[string]string{
		"capture none -w -":                   `no port "none"; there are: vtep, `,
		"capture blue0":                       "-w FILE is missing",
		"capture blue0 --network red -w -":    `no port "blue0"`,
		"capture blue0 -s 100000 -w -":        "snaplen must be 1 to 65535",
		"capture blue0 -w /nowhere/at/all.ng": "no such file",
	} {
		if status, _, err := l.run(args); status == 0 || !strings.Contains(err, want) {
			t.Errorf("%s: %d %s, want %q", args, status, err, want)
		}
	}
	if left := l.ok("port show blue"); !strings.Contains(left, "blue0") {
		t.Error(fmt.Sprint("port is gone: ", left))
	}
}
