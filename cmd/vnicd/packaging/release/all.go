package main

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
)

// all makes the folder "release" anew.
func (b *builder) all() error {
	dir := filepath.Join(b.out, "release")
	if err := errors.Join(os.RemoveAll(dir), os.Mkdir(dir, 0o755)); err != nil {
		return err
	}
	notes, err := b.notes()
	if err != nil {
		return err
	}
	var licences []byte
	for _, arch := range []string{"amd64", "arm64"} {
		host, err := b.host(arch)
		if err != nil {
			return err
		}
		text, err := os.ReadFile(b.licenceFile(arch))
		if err != nil {
			return err
		}
		if licences != nil && !bytes.Equal(text, licences) {
			return fmt.Errorf("the modules of %s are not those of the architecture before: "+
				"third-party-licences.txt is for all", arch)
		}
		licences = text
		if err := errors.Join(b.tarball(host, arch, dir), b.image(host, arch, dir), b.writeSBOM(arch, dir)); err != nil {
			return err
		}
		if arch != host.arch { // packages are for the architecture that is tested
			continue
		}
		if err := errors.Join(b.pack(host, "deb", dir), b.pack(host, "rpm", dir)); err != nil {
			return err
		}
	}
	guest, err := b.guest()
	if err != nil {
		return err
	}
	if err := errors.Join(b.pack(guest, "deb", dir), b.pack(guest, "rpm", dir),
		os.WriteFile(filepath.Join(dir, "third-party-licences.txt"), licences, 0o644),
		os.WriteFile(filepath.Join(dir, "release-notes.md"), notes, 0o644)); err != nil {
		return err
	}
	if err := b.apt(dir, dir); err != nil {
		return err
	}
	return writeSums(dir)
}

// writeSums writes SHA256SUMS, for `sha256sum -c`.
func writeSums(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	var sums bytes.Buffer
	for _, e := range entries {
		data, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			return err
		}
		fmt.Fprintf(&sums, "%x  %s\n", sha256.Sum256(data), e.Name())
	}
	return os.WriteFile(filepath.Join(dir, "SHA256SUMS"), sums.Bytes(), 0o644)
}

// notes returns the section of CHANGELOG.md: that of the version if the commit has its tag, else "Unreleased".
func (b *builder) notes() ([]byte, error) {
	text, err := os.ReadFile(filepath.Join(b.root, "CHANGELOG.md"))
	if err != nil {
		return nil, err
	}
	title := "Unreleased"
	if b.version.tagged {
		title = b.version.numbers
	}
	return cutNotes(string(text), title, b.version.ref())
}

var (
	inlineLink = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	absolute   = regexp.MustCompile(`^(?:[a-z]+:|#)`)
)

// cutNotes returns a section of the changelog, with links that work outside of the repository.
func cutNotes(changelog, title, ref string) ([]byte, error) {
	heading := regexp.MustCompile(`(?m)^## \[?` + regexp.QuoteMeta(title) + `\]?(?: .*)?$`)
	at := heading.FindStringIndex(changelog)
	if at == nil {
		return nil, fmt.Errorf("CHANGELOG.md has no section %q", title)
	}
	section, _, _ := strings.Cut(changelog[at[1]:], "\n## ")
	section = inlineLink.ReplaceAllStringFunc(section, func(s string) string {
		target := inlineLink.FindStringSubmatch(s)[1]
		if absolute.MatchString(target) {
			return s
		}
		return "](https://github.com/vnicd/vnicd/blob/" + ref + "/" + path.Clean(target) + ")"
	})
	if section = strings.TrimSpace(section); section == "" {
		return nil, fmt.Errorf("the section %q of CHANGELOG.md is empty", title)
	}
	return []byte(section + "\n"), nil
}
