package main

import (
	"bytes"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/testutil/nstest"
)

// newKeys returns a folder with the secret keys of some users, for gpg.
func newKeys(t *testing.T, users ...string) string {
	t.Helper()
	for program, pkg := range map[string]string{"gpg": "gpg", "gpg-agent": "gpg-agent", "gpgconf": "gpgconf"} {
		nstest.Require(t, program, pkg)
	}
	home, err := os.MkdirTemp("", "gpg") // the agent's socket is in it: its path has to be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		output(t, "gpgconf", "--homedir", home, "--kill", "all")
		if err := os.RemoveAll(home); err != nil {
			t.Error(err)
		}
	})
	for _, u := range users {
		output(t, "gpg", "--homedir", home, "--batch", "--quiet", "--passphrase", "", "--quick-generate-key", u,
			"ed25519", "sign")
	}
	return home
}

// aptBuilder returns a builder, and a folder with small packages: one for all architectures, one for each.
func aptBuilder(t *testing.T) (*builder, string) {
	t.Helper()
	v, err := parseVersion("v1.2.3-rc1-4-gabcdef0")
	if err != nil {
		t.Fatal(err)
	}
	b := &builder{root: t.TempDir(), work: t.TempDir(), version: v, time: time.Unix(1.7e9, 0).UTC()}
	packages := t.TempDir()
	for _, p := range [][2]string{{"vnicd", "amd64"}, {"vnicd", "arm64"}, {"vnicd-dkms", "all"}} {
		smallDeb(t, packages, p[0], p[1])
	}
	return b, packages
}

func smallDeb(t *testing.T, dir, name, arch string) {
	t.Helper()
	root := t.TempDir()
	control := fmt.Sprintf("Package: %s\nVersion: 1.2.3~rc1+4.gabcdef0\nArchitecture: %s\n"+
		"Maintainer: nobody <nobody@example.org>\nDescription: for a test\n Architecture: none\n", name, arch)
	if err := os.Mkdir(filepath.Join(root, "DEBIAN"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "DEBIAN/control"), []byte(control), 0o644); err != nil {
		t.Fatal(err)
	}
	output(t, "dpkg-deb", "--build", "--root-owner-group", root, dir)
}

// makeTree has a builder write its archive, and returns the archive and the folder into which it is unpacked.
func makeTree(t *testing.T, b *builder, packages string) ([]byte, string) {
	t.Helper()
	dir := t.TempDir()
	if err := b.apt(packages, dir); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "vnicd-1.2.3~rc1+4.gabcdef0-apt.tar")
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	output(t, "tar", "-xf", path, "-C", dir)
	return data, strings.TrimSuffix(path, ".tar")
}

// apt is apt-get of a machine with one architecture, which has a tree's key and nothing else.
type apt struct {
	dir, config string
}

