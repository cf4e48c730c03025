package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vnicd/vnicd/device/testutil/nstest"
)

// Versions are valid for dpkg and rpm, and both sort them by age.
func TestVersions(t *testing.T) {
	nstest.Require(t, "rpm", "rpm")
	ordered := []struct{ git, pkg, ref string }{
		{"v0.9.0", "0.9.0", "v0.9.0"},
		{"v1.2.3-rc1", "1.2.3~rc1", "v1.2.3-rc1"},
		{"v1.2.3-rc1-5-g1234567", "1.2.3~rc1+5.g1234567", "1234567"},
		{"v1.2.3-rc2", "1.2.3~rc2", "v1.2.3-rc2"},
		{"v1.2.3", "1.2.3", "v1.2.3"},
		{"v1.2.3-4-gabcdef1", "1.2.3+4.gabcdef1", "abcdef1"},
		{"v1.2.3-10-gabcdef1", "1.2.3+10.gabcdef1", "abcdef1"},
		{"v1.2.3-10-gabcdef1-dirty", "1.2.3+10.gabcdef1.dirty", "abcdef1"},
		{"v1.2.4", "1.2.4", "v1.2.4"},
	}
	before := ""
	for _, c := range ordered {
		v, err := parseVersion(c.git)
		if err != nil || v.pkg() != c.pkg || v.ref() != c.ref || v.tagged == strings.Contains(c.git, "-g") {
			t.Errorf("%s is %q, %q, tagged %v: %v", c.git, v.pkg(), v.ref(), v.tagged, err)
		}
		if before != "" {
			if out, err := exec.Command("dpkg", "--compare-versions", before, "lt-nl", c.pkg).CombinedOutput(); err != nil ||
				len(out) > 0 {
				t.Errorf("dpkg: %s is not before %s, or not valid: %v %s", before, c.pkg, err, out)
			}
			out, err := exec.Command("rpm", "--eval", `%{lua:print(rpm.vercmp("`+before+`", "`+c.pkg+`"))}`).CombinedOutput()
			if err != nil || strings.TrimSpace(string(out)) != "-1" {
				t.Errorf("rpm: %s is not before %s: %v %s", before, c.pkg, err, out)
			}
		}
		before = c.pkg
	}
	for _, s := range []string{"", "1.2.3", "v1.2", "v1.2.3-", "v1.2.3-next", "v1.2.3 ", "v1.2.3-4-gxyz", "v1.2.3\n"} {
		if v, err := parseVersion(s); err == nil {
			t.Errorf("%q is %q", s, v.pkg())
		}
	}
}

func TestCommitTime(t *testing.T) {
	t.Setenv("SOURCE_DATE_EPOCH", "86400")
	if at, err := commitTime("."); err != nil || at.Unix() != 86400 {
		t.Error(at, err)
	}
	t.Setenv("SOURCE_DATE_EPOCH", "yesterday")
	if at, err := commitTime("."); err == nil {
		t.Error(at)
	}
}

// Release notes are one section, and their links work outside of the repository.
func TestCutNotes(t *testing.T) {
	const log = "# Changelog\n\n## Unreleased\n\n- a ([x](docs/a.md#b), [y](#c), [z](https://example.org))\n\n" +
		"## 1.2.3 (2026-01-02)\n\n### Fixed\n- b\n\n## 1.2.3-rc1\n"
	for title, want := range map[string]string{
		"Unreleased": "- a ([x](https://github.com/vnicd/vnicd/blob/v1/docs/a.md#b), [y](#c), [z](https://example.org))\n",
		"1.2.3":      "### Fixed\n- b\n",
		"1.2.3-rc1":  "",
		"1.2":        "",
	} {
		out, err := cutNotes(log, title, "v1")
		if string(out) != want || (err != nil) != (want == "") {
			t.Errorf("%s: %q, %v", title, out, err)
		}
	}
}

// A module without a licence ends the release, as does one whose licence nobody has looked at.
func TestLicenceUnknown(t *testing.T) {
	root := t.TempDir()
	pkg := filepath.Join(root, "a", "b")
	if err := os.MkdirAll(pkg, 0o755); err != nil {
		t.Fatal(err)
	}
	write := func(path, text string) {
		if err := os.WriteFile(filepath.Join(root, path), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	find := func() (module, error) {
		m := module{path: "example.org/m", version: "v1.0.0", root: root}
		return m, m.find([]string{pkg, filepath.Dir(pkg)})
	}
	write("licence.go", "Permission is hereby granted, free of charge, to any person obtaining a copy")
	if m, err := find(); err == nil || !strings.Contains(err.Error(), "example.org/m v1.0.0") {
		t.Errorf("%+v, %v", m, err)
	}
	write("LICENSE", "GNU GENERAL PUBLIC LICENSE")
	if m, err := find(); err == nil {
		t.Errorf("%+v", m)
	}
	write("LICENSE", "Permission is hereby granted,\nfree of charge, to any person obtaining  a copy")
	write("a/b/COPYING.txt", "                Apache License\n          Version 2.0, January 2004")
	write("a/NOTICE", "Copyright somebody")
	if m, err := find(); err != nil || m.licence != "Apache-2.0 AND MIT" || len(m.files) != 3 {
		t.Errorf("%+v, %v", m, err)
	}
}

// A package's description names files that exist, in one way, and misses none that was built.
func TestSpec(t *testing.T) {
	root := t.TempDir()
	write := func(path, text string, mode os.FileMode) string {
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	write("usr/b.1", "", 0o600)
	write("usr/a.1", "", 0o700)
	read := func(contents string) (*spec, error) {
		text := "name: x\narch: all\nversion: ${V}\ncontents:\n  - " + contents + "\n"
		return readSpec(root, write("package.yaml", text, 0o644), map[string]string{"V": "1.2"})
	}
	s, err := read("{src: usr/*.1, dst: /man/}")
	if err != nil || len(s.contents) != 2 || s.contents[0].Path != "/man/a.1" || s.contents[0].Info.Mode != 0o755 ||
		s.contents[1].Info.Mode != 0o644 || s.fields["version"] != 1.2 || s.fileName("rpm", "1.2") != "x-1.2-1.noarch.rpm" {
		t.Errorf("%+v, %v", s, err)
	}
	if err := s.complete(filepath.Join(root, "usr")); err != nil {
		t.Error(err)
	}
	write("usr/c.2", "", 0o644)
	if err := s.complete(filepath.Join(root, "usr")); err == nil || !strings.Contains(err.Error(), "c.2") {
		t.Error(err)
	}
	for _, contents := range []string{"{src: usr/*.9, dst: /man/}", "{src: usr/*.1, dst: /man}", "{src: usr, dst: /man/}",
		"{src: usr, dst: /man, type: tree}", "{src: '${W}/usr/a.1', dst: /man/}"} {
		if s, err := read(contents); err == nil {
			t.Errorf("%s: %+v", contents, s)
		}
	}
}
