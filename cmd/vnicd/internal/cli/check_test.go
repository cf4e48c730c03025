package cli

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

// JSON has the mistakes of all files with their places, and what a configuration without mistakes has.
func TestCheckJSON(t *testing.T) {
	main := filepath.Join(t.TempDir(), "vnicd.yaml")
	text := "run-dir: /run/x\nlog-level: info\nnetworks: [{name: blue, vni: 100}]\n" +
		"vms: [{name: one, network: blue, mac: \"02:00:00:00:00:01\"}]\n" +
		"applications: [{name: app, network: blue, mac: \"02:00:00:00:00:a1\"}]\n"
	if err := os.WriteFile(main, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	level := fragment(t, main, "10-level.yaml", "# Quiet.\nlog-level: warn\n")
	check := func(status int, want checked) {
		t.Helper()
		var out, errText strings.Builder
		if got := Main("test", []string{"check", "-j", "-c", main}, &out, &errText); got != status || errText.Len() > 0 {
			t.Errorf("status %d, want %d: %s", got, status, errText.String())
		}
		var got checked
		if err := json.Unmarshal([]byte(out.String()), &got); err != nil {
			t.Fatalf("%v: %s", err, out.String())
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%+v, want %+v", got, want)
		}
	}
	files := []string{main, level}
	check(0, checked{Files: files, Networks: 1, VMs: 1, Applications: 1,
		Overrides: []checkOverride{{checkPlace{level, 2, "log-level"}, checkPlace{main, 2, "log-level"}}},
		Mistakes:  []checkMistake{}})

	vms := fragment(t, main, "20-vms.yaml", "vms:\n  - {name: two, network: blue}\n  - {name: one, network: red, "+
		"mac: \"02:00:00:00:00:03\"}\n")
	var got checked
	var out, errText strings.Builder
	if status := Main("test", []string{"check", "-j", "-c", main}, &out, &errText); status != exitUsage {
		t.Errorf("status %d", status)
	}
	if err := json.Unmarshal([]byte(out.String()), &got); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got.Files, append(files, vms)) || got.VMs != 0 || len(got.Mistakes) < 2 {
		t.Fatalf("%s", out.String())
	}
	m := got.Mistakes[0]
	if m.checkPlace != (checkPlace{vms, 2, "vms[0]"}) || !strings.Contains(m.Message, "needs `mac`") {
		t.Errorf("%+v", m)
	}
	check(exitUsage, got)
}

// The file of monitoring.web-config is checked with the rest.
func TestCheckWebConfig(t *testing.T) {
	dir := t.TempDir()
	main, web := filepath.Join(dir, "vnicd.yaml"), filepath.Join(dir, "web.yml")
	text := "networks: []\nmonitoring: {listen: /run/m, web-config: " + web + "}\n"
	if err := os.WriteFile(main, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	for text, want := range map[string]checkMistake{
		"http_server_config: {http2: false}\n":                   {},
		"http_server_config: {}\nbasic_auth_users: {alice: x}\n": {checkPlace{web, 2, "basic_auth_users.alice"}, "bcrypt"},
		"": {checkPlace{main, 2, "monitoring.web-config"}, web + " is empty"},
	} {
		if err := os.WriteFile(web, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		var out, errText strings.Builder
		status := Main("test", []string{"check", "-j", "-c", main}, &out, &errText)
		var got checked
		if err := json.Unmarshal([]byte(out.String()), &got); err != nil {
			t.Fatalf("%v: %s %s", err, out.String(), errText.String())
		}
		switch {
		case want == (checkMistake{}):
			if status != 0 || len(got.Mistakes) != 0 {
				t.Errorf("%q: status %d, %+v", text, status, got)
			}
		case status != exitUsage || len(got.Mistakes) != 1 || got.Mistakes[0].checkPlace != want.checkPlace ||
			!strings.Contains(got.Mistakes[0].Message, want.Message):
			t.Errorf("%q: status %d, %+v, want %+v", text, status, got, want)
		}
		if status := Main("test", []string{"check", "-c", main}, &out, &errText); (status == 0) != (want == checkMistake{}) {
			t.Errorf("%q: status %d", text, status)
		}
	}
}