// newApt returns a machine that knows a tree by its address.
func newApt(t *testing.T, address, keyring, arch string) apt {
	t.Helper()
	a := apt{dir: t.TempDir()}
	a.config = filepath.Join(a.dir, "apt.conf")
	sources := fmt.Sprintf("Types: deb\nURIs: %s\nSuites: stable\nComponents: main\nSigned-By: %s\n", address, keyring)
	for path, text := range map[string]string{
		"vnicd.sources": sources,
		"status":        "",
		"apt.conf": fmt.Sprintf(`Dir::Etc "%[1]s"; Dir::Etc::sourcelist "vnicd.sources"; Dir::Etc::sourceparts "none";
Dir::Etc::main "none"; Dir::Etc::parts "none"; Dir::Etc::preferences "none"; Dir::Etc::preferencesparts "none";
Dir::State "%[1]s/state"; Dir::State::status "%[1]s/status"; Dir::Cache "%[1]s/cache";
APT::Architecture "%[2]s"; APT::Architectures {"%[2]s";}; APT::Sandbox::User ""; APT::Update::Error-Mode "any";
Acquire::http::Proxy "DIRECT"; Acquire::Languages "none"; Acquire::Retries "0";
`, a.dir, arch),
		"none/.x": "", "state/lists/partial/.x": "", "cache/archives/partial/.x": "",
	} {
		path = filepath.Join(a.dir, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return a
}

// get runs apt-get, to update or for some packages, and returns what it prints.
func (a apt) get(command string, packages ...string) (string, error) {
	if command == "update" {
		packages = nil
	}
	c := exec.Command("apt-get", append([]string{command}, packages...)...)
	c.Dir, c.Env = a.dir, append(os.Environ(), "APT_CONFIG="+a.config, "LC_ALL=C.UTF-8")
	out, err := c.CombinedOutput()
	return string(out), err
}

// edit replaces text in a file, which must have it, and returns the file's data.
func edit(t *testing.T, path, from, to string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil || !bytes.Contains(data, []byte(from)) {
		t.Fatalf("%s has no %q (%v)", path, from, err)
	}
	data = bytes.ReplaceAll(data, []byte(from), []byte(to))
	if err := os.WriteFile(path, data, 0o644); err != nil {
		t.Fatal(err)
	}
	return data
}

// TestAptTree makes a signed tree. Each sum and both signatures are right, apt-get takes packages from it over HTTP,
// and refuses the tree or the package if a file was changed, or another key signed it.
func TestAptTree(t *testing.T) {
	for program, pkg := range map[string]string{"dpkg-deb": "dpkg", "apt-get": "apt", "gpgv": "gpgv"} {
		nstest.Require(t, program, pkg)
	}
	t.Setenv("GNUPGHOME", newKeys(t, "releaser", "somebody else", "releaser's namesake"))
	b, packages := aptBuilder(t)
	for _, name := range []string{"releaser", "nobody"} { // of two keys, and of none
		if key, err := b.findKey(name); err == nil {
			t.Errorf("the key of %s is %s", name, key)
		}
	}
	unsigned, _ := makeTree(t, b, packages)
	var err error
	if b.aptKey, err = b.findKey("=somebody else"); err != nil {
		t.Fatal(err)
	}
	_, foreign := makeTree(t, b, packages)
	if b.aptKey, err = b.findKey("=releaser"); err != nil {
		t.Fatal(err)
	}
	_, tree := makeTree(t, b, packages)
	keyring := filepath.Join(tree, aptKeyring)
	if k := output(t, "gpg", "--show-keys", "--with-colons", keyring); strings.Count(k, "pub:") != 1 ||
		!strings.Contains(k, ":"+b.aptKey+":") || strings.Contains(k, "sec:") {
		t.Errorf("the keyring of %s has:\n%s", b.aptKey, k)
	}
	t.Run("signatures", func(t *testing.T) {
		release := filepath.Join(tree, "dists/stable/Release")
		output(t, "gpgv", "--keyring", keyring, release+".gpg", release)
		inRelease := filepath.Join(filepath.Dir(release), "InRelease")
		inline := output(t, "gpgv", "--keyring", keyring, "--output", "-", inRelease)
		if text, err := os.ReadFile(release); err != nil || string(text) != inline {
			t.Errorf("Release: %v\n%s\nInRelease:\n%s", err, text, inline)
		}
	})
	t.Run("sums", func(t *testing.T) { testAptSums(t, tree) })
	t.Run("unsigned", func(t *testing.T) {
		other := *b
		other.work, other.aptKey = t.TempDir(), ""
		again, bare := makeTree(t, &other, packages)
		if !bytes.Equal(again, unsigned) {
			t.Error("two runs give different bytes")
		}
		// With a key there are three more files, and no other is different.
		out, _ := exec.Command("diff", "-rq", bare, tree).Output()
		more := fmt.Sprintf("Only in %[1]s/dists/stable: InRelease\nOnly in %[1]s/dists/stable: Release.gpg\n"+
			"Only in %[1]s: %[2]s\n", tree, aptKeyring)
		if string(out) != more {
			t.Errorf("%s, want\n%s", out, more)
		}
		web := httptest.NewServer(http.FileServer(http.Dir(filepath.Dir(bare))))
		defer web.Close()
		if out, err := newApt(t, web.URL+"/"+filepath.Base(bare), keyring, "amd64").get("update"); err == nil {
			t.Errorf("apt accepts a tree without a signature:\n%s", out)
		}
	})
	for _, arch := range aptArchitectures {
		t.Run(arch, func(t *testing.T) { testAptGet(t, tree, keyring, arch) })
	}
	t.Run("changed", func(t *testing.T) { testAptChanges(t, tree, foreign, keyring) })
}

// testAptSums compares the sums in Release and in Packages with the files, of which each has one.
func testAptSums(t *testing.T, tree string) {
	listed := 0
	c := func(dir, sums string) {
		t.Helper()
		cmd := exec.Command("sha256sum", "--check", "--strict")
		cmd.Dir, cmd.Stdin = dir, strings.NewReader(sums)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
		listed += strings.Count(sums, "\n")
	}
	read := func(path string) string {
		text, err := os.ReadFile(filepath.Join(tree, path))
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	release := read("dists/stable/Release")
	for _, field := range []string{"Suite: stable", "Codename: stable", "Architectures: amd64 arm64",
		"Components: main", "Date: Tue, 14 Nov 2023 22:13:20 UTC"} {
		if !strings.Contains(release, field+"\n") {
			t.Errorf("Release has no %q:\n%s", field, release)
		}
	}
	var sums string
	for _, m := range regexp.MustCompile(`(?m)^ ([0-9a-f]{64}) (\d+) (.+)$`).FindAllStringSubmatch(release, -1) {
		if size := fmt.Sprint(len(read("dists/stable/" + m[3]))); size != m[2] {
			t.Errorf("%s has %s bytes, not %s", m[3], size, m[2])
		}
		sums += m[1] + "  " + m[3] + "\n"
	}
	c(filepath.Join(tree, "dists/stable"), sums)
	packages := map[string]string{}
	for _, arch := range aptArchitectures {
		index := "dists/stable/main/binary-" + arch + "/Packages"
		if text := read(index); text != output(t, "gzip", "-dc", filepath.Join(tree, index+".gz")) {
			t.Errorf("%s.gz is not %s", index, text)
		}
		for stanza := range strings.SplitSeq(strings.TrimSuffix(read(index), "\n\n"), "\n\n") {
			field := func(name string) string {
				m := regexp.MustCompile(`(?m)^` + name + `: (.*)$`).FindStringSubmatch(stanza)
				if m == nil {
					t.Fatalf("no %s in %q", name, stanza)
				}
				return m[1]
			}
			file := field("Filename")
			if size := fmt.Sprint(len(read(file))); size != field("Size") {
				t.Errorf("%s has %s bytes, not %s", file, size, field("Size"))
			}
			if a := field("Architecture"); a != arch && a != "all" {
				t.Errorf("%s has %s", index, file)
			}
			packages[file] = field("SHA256") + "  " + file + "\n"
		}
	}
	sums = ""
	for _, line := range packages {
		sums += line
	}
	c(tree, sums)
	if listed != 4+3 {
		t.Errorf("%d files have sums", listed)
	}
}

// testAptGet takes packages from the tree as a machine with an architecture does.
func testAptGet(t *testing.T, tree, keyring, arch string) {
	web := httptest.NewServer(http.FileServer(http.Dir(filepath.Dir(tree))))
	defer web.Close()
	a := newApt(t, web.URL+"/"+filepath.Base(tree), keyring, arch)
	for _, command := range []string{"update", "download"} {
		if out, err := a.get(command, "vnicd", "vnicd-dkms"); err != nil || strings.Contains(out, "W:") {
			t.Fatalf("apt-get %s: %v\n%s", command, err, out)
		}
	}
	files, err := filepath.Glob(filepath.Join(a.dir, "*.deb"))
	if err != nil {
		t.Fatal(err)
	}
	var has []string
	for _, f := range files {
		has = append(has, output(t, "dpkg-deb", "--show", "--showformat=${Package} ${Architecture}", f))
	}
	if want := []string{"vnicd-dkms all", "vnicd " + arch}; !slices.Equal(has, want) {
		t.Errorf("%q, want %q", has, want)
	}
}

// testAptChanges: apt-get accepts only files that the key covers.
func testAptChanges(t *testing.T, tree, foreign, keyring string) {
	const release, index = "dists/stable/Release", "dists/stable/main/binary-amd64/Packages"
	for _, c := range []struct {
		name, tree    string
		change        func(t *testing.T)
		command, says string // what fails, and how
	}{
		{"nothing", tree, func(*testing.T) {}, "", ""},
		{"key", foreign, func(*testing.T) {}, "update", "NO_PUBKEY|Missing key"},
		{"package", tree, func(t *testing.T) {
			edit(t, "pool/main/v/vnicd/vnicd_1.2.3~rc1+4.gabcdef0_amd64.deb", "debian-binary", "debian-binarY")
		}, "download", "Hash Sum mismatch"},
		{"index", tree, func(t *testing.T) {
			text := edit(t, index, "Maintainer: nobody", "Maintainer: nobodY")
			if err := writeGzip(index+".gz", text); err != nil {
				t.Fatal(err)
			}
		}, "update", "Hash Sum mismatch"},
		{"InRelease", tree, func(t *testing.T) {
			edit(t, "dists/stable/InRelease", "Label: vnicd", "Label: vnicD")
		}, "update", "is not signed"},
		{"Release", tree, func(t *testing.T) {
			if err := os.Remove("dists/stable/InRelease"); err != nil {
				t.Fatal(err)
			}
			edit(t, release, "Label: vnicd", "Label: vnicD")
		}, "update", "is not signed"},
	} {
		t.Run(c.name, func(t *testing.T) {
			copied := filepath.Join(t.TempDir(), "tree")
			output(t, "cp", "-r", c.tree, copied)
			t.Chdir(copied)
			c.change(t)
			a := newApt(t, "file:"+copied, keyring, "amd64")
			for _, command := range []string{"update", "download"} {
				out, err := a.get(command, "vnicd")
				if command == c.command {
					if err == nil || !regexp.MustCompile(c.says).MatchString(out) {
						t.Errorf("apt-get %s: %v, want %s\n%s", command, err, c.says, out)
					}
					return
				}
				if err != nil {
					t.Fatalf("apt-get %s: %v\n%s", command, err, out)
				}
			}
		})
	}
}

// testAptRelease: a release's tree has its packages.
func testAptRelease(t *testing.T, path string, debs ...string) {
	dir := t.TempDir()
	output(t, "tar", "-xf", path, "-C", dir, "--strip-components=1")
	for _, deb := range debs {
		output(t, "cmp", deb, filepath.Join(dir, "pool/main/v/vnicd", filepath.Base(deb)))
	}
	for arch, want := range map[string]string{"amd64": "vnicd-dkms vnicd", "arm64": "vnicd-dkms"} {
		text, err := os.ReadFile(filepath.Join(dir, "dists/stable/main/binary-"+arch+"/Packages"))
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, m := range regexp.MustCompile(`(?m)^Package: (.*)$`).FindAllSubmatch(text, -1) {
			names = append(names, string(m[1]))
		}
		if has := strings.Join(names, " "); has != want {
			t.Errorf("%s has %s, want %s", arch, has, want)
		}
	}
}
