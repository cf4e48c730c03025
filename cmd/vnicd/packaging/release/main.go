// Command release makes vnicd's packages, and all files of a release. Run it in the project's root:
//
//	release [-version vX.Y.Z] [-out build] [-apt-key KEY] host|guest|library|image|apt|all
//
// With "host", "guest" and "library" it makes the Debian package in the output folder, with "image" the host's OCI
// image, with "apt" a tree of packages for apt-get, signed by gpg with a key. With "all" it makes a folder "release"
// there (README.md of this folder's parent says what is in it). The same commit, compiled by the same version of Go,
// gives the same bytes, signatures aside.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// packaging is the folder with what packages are made of, in the project.
const packaging = "cmd/vnicd/packaging"

// builder makes packages.
type builder struct {
	root    string // of the project
	work    string // for intermediate files
	out     string
	version version
	time    time.Time // of all files
	nfpm    string    // the program
	aptKey  string    // fingerprint of gpg's key that signs the apt tree, or empty
}

func main() {
	described := flag.String("version", "", "as `git describe` prints it")
	out := flag.String("out", "build", "folder for the packages")
	key := flag.String("apt-key", "", "gpg's secret key that signs the apt tree (fingerprint)")
	flag.Usage = func() {
		fmt.Fprintln(os.Stderr, "usage: release [-version vX.Y.Z] [-out build] [-apt-key KEY] "+
			"host|guest|library|image|apt|all")
		flag.PrintDefaults()
	}
	flag.Parse()
	if flag.NArg() != 1 {
		flag.Usage()
		os.Exit(2)
	}
	if err := run(".", *described, *out, *key, flag.Arg(0)); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

// run makes what is named, of the project in root.
func run(root, described, out, key, what string) (err error) {
	b := &builder{}
	if b.root, err = filepath.Abs(root); err != nil {
		return err
	}
	if b.out, err = filepath.Abs(out); err != nil {
		return err
	}
	if b.version, err = parseVersion(described); err != nil {
		return err
	}
	if b.time, err = commitTime(b.root); err != nil {
		return err
	}
	if key != "" {
		if b.aptKey, err = b.findKey(key); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(b.out, 0o755); err != nil {
		return err
	}
	if b.work, err = os.MkdirTemp(b.out, ".release-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(b.work)) }()
	switch what {
	case "host":
		s, err := b.host("amd64")
		if err != nil {
			return err
		}
		return b.replaceDeb(s)
	case "guest":
		s, err := b.guest()
		if err != nil {
			return err
		}
		return b.replaceDeb(s)
	case "library":
		s, err := b.library()
		if err != nil {
			return err
		}
		return b.replaceDeb(s)
	case "image":
		s, err := b.host("amd64")
		if err != nil {
			return err
		}
		return b.image(s, "amd64", b.out)
	case "apt":
		host, err := b.host("amd64")
		if err != nil {
			return err
		}
		guest, err := b.guest()
		if err != nil {
			return err
		}
		if err := errors.Join(b.pack(host, "deb", b.work), b.pack(guest, "deb", b.work)); err != nil {
			return err
		}
		return b.apt(b.work, b.out)
	case "all":
		return b.all()
	}
	return fmt.Errorf("%q: expected host, guest, library, image, apt or all", what)
}

// command runs a program in the project's root with additions to the environment, and returns its output.
func (b *builder) command(env []string, name string, args ...string) ([]byte, error) {
	c := exec.Command(name, args...)
	c.Dir = b.root
	c.Env = append(append(os.Environ(), fmt.Sprintf("SOURCE_DATE_EPOCH=%d", b.time.Unix()), "TZ=UTC"), env...)
	c.Stderr = os.Stderr
	out, err := c.Output()
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, out)
	}
	return out, nil
}
