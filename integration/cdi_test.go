package integration

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

// Two tenants with the same addresses. Root of the second one's containers is an ordinary user of the host.
const (
	tenantsForContainers = `networks:
  - {name: blue, vni: 100}
  - {name: green, vni: 200}
applications:
  - {name: blue1, network: blue, mac: "02:00:00:00:00:a1", ips: [10.0.0.1]}
  - {name: blue2, network: blue, mac: "02:00:00:00:00:a2", ips: [10.0.0.2]}
  - {name: blue3, network: blue, mac: "02:00:00:00:00:a3", ips: [10.0.0.3]}
  - {name: blue4, network: blue, mac: "02:00:00:00:00:a4", ips: [10.0.0.4]}
  - {name: green1, network: green, mac: "02:00:00:00:00:a1", ips: [10.0.0.1], user: 200000}
  - {name: green2, network: green, mac: "02:00:00:00:00:a2", ips: [10.0.0.2], user: 200000}
`
	userNamespace = "--uidmap=0:200000:1000"
)

// TestCDI: podman's containers of two tenants get the applications that --device names, by the file of `vnicd cdi`
// (MT-10). They have no network and nothing else of vnicd. Programs of one tenant exchange data that is compared, and
// reach no program of the other one. They go on when vnicd is killed or upgraded under a keeper; and when it ends with
// their connections, programs in the same containers find the socket of the next one.
func TestCDI(t *testing.T) {
	l, ctx := newLabWithoutModule(t)
	h := must[*lab.Host](t)(l.Host("h1"))
	h.Keep = true
	check(t, h.Run(ctx, tenantsForContainers))
	dumpOnFailure(t, []*lab.Host{h}, new([]*qemu.Machine))
	etc := filepath.Join(l.Dir, "etc")
	must[string](t)(h.CLI(ctx, "cdi", "--output", filepath.Join(etc, "cdi", "vnicd.json")))
	c := &tenantContainers{podman: newPodman(t, l, "mount -t overlay -o lowerdir="+etc+":/etc none /etc"), dir: l.Dir}
	c.makeImage(ctx, t, l)
	l.Add(func() {
		_, err := podman(context.Background(), c.podman, "rm", "--force", "--all", "--time=1")
		check(t, err)
	})
	for _, name := range []string{"blue1", "blue2"} {
		c.start(ctx, t, name, "--device=vnicd.io/application="+name)
	}
	for _, name := range []string{"green1", "green2"} {
		c.start(ctx, t, name, "--device=vnicd.io/application="+name, userNamespace)
	}

	for _, name := range []string{"blue1", "green2"} {
		t.Run("contents of "+name, func(t *testing.T) { c.onlySocket(ctx, t, name, h.Dir, "ro,nosuid,nodev,noexec") })
	}
	pairs := func(t *testing.T) {
		// Both servers have one address and port. Each counts the rounds of its own tenant's client.
		blue, green := c.serve(ctx, t, "blue1"), c.serve(ctx, t, "green1")
		check(t, c.ping(t, "blue2", "-n=200").Wait(ctx))
		check(t, c.ping(t, "green2", "-n=300").Wait(ctx))
		for p, want := range map[*harness.Process]string{blue: "200 rounds", green: "300 rounds"} {
			if err := p.Wait(ctx); err != nil || !strings.Contains(p.LogTail(), want) {
				t.Errorf("%v, %s\nwant %s", err, p.LogTail(), want)
			}
		}
	}
	t.Run("both tenants", pairs)
	t.Run("the other tenant", func(t *testing.T) {
		blue := c.serve(ctx, t, "blue1")
		p := c.ping(t, "green2", "-timeout=10s")
		if err := p.Wait(ctx); err == nil || !strings.Contains(p.LogTail(), "deadline exceeded") {
			t.Errorf("a program of green calls one of blue: %v, %s", err, p.LogTail())
		}
		check(t, c.ping(t, "blue2", "-n=10").Wait(ctx)) // the server serves one client only
		check(t, blue.Wait(ctx))
	})

	t.Run("a volume in place of the device", func(t *testing.T) {
		c.start(ctx, t, "blue3", c.volume(t, l, h, "blue3")...)
		c.onlySocket(ctx, t, "blue3", h.Dir, "ro,nosuid,nodev,noexec")
		blue := c.serve(ctx, t, "blue1")
		check(t, c.ping(t, "blue3").Wait(ctx))
		check(t, blue.Wait(ctx))
	})

	t.Run("a kubelet's device", func(t *testing.T) {
		c.start(ctx, t, "blue4", allocated(ctx, t, l, h, "vnicd.io/blue", "blue4")...)
		c.onlySocket(ctx, t, "blue4", h.Dir, "ro,")
		blue := c.serve(ctx, t, "blue1")
		check(t, c.ping(t, "blue4").Wait(ctx))
		check(t, blue.Wait(ctx))
	})

	server := c.serve(ctx, t, "blue1")
	client := c.ping(t, "blue2", "-n=1000000000")
	received := func() string {
		s, err := h.CLI(ctx, "status", "blue1")
		if err != nil {
			return ""
		}
		return regexp.MustCompile(`rx_packets +\d+`).FindString(s)
	}
	goesOn := func() {
		t.Helper()
		for range 2 { // counters begin anew with each vnicd
			was := ""
			eventually(ctx, t, "messages come", func() bool {
				now := received()
				first := was == ""
				if first {
					was = now
				}
				return !first && now != was
			})
		}
		for _, p := range []*harness.Process{server, client} {
			select {
			case <-p.Done():
				t.Fatalf("a program has ended: %s", p.LogTail())
			default:
			}
		}
	}
	goesOn()
	for range 3 {
		was := childOf(t, h.Proc.PID())
		if was == 0 {
			t.Fatal("vnicd does not run")
		}
		check(t, syscall.Kill(was, syscall.SIGKILL))
		eventually(ctx, t, "the keeper starts another vnicd", func() bool {
			now := childOf(t, h.Proc.PID())
			_, err := h.Status(ctx)
			return err == nil && now != was && now != 0
		})
		goesOn()
	}
	must[string](t)(h.CLI(ctx, "upgrade"))
	goesOn()

	// Without the keeper nothing has the connections.
	h.Proc.Kill()
	for _, p := range []*harness.Process{server, client} {
		if err := p.Wait(ctx); err == nil || !strings.Contains(p.LogTail(), "connection to vnicd lost") {
			t.Errorf("%v: %s", err, p.LogTail())
		}
	}
	check(t, h.Start(ctx))
	t.Run("after another vnicd has started", pairs)
}

