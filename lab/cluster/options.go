// Package cluster is the engine of `vnicd lab`: VMs on "hosts" of one machine, with the HCA up, on which a command
// runs.
//
// Prepare, in the caller's environment, provides the images and the kernel module. Enter starts this program again in
// namespaces of its own, where Serve makes hosts and VMs and runs the command. All that Serve makes ends with these
// namespaces: interfaces, mounts, processes and the scratch directory, whatever ends them.
//
//	Prepare ──▶ Enter ──(rootless --private)──▶ Serve: hosts ──▶ VMs ──▶ command ──▶ logs, if it failed
//
// Up, in place of Enter, leaves a cluster running that serves a Unix socket in a directory of its own (Claim). Exec,
// Down and List are the socket's clients.
//
//	Claim ──▶ Prepare ──▶ Up ──(rootless --private)──▶ Serve: hosts ──▶ VMs ──▶ commands of Exec ──▶ Down
package cluster

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Limits of a cluster. A VM takes 768 MiB of the machine by default.
const (
	maxHosts = 16
	maxVMs   = 64 // of all hosts
	maxDelay = time.Second
)

// kernels maps the kernel versions that guests may have to the Debian release that has it (vm-images: RELEASE).
var kernels = map[string]string{"6.1": "bookworm", "6.12": "trixie", "7.x": "trixie-backports"}

// Kernels returns the values of Options.Kernel.
func Kernels() []string { return slices.Sorted(maps.Keys(kernels)) }

// Options describe a cluster and what runs on it.
type Options struct {
	Hosts      int
	VMsPerHost int
	CPUs       int // of each VM
	MemoryMiB  int // of each VM
	Kernel     string
	Packages   []string // Debian packages that guests have in addition

	// Loss and Delay apply to what each host sends on the underlay.
	Loss  float64 // percent of the tunnels' packets, to a tenth
	Delay time.Duration

	// Command is the only one of a cluster that ends with it. Its Env is that of every command.
	Command
	Dir  string // mounted in all VMs under the same path; the command's current directory
	Logs string // absolute path of the directory for logs of a failure; "": a new one in /tmp
}

// Command is what runs on a cluster.
type Command struct {
	Argv []string // empty: an interactive shell
	Each bool     // run it on all VMs
	VM   string   // run it on this VM; "": the first
	Env  []string // NAME=VALUE, added to its environment
}

var (
	packageName  = regexp.MustCompile(`^[a-z0-9][a-z0-9+.-]+$`)
	variableName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
)

// Validate reports every mistake in the options.
func (o *Options) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if o.Hosts < 1 || o.Hosts > maxHosts {
		bad("--hosts %d: want 1 to %d", o.Hosts, maxHosts)
	}
	if o.VMsPerHost < 1 || o.VMsPerHost > maxVMs || o.Hosts >= 1 && o.VMsPerHost > maxVMs/o.Hosts {
		bad("--vms-per-host %d: want at least 1, and at most %d VMs on all hosts", o.VMsPerHost, maxVMs)
	}
	if o.CPUs < 1 || o.CPUs > 64 {
		bad("--cpus %d: want 1 to 64", o.CPUs)
	}
	if o.MemoryMiB < 512 || o.MemoryMiB > 1<<20 {
		bad("--memory %d: want 512 to %d MiB", o.MemoryMiB, 1<<20)
	}
	if kernels[o.Kernel] == "" {
		bad("--kernel %q: want %s", o.Kernel, strings.Join(Kernels(), ", "))
	}
	for _, p := range o.Packages {
		if !packageName.MatchString(p) {
			bad("--packages %q: want names of Debian packages", p)
		}
	}
	if o.Loss < 0 || o.Loss > 100 {
		bad("--loss %v%%: want 0%% to 100%%", o.Loss)
	}
	if o.Delay < 0 || o.Delay > maxDelay {
		bad("--delay %v: want 0s to %v", o.Delay, maxDelay)
	}
	errs = append(errs, o.Command.Validate())
	if err := mountable(o.Dir); err != nil {
		errs = append(errs, err)
	}
	if o.Logs != "" && (!filepath.IsAbs(o.Logs) || hidden(o.Logs)) {
		bad("--logs %s: want a directory outside of %s, which is another one in the lab", o.Logs, ownDir)
	}
	return errors.Join(errs...)
}

// Validate reports every mistake in the command.
func (c *Command) Validate() error {
	var errs []error
	for _, v := range c.Env {
		if name, _, ok := strings.Cut(v, "="); !ok || !variableName.MatchString(name) {
			errs = append(errs, fmt.Errorf("--env %q: want NAME=VALUE", v))
		}
	}
	if c.Each && c.VM != "" {
		errs = append(errs, errors.New("--each and --vm: want one of them"))
	}
	return errors.Join(errs...)
}

// ParseLoss parses a part of packets such as 1% or 0.1%, and returns it in percent.
func ParseLoss(text string) (float64, error) {
	number, ok := strings.CutSuffix(text, "%")
	loss, err := strconv.ParseFloat(number, 64)
	if !ok || err != nil || !(loss >= 0 && loss <= 100) || math.Abs(loss*10-math.Round(loss*10)) > 1e-9 {
		return 0, fmt.Errorf("loss %q: want a percentage from 0%% to 100%% with at most one decimal, such as 0.1%%", text)
	}
	return loss, nil
}

// ownDir is the directory that the lab has of its own (vm-images/rootless).
const ownDir = "/run"

// hidden reports whether the lab sees something else at the path.
func hidden(path string) bool { return within(filepath.Clean(path), ownDir) }

// within reports whether a clean path is dir or below.
func within(path, dir string) bool { return path == dir || strings.HasPrefix(path, dir+"/") }

// Directories of the guest over which nothing may be mounted: those themselves, and all below the second group.
var (
	systemDirs = []string{"/", "/bin", "/boot", "/etc", "/host", "/lib", "/lib64", "/sbin", "/usr", "/var"}
	kernelDirs = []string{"/dev", "/proc", ownDir, "/sys"}
)

// mountable reports whether the directory can be mounted in guests under its own path.
func mountable(dir string) error {
	clean := filepath.Clean(dir)
	if !filepath.IsAbs(dir) || clean != dir {
		return fmt.Errorf("current directory %q: want a clean absolute path", dir)
	}
	if slices.Contains(systemDirs, dir) || slices.ContainsFunc(kernelDirs, func(d string) bool { return within(dir, d) }) {
		return fmt.Errorf("current directory %s: in the guests it would hide files of the system; change to another", dir)
	}
	if strings.ContainsAny(dir, "\n\x00") {
		return fmt.Errorf("current directory %q: want a path without line feeds", dir)
	}
	return nil
}
