package main

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"go.yaml.in/yaml/v3"
)

// A package is made in two steps: host, guest and library build files that are not in the project, and return the
// package's description with every file named; pack gives it to nFPM.

// maintainer has GitHub's address of the project's account, which takes no mail.
const maintainer = "the vnicd authors <vnicd@users.noreply.github.com>"

// goEnv compiles static programs for Linux that run on every processor of the architecture.
func goEnv(arch string) []string {
	return []string{"CGO_ENABLED=0", "GOOS=linux", "GOARCH=" + arch, "GOAMD64=v1", "GOARM64=v8.0"}
}

// host builds the daemon for an architecture, with its manual pages, completions and the licences of its libraries.
func (b *builder) host(arch string) (*spec, error) {
	dir := filepath.Join(b.work, "host-"+arch)
	binary := b.binary(arch)
	if err := os.MkdirAll(filepath.Dir(binary), 0o755); err != nil {
		return nil, err
	}
	if _, err := b.command(goEnv(arch), "go", "build", "-trimpath",
		"-ldflags", "-s -w -X main.version="+b.version.git, "-o", binary, "./cmd/vnicd"); err != nil {
		return nil, err
	}
	if _, err := b.command(nil, "go", "run", "./"+packaging+"/docs", b.version.git, dir); err != nil {
		return nil, err
	}
	if err := compressAll(filepath.Join(dir, "usr/share/man/man*/*.[1-9]")); err != nil {
		return nil, err
	}
	licences, err := b.licences(arch)
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(b.licenceFile(arch), licences, 0o644); err != nil {
		return nil, err
	}
	return b.describe("vnicd", dir)
}

// binary returns the path of the daemon that host builds.
func (b *builder) binary(arch string) string {
	return filepath.Join(b.work, "host-"+arch, "usr/bin/vnicd")
}

// licenceFile returns the path of the licences that host writes.
func (b *builder) licenceFile(arch string) string {
	return filepath.Join(b.work, "host-"+arch, "third-party-licences.txt")
}

// guest copies the module's source with the version in it.
func (b *builder) guest() (*spec, error) {
	dir := filepath.Join(b.work, "guest")
	if err := os.MkdirAll(filepath.Join(dir, "src"), 0o755); err != nil {
		return nil, err
	}
	module := filepath.Join(b.root, "guestdrv/linux")
	for _, pattern := range []string{"Kbuild", "Makefile", "dkms.conf", "*.c", "*.h"} {
		files, err := filepath.Glob(filepath.Join(module, pattern))
		if err != nil || len(files) == 0 {
			return nil, fmt.Errorf("no files %s in %s (%v)", pattern, module, err)
		}
		for _, f := range files {
			if strings.HasSuffix(f, ".mod.c") { // left by a compilation
				continue
			}
			if err := copyFile(f, filepath.Join(dir, "src", filepath.Base(f)), "", ""); err != nil {
				return nil, err
			}
		}
	}
	scripts := filepath.Join(b.root, packaging, "packages/vnicd-dkms")
	for _, c := range []struct{ from, to, pattern, replacement string }{
		{filepath.Join(module, "dkms.conf"), "src/dkms.conf", `(?m)^PACKAGE_VERSION=.*$`, `PACKAGE_VERSION="%s"`},
		{filepath.Join(module, "vnicd_main.c"), "src/vnicd_main.c", `(?m)^MODULE_VERSION\(.*$`, `MODULE_VERSION("%s");`},
		{filepath.Join(scripts, "postinst"), "postinst", "@VERSION@", "%s"},
		{filepath.Join(scripts, "prerm"), "prerm", "@VERSION@", "%s"},
	} {
		replacement := fmt.Sprintf(c.replacement, b.version.pkg())
		if err := copyFile(c.from, filepath.Join(dir, c.to), c.pattern, replacement); err != nil {
			return nil, err
		}
	}
	return b.describe("vnicd-dkms", dir)
}

// library compiles the library for C programs, and has it installed into a folder.
func (b *builder) library() (*spec, error) {
	dir := filepath.Join(b.work, "library")
	if _, err := b.command(nil, "make", "-s", "-C", "guestdrv/libvnicd", "OUT="+filepath.Join(b.work, "objects"),
		"DESTDIR="+dir, "VERSION="+b.version.pkg(), "install"); err != nil {
		return nil, err
	}
	if err := compressAll(filepath.Join(dir, "usr/share/man/man3/*.3")); err != nil {
		return nil, err
	}
	return b.describe("libvnicd-dev", dir)
}

// describe writes the changelog that Debian and rpm expect, and reads the package's description.
func (b *builder) describe(name, dir string) (*spec, error) {
	log, err := yaml.Marshal([]map[string]any{{
		"semver": b.version.pkg(), "date": b.time, "packager": maintainer,
		"deb":     map[string]any{"urgency": "medium", "distributions": []string{"unstable"}},
		"changes": []map[string]any{{"note": "https://github.com/vnicd/vnicd/blob/" + b.version.ref() + "/CHANGELOG.md"}},
	}})
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(dir, "changelog.yaml"), log, 0o644); err != nil {
		return nil, err
	}
	s, err := readSpec(b.root, filepath.Join(b.root, packaging, "packages", name, "package.yaml"),
		map[string]string{"VERSION": b.version.pkg(), "GENERATED": dir})
	if err != nil {
		return nil, err
	}
	return s, s.complete(filepath.Join(dir, "usr"))
}

// copyFile copies a file and replaces what matches the pattern, if there is one, which must occur.
func copyFile(from, to, pattern, replacement string) error {
	text, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	if pattern != "" {
		re := regexp.MustCompile(pattern)
		if !re.Match(text) {
			return fmt.Errorf("%s has nothing that matches %s", from, pattern)
		}
		text = re.ReplaceAllLiteral(text, []byte(replacement))
	}
	return os.WriteFile(to, text, 0o644)
}

// compressAll replaces files by compressed ones.
func compressAll(pattern string) error {
	files, err := filepath.Glob(pattern)
	if err != nil || len(files) == 0 {
		return fmt.Errorf("no files %s (%v)", pattern, err)
	}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			return err
		}
		if err := writeGzip(f+".gz", text); err != nil {
			return err
		}
		if err := os.Remove(f); err != nil {
			return err
		}
	}
	return nil
}

// writeGzip writes a compressed file without name and time.
func writeGzip(path string, data []byte) error {
	z, err := zip(data)
	if err != nil {
		return err
	}
	return os.WriteFile(path, z, 0o644)
}

func zip(data []byte) ([]byte, error) {
	var z bytes.Buffer
	w, err := gzip.NewWriterLevel(&z, gzip.BestCompression)
	if err != nil {
		return nil, err
	}
	if _, err := w.Write(data); err != nil {
		return nil, err
	}
	err = w.Close()
	return z.Bytes(), err
}
