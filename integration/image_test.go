package integration

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/vnicd/vnicd/device/testutil/nstest"
	"github.com/vnicd/vnicd/lab"
)

// TestImage: the release's OCI image runs by podman as OPERATING says, with these capabilities and no others, on both
// hosts. Programs in VMs work, and outlive a crash of the daemon in its container and its upgrade there.
func TestImage(t *testing.T) {
	var c *containers
	begin := func(ctx context.Context, t *testing.T, l *lab.Lab) *stand {
		c = newContainers(ctx, t, l)
		keep := func(w *twoHosts) { w.a.Keep, w.b.Keep = true, true }
		w := makeTwoHosts(ctx, t, l, keep, vmA, vmB)
		l.Add(func() { check(t, c.run(context.Background(), "stop", "--all", "--time=10")) })
		s := &stand{Lab: l, hosts: []*lab.Host{w.a, w.b}, vms: w.vms, timeout: 14, at: [2]int{0, 1}}
		s.client, s.server = w.load(ctx, t)
		return s
	}
	crash := func(ctx context.Context, t *testing.T, s *stand, n int) {
		h, _ := s.victim(n)
		was := c.daemon(ctx, t, h)
		if was == 1 {
			t.Fatal("vnicd does not run")
		}
		check(t, syscall.Kill(was, syscall.SIGKILL))
		eventually(ctx, t, "the keeper starts another vnicd", func() bool {
			now := c.daemon(ctx, t, h)
			_, err := h.Status(ctx)
			return err == nil && now != was && now > 1
		})
	}
	replace := func(ctx context.Context, t *testing.T, s *stand, n int) {
		h, _ := s.victim(n)
		check(t, c.run(ctx, "cp", c.vnicd, c.name(h)+":/usr/bin/vnicd"))
		check(t, c.run(ctx, "exec", c.name(h), "vnicd", "-c", filepath.Join(h.Dir, "vnicd.yaml"), "upgrade"))
		want := must[string](t)(h.CLI(ctx, "--version")) // "vnicd version x", of c.vnicd
		if v := versionOf(ctx, t, h); want != "vnicd version "+v+"\n" || "v"+v == imageVersion || v == imageVersion {
			t.Errorf("%s runs %s, want %s", h.Name, v, want)
		}
	}
	crashes, upgrades := 4, 2
	outlive(t, begin, "counters,cm,ping", event{name: "crash in the container", run: crash, times: &crashes},
		event{name: "upgrade in the container", run: replace, times: &upgrades})
}

// imageVersion is not the version of the lab's program.
const imageVersion = "v0.0.1-rc1"

// containers are vnicds in podman's containers.
type containers struct {
	vnicd  string // the lab's own program
	podman string // a script that runs it
}

// newContainers loads the image into a store of its own, and has the lab start vnicd from it.
func newContainers(ctx context.Context, t *testing.T, l *lab.Lab) *containers {
	t.Helper()
	dir := l.Env.Dir
	c := &containers{vnicd: l.VNICD, podman: newPodman(t, l, "")}
	build := exec.CommandContext(ctx, "go", "run", "./cmd/vnicd/packaging/release", "-version", imageVersion, "-out", dir,
		"image")
	build.Dir = l.Env.Root
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	files := must[[]string](t)(filepath.Glob(filepath.Join(dir, "vnicd-*-amd64.oci.tar")))
	if len(files) != 1 {
		t.Fatalf("%q", files)
	}
	check(t, c.run(ctx, "load", "--quiet", "--input", files[0]))
	l.VNICD = filepath.Join(dir, "vnicd-in-container")
	script(t, l.VNICD, `[ "$1" = run ] || exec %[1]s "$@"
dir=$(dirname "$3")
exec %[2]s run --rm --init --name="vnicd-$(basename "$dir")" --network=host --cgroups=disabled \
	--cap-drop=all --cap-add=NET_ADMIN,NET_BIND_SERVICE,LINUX_IMMUTABLE,BPF --security-opt=no-new-privileges \
	--device=/dev/net/tun --ulimit=nofile=4096:4096 --ulimit=nproc=4096:4096 \
	--volume="$dir:$dir" vnicd:%[3]s "$@"`, c.vnicd, c.podman, strings.TrimPrefix(imageVersion, "v"))
	return c
}

// newPodman writes a script that runs podman with a store of its own, after the shell command prepare in a mount
// namespace of its own, and returns its path. The images are removed with the lab.
func newPodman(t *testing.T, l *lab.Lab, prepare string) string {
	t.Helper()
	for program, pkg := range map[string]string{"podman": "podman", "catatonit": "catatonit"} {
		nstest.Require(t, program, pkg)
	}
	dir := l.Env.Dir
	path := filepath.Join(dir, "podman")
	if prepare != "" {
		prepare += " && "
	}
	// A network namespace hides the control groups. Older runtimes refuse those of version 1 and 2 beside each other.
	script(t, path, `exec unshare --mount sh -c 'mount -t cgroup2 none /sys/fs/cgroup && %[2]sexec podman "$@"' podman \
	--storage-driver=vfs --root=%[1]s/images --runroot=%[1]s/containers --events-backend=file "$@"`, dir, prepare)
	l.Add(func() {
		_, err := podman(context.Background(), path, "rmi", "--force", "--all") // containers that have not started, too
		check(t, err)
	})
	return path
}

// podman runs newPodman's script.
func podman(ctx context.Context, script string, args ...string) (out string, err error) {
	b, err := exec.CommandContext(ctx, script, args...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("podman %q: %w\n%s", args, err, b)
	}
	return string(b), nil
}

// script writes a program of /bin/sh.
func script(t *testing.T, path, format string, a ...any) {
	t.Helper()
	check(t, os.WriteFile(path, []byte("#!/bin/sh\n"+fmt.Sprintf(format, a...)+"\n"), 0o755))
}

func (c *containers) run(ctx context.Context, args ...string) error {
	_, err := podman(ctx, c.podman, args...)
	return err
}

func (c *containers) name(h *lab.Host) string { return "vnicd-" + filepath.Base(h.Dir) }

// daemon returns the PID of the daemon in a host's container, as this machine sees it; 1: it does not run. Its parent
// is the keeper, the child of podman's init.
func (c *containers) daemon(ctx context.Context, t *testing.T, h *lab.Host) int {
	t.Helper()
	pid := string(must[[]byte](t)(exec.CommandContext(ctx, c.podman, "inspect", "--format", "{{.State.Pid}}",
		c.name(h)).Output()))
	for range 2 {
		pid = strings.TrimSpace(pid)
		children := must[[]byte](t)(os.ReadFile("/proc/" + pid + "/task/" + pid + "/children"))
		if pid = string(children); pid == "" {
			return 1
		}
	}
	return must[int](t)(strconv.Atoi(strings.TrimSpace(pid)))
}
