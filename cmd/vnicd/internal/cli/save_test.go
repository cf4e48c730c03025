package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
)

// TestSave adds and removes networks and VMs with --save. What the daemon refuses, or another file defines, changes
// neither files nor the daemon.
func TestSave(t *testing.T) {
	l := newLab(t)
	dir := config.FragmentDir(l.config)
	// state is the daemon's networks and VMs, and the fragments.
	state := func() (s string) {
		for _, line := range strings.Split(l.ok("vm")+l.ok("network"), "\n") {
			if name, _, _ := strings.Cut(line, " "); name != "" {
				s += strings.TrimSuffix(name, ":") + " "
			}
		}
		list, err := os.ReadDir(dir)
		if err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		for _, e := range list {
			s += "+" + e.Name() + " "
		}
		return s
	}
	byHand := "vms:\n  - {name: hand, network: blue, mac: \"02:00:00:00:00:99\"}\n"
	for _, step := range []struct {
		line   string
		status int
		want   string // in what is said
		state  string
	}{
		{"network add --save red vni 200 mtu 1400 peer 192.0.2.3 learn-peers", 0, "", "one blue red +network-red.yaml "},
		{"vm add two network red mac 02:00:00:00:00:02 ip 10.0.0.2 ip fd00::2 queues 2 rate 1G memory-weight 7 --save",
			0, "", "one two blue red +network-red.yaml +vm-two.yaml "},
		{"reload", 0, "", "one two blue red +network-red.yaml +vm-two.yaml "},
		{"vm add --save two network red mac 02:00:00:00:00:03", exitUsage, `is already used in line 3`,
			"one two blue red +network-red.yaml +vm-two.yaml "},
		{"network del --save red", exitUsage, `without network "red" the configuration would have mistakes:`,
			"one two blue red +network-red.yaml +vm-two.yaml "},
		{"vm del --save one", exitFailure, "is defined in " + l.config + ":7, which `vnicd vm add --save` has not written",
			"one two blue red +network-red.yaml +vm-two.yaml "},
		// Not by its right name: nothing changes.
		{"vm del --save three", exitFailure, `no VM "three"; there are: one, two`,
			"one two blue red +network-red.yaml +vm-two.yaml "},
		// In the daemon only.
		{"vm add three network red mac 02:00:00:00:00:03", 0, "", "one two three blue red +network-red.yaml +vm-two.yaml "},
		{"vm add --save three network red mac 02:00:00:00:00:04", exitFailure, "is already used in an earlier request",
			"one two three blue red +network-red.yaml +vm-two.yaml "},
		{"vm del --save three", 0, "", "one two blue red +network-red.yaml +vm-two.yaml "},
		// In the file only.
		{"vm del two", 0, "", "one blue red +network-red.yaml +vm-two.yaml "},
		{"vm del --save two", 0, "", "one blue red +network-red.yaml "},
		{"vm add three network red mac 02:00:00:00:00:03", 0, "", "one three blue red +network-red.yaml "},
		// The daemon refuses; the file comes back.
		{"network del --save red", exitFailure, `network "red" has VMs: three`, "one three blue red +network-red.yaml "},
		{"vm move three network blue", 0, "", "one three blue red +network-red.yaml "},
		{"network del --save red", 0, "", "one three blue "},
		{"vm del three", 0, "", "one blue "},
		// A reload that finds no file any more removes what was saved, also without a reload in between.
		{"vm add --save four network blue mac 02:00:00:00:00:04", 0, "", "one four blue +vm-four.yaml "},
		{"rm vm-four.yaml", 0, "", "one four blue "},
		{"reload", 0, "VM four removed", "one blue "},
		// Somebody's file.
		{"write vm-hand.yaml", 0, "", "one blue +vm-hand.yaml "},
		{"reload", 0, "VM hand added", "one hand blue +vm-hand.yaml "},
		{"vm del --save hand", exitFailure, "vm-hand.yaml has not been written by `vnicd vm add --save`",
			"one hand blue +vm-hand.yaml "},
		{"vm add --save ../x network blue mac 02:00:00:00:00:05", exitFailure, `vm name "../x" must be 1 to 32`,
			"one hand blue +vm-hand.yaml "},
	} {
		var status int
		var out, errText string
		verb, rest, _ := strings.Cut(step.line, " ")
		path := filepath.Join(dir, rest)
		switch verb {
		case "rm":
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
		case "write":
			if err := os.WriteFile(path, []byte(byHand), 0o644); err != nil {
				t.Fatal(err)
			}
		default:
			status, out, errText = l.run(step.line)
		}
		if status != step.status || !strings.Contains(out+errText, step.want) {
			t.Errorf("vnicd %s: status %d, %s%s; want %d, %s", step.line, status, out, errText, step.status, step.want)
		}
		if got := state(); got != step.state {
			t.Fatalf("after %s there are %s, want %s", step.line, got, step.state)
		}
	}
}

// The file that is changed is the daemon's, and no daemon means no change.
func TestSaveElsewhere(t *testing.T) {
	l := newLab(t)
	other := filepath.Join(t.TempDir(), "other.yaml")
	text, err := os.ReadFile(l.config)
	if err == nil {
		err = os.WriteFile(other, text, 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
	same := filepath.Join(t.TempDir(), "same.yaml")
	if err := os.Symlink(l.config, same); err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct{ config, flags, want string }{
		{other, "", "the running vnicd has the configuration " + l.config + ", not " + other + ": name it with --config"},
		// Another name, and so another directory of fragments.
		{same, "", "the running vnicd has the configuration " + l.config + ", not " + same},
		{l.config, " --control " + l.dir + "/nobody", "no vnicd at " + l.dir + "/nobody"},
	} {
		for _, line := range []string{"vm add --save two network blue mac 02:00:00:00:00:02", "vm del --save one"} {
			l := *l
			l.config = step.config
			if status, _, errText := l.run(line + step.flags); status == 0 || !strings.Contains(errText, step.want) {
				t.Errorf("vnicd -c %s %s: status %d, %s, want %s", step.config, line, status, errText, step.want)
			}
		}
	}
	for _, main := range []string{l.config, other, same} {
		if _, err := os.Stat(config.FragmentDir(main)); !os.IsNotExist(err) {
			t.Errorf("%s: %v", config.FragmentDir(main), err)
		}
	}
	if out := l.ok("vm"); !strings.Contains(out, "one ") || strings.Contains(out, "two ") {
		t.Errorf("vnicd vm: %s", out)
	}
}
