package cli

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vnicd/vnicd/guestdrv"
)

// TestReload changes everything in the file that a running daemon can reload, and things it must refuse, which must
// leave it unchanged. An attached VM stays attached throughout.
func TestReload(t *testing.T) {
	l := newLab(t)
	before, err := os.ReadFile(l.config)
	if err != nil {
		t.Fatal(err)
	}
	head, _, _ := strings.Cut(string(before), "networks:")
	guest, err := guestdrv.Open(context.Background(), filepath.Join(l.dir, "one.hca"), guestdrv.Config{Memory: 8 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer guest.Close()
	l.ok("vm add extra network blue mac 02:00:00:00:00:77") // added at run time: stays

	const blue, one = "networks:\n  - {name: blue, vni: 100, peers: [192.0.2.2]}\n",
		"vms:\n  - {name: one, network: blue, mac: \"02:00:00:00:00:01\", ips: [10.0.0.1]}\n"
	const two = "  - {name: two, network: blue, mac: \"02:00:00:00:00:02\"}\n"
	for _, step := range []struct {
		name, head, body string
		want             string // the output, one change per line; if refused: the error
		fails            bool
		show, says       string // "-" in front: must not contain
	}{
		{"nothing", head, blue + one, "", false, "vm", "extra"},
		{"a mistake", head, "networks: 3\n", "networks must be a list", true, "vm", "one "},
		{"fixed keys", head + "engines: 2\nbuffers: 300\n", blue + one,
			"`buffers` cannot change while vnicd runs; `engines` cannot change", true, "vm", "one "},
		{"another vni", head, strings.Replace(blue, "100", "101", 1) + one + two,
			`network "blue" can change its peers and its tap`, true, "vm", "-two "},
		{"an attached VM", head, blue + strings.Replace(one, "00:01", "00:09", 1),
			`VM "one" is attached; only its network, dma, memory-budget and memory-weight can`, true, "vm", "00:01"},
		{"an attached VM's dma", head, blue + strings.Replace(one, "}", ", dma: ro}", 1), "VM one dma ro", false, "vm",
			"dma ro"},
		{"and back", head, blue + one, "VM one dma rw", false, "vm", "-dma"},
		{"its memory", head, blue + strings.Replace(one, "}", ", memory-budget: 64MiB, memory-weight: 200}", 1),
			"VM one memory-budget 64MiB, memory-weight 200", false, "status one", "resident of 64.0 MiB"},
		{"and back", head, blue + one, "VM one memory-budget none, memory-weight 100", false, "status one", "-resident of"},
		{"a log level", head + "log-level: warn\n", blue + one, "log level warn", false, "", ""},
		{"and back", head, blue + one, "log level info", false, "", ""},
		{"a VM", head, blue + one + two, "VM two added", false, "vm", "two "},
		{"a VM changed", head, blue + one + strings.Replace(two, "00:02", "00:22", 1),
			"VM two removed to be changed\nVM two added as changed", false, "vm", "00:22"},
		{"peers", head, strings.Replace(blue, "192.0.2.2", "192.0.2.3, 192.0.2.4", 1) + one,
			"VM two removed\npeer 192.0.2.3 of network blue added\npeer 192.0.2.4 of network blue added\npeer 192.0.2.2 of network blue removed", false, "network show blue", "-192.0.2.2"},
		{"learning", head, strings.Replace(blue, "peers: [192.0.2.2]", "peers: [192.0.2.3], learn-peers: true", 1) + one,
			"peer 192.0.2.4 of network blue removed\nnetwork blue learns peers: true", false, "network show blue",
			"192.0.2.3 static"},
		{"a host port", head, strings.Replace(blue, "}\n", ", tap: {name: op0, addresses: [10.0.0.254/24]}}\n", 1) + one,
			"host port op0 added\npeer 192.0.2.2 of network blue added\npeer 192.0.2.3 of network blue removed\nnetwork blue learns peers: false", false, "port show blue", "op0"},
		{"another network", head, blue + "  - {name: red, vni: 200}\n" + strings.Replace(one, "blue", "red", 1),
			"network red added\nVM one moved to network red\nhost port op0 removed", false, "vm", "one    network red"},
		{"a network with a VM", head, "networks:\n  - {name: red, vni: 200}\n" + strings.Replace(one, "blue", "red", 1),
			`network blue removed: conflict: network "blue" has VMs: extra`, true, "network", "blue"},
		{"and back", head, blue + one, "VM one moved to network blue\nnetwork red removed", false, "network", "-red"},
	} {
		if err := os.WriteFile(l.config, []byte(step.head+step.body), 0o600); err != nil {
			t.Fatal(err)
		}
		status, out, errText := l.run("reload")
		if step.fails != (status != 0) {
			t.Fatalf("%s: status %d: %s%s", step.name, status, out, errText)
		}
		if step.fails && !strings.Contains(errText, step.want) || !step.fails && strings.TrimSpace(out) != step.want {
			t.Errorf("%s: %q, %q; want %q", step.name, out, errText, step.want)
		}
		if step.show != "" {
			// The file may have mistakes, so name the socket.
			status, shown, errText := l.run(step.show + " --control " + filepath.Join(l.dir, "vnicd.sock"))
			says, not := strings.CutPrefix(step.says, "-")
			if status != 0 || strings.Contains(shown, says) == not {
				t.Errorf("%s: vnicd %s: want %q in\n%s%s", step.name, step.show, step.says, shown, errText)
			}
		}
		if _, err := guest.Port(context.Background()); err != nil {
			t.Fatalf("%s: the attached VM lost its device: %v", step.name, err)
		}
	}
	if _, err := net.Dial("unix", filepath.Join(l.dir, "two.hca")); err == nil {
		t.Error("a removed VM's socket still accepts connections")
	}
}
