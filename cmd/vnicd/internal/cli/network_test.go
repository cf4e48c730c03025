package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/worker"
	"github.com/vnicd/vnicd/device/testutil/nstest"
)

func TestMain(m *testing.M) {
	if status, is := worker.Main(workers, os.Args[1:]); is {
		os.Exit(status)
	}
	if os.Getenv(noCapset) != "" {
		withoutCapset(os.Args[1:])
	}
	if os.Getenv(asVNICD) != "" {
		os.Exit(Main("test", os.Args[1:], os.Stdout, os.Stderr))
	}
	if status, done := nstest.Isolate(); done {
		os.Exit(status)
	}
	os.Exit(m.Run())
}

// lab is a running daemon in a namespace, and its command line.
type lab struct {
	t      *testing.T
	ns     *nstest.NS
	far    *nstest.NS // the other end of the underlay
	dir    string
	config string
}

func newLab(t *testing.T) *lab {
	t.Helper()
	l := &lab{t: t, ns: nstest.Own(t, "cli"), dir: t.TempDir()}
	l.far = nstest.New(t, "far")
	nstest.Pair(l.ns, l.far, "under", 1500)
	l.ns.Addr("under", "192.0.2.1/24")
	l.config = filepath.Join(l.dir, "vnicd.yaml")
	text := fmt.Sprintf(`control-group: root
run-dir: %s
vtep: {local: 192.0.2.1}
networks:
  - {name: blue, vni: 100, peers: [192.0.2.2]}
vms:
  - {name: one, network: blue, mac: "02:00:00:00:00:01", ips: [10.0.0.1]}
`, l.dir)
	if err := os.WriteFile(l.config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg, err := config.Load(l.config)
	if err != nil {
		t.Fatal(err)
	}
	d, err := daemon.Start(cfg, "test", hclog.NewNullLogger())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
		if left, _ := filepath.Glob(filepath.Join(l.dir, "*.net")); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	})
	return l
}

// run runs a command line, words separated by blanks.
func (l *lab) run(line string) (status int, out, err string) {
	var o, e bytes.Buffer
	status = Main("test", append([]string{"-c", l.config}, strings.Fields(line)...), &o, &e)
	return status, o.String(), e.String()
}

func (l *lab) ok(line string) string {
	l.t.Helper()
	status, out, err := l.run(line)
	if status != 0 {
		l.t.Fatalf("vnicd %s: status %d: %s", line, status, err)
	}
	return out
}

