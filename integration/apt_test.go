package integration

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/vnicd/vnicd/device/testutil/nstest"
)

// aptSource is what OPERATING.md has a machine know of an apt tree.
var aptSource = regexp.MustCompile("(?s)```\n(Types: deb\n.*?)```")

// installByApt makes an apt tree signed by a new key, and installs the host's package from it as OPERATING.md says. It
// has apt refuse the tree before: with another key, and with an index that was changed.
func (u *user) installByApt(t *testing.T) {
	t.Helper()
	source := aptSource.FindSubmatch(must[[]byte](t)(os.ReadFile("../cmd/vnicd/OPERATING.md")))
	if source == nil {
		t.Fatal("OPERATING.md has no source of packages")
	}
	u.makeAptTree(t)
	// The container has no way to Debian's.
	must[string](t)(u.c.Run(u.ctx, "rm -rf /etc/apt/sources.list /etc/apt/sources.list.d/*"))
	const keyrings = "/etc/apt/keyrings/vnicd-archive-keyring.gpg"
	for _, c := range []struct{ tree, key, refused string }{
		{"tree", "other.gpg", "(?i)no_pubkey|missing key"},
		{"changed", "tree/vnicd-archive-keyring.gpg", "Hash Sum mismatch"},
		{"tree", "tree/vnicd-archive-keyring.gpg", ""},
	} {
		text := strings.ReplaceAll(string(source[1]), "https://HOST/vnicd-VERSION-apt",
			"file:"+home+"/vnicd/build/"+c.tree)
		if !strings.Contains(text, "Signed-By: "+keyrings+"\n") || !strings.Contains(text, home) {
			t.Fatal(text)
		}
		must[string](t)(u.c.Run(u.ctx, "install -D -m 644 "+home+"/vnicd/build/"+c.key+" "+keyrings+
			" && cat >/etc/apt/sources.list.d/vnicd.sources <<'S'\n"+text+"S"))
		out, err := u.c.Run(u.ctx, u.as("sudo apt-get update 2>&1"))
		if c.refused != "" && (err == nil || !regexp.MustCompile(c.refused).MatchString(out)) {
			t.Errorf("apt-get update from %s with %s: %v, want %q\n%s", c.tree, c.key, err, c.refused, out)
		}
		if c.refused != "" {
			if out, err := u.c.Run(u.ctx, u.as("sudo apt-get install -y vnicd 2>&1")); err == nil {
				t.Fatalf("apt-get installs from %s with %s:\n%s", c.tree, c.key, out)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Log(tail(strings.TrimSpace(u.run(t, "sudo apt-get install -y vnicd 2>&1")), 1500))
	}
	u.pkg = "vnicd"
}

// makeAptTree makes a tree in the user's folder of packages: "tree", "changed" with another index, and
// "other.gpg", a key that has not signed them.
func (u *user) makeAptTree(t *testing.T) {
	t.Helper()
	for program, pkg := range map[string]string{"gpg": "gpg", "gpg-agent": "gpg-agent", "gpgconf": "gpgconf"} {
		nstest.Require(t, program, pkg)
	}
	keys := must[string](t)(os.MkdirTemp("", "gpg")) // the agent's socket is in it: its path has to be short
	t.Setenv("GNUPGHOME", keys)
	command := func(name string, args ...string) string {
		t.Helper()
		return string(must[[]byte](t)(exec.CommandContext(u.ctx, name, args...).Output()))
	}
	defer func() {
		command("gpgconf", "--kill", "all")
		check(t, os.RemoveAll(keys))
	}()
	for _, name := range []string{"releaser", "other"} {
		command("gpg", "--batch", "--quiet", "--passphrase", "", "--quick-generate-key", name, "ed25519", "sign")
	}
	check(t, os.WriteFile(filepath.Join(u.build, "other.gpg"), []byte(command("gpg", "--export", "other")), 0o644))
	inSource("BUILD=%s APT_KEY=releaser")(u, t, "make apt-tree")
	archives := must[[]string](t)(filepath.Glob(filepath.Join(u.build, "vnicd-*-apt.tar")))
	if len(archives) != 1 {
		t.Fatalf("%q", archives)
	}
	for _, name := range []string{"tree", "changed"} {
		dir := filepath.Join(u.build, name)
		check(t, os.Mkdir(dir, 0o755))
		command("tar", "-xf", archives[0], "-C", dir, "--strip-components=1", "--no-same-owner")
	}
	index := filepath.Join(u.build, "changed/dists/stable/main/binary-amd64/Packages")
	check(t, os.Remove(index+".gz"))
	text := must[[]byte](t)(os.ReadFile(index))
	check(t, os.WriteFile(index, bytes.Replace(text, []byte("Version: "), []byte("Version: 9"), 1), 0o644))
}
