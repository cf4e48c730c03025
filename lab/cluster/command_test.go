package cluster

import (
	"bytes"
	"errors"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// TestRemote: words, variables and the status of a command survive the remote shell unchanged.
func TestRemote(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "it's $HOME")
	run := func(env []string, argv ...string) (string, int) {
		t.Helper()
		cmd := exec.Command("sh", "-c", "mkdir -p "+quote(dir)+"; "+remote(dir, env, argv))
		out, err := cmd.Output()
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		return string(out), cmd.ProcessState.ExitCode()
	}
	words := []string{"a b", "", "it's", "$HOME", "*", "\n", `\`, "-n"}
	if out, status := run(nil, append([]string{"printf", "%s|"}, words...)...); out != strings.Join(words, "|")+"|" ||
		status != 0 {
		t.Errorf("%q, status %d", out, status)
	}
	if out, _ := run([]string{"A=x y'z", "B="}, "sh", "-c", `echo "$A,${B-unset}"; pwd`); out != "x y'z,\n"+dir+"\n" {
		t.Errorf("%q", out)
	}
	if _, status := run(nil, "sh", "-c", "exit 3"); status != 3 {
		t.Errorf("status %d, want 3", status)
	}
	if _, status := run(nil, "sh", "-c", "kill -KILL $$"); status != 128+9 {
		t.Errorf("killed: status %d, want 137", status)
	}
	if _, status := run(nil, "no-such-program"); status != 127 {
		t.Errorf("no such program: status %d, want 127", status)
	}
}

// TestPrefixed: lines of several writers stay whole, however they are cut; long ones are split.
func TestPrefixed(t *testing.T) {
	var out bytes.Buffer
	var mu sync.Mutex
	a, b := &prefixed{mu: &mu, to: &out, prefix: "a"}, &prefixed{mu: &mu, to: &out, prefix: "b"}
	for _, x := range []struct {
		to   *prefixed
		text string
	}{{a, "one\ntw"}, {b, "1"}, {a, "o\n\nthree"}, {b, "2\n"}} {
		if n, err := x.to.Write([]byte(x.text)); n != len(x.text) || err != nil {
			t.Errorf("%q: %d, %v", x.text, n, err)
		}
	}
	if err := errors.Join(a.flush(), a.flush(), b.flush()); err != nil {
		t.Error(err)
	}
	if got, want := out.String(), "a: one\na: two\na: \nb: 12\na: three\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	out.Reset()
	if _, err := a.Write(bytes.Repeat([]byte("x"), 2*maxLine+1)); err != nil {
		t.Error(err)
	}
	if n := strings.Count(out.String(), "\n"); n != 2 {
		t.Errorf("%d lines, want 2", n)
	}
}
