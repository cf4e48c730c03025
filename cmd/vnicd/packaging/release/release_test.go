package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"debug/elf"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/vnicd/vnicd/device/testutil/nstest"
)

const project = "../../../.."

var reproduce = flag.Bool("reproduce", false,
	"TestRelease makes all of a release, twice and from different folders, instead of some files once")

// output runs a command and returns what it prints.
func output(t *testing.T, name string, args ...string) string {
	t.Helper()
	var errs bytes.Buffer
	c := exec.Command(name, args...)
	c.Stderr = &errs
	out, err := c.Output()
	if err != nil {
		t.Fatalf("%s %q: %v\n%s%s", name, args, err, out, errs.Bytes())
	}
	return string(out)
}

// TestRelease makes packages, tarball, apt tree and SBOM and compares what they have. With -reproduce it makes all of a
// release twice and compares the bytes.
func TestRelease(t *testing.T) {
	nstest.Require(t, "rpm", "rpm")
	nstest.Require(t, "dpkg-deb", "dpkg")
	const described = "v1.2.3-rc1-4-gabcdef0"
	var dir string
	if *reproduce {
		dir = twice(t, described)
	} else {
		dir = t.TempDir()
		v, err := parseVersion(described)
		if err != nil {
			t.Fatal(err)
		}
		b := &builder{work: t.TempDir(), out: dir, version: v}
		if b.root, err = filepath.Abs(project); err != nil {
			t.Fatal(err)
		}
		if b.time, err = commitTime(b.root); err != nil {
			t.Fatal(err)
		}
		host, err := b.host("amd64")
		if err != nil {
			t.Fatal(err)
		}
		guest, err := b.guest()
		if err != nil {
			t.Fatal(err)
		}
		for _, err := range []error{b.pack(host, "deb", dir), b.pack(host, "rpm", dir), b.pack(guest, "deb", dir),
			b.pack(guest, "rpm", dir), b.tarball(host, "amd64", dir), b.image(host, "amd64", dir),
			b.writeSBOM("amd64", dir), b.apt(dir, dir)} {
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	const version = "1.2.3~rc1+4.gabcdef0"
	file := func(name string) string { return filepath.Join(dir, fmt.Sprintf(name, version)) }
	t.Run("host", func(t *testing.T) {
		testPair(t, file("vnicd_%s_amd64.deb"), file("vnicd-%s-1.x86_64.rpm"), dependencies{
			"Version": version, "Architecture": "amd64", "Recommends": "systemd", "Suggests": "qemu-system-x86",
		}, dependencies{
			"VERSION": version, "RELEASE": "1", "ARCH": "x86_64", "REQUIRENAME": "/bin/sh", "RECOMMENDNAME": "systemd",
			"SUGGESTNAME": "qemu-system-x86",
		}, []string{"/etc/vnicd/vnicd.yaml"})
	})
	t.Run("guest", func(t *testing.T) {
		testPair(t, file("vnicd-dkms_%s_all.deb"), file("vnicd-dkms-%s-1.noarch.rpm"), dependencies{
			"Version": version, "Architecture": "all", "Depends": "dkms (>= 2.8)", "Recommends": "rdma-core, ibverbs-providers",
			"Suggests": "linux-headers-amd64 | linux-headers-generic",
		}, dependencies{
			"VERSION": version, "RELEASE": "1", "ARCH": "noarch", "REQUIRENAME": "/bin/sh dkms",
			"RECOMMENDNAME": "rdma-core libibverbs", "SUGGESTNAME": "kernel-devel",
		}, []string{"/etc/modprobe.d/vnicd.conf"})
		for f, want := range map[string]string{"dkms.conf": `PACKAGE_VERSION="` + version + `"`,
			"vnicd_main.c": `MODULE_VERSION("` + version + `");`} {
			path := "./usr/src/vnicd-" + version + "/" + f
			text := output(t, "sh", "-c", `dpkg-deb --fsys-tarfile "$0" | tar -xO "$1"`, file("vnicd-dkms_%s_all.deb"), path)
			if !strings.Contains(text, want+"\n") {
				t.Errorf("%s has no %s", f, want)
			}
		}
	})
	t.Run("tarball", func(t *testing.T) {
		testTarball(t, file("vnicd-%s-linux-amd64.tar.gz"), file("vnicd_%s_amd64.deb"), "vnicd-"+version+"-linux-amd64")
	})
	t.Run("image", func(t *testing.T) {
		testImage(t, file("vnicd-%s-linux-amd64.oci.tar"), file("vnicd_%s_amd64.deb"), "vnicd:1.2.3-rc1-4-gabcdef0")
	})
	t.Run("apt", func(t *testing.T) {
		testAptRelease(t, file("vnicd-%s-apt.tar"), file("vnicd_%s_amd64.deb"), file("vnicd-dkms_%s_all.deb"))
	})
	t.Run("sbom", func(t *testing.T) { testSBOM(t, file("vnicd-%s-linux-amd64.spdx.json"), file("vnicd_%s_amd64.deb")) })
}

// dependencies are fields of a package that are not the same in both.
type dependencies map[string]string

// entry is a file as a package has it.
type entry struct {
	mode        int64 // with the file's type, as in stat(2)
	owner, link string
	sum         string // of a regular file's data
}

// inTar returns the files of an archive by their absolute paths, and the data of one.
func inTar(t *testing.T, r io.Reader, prefix, wanted string) (map[string]entry, []byte) {
	t.Helper()
	files, found := map[string]entry{}, []byte(nil)
	for a := tar.NewReader(r); ; {
		h, err := a.Next()
		if err == io.EOF {
			return files, found
		} else if err != nil {
			t.Fatal(err)
		}
		if h.Uname == "" && h.Gname == "" && h.Uid == 0 && h.Gid == 0 { // nFPM's own changelog
			h.Uname, h.Gname = "root", "root"
		}
		e := entry{mode: h.Mode, owner: fmt.Sprint(h.Uname, ":", h.Gname, " ", h.Uid, ":", h.Gid), link: h.Linkname}
		switch h.Typeflag {
		case tar.TypeReg:
			data, err := io.ReadAll(a)
			if err != nil {
				t.Fatal(err)
			}
			e.mode, e.sum = e.mode|syscall.S_IFREG, fmt.Sprintf("%x", sha256.Sum256(data))
			if h.Name == prefix+wanted {
				found = data
			}
		case tar.TypeSymlink:
			e.mode = syscall.S_IFLNK // a link's own mode has no meaning
		case tar.TypeDir:
			e.mode |= syscall.S_IFDIR
		default:
			t.Errorf("%s has the type %c", h.Name, h.Typeflag)
		}
		name, ok := strings.CutPrefix(h.Name, prefix+"/")
		if !ok {
			t.Errorf("%s is not below %s", h.Name, prefix)
		}
		files["/"+strings.TrimSuffix(name, "/")] = e
	}
}

func inDeb(t *testing.T, path, wanted string) (map[string]entry, []byte) {
	t.Helper()
	return inTar(t, strings.NewReader(output(t, "dpkg-deb", "--fsys-tarfile", path)), ".", wanted)
}

// inRPM returns the files of a package and the flags that each has.
func inRPM(t *testing.T, path string) (map[string]entry, map[string]string) {
	t.Helper()
	files, flags := map[string]entry{}, map[string]string{}
	for line := range strings.Lines(output(t, "rpm", "-qp", "--qf", `[%{FILENAMES}\t%{FILEMODES}\t%{FILEUSERNAME}:`+
		`%{FILEGROUPNAME}\t%{FILELINKTOS}\t%{FILEDIGESTS}\t%{FILEFLAGS:fflags}\n]`, path)) {
		f := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
		mode, err := strconv.ParseInt(f[1], 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		if mode &= 0xffff; mode&syscall.S_IFMT == syscall.S_IFLNK {
			mode = syscall.S_IFLNK
		}
		files[f[0]], flags[f[0]] = entry{mode: mode, owner: f[2] + " 0:0", link: f[3], sum: f[4]}, f[5]
	}
	return files, flags
}

// elsewhere are files of Debian that rpm's distributions have at other paths, or not at all.
var elsewhere = []struct {
	debian *regexp.Regexp
	rpm    string
}{
	{regexp.MustCompile(`^/usr/share/doc/[^/]+/changelog\.Debian\.gz$`), ""}, // a field of the package
	{regexp.MustCompile(`^/usr/share/lintian/overrides/[^/]+$`), ""},
	{regexp.MustCompile(`^/usr/share/zsh/vendor-completions/_vnicd$`), "/usr/share/zsh/site-functions/_vnicd"},
}

// testPair: two packages have the same files, modes, owners and scripts, and name what they need as their
// distributions do.
func testPair(t *testing.T, deb, rpm string, debFields, rpmFields dependencies, configs []string) {
	output(t, "rpm", "-K", "--nosignature", rpm) // checks the digests
	inD, _ := inDeb(t, deb, "")
	inR, flags := inRPM(t, rpm)
	for path, r := range inR {
		if r.mode&syscall.S_IFMT == syscall.S_IFDIR {
			if d := inD[path]; d != r {
				t.Errorf("directory %s: deb %+v, rpm %+v", path, d, r)
			}
		}
	}
	files := 0
	for path, d := range inD {
		if d.owner != "root:root 0:0" || d.mode&0o7022 != 0 && d.mode&syscall.S_IFMT != syscall.S_IFLNK {
			t.Errorf("%s: %+v", path, d)
		}
		if d.mode&syscall.S_IFMT == syscall.S_IFDIR {
			continue
		}
		files++
		at := path
		for _, e := range elsewhere {
			if e.debian.MatchString(path) {
				at = e.rpm
			}
		}
		if at == "" {
			continue
		}
		r, ok := inR[at]
		if delete(inR, at); !ok || r != d {
			t.Errorf("%s: deb %+v, rpm %+v", path, d, r)
		}
		if config := strings.Contains(flags[at], "c"); config != slices.Contains(configs, path) ||
			config && !strings.Contains(flags[at], "n") {
			t.Errorf("%s has rpm's flags %q", at, flags[at])
		}
		if doc := strings.HasPrefix(path, "/usr/share/doc/") || strings.HasPrefix(path, "/usr/share/man/"); doc !=
			strings.Contains(flags[at], "d") {
			t.Errorf("%s has rpm's flags %q", at, flags[at])
		}
	}
	for path, r := range inR {
		if r.mode&syscall.S_IFMT != syscall.S_IFDIR {
			t.Errorf("only the rpm has %s", path)
		}
	}
	if files < 25 {
		t.Errorf("only %d files", files)
	}

	control := t.TempDir()
	output(t, "dpkg-deb", "--control", deb, control)
	conffiles, err := os.ReadFile(filepath.Join(control, "conffiles"))
	if want := strings.Join(configs, "\n") + "\n"; err != nil || string(conffiles) != want {
		t.Errorf("conffiles: %q, %v", conffiles, err)
	}
	scripts := 0
	for debian, tag := range map[string]string{"preinst": "PREIN", "postinst": "POSTIN", "prerm": "PREUN",
		"postrm": "POSTUN"} {
		d, err := os.ReadFile(filepath.Join(control, debian))
		r := output(t, "rpm", "-qp", "--qf", "%|"+tag+"?{%{"+tag+"}}|", rpm)
		if strings.TrimSpace(r) != strings.TrimSpace(string(d)) {
			t.Errorf("%s:\n%s\n%s:\n%s", debian, d, tag, r)
		}
		if err == nil {
			scripts++
			output(t, "sh", "-n", filepath.Join(control, debian))
		}
	}
	if scripts < 2 {
		t.Errorf("%d scripts", scripts)
	}
	for field, want := range debFields {
		if v := strings.TrimSpace(output(t, "dpkg-deb", "-f", deb, field)); v != want {
			t.Errorf("deb: %s %q, expected %q", field, v, want)
		}
	}
	for tag, want := range rpmFields {
		if v := strings.TrimSpace(output(t, "rpm", "-qp", "--qf", "[%{"+tag+"} ]", rpm)); v != want {
			t.Errorf("rpm: %s %q, expected %q", tag, v, want)
		}
	}
}

// testTarball: it has the package's files, and none of the directories that every system has.
func testTarball(t *testing.T, path, deb, prefix string) {
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	files, program := inTar(t, z, prefix, "/usr/bin/vnicd")
	debian, _ := inDeb(t, deb, "")
	for p, e := range files {
		if debian[p] != e {
			t.Errorf("%s: tarball %+v, deb %+v", p, e, debian[p])
		}
	}
	for p, e := range debian {
		forDebian := elsewhere[0].debian.MatchString(p) || elsewhere[1].debian.MatchString(p)
		if _, ok := files[p]; !ok && !forDebian && e.mode&syscall.S_IFMT != syscall.S_IFDIR {
			t.Errorf("the tarball has no %s", p)
		}
	}
	for _, p := range []string{"/usr", "/usr/bin", "/etc", "/usr/share/man/man8"} {
		if _, ok := files[p]; ok {
			t.Errorf("the tarball has %s", p)
		}
	}
	e, err := elf.NewFile(bytes.NewReader(program))
	if err != nil {
		t.Fatal(err)
	}
	if slices.ContainsFunc(e.Progs, func(p *elf.Prog) bool { return p.Type == elf.PT_INTERP }) {
		t.Error("the program is not static")
	}
}

// testImage: every part has the sum and the size by which it is named, and the layer has the package's files.
func testImage(t *testing.T, path, deb, name string) {
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	parts := map[string][]byte{}
	for a := tar.NewReader(f); ; {
		h, err := a.Next()
		if err == io.EOF {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		if parts[h.Name], err = io.ReadAll(a); err != nil {
			t.Fatal(err)
		}
	}
	if layout := string(parts["oci-layout"]); layout != `{"imageLayoutVersion":"1.0.0"}` {
		t.Errorf("layout %s", layout)
	}
	blob := func(b ociBlob, mediaType string) []byte {
		data, ok := parts["blobs/"+strings.Replace(b.Digest, ":", "/", 1)]
		if !ok || len(data) != b.Size || fmt.Sprintf("sha256:%x", sha256.Sum256(data)) != b.Digest ||
			b.MediaType != mediaType {
			t.Fatalf("%+v: found %v, %d bytes; expected %s", b, ok, len(data), mediaType)
		}
		return data
	}
	decode := func(text []byte, v any) {
		if err := json.Unmarshal(text, v); err != nil {
			t.Fatal(err)
		}
	}
	var index ociIndex
	decode(parts["index.json"], &index)
	if len(index.Manifests) != 1 || index.Manifests[0].Annotations["org.opencontainers.image.ref.name"] != name ||
		*index.Manifests[0].Platform != (ociPlatform{"amd64", "linux"}) {
		t.Fatalf("%+v", index)
	}
	var manifest ociManifest
	decode(blob(index.Manifests[0], mediaManifest), &manifest)
	var config ociConfig
	decode(blob(manifest.Config, mediaConfig), &config)
	if len(manifest.Layers) != 1 || len(config.RootFS.DiffIDs) != 1 {
		t.Fatalf("%+v, %+v", manifest, config)
	}
	z, err := gzip.NewReader(bytes.NewReader(blob(manifest.Layers[0], mediaLayer)))
	if err != nil {
		t.Fatal(err)
	}
	layer, err := io.ReadAll(z)
	if err != nil {
		t.Fatal(err)
	}
	if sum := fmt.Sprintf("sha256:%x", sha256.Sum256(layer)); config.RootFS.DiffIDs[0] != sum {
		t.Errorf("the layer has the sum %s, not %s", sum, config.RootFS.DiffIDs[0])
	}
	files, _ := inTar(t, bytes.NewReader(layer), ".", "")
	debian, _ := inDeb(t, deb, "")
	own := map[string]int64{"/run/vnicd": 0o755, "/tmp": 0o1777}
	for p, e := range files {
		if mode, ok := own[p]; ok && e.mode == mode|syscall.S_IFDIR {
			continue
		}
		if debian[p] != e {
			t.Errorf("%s: image %+v, deb %+v", p, e, debian[p])
		}
	}
	for _, p := range append(config.Config.Entrypoint, "/run/vnicd", "/tmp", "/etc/vnicd/vnicd.yaml",
		"/usr/share/doc/vnicd/third-party-licences.txt", "/usr/share/licenses/vnicd/LICENSE",
		"/usr/libexec/vnicd/vnicd-hca") {
		if _, ok := files[p]; !ok {
			t.Errorf("the image has no %s", p)
		}
	}
}

// testSBOM: the document has what SPDX 2.3 requires, and the checksum of the packaged program.
func testSBOM(t *testing.T, path, deb string) {
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var d spdxDocument
	strict := json.NewDecoder(bytes.NewReader(text))
	strict.DisallowUnknownFields()
	if err := strict.Decode(&d); err != nil {
		t.Fatal(err)
	}
	_, program := inDeb(t, deb, "/usr/bin/vnicd")
	if sum := fmt.Sprintf("%x", sha256.Sum256(program)); len(program) == 0 || d.Packages[0].Checksums[0].Value != sum ||
		!strings.HasSuffix(d.Namespace, sum) {
		t.Errorf("%+v, but the program has %s", d.Packages[0], sum)
	}
	ids := map[string]bool{d.ID: true}
	for _, p := range d.Packages {
		if ids[p.ID] || !regexp.MustCompile(`^SPDXRef-[A-Za-z0-9.-]+$`).MatchString(p.ID) || p.Version == "" ||
			p.Declared == "" {
			t.Errorf("%+v", p)
		}
		ids[p.ID] = true
	}
	for _, r := range d.Relationships {
		if !ids[r.From] || !ids[r.To] {
			t.Errorf("%+v", r)
		}
	}
	for _, want := range []string{"std", "github.com/osrg/gobgp/v4", "github.com/cilium/ebpf"} {
		if !slices.ContainsFunc(d.Packages, func(p spdxPackage) bool { return p.Name == want }) {
			t.Errorf("no module %s", want)
		}
	}
	if len(d.Relationships) != len(d.Packages) || d.Version != "SPDX-2.3" {
		t.Errorf("%d packages, %d relationships, %s", len(d.Packages), len(d.Relationships), d.Version)
	}
}

// twice makes all of a release in this folder, and in a copy of it with nothing compiled, another umask, language and
// time zone. It returns the folder of the first.
func twice(t *testing.T, described string) string {
	first, second, copied := t.TempDir(), t.TempDir(), filepath.Join(t.TempDir(), "elsewhere")
	if err := run(project, described, first, "", "all"); err != nil {
		t.Fatal(err)
	}
	defer syscall.Umask(syscall.Umask(0o077))
	output(t, "sh", "-c", `mkdir "$1" && cp -a "$0/.git" "$1/.git" && cd "$0" &&
		git ls-files -z --cached --others --exclude-standard | tar -c --null --ignore-failed-read -T - | tar -x -C "$1"`,
		project, copied)
	t.Setenv("GOCACHE", t.TempDir())
	t.Setenv("TZ", "Asia/Kathmandu")
	t.Setenv("LC_ALL", "C.UTF-8")
	if err := run(copied, described, second, "", "all"); err != nil {
		t.Fatal(err)
	}
	read := func(dir string) map[string]string {
		files := map[string]string{}
		entries, err := os.ReadDir(filepath.Join(dir, "release"))
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			data, err := os.ReadFile(filepath.Join(dir, "release", e.Name()))
			if err != nil {
				t.Fatal(err)
			}
			files[e.Name()] = string(data)
		}
		return files
	}
	a, b := read(first), read(second)
	if len(a) != 14 || len(b) != 14 {
		t.Errorf("%q and %q", slices.Sorted(maps.Keys(a)), slices.Sorted(maps.Keys(b)))
	}
	for name := range a {
		if a[name] != b[name] {
			t.Errorf("%s: %d bytes and %d, not the same", name, len(a[name]), len(b[name]))
		}
	}
	c := exec.Command("sha256sum", "-c", "SHA256SUMS")
	c.Dir = filepath.Join(first, "release")
	if out, err := c.CombinedOutput(); err != nil || strings.Count(string(out), ": OK\n") != len(a)-1 {
		t.Errorf("%v\n%s", err, out)
	}
	return filepath.Join(first, "release")
}
