package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/guestdrv"
)

// A file of the Container Device Interface (SPEC.md of github.com/cncf-tags/container-device-interface), as far as
// vnicd uses it. Runtimes refuse fields that they do not know, and versions that are newer than they are.
type cdiSpec struct {
	Version string      `json:"cdiVersion"`
	Kind    string      `json:"kind"`
	Devices []cdiDevice `json:"devices"`
}

type cdiDevice struct {
	Name  string   `json:"name"`
	Edits cdiEdits `json:"containerEdits"`
}

type cdiEdits struct {
	Env    []string   `json:"env"`
	Mounts []cdiMount `json:"mounts"`
}

type cdiMount struct {
	HostPath      string   `json:"hostPath"`
	ContainerPath string   `json:"containerPath"`
	Options       []string `json:"options"`
}

const (
	// The first version in which a device's name may begin with a digit, as an application's may.
	cdiVersion = "0.5.0"
	// CDI wants a DNS name as the vendor, to tell the devices of a host apart. Runtimes compare it with what --device
	// says, and look nothing up.
	cdiKind = "vnicd.io/application"
)

// cdiContainerDir is the directory in a container.
var cdiContainerDir = filepath.Dir(guestdrv.DefaultSocket)

// cdiName are the names that CDI permits to a device, among those of applications.
var cdiName = regexp.MustCompile(`[A-Za-z0-9]$`)

// newCDIDevice gives a container the directory of an application. The mount is read-only, so that nothing but the
// socket can be in there; connect(2) works on it all the same.
func newCDIDevice(name, dir string) cdiDevice {
	return cdiDevice{name, cdiEdits{
		Env: []string{guestdrv.SocketVariable + "=" + guestdrv.DefaultSocket},
		Mounts: []cdiMount{{HostPath: dir, ContainerPath: cdiContainerDir,
			Options: []string{"ro", "nosuid", "nodev", "noexec", "bind"}}},
	}}
}

func (a *app) cdiCmd() *cobra.Command {
	var output string
	c := &cobra.Command{
		Use:   "cdi [APPLICATION]...",
		Short: "Print the host applications as devices for containers (CDI)",
		Long: `Prints a file of the Container Device Interface (CDI) with a device for each application, or
for those that are named. Container runtimes read such files in /etc/cdi and /var/run/cdi:

    vnicd cdi --output /etc/cdi/vnicd.json
    podman run --device ` + cdiKind + `=NAME ...

A container with the device has the directory ` + cdiContainerDir + ` with the application's socket,
` + config.AppSocket + `, and nothing else of vnicd, and the variable ` + guestdrv.SocketVariable + ` with the socket's path. Programs
with guestdrv or libvnicd use it if they name no other one. The directory stays when vnicd is
replaced; the socket in it is then that of the next vnicd.

The applications are those of the running daemon, or of the configuration if none answers.
Run it again when they have changed. A device does not give the right to open the socket, which
user, group and socket-mode in vnicd.yaml(5) do.

` + whichSocket,
		Args:              args(cobra.ArbitraryArgs),
		ValidArgsFunction: a.complete(nil, a.names(applications)),
		RunE: func(c *cobra.Command, argv []string) error {
			if output != "" && filepath.Ext(output) != ".json" {
				return usageError{fmt.Errorf("--output must end with .json, or runtimes ignore the file; found %q", output)}
			}
			dirs, err := a.appDirs(c)
			if err != nil {
				return err
			}
			text, err := a.cdiFile(dirs, argv)
			if err != nil {
				return err
			}
			if output == "" {
				_, err = a.out.Write(text)
				return err
			}
			return replaceFile(output, text)
		},
	}
	c.Flags().StringVar(&a.control, "control", "", "control socket `path`")
	c.Flags().StringVarP(&output, "output", "o", "", "replace this `file`, at once, in place of printing")
	return c
}

// appDirs returns the directories of the applications, by name: of the running daemon, or else of the configuration.
func (a *app) appDirs(c *cobra.Command) (map[string]string, error) {
	dirs := map[string]string{}
	if s := a.running(c, 5*time.Second); s != nil {
		l, err := applicationsOf(s)
		for _, v := range l {
			dirs[v.Name] = v.Dir
		}
		return dirs, err
	}
	cfg, err := a.load()
	if err != nil {
		return nil, err
	}
	for _, v := range cfg.VMs {
		if v.Application != nil {
			dirs[v.Name] = cfg.AppDir(v)
		}
	}
	return dirs, nil
}

// cdiFile makes the file for the applications of these names; of all, if there are none. Applications whose names CDI
// does not permit are left out, and a message says so.
func (a *app) cdiFile(dirs map[string]string, names []string) ([]byte, error) {
	all := make([]string, 0, len(dirs))
	for name := range dirs {
		all = append(all, name)
	}
	slices.Sort(all)
	if len(all) == 0 {
		return nil, errors.New("there are no applications, and a CDI file has at least one device")
	}
	for _, name := range names {
		if dirs[name] == "" {
			return nil, usageError{fmt.Errorf("no application %q; there are: %s", name, strings.Join(all, ", "))}
		}
	}
	if len(names) > 0 {
		all = slices.Clone(names)
		slices.Sort(all)
		all = slices.Compact(all)
	}
	spec := cdiSpec{Version: cdiVersion, Kind: cdiKind}
	for _, name := range all {
		if !cdiName.MatchString(name) {
			fmt.Fprintf(a.err, "vnicd: application %q is left out: a CDI device's name ends with a letter or a digit\n", name)
			continue
		}
		spec.Devices = append(spec.Devices, newCDIDevice(name, dirs[name]))
	}
	if len(spec.Devices) == 0 {
		return nil, errors.New("no application has a name that CDI permits")
	}
	text, err := json.MarshalIndent(spec, "", "  ")
	return append(text, '\n'), err
}

// replaceFile writes a file that everybody may read, and its directory if there is none. Readers see the old file or
// the new one: the temporary name is not that of a CDI file.
func replaceFile(path string, text []byte) error {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	f, err := os.CreateTemp(dir, "."+filepath.Base(path)+".")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	_, err = f.Write(text)
	if err = errors.Join(err, f.Chmod(0o644), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}
