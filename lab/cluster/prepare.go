package cluster

import (
	"context"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/hypervisor/qemu"
	vmimages "github.com/vnicd/vnicd/vm-images"
)

// Spec is a cluster whose images and module exist.
type Spec struct {
	Options
	VNICD   string // the daemon's binary
	Recipes string // directory of vm-images, unpacked
	Module  string // directory of vnicd.ko
	Stay    bool   // it lasts until Down
}

// tools are the programs of the host that a cluster needs, with their Debian packages. Building images needs more,
// which vm-images/build names.
var tools = map[string]string{"ip": "iproute2", "ethtool": "ethtool", "ssh": "openssh-client",
	"ssh-keygen": "openssh-client", "unshare": "util-linux"}

// Prepare provides what the cluster needs: it unpacks the recipes and the module's source, builds missing images and
// compiles the module, all in vnicd's cache. The first time it takes minutes and the network; then a second. Progress
// goes to log. o must be valid.
func Prepare(ctx context.Context, o Options, log io.Writer) (*Spec, error) {
	if err := haveTools(); err != nil {
		return nil, err
	}
	s := &Spec{Options: o}
	var err error
	if s.VNICD, err = os.Executable(); err != nil {
		return nil, err
	}
	cache, err := cacheDir()
	if err != nil {
		return nil, err
	}
	for what, path := range map[string]string{"this program": s.VNICD, "the directory of images": cache} {
		if hidden(path) {
			return nil, fmt.Errorf("%s is in %s, which is another directory in the lab: want it elsewhere", what, path)
		}
	}
	sum, err := fingerprint(vmimages.Recipes)
	if err != nil {
		return nil, err
	}
	if s.Recipes, err = provide(filepath.Join(cache, "lab-recipes-"+sum), func(dir string) error {
		return unpack(vmimages.Recipes, dir, vmimages.Executables)
	}); err != nil {
		return nil, err
	}
	b := s.builder(log)
	img, err := b.Build(ctx)
	if err != nil {
		return nil, err
	}
	source, err := fs.Sub(guestdrv.ModuleSource, "linux")
	if err != nil {
		return nil, err
	}
	if sum, err = fingerprint(source, img.ModuleRoot); err != nil {
		return nil, err
	}
	s.Module, err = provide(filepath.Join(cache, "lab-module-"+sum), func(dir string) error {
		fmt.Fprintf(log, "vnicd: lab: compiling the module for kernel %s\n", img.KVer)
		return compile(ctx, s.builder(nil), source, dir)
	})
	return s, err
}

// compile compiles the module into dir.
func compile(ctx context.Context, b *qemu.Builder, source fs.FS, dir string) error {
	src, err := os.MkdirTemp("", "vnicd-module-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(src)
	if err := unpack(source, src, nil); err != nil {
		return err
	}
	return b.Module(ctx, src, dir)
}

// builder returns the builder of the cluster's images.
func (s *Spec) builder(log io.Writer) *qemu.Builder {
	return &qemu.Builder{Script: filepath.Join(s.Recipes, "build"), Env: s.imageEnv(), Log: log, OwnGroup: true}
}

// imageEnv returns the variables that choose the images.
func (s *Spec) imageEnv() []string {
	packages := slices.Clone(s.Packages)
	slices.Sort(packages)
	return []string{"RELEASE=" + kernels[s.Kernel], "PACKAGES=" + strings.Join(slices.Compact(packages), " ")}
}

// haveTools reports missing programs of the host.
func haveTools() error {
	var missing []string
	for tool, deb := range tools {
		if _, err := exec.LookPath(tool); err == nil {
			continue
		}
		// The lab itself runs with these directories in PATH (vm-images/rootless).
		if !slices.ContainsFunc([]string{"/usr/sbin/", "/sbin/"}, func(d string) bool {
			_, err := exec.LookPath(d + tool)
			return err == nil
		}) {
			missing = append(missing, deb)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	slices.Sort(missing)
	return fmt.Errorf("missing on this machine: %[1]s; install with: sudo apt-get install %[1]s",
		strings.Join(slices.Compact(missing), " "))
}