// tenantContainers are containers that wait for programs to be started in them.
type tenantContainers struct{ podman, dir string }

// makeImage makes an image of two static programs.
func (c *tenantContainers) makeImage(ctx context.Context, t *testing.T, l *lab.Lab) {
	t.Helper()
	root := filepath.Join(c.dir, "image")
	check(t, os.Mkdir(root, 0o755))
	build := exec.CommandContext(ctx, "go", "build", "-o", root, "../guestdrv/examples/rping")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	pause := must[string](t)(exec.LookPath("catatonit"))
	check(t, os.WriteFile(filepath.Join(root, "pause"), must[[]byte](t)(os.ReadFile(pause)), 0o755))
	archive := filepath.Join(c.dir, "image.tar")
	if out, err := exec.CommandContext(ctx, "tar", "-C", root, "-cf", archive, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	must[string](t)(podman(ctx, c.podman, "import", "--quiet", archive, "program:1"))
}

func (c *tenantContainers) start(ctx context.Context, t *testing.T, name string, options ...string) {
	t.Helper()
	must[string](t)(podman(ctx, c.podman, slices.Concat([]string{"run", "--detach", "--name=" + name,
		"--network=none", "--cgroups=disabled", "--ulimit=nofile=4096:4096", "--ulimit=nproc=4096:4096"}, options,
		[]string{"program:1", "/pause", "-P"})...))
}

// rping starts guestdrv's example in a container, which finds the socket by itself.
func (c *tenantContainers) rping(t *testing.T, container string, args ...string) *harness.Process {
	t.Helper()
	log := filepath.Join(c.dir, container+".log")
	argv := append([]string{c.podman, "exec", container, "/rping", "-address=10.0.0." + container[len(container)-1:],
		"-timeout=10m"}, args...)
	p := must[*harness.Process](t)((&harness.Namespace{}).Start(log, nil, argv...))
	t.Cleanup(p.Kill)
	return p
}

// serve starts a server, which serves one client.
func (c *tenantContainers) serve(ctx context.Context, t *testing.T, container string) *harness.Process {
	t.Helper()
	p := c.rping(t, container)
	eventually(ctx, t, "the program in "+container+" listens", func() bool {
		select {
		case <-p.Done():
			t.Fatalf("the program in %s has ended: %s", container, p.LogTail())
		default:
		}
		return strings.Contains(p.LogTail(), "waiting for a client")
	})
	return p
}

// ping starts a client of the server at 10.0.0.1.
func (c *tenantContainers) ping(t *testing.T, container string, args ...string) *harness.Process {
	t.Helper()
	return c.rping(t, container, append(args, "10.0.0.1")...)
}

// volume returns the options for podman that do what the pod in OPERATING.md asks for.
func (c *tenantContainers) volume(t *testing.T, l *lab.Lab, h *lab.Host, name string) []string {
	t.Helper()
	text := string(must[[]byte](t)(os.ReadFile(filepath.Join(l.Env.Root, "cmd/vnicd/OPERATING.md"))))
	_, text, _ = strings.Cut(text, "```yaml\napiVersion: v1\n")
	text, _, _ = strings.Cut(text, "```")
	var pod struct {
		Kind     string
		Metadata struct{ Name string }
		Spec     struct {
			NodeName   string `yaml:"nodeName"`
			Containers []struct {
				Name, Image  string
				Env          []struct{ Name, Value string }
				VolumeMounts []struct {
					Name      string
					MountPath string `yaml:"mountPath"`
					ReadOnly  bool   `yaml:"readOnly"`
				} `yaml:"volumeMounts"`
			}
			Volumes []struct {
				Name     string
				HostPath struct{ Path, Type string } `yaml:"hostPath"`
			}
		}
	}
	d := yaml.NewDecoder(strings.NewReader(text))
	d.KnownFields(true)
	check(t, d.Decode(&pod))
	program, volume := pod.Spec.Containers[0], pod.Spec.Volumes[0]
	mount, env := program.VolumeMounts[0], program.Env[0]
	if pod.Kind != "Pod" || mount.Name != volume.Name || !mount.ReadOnly || volume.HostPath.Type != "Directory" ||
		volume.HostPath.Path != "/run/vnicd/app.app" {
		t.Errorf("%+v", pod)
	}
	return []string{"--env=" + env.Name + "=" + env.Value,
		"--volume=" + filepath.Join(h.Dir, name+".app") + ":" + mount.MountPath + ":ro,nosuid,nodev,noexec"}
}

// onlySocket checks what a container sees: one socket and its name, by one mount, to which nobody can write, with these
// options among others.
func (c *tenantContainers) onlySocket(ctx context.Context, t *testing.T, name, runDir, options string) {
	out := must[string](t)(podman(ctx, c.podman, "inspect", "--format={{.State.Pid}}", name))
	words := strings.Fields(out) // after what podman warns of
	proc := "/proc/" + words[len(words)-1]
	root := proc + "/root"
	var sockets []string
	check(t, filepath.WalkDir(root+"/", func(path string, e fs.DirEntry, err error) error {
		at := strings.TrimPrefix(path, root)
		switch {
		case err != nil:
			return err
		case at == "/proc" || at == "/sys" || at == "/dev":
			return filepath.SkipDir
		case e.Type()&fs.ModeSocket != 0:
			sockets = append(sockets, at)
		}
		return nil
	}))
	if !slices.Equal(sockets, []string{"/run/vnicd/hca"}) {
		t.Errorf("sockets %q", sockets)
	}
	entries := must[[]os.DirEntry](t)(os.ReadDir(root + "/run/vnicd"))
	if len(entries) != 1 {
		t.Errorf("in the directory: %v", entries)
	}
	same := func(a, b string) bool {
		return os.SameFile(must[os.FileInfo](t)(os.Lstat(a)), must[os.FileInfo](t)(os.Lstat(b)))
	}
	if !same(root+"/run/vnicd/hca", filepath.Join(runDir, name+".hca")) {
		t.Error("the socket is that of another application")
	}
	env := strings.Split(string(must[[]byte](t)(os.ReadFile(proc+"/environ"))), "\x00")
	if !slices.Contains(env, "VNICD_SOCKET=/run/vnicd/hca") {
		t.Errorf("environment %q", env)
	}
	mounts := string(must[[]byte](t)(os.ReadFile(proc + "/mountinfo")))
	if n := strings.Count(mounts, name+".app /run/vnicd "+options); n != 1 {
		t.Errorf("%d mounts of the directory in\n%s", n, mounts)
	}
	if err := os.WriteFile(root+"/run/vnicd/x", nil, 0o600); !errors.Is(err, syscall.EROFS) {
		t.Errorf("writing into the directory: %v", err)
	}
}

// childOf returns a child of a process, 0 if it has none. Any of its threads may be the parent.
func childOf(t *testing.T, pid int) int {
	t.Helper()
	for _, path := range must[[]string](t)(filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))) {
		if list := strings.Fields(string(must[[]byte](t)(os.ReadFile(path)))); len(list) > 0 {
			return must[int](t)(strconv.Atoi(list[0]))
		}
	}
	return 0
}
