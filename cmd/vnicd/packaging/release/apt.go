package main

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// An apt tree is what a static web server serves for apt-get: the Debian packages, an index of them for each
// architecture, and a file Release with the indexes' sums, which is signed
// (https://wiki.debian.org/DebianRepository/Format). It is written here, not by apt-ftparchive, so that its bytes do
// not depend on the version of another program.

// aptArchitectures are those that have an index. Packages for all architectures are in each.
var aptArchitectures = []string{"amd64", "arm64"}

// aptKeyring is the public key's file in the tree.
const aptKeyring = "vnicd-archive-keyring.gpg"

// apt writes the tree of a folder's Debian packages into another folder, as an archive.
func (b *builder) apt(packages, dir string) error {
	tree, err := b.aptTree(packages)
	if err != nil {
		return err
	}
	if b.aptKey != "" {
		if err := b.sign(tree); err != nil {
			return err
		}
	}
	name := fmt.Sprintf("vnicd-%s-apt", b.version.pkg())
	files := archiveFiles{}
	for path, data := range tree {
		files[name+"/"+path] = data
	}
	path := filepath.Join(dir, name+".tar")
	if err := files.write(path, b.time); err != nil {
		return err
	}
	fmt.Println(path)
	if b.aptKey == "" {
		fmt.Println("the apt tree is not signed, and apt refuses it: " +
			"to sign it, add APT_KEY=FINGERPRINT, of a secret key of gpg")
	}
	return nil
}

// aptTree returns the files of a tree that is not signed.
func (b *builder) aptTree(packages string) (archiveFiles, error) {
	debs, err := filepath.Glob(filepath.Join(packages, "*.deb"))
	if err != nil || len(debs) == 0 {
		return nil, fmt.Errorf("no Debian packages in %s (%v)", packages, err)
	}
	tree := archiveFiles{}
	indexes := map[string]*bytes.Buffer{}
	for _, arch := range aptArchitectures {
		indexes[arch] = &bytes.Buffer{}
	}
	for _, deb := range debs {
		data, err := os.ReadFile(deb)
		if err != nil {
			return nil, err
		}
		control, err := b.command(nil, "dpkg-deb", "--field", deb)
		if err != nil {
			return nil, err
		}
		path := "pool/main/v/vnicd/" + filepath.Base(deb)
		tree[path] = data
		stanza := fmt.Sprintf("%s\nFilename: %s\nSize: %d\nSHA256: %x\n\n", bytes.TrimSpace(control), path, len(data),
			sha256.Sum256(data))
		arch := architecture.FindSubmatch(control)
		if arch == nil {
			return nil, fmt.Errorf("%s has no architecture", deb)
		}
		if only := string(arch[1]); only != "all" {
			if indexes[only] == nil {
				return nil, fmt.Errorf("%s is for %s: expected all, %s", deb, only,
					strings.Join(aptArchitectures, " or "))
			}
			indexes[only].WriteString(stanza)
			continue
		}
		for _, index := range indexes {
			index.WriteString(stanza)
		}
	}
	listed := archiveFiles{}
	for arch, index := range indexes {
		path := "main/binary-" + arch + "/Packages"
		listed[path] = index.Bytes()
		if listed[path+".gz"], err = zip(index.Bytes()); err != nil {
			return nil, err
		}
	}
	tree[aptRelease] = b.aptRelease(listed)
	for path, data := range listed {
		tree["dists/stable/"+path] = data
	}
	return tree, nil
}

var architecture = regexp.MustCompile(`(?m)^Architecture: (.+)$`)

// aptRelease is the path of the file whose signature covers all others.
const aptRelease = "dists/stable/Release"

// aptRelease returns that file, for indexes by their paths beside it.
func (b *builder) aptRelease(indexes archiveFiles) []byte {
	var text bytes.Buffer
	fmt.Fprintf(&text, `Origin: vnicd
Label: vnicd
Suite: stable
Codename: stable
Date: %s
Architectures: %s
Components: main
Description: vnicd %s
SHA256:
`, b.time.Format("Mon, 02 Jan 2006 15:04:05 UTC"), strings.Join(aptArchitectures, " "), b.version.pkg())
	for _, path := range slices.Sorted(maps.Keys(indexes)) {
		fmt.Fprintf(&text, " %x %d %s\n", sha256.Sum256(indexes[path]), len(indexes[path]), path)
	}
	return text.Bytes()
}

// sign adds two forms of the signature, of which apt prefers InRelease, and the public key. A signature has the time at
// which it is made, not the release's: one from before the key was made is not valid.
func (b *builder) sign(tree archiveFiles) error {
	file := filepath.Join(b.work, "Release")
	if err := os.WriteFile(file, tree[aptRelease], 0o644); err != nil {
		return err
	}
	for path, how := range map[string][]string{
		"dists/stable/InRelease":   {"--clearsign", file},
		"dists/stable/Release.gpg": {"--armor", "--detach-sign", file},
	} {
		how = append([]string{"--local-user", b.aptKey, "--digest-algo", "SHA512", "--output", "-"}, how...)
		signature, err := b.gpg(how...)
		if err != nil {
			return err
		}
		tree[path] = signature
	}
	key, err := b.gpg("--export-options", "export-minimal", "--export", b.aptKey)
	if err != nil {
		return err
	}
	tree[aptKeyring] = key
	return nil
}

// findKey returns the fingerprint of the secret key that gpg knows by a name.
func (b *builder) findKey(name string) (string, error) {
	list, err := b.gpg("--with-colons", "--list-secret-keys", name)
	if err != nil {
		return "", err
	}
	keys := primaryKey.FindAllSubmatch(list, -1)
	if len(keys) != 1 {
		return "", fmt.Errorf("%q is the name of %d secret keys: expected the fingerprint of one", name, len(keys))
	}
	return string(keys[0][1]), nil
}

// primaryKey matches a secret key and its fingerprint as gpg lists them (doc/DETAILS of GnuPG).
var primaryKey = regexp.MustCompile(`(?m)^sec:.*\nfpr:(?:[^:]*:){8}([0-9A-F]+):`)

// gpg runs gpg, which finds keys in $GNUPGHOME.
func (b *builder) gpg(args ...string) ([]byte, error) {
	args = append([]string{"--batch", "--quiet", "--no-comments", "--no-emit-version"}, args...)
	return b.command(nil, "gpg", args...)
}