// TestRuntimeChanges makes every change that a running daemon accepts, and changes that it must refuse. A refusal must
// leave the daemon unchanged.
func TestRuntimeChanges(t *testing.T) {
	l := newLab(t)
	// The part of the state that does not change by itself.
	state := func() (s string) {
		for _, line := range []string{"network", "vm", "port", "fdb", "neigh"} {
			for _, x := range strings.Split(l.ok(line), "\n") {
				if strings.Contains(x, "peer ") {
					x, _, _ = strings.Cut(x, " mtu ") // follows the underlay
				}
				if !strings.Contains(x, "learnt ") && !strings.Contains(x, " rx ") && !strings.Contains(x, "snooped") &&
					!strings.Contains(x, " addresses ") {
					s += strings.Join(strings.Fields(x), " ") + "\n"
				}
			}
		}
		return s
	}
	for _, step := range []struct {
		line string
		want string // if refused: the error
		show string // a command, whose
		says string // output contains this; "-" in front: does not
	}{
		{"network add red vni 200 mtu 1400 peer 192.0.2.3 peer 192.0.2.4", "", "network show red", "red: vni 200 mtu 1400"},
		{"", "", "network show red", "peer 192.0.2.4 static"},
		{"network add red vni 201", `network name "red" is already used in an earlier request`, "", ""},
		{"network add green vni 100", "vni 100 is already used by the network in " + l.config + ":5", "", ""},
		{"network add green vni 300 mtu 1480", "larger than the underlay carries", "", ""},
		{"network add green vni 300 peer 192.0.2.1", "is this host itself", "", ""},
		{"network add green vni 300 mtu lots", `mtu must be a number`, "", ""},
		{"network add green", `"vni" is missing`, "", ""},
		{"network add green vni 300 colour green", `unknown word "colour"; known: ageing, learn-peers`, "", ""},
		{"network add-peer red 192.0.2.5", "", "network show red", "peer 192.0.2.5"},
		{"network add-peer red 192.0.2.1", "is this host itself", "", ""},
		{"network add-peer red 2001:db8::1", "different families", "", ""},
		{"network add-peer none 192.0.2.5", `no network "none"; there are: blue, red`, "", ""},
		{"network del-peer red 192.0.2.5", "", "network show red", "-192.0.2.5"},
		{"network del-peer red 192.0.2.5", "no such peer was added at run time", "", ""},
		{"network del-peer red 192.0.2.3", "no such peer was added at run time", "", ""},
		{"network add-tap red red0 address 10.0.0.254/24 offloads maybe", "tap offloads must be true or false", "", ""},
		{"network add-tap red red0 address 10.0.0.254/24 rate 1G offloads off", "", "port show red",
			"red0: network red kind tap"},
		{"network add-tap red red1", `has the host port "red0"`, "", ""},
		{"network add-tap blue red0", `tap name "red0" is already used`, "", ""},
		{"network add-tap blue blue0 bridge nowhere", "nowhere", "", ""},
		{"fdb add 02:00:00:00:00:99 network red port red0", "", "fdb show red", "port red0"},
		{"fdb add 02:00:00:00:00:99 network red vtep 192.0.2.3", "", "fdb show red", "vtep 192.0.2.3  api"},
		{"fdb add 02:00:00:00:00:99 network red vtep 192.0.2.77", "not a peer of the network", "", ""},
		{"fdb add 02:00:00:00:00:99 network red port none", "no such port in the network", "", ""},
		{"fdb add 02:00:00:00:00:99 network red", "must be behind a VTEP or at a port", "", ""},
		{"fdb add 02:00:00:00:00:99 network red vtep nonsense", "the body is wrong", "", ""},
		{"fdb add 03:00:00:00:00:99 network red port red0", "is not the address of a host", "", ""},
		{"fdb add 02:00:00:00:00:99 network red port red0 vlan 7", "", "fdb show red", "vlan 7"},
		{"fdb add 02:00:00:00:00:99 network red port red0 vlan 4095", "vlan must be 1 to 4094", "", ""},
		{"fdb del 02:00:00:00:00:99 network red vlan 7", "", "fdb show red", "-vlan 7"},
		{"fdb del 02:00:00:00:00:99 network red", "", "fdb show red", "-00:99"},
		{"fdb del 02:00:00:00:00:99 network red", "no such mac was added", "", ""},
		{"fdb add 02:00:00:00:00:01 network blue vtep 192.0.2.2", "in use by another port", "", ""},
		{"fdb del 02:00:00:00:00:01 network blue", "no such mac was added", "", ""},
		{"neigh add 10.0.0.9 network blue mac 02:00:00:00:00:09", "", "neigh show blue", "10.0.0.9"},
		{"neigh add 10.0.0.1 network blue mac 02:00:00:00:00:09", "belongs to another MAC", "neigh", "10.0.0.1"},
		{"neigh del 10.0.0.9 network blue", "", "neigh", "-10.0.0.9"},
		{"vm add two network red mac 02:00:00:00:00:01 ip 10.0.0.1 rate 1G", "", "vm",
			"two  network red   mac 02:00:00:00:00:01"},
		{"vm add two network red mac 02:00:00:00:00:02", `VM name "two" is already used in an earlier request`, "", ""},
		{"vm add three network red mac 02:00:00:00:00:01", "mac 02:00:00:00:00:01 is already used", "", ""},
		{"vm add three network none mac 02:00:00:00:00:03", `network "none", which is not defined; defined: blue, red`, "",
			""},
		{"vm add three network red mac 02:00:00:00:00:03 user nobody-at-all", "user must be a user of this host", "", ""},
		{"vm add three network red mac 02:00:00:00:00:03 rate fast", "rate must be bits per second", "", ""},
		{"vm add three network red mac 02:00:00:00:00:03 queues 9", "queues must be a number from 1 to 8", "", ""},
		{"vm add three network red mac 02:00:00:00:00:03 queues 4", "", "port show red", "three: network red kind vm"},
		{"network del red", `network "red" has VMs: two, three`, "", ""},
		{"vm move two network blue", "mac 02:00:00:00:00:01 is already used", "", ""},
		{"vm move three network blue", "", "port show blue", "three: network blue"},
		{"vm move three network none", `no network "none"`, "", ""},
		{"vm move four network blue", `no VM "four"; there are: one, two, three`, "", ""},
		{"", "", "port show red", "-three"},
		{"vm quarantine three", "", "vm", "net down  hca down dma blocked"},
		{"vm quarantine three", "", "status three", "dma blocked, refused 0 reads, 0 writes"},
		{"vm quarantine three --read-only", "", "status", "dma ro"},
		{"vm quarantine four", `no VM "four"; there are: one, two, three`, "", ""},
		{"vm quarantine", "accepts 1 arg(s)", "", ""},
		{"vm release", "accepts 1 arg(s)", "", ""},
		{"vm release three", "", "vm", "-dma "},
		{"vm release four", `no VM "four"; there are: one, two, three`, "", ""},
		{"vm add four network red mac 02:00:00:00:00:04 dma none", `dma must be rw, ro or blocked, found "none"`, "", ""},
		{"vm add four network red mac 02:00:00:00:00:04 dma blocked", "", "vm", "dma blocked"},
		{"vm del four", "", "vm", "-dma "},
		{"", "", "qemu-args three", "three.net"},
		{"", "", "qemu-args three", "queues=4"},
		{"", "", "qemu-args three", "host_mtu=1450,rx_queue_size=1024,tx_queue_size=1024,mq=on,vectors=10"},
		{"vm add five network red mac 02:00:00:00:00:05 hca ivshmem", "", "qemu-args five", "ivshmem-doorbell,id=five-hca"},
		{"", "", "qemu-args five", "vectors=5,master=on"},
		{"vm del five", "", "vm", "-five"},
		{"vm del two", "", "vm", "-two  network"},
		{"vm del two", `no VM "two"`, "", ""},
		{"network del-tap red", "", "port show red", "-tap"},
		{"network del red", "", "network", "-red"},
		{"network del red", `no network "red"; there are: blue`, "", ""},
		{"vm del three", "", "vm", "-three  network"},
		{"vm del one", "", "vm", "-one  network"},
		{"network del blue", "", "port", "-blue"},
		{"network add blue vni 100 learn-peers", "", "network", "blue: vni 100 mtu 1450"},
		{"vm add one network blue mac 02:00:00:00:00:01", "", "vm", "one  network blue"},
	} {
		if step.line != "" {
			before := ""
			if step.want != "" {
				before = state()
			}
			status, _, err := l.run(step.line)
			if step.want == "" && status != 0 {
				t.Fatalf("vnicd %s: status %d: %s", step.line, status, err)
			}
			if step.want != "" && (status == 0 || !strings.Contains(err, step.want)) {
				t.Errorf("vnicd %s: status %d, says %q, want %q", step.line, status, err, step.want)
			}
			if step.want != "" && state() != before {
				t.Errorf("vnicd %s was refused, but changed:\n%s\ninto\n%s", step.line, before, state())
			}
		}
		if step.show != "" {
			out := l.ok(step.show)
			says, not := strings.CutPrefix(step.says, "-")
			if strings.Contains(out, says) == not {
				t.Errorf("after %q: vnicd %s: want %q in\n%s", step.line, step.show, step.says, out)
			}
		}
	}
	if _, err := os.Stat(filepath.Join(l.dir, "two.net")); !os.IsNotExist(err) {
		t.Errorf("a removed VM's socket: %v", err)
	}
	if _, err := net.Dial("unix", filepath.Join(l.dir, "one.hca")); err != nil {
		t.Errorf("an added VM's socket: %v", err)
	}
}

