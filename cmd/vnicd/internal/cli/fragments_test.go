package cli

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/device/testutil"
)

// fragment writes a fragment of the configuration; an empty text removes it.
func fragment(t *testing.T, main, name, text string) (path string) {
	t.Helper()
	path = filepath.Join(config.FragmentDir(main), name)
	err := os.Remove(path)
	if text != "" {
		if err = os.MkdirAll(filepath.Dir(path), 0o755); err == nil {
			err = os.WriteFile(path, []byte(text), 0o644)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// TestReloadFragments reloads a daemon whose fragments come, change and go, and have mistakes.
func TestReloadFragments(t *testing.T) {
	l := newLab(t)
	const vm = "vms:\n  - {name: NAME, network: blue, mac: \"02:00:00:00:00:MAC\"}\n"
	text := func(name, mac string) string { return strings.NewReplacer("NAME", name, "MAC", mac).Replace(vm) }
	reload := func(want string) {
		t.Helper()
		if got := strings.TrimSpace(l.ok("reload")); got != want {
			t.Errorf("reload: %q, want %q", got, want)
		}
	}
	refused := func(want string) {
		t.Helper()
		if status, out, errText := l.run("reload --control " + l.dir + "/vnicd.sock"); status != 1 ||
			!strings.Contains(errText, want) {
			t.Errorf("reload: status %d, %s%s, want %q", status, out, errText, want)
		}
	}
	two := fragment(t, l.config, "10-two.yaml", "log-level: warn\n"+text("two", "02"))
	reload("log level warn\nVM two added")
	fragment(t, l.config, "20-level.yaml", "log-level: error\n")
	reload("log level error")
	if got := l.ok("check"); got != l.config+": 1 networks, 2 VMs, 2 fragments in "+filepath.Dir(two)+"\n"+
		filepath.Dir(two)+"/20-level.yaml:1: log-level overrides "+two+":1\n" {
		t.Errorf("check: %s", got)
	}
	fragment(t, l.config, "10-two.yaml", "\n"+text("two", "22"))
	reload("VM two removed to be changed\nVM two added as changed")

	three := fragment(t, l.config, "30-three.yaml", text("three", "03")+text("four", "22")[5:])
	want := three + ":3: mac 02:00:00:00:00:22 is already used in network \"blue\" by the VM in " + two + ":3"
	refused(want)
	if status, _, errText := l.run("check"); status != exitUsage || errText != "vnicd: "+want+"\n" {
		t.Errorf("check: status %d, %s", status, errText)
	}
	if out := l.ok("vm --control " + l.dir + "/vnicd.sock"); strings.Contains(out, "three") {
		t.Errorf("a refused reload has changed something: %s", out)
	}
	fragment(t, l.config, "30-three.yaml", "networks: [{name: red, vni: 200}]\n")
	reload("network red added")
	fragment(t, l.config, "30-three.yaml", "networks: [{name: red, vni: 201}]\n")
	refused(three + `:1: network "red" can change its peers and its tap`)
	fragment(t, l.config, "30-three.yaml", "")
	reload("network red removed")

	// What was added at run time stays, until it has been in a file.
	l.ok("vm add extra network blue mac 02:00:00:00:00:77")
	l.ok("network add green vni 300")
	reload("")
	fragment(t, l.config, "40-extra.yaml", text("extra", "77"))
	fragment(t, l.config, "50-green.yaml", "networks: [{name: green, vni: 300}]\n")
	reload("")
	fragment(t, l.config, "40-extra.yaml", "")
	fragment(t, l.config, "50-green.yaml", "")
	reload("VM extra removed\nnetwork green removed")
}

// A confined daemon reads its fragments upon SIGHUP, and the one after it at its start.
func TestRunFragments(t *testing.T) {
	k := newKeptDaemon(t)
	fragment(t, k.config, "three.yaml", "vms: [{name: three, network: blue, mac: \"02:00:00:00:00:03\"}]\n")
	if err := k.keeper.Process.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	names := func() (names string) {
		for _, v := range k.status().VMs {
			names += v.Name + " "
		}
		return names
	}
	testutil.Eventually(t, "the fragment's VM is added", func() bool { return names() == "one two three " })
	four := fragment(t, k.config, "four.yaml", "vms: [{name: four, network: blue}]\n")
	if status, _, errText := k.run("upgrade"); status == 0 ||
		!strings.Contains(errText+k.log.String(), four+":1: a VM needs `mac`") {
		t.Errorf("upgrade with a mistake in a fragment: status %d, %s", status, errText)
	}
	fragment(t, k.config, "four.yaml", "vms: [{name: four, network: blue, mac: \"02:00:00:00:00:04\"}]\n")
	if status, _, errText := k.run("upgrade"); status != 0 {
		t.Fatalf("upgrade: status %d, %s", status, errText)
	}
	if got := names(); got != "one two four three " {
		t.Errorf("after an upgrade the VMs are %s", got)
	}
}
