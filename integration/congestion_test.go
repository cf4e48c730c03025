package integration

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
	"github.com/vnicd/vnicd/lab/wirefault"
)

// TestCongestedRouter: programs of two hosts exchange large messages through a congested router that marks ECN-capable
// packets and drops others (MT-8, RFC 6040). Marks pass from the outer header to the receiving QP and return to the
// sending QP as CNPs (A17.9.3); nothing is lost. With `ecn: false` there are no marks, and lost packets are
// retransmitted.
func TestCongestedRouter(t *testing.T) {
	l, ctx := newLabWithoutModule(t)
	program := filepath.Join(l.Dir, "pingpong")
	if out, err := exec.CommandContext(ctx, "go", "build", "-o", program,
		"../guestdrv/examples/pingpong").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	w := wiredHosts(t, l)
	hosts := []*lab.Host{w.a, w.b}
	dumpOnFailure(t, hosts, &w.vms)
	app := func(i int, more ...string) []string {
		return append([]string{program, "-socket", hosts[i].Dir + "/app.hca", "-address", fmt.Sprintf("10.0.0.%d", i+1),
			"-size", "1000000", "-n", "20", "-timeout", "5m"}, more...)
	}
	for _, ecn := range []bool{true, false} {
		t.Run(fmt.Sprintf("ecn=%t", ecn), func(t *testing.T) {
			for i, h := range hosts {
				text := hostConfig(fmt.Sprintf("192.0.2.%d", i+1), fmt.Sprintf("192.0.2.%d", 2-i)) +
					fmt.Sprintf("applications:\n  - {name: app, network: blue, mac: \"02:00:00:00:00:a%d\", ips: [10.0.0.%d]}\necn: %t\n", i+1, i+1, ecn)
				check(t, h.Run(ctx, text))
			}
			server := must[*harness.Process](t)(w.b.NS.Start(filepath.Join(w.b.Dir, "app.log"), nil, app(1)...))
			t.Cleanup(server.Kill)
			eventually(ctx, t, "the program listens", func() bool {
				out, err := w.b.NS.Run(ctx, "ss", "-ltnH", "sport", "=", "18515")
				return err == nil && out != ""
			})
			marked, dropped := w.wire.Marked.Load(), w.wire.Dropped.Load()
			w.wire.SetPolicy(wirefault.Policy{Congest: 20, Seed: 1})
			defer w.wire.SetPolicy(wirefault.Policy{})
			out, err := w.a.NS.Run(ctx, app(0, "192.0.2.2")...)
			if serr := server.Wait(ctx); err != nil || serr != nil {
				t.Fatalf("%v\n%s\n%v\n%s", err, out, serr, server.LogTail())
			}
			marked, dropped = w.wire.Marked.Load()-marked, w.wire.Dropped.Load()-dropped
			sum := map[string]uint64{}
			for _, h := range hosts {
				for name, n := range hcaStatus(ctx, t, h, "app").Stats {
					sum[name] += n
				}
			}
			t.Logf("%d marked, %d dropped; %v\n%s", marked, dropped, sum, out)
			seen, sent, heeded := sum["np_ecn_marked_roce_packets"], sum["np_cnp_sent"], sum["rp_cnp_handled"]
			switch {
			case ecn && (marked == 0 || dropped != 0 || sum["selective_acks_sent"]+sum["tx_naks"] != 0):
				t.Error("want packets marked and none lost")
			case ecn && (seen > marked || seen < marked/2 || heeded > sent || heeded < sent/2 || heeded == 0):
				t.Errorf("%d packets marked, %d received with a mark, %d CNPs sent, %d handled", marked, seen, sent, heeded)
			case !ecn && (dropped == 0 || sum["retransmits"] < dropped/2 || marked+seen+sent != 0):
				t.Error("want packets lost and retransmitted, and none marked")
			}
			for _, h := range hosts {
				check(t, h.Stop(ctx))
			}
		})
	}
}
