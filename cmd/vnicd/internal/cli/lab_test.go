package cli

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"
)

// TestLabUsage: mistakes in the command line of a lab are found before anything is built, and are named all together.
func TestLabUsage(t *testing.T) {
	t.Chdir(t.TempDir())
	for _, x := range []struct {
		args []string
		want []string
	}{
		{[]string{"run"}, []string{"requires at least 1 arg", "vnicd lab run [flags] -- CMD"}},
		{[]string{"shell", "ls"}, []string{"unknown command"}},
		{[]string{"run", "--loss", "5", "--hosts", "0", "--", "true"}, []string{`--loss: loss "5": want a percentage`,
			"--hosts 0: want 1 to 16"}},
		{[]string{"run", "--delay", "5", "true"}, []string{"--delay", "missing unit"}},
		{[]string{"run", "--kernel", "5.4", "true"}, []string{"want 6.1, 6.12, 7.x"}},
		{[]string{"run", "--packages", "gdb;x", "true"}, []string{`--packages "gdb;x": want names of Debian packages`}},
		{[]string{"run", "-e", "1A=2", "true"}, []string{"want NAME=VALUE"}},
		{[]string{"up", "true"}, []string{"unknown command"}},
		{[]string{"up", "--name", "a/b"}, []string{`--name: name "a/b": want 1 to 32 letters`}},
		{[]string{"up", "--hosts", "0"}, []string{"--hosts 0: want 1 to 16"}},
		{[]string{"exec"}, []string{"requires at least 1 arg", "vnicd lab exec [flags] -- CMD"}},
		{[]string{"exec", "--name", "..", "true"}, []string{`--name: name ".."`}},
		{[]string{"exec", "--each", "--vm", "vm2", "-e", "1A=2", "true"}, []string{"--each and --vm", "want NAME=VALUE"}},
		{[]string{"shell", "--vm", "vm2"}, []string{"--vm is for a lab that is up: want --name, too"}},
		{[]string{"shell", "--name", "a", "--hosts", "1", "--loss", "1%"},
			[]string{"made without --hosts, --loss"}},
		{[]string{"down", "a", "b"}, []string{"accepts at most 1 arg"}},
		{[]string{"down", "a b"}, []string{`name "a b"`}},
	} {
		var out, errOut strings.Builder
		if code := Main("test", append([]string{"lab"}, x.args...), &out, &errOut); code != exitUsage {
			t.Errorf("%q: status %d, want %d", x.args, code, exitUsage)
		}
		for _, want := range x.want {
			if !strings.Contains(errOut.String(), want) {
				t.Errorf("%q: no %q in %q", x.args, want, errOut.String())
			}
		}
	}
}

// TestLabFlags: flags of the command are not those of the lab; variables without a value have that of this process.
func TestLabFlags(t *testing.T) {
	t.Chdir(t.TempDir())
	t.Setenv("B", "x y")
	var f labFlags
	var command []string
	c := &cobra.Command{Use: "run", RunE: func(_ *cobra.Command, argv []string) error { command = argv; return nil }}
	c.Flags().SetInterspersed(false)
	f.add(c)
	c.SetArgs(strings.Fields("--loss 0.5% --delay 2ms -e A=1 -e B --packages gdb,strace --logs logs ls -l --hosts x"))
	if err := c.Execute(); err != nil {
		t.Fatal(err)
	}
	o, err := f.complete()
	if err != nil || o.Loss != 0.5 || o.Delay.Milliseconds() != 2 || !slices.Equal(o.Env, []string{"A=1", "B=x y"}) ||
		!slices.Equal(o.Packages, []string{"gdb", "strace"}) || o.Logs != o.Dir+"/logs" ||
		!slices.Equal(command, []string{"ls", "-l", "--hosts", "x"}) {
		t.Errorf("%+v, %q, %v", o, command, err)
	}
}

// TestNoLab: commands for a lab that is not up say so, with the status of a lab that failed.
func TestNoLab(t *testing.T) {
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	for _, line := range []string{"exec --name x true", "shell --name x", "down x"} {
		var out, errOut strings.Builder
		if code := Main("test", append([]string{"lab"}, strings.Fields(line)...), &out, &errOut); code != exitLab ||
			!strings.Contains(errOut.String(), `no lab "x": `) {
			t.Errorf("%s: status %d: %s", line, code, errOut.String())
		}
	}
	var out, errOut strings.Builder
	if code := Main("test", []string{"lab", "list", "-j"}, &out, &errOut); code != exitOK || out.String() != "[]\n" {
		t.Errorf("status %d: %s%s", code, out.String(), errOut.String())
	}
}

// TestLabServeAlone: what runs in a lab's namespaces refuses to run elsewhere, where it would change the machine.
func TestLabServeAlone(t *testing.T) {
	var out, errOut strings.Builder
	if code := Main("test", labServe, &out, &errOut); code != exitFailure ||
		!strings.Contains(errOut.String(), "part of `vnicd lab run`") {
		t.Errorf("status %d: %s", code, errOut.String())
	}
}

// TestLabExamples: the files for CI are YAML, and their labs have valid options.
func TestLabExamples(t *testing.T) {
	line := regexp.MustCompile(`(?m)^[ -]*(?:run: )?vnicd lab run (.*)$`)
	for _, name := range []string{"github-actions.yml", "gitlab-ci.yml"} {
		text, err := os.ReadFile("../../../../docs/lab/" + name)
		if err != nil {
			t.Fatal(err)
		}
		var parsed map[string]any
		if err := yaml.Unmarshal(text, &parsed); err != nil || len(parsed) == 0 {
			t.Errorf("%s: %v", name, err)
		}
		labs := line.FindAllSubmatch(text, -1)
		if len(labs) != 1 {
			t.Fatalf("%s runs %d labs, want one", name, len(labs))
		}
		var f labFlags
		c := &cobra.Command{RunE: func(_ *cobra.Command, argv []string) error {
			if _, err := f.complete(); err != nil || len(argv) == 0 || f.logs == "" {
				t.Errorf("%s: %q: %v", name, labs[0][1], err)
			}
			return nil
		}}
		f.add(c)
		c.SetArgs(strings.Fields(string(labs[0][1])))
		if err := c.Execute(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}