// Errors are JSON with the cause, and a status by their kind.
func TestAPIErrors(t *testing.T) {
	l := newLab(t)
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(context.Context, string, string) (net.Conn, error) {
			return net.Dial("unix", filepath.Join(l.dir, "vnicd.sock"))
		}}}
	for _, c := range []struct {
		method, url, body string
		status            int
		want              string
	}{
		{"GET", "/v2/status", "", 404, "no GET /v2/status"},
		{"PATCH", "/v1/networks", "", 404, "no PATCH"},
		{"POST", "/v1/networks", "{", 400, "not YAML"},
		{"POST", "/v1/networks", "", 400, "the body is empty"},
		{"POST", "/v1/networks", `{"name":"x","vni":1,"colour":1}`, 400, `unknown key "colour"`},
		{"POST", "/v1/networks", `{"name":"x","vni":0}`, 400, "vni must be a number"},
		{"POST", "/v1/networks", `[` + strings.Repeat(" ", 2<<20) + `]`, 400, "too large"},
		{"POST", "/v1/vms", `{"name":"../x","network":"blue","mac":"02:00:00:00:00:07"}`, 400, "must be 1 to 32 letters"},
		{"DELETE", "/v1/vms/none", "", 404, `no VM "none"`},
		{"DELETE", "/v1/networks/blue", "", 409, "has VMs: one"},
		{"PUT", "/v1/networks/blue/fdb/nonsense", "{}", 400, "is not an Ethernet address"},
		{"PUT", "/v1/networks/blue/fdb/02:00:00:00:00:07", `{"colour":1}`, 400, "unknown field"},
		{"PUT", "/v1/networks/blue/neighbours/nonsense", "{}", 400, "unable to parse IP"},
		{"PUT", "/v1/networks/blue/peers/224.0.0.1", "", 400, "not the address of a host"},
		{"GET", "/v1/fdb?network=none", "", 404, `no network "none"`},
	} {
		req, err := http.NewRequest(c.method, "http://vnicd"+c.url, strings.NewReader(c.body))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := client.Do(req)
		if err != nil {
			t.Fatalf("%s %s: %v", c.method, c.url, err)
		}
		text, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		var e struct{ Error string }
		if err := json.Unmarshal(text, &e); err != nil || resp.StatusCode != c.status || !strings.Contains(e.Error, c.want) {
			t.Errorf("%s %s: %d %s, want %d with %q", c.method, c.url, resp.StatusCode, text, c.status, c.want)
		}
	}
	var st unix.Stat_t
	if err := unix.Stat(filepath.Join(l.dir, "vnicd.sock"), &st); err != nil || st.Mode&0o777 != 0o660 {
		t.Errorf("the control socket's mode is %o, %v", st.Mode, err)
	}
}
