package deviceplugin

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// kubelet is as much of a kubelet as plugins see: it takes registrations, connects to the plugins, and watches.
type kubelet struct {
	api.UnimplementedRegistrationServer
	t    *testing.T
	dir  string
	grpc *grpc.Server

	mu      sync.Mutex
	refuse  error
	clients map[string]api.DevicePluginClient // by resource
	lists   map[string]string                 // the last list of each
	conns   []*grpc.ClientConn
	watches sync.WaitGroup
}

// startKubelet starts one, which removes all sockets in its directory first.
func startKubelet(t *testing.T, dir string) *kubelet {
	t.Helper()
	return startKubeletThat(t, dir, "*.sock", nil)
}

// startKubeletThat starts one that removes some sockets, and refuses plugins with an error until the test changes that.
func startKubeletThat(t *testing.T, dir, removes string, refuse error) *kubelet {
	t.Helper()
	old, _ := filepath.Glob(filepath.Join(dir, removes))
	for _, s := range old {
		_ = os.Remove(s)
	}
	k := &kubelet{t: t, dir: dir, grpc: grpc.NewServer(), clients: map[string]api.DevicePluginClient{},
		lists: map[string]string{}, refuse: refuse}
	api.RegisterRegistrationServer(k.grpc, k)
	l, err := net.Listen("unix", filepath.Join(dir, "kubelet.sock"))
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = k.grpc.Serve(l) }()
	t.Cleanup(k.stop)
	return k
}

func (k *kubelet) stop() {
	k.grpc.Stop()
	k.mu.Lock()
	for _, c := range k.conns {
		_ = c.Close()
	}
	k.conns = nil
	k.mu.Unlock()
	k.watches.Wait()
}

// Register implements api.RegistrationServer.
func (k *kubelet) Register(_ context.Context, r *api.RegisterRequest) (*api.Empty, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.refuse != nil {
		return nil, k.refuse
	}
	if r.Version != "v1beta1" || filepath.Base(r.Endpoint) != r.Endpoint {
		k.t.Errorf("version %q, endpoint %q", r.Version, r.Endpoint)
	}
	conn, err := grpc.NewClient("unix:"+filepath.Join(k.dir, r.Endpoint),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	k.conns = append(k.conns, conn)
	client := api.NewDevicePluginClient(conn)
	k.clients[r.ResourceName] = client
	k.watches.Go(func() {
		watch, err := client.ListAndWatch(context.Background(), &api.Empty{})
		for err == nil {
			var list *api.ListAndWatchResponse
			if list, err = watch.Recv(); err == nil {
				var is []string
				for _, d := range list.Devices {
					is = append(is, d.ID+" "+d.Health)
				}
				k.mu.Lock()
				k.lists[r.ResourceName] = strings.Join(is, ", ")
				k.mu.Unlock()
			}
		}
	})
	return &api.Empty{}, nil
}

// devices waits until the kubelet has this list of a resource.
func (k *kubelet) devices(resource, want string) {
	k.t.Helper()
	deadline := time.Now().Add(time.Minute)
	for {
		k.mu.Lock()
		is, ok := k.lists[resource]
		k.mu.Unlock()
		if ok && is == want {
			return
		}
		if time.Now().After(deadline) {
			k.t.Fatalf("devices of %s: %q, want %q", resource, is, want)
		}
		time.Sleep(time.Millisecond)
	}
}

func (k *kubelet) allocate(resource string, ids ...[]string) (*api.AllocateResponse, error) {
	k.mu.Lock()
	client := k.clients[resource]
	k.mu.Unlock()
	q := &api.AllocateRequest{}
	for _, i := range ids {
		q.ContainerRequests = append(q.ContainerRequests, &api.ContainerAllocateRequest{DevicesIds: i})
	}
	return client.Allocate(context.Background(), q)
}

// plugin runs the plugin, with applications and the log that the test reads and changes.
type plugin struct {
	mu   sync.Mutex
	apps []Application
	err  error
	log  bytes.Buffer
	wait func() error // until it ends by itself
	end  func() error
}

func (p *plugin) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.log.Write(b)
}

func (p *plugin) set(err error, apps ...Application) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.apps, p.err = apps, err
}

func (p *plugin) logged(t *testing.T, want string) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		p.mu.Lock()
		text := p.log.String()
		p.mu.Unlock()
		if strings.Contains(text, want) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("no %q in the log:\n%s", want, text)
		}
	}
}

func start(t *testing.T, dir string, patience time.Duration, apps ...Application) *plugin {
	p := &plugin{apps: apps}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		ended <- Run(ctx, Config{Dir: dir, Mount: "/run/vnicd",
			Variables: map[string]string{"VNICD_SOCKET": "/run/vnicd/hca"},
			Log:       hclog.New(&hclog.LoggerOptions{Output: p}), Every: time.Millisecond, Patience: patience,
			Applications: func(context.Context) ([]Application, error) {
				p.mu.Lock()
				defer p.mu.Unlock()
				return slices.Clone(p.apps), p.err
			}})
	}()
	p.wait = sync.OnceValue(func() error { return <-ended })
	p.end = func() error {
		cancel()
		return p.wait()
	}
	t.Cleanup(func() { _ = p.end() })
	return p
}

var (
	blue1  = Application{"blue1", "blue", "/run/vnicd/blue1.app"}
	blue2  = Application{"blue2", "blue", "/run/vnicd/blue2.app"}
	green1 = Application{"green1", "green", "/run/vnicd/green1.app"}
)

// Each network is a resource and each of its applications a device, of which a container gets the directory; the list
// follows the applications.
func TestDevices(t *testing.T) {
	dir := t.TempDir()
	k := startKubelet(t, dir)
	p := start(t, dir, time.Hour, blue2, blue1, green1)
	k.devices("vnicd.io/blue", "blue1 Healthy, blue2 Healthy")
	k.devices("vnicd.io/green", "green1 Healthy")

	r, err := k.allocate("vnicd.io/blue", []string{"blue2"}, []string{"blue1"})
	if err != nil {
		t.Fatal(err)
	}
	for i, name := range []string{"blue2", "blue1"} {
		c := r.ContainerResponses[i]
		if len(c.Mounts) != 1 || c.Mounts[0].HostPath != "/run/vnicd/"+name+".app" ||
			c.Mounts[0].ContainerPath != "/run/vnicd" || !c.Mounts[0].ReadOnly ||
			len(c.Envs) != 1 || c.Envs["VNICD_SOCKET"] != "/run/vnicd/hca" || len(c.Devices) != 0 {
			t.Errorf("%s: %v", name, c)
		}
	}
	p.set(nil, blue1)
	k.devices("vnicd.io/blue", "blue1 Healthy")
	k.devices("vnicd.io/green", "")
	for _, c := range []struct {
		ids  []string
		code codes.Code
		want string
	}{
		{[]string{"blue2"}, codes.NotFound, `no application "blue2"`}, {[]string{"green1"}, codes.NotFound, "green1"},
		{[]string{"blue1", "blue2"}, codes.InvalidArgument, "ask for 1"}, {nil, codes.InvalidArgument, "ask for 1"},
	} {
		_, err := k.allocate("vnicd.io/blue", []string{"blue1"}, c.ids)
		if status.Code(err) != c.code || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v: %v", c.ids, err)
		}
	}
	moved := blue1 // as with another run-dir
	moved.Dir = "/run/other/blue1.app"
	p.set(nil, moved, green1)
	k.devices("vnicd.io/green", "green1 Healthy")
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		r, err := k.allocate("vnicd.io/blue", []string{"blue1"})
		if err == nil && r.ContainerResponses[0].Mounts[0].HostPath == moved.Dir {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("after the directory has changed: %v, %v", r, err)
		}
	}
	if err := p.end(); err != nil {
		t.Error(err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "vnicd*")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// A kubelet that starts, first or again, gets the plugins; one that refuses is asked again, and the log says so once.
func TestKubeletStarts(t *testing.T) {
	dir := t.TempDir()
	p := start(t, dir, time.Hour, blue1)
	p.logged(t, "kubelet.sock: no such file")
	for range 3 {
		k := startKubelet(t, dir)
		k.devices("vnicd.io/blue", "blue1 Healthy")
		k.stop()
	}
	k := startKubeletThat(t, dir, "kubelet.sock", nil)
	k.devices("vnicd.io/blue", "blue1 Healthy")
	k.stop()
	k = startKubeletThat(t, dir, "*.sock", status.Error(codes.InvalidArgument, "not this one"))
	p.logged(t, "not this one")
	time.Sleep(20 * time.Millisecond)
	k.mu.Lock()
	k.refuse = nil
	k.mu.Unlock()
	k.devices("vnicd.io/blue", "blue1 Healthy")
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := strings.Count(p.log.String(), "not this one"); n > 2 { // it may be refused before the socket is complete
		t.Errorf("refused %d times in the log:\n%s", n, p.log.String())
	}
}

// While vnicd does not answer, the devices stay, and are unhealthy if that lasts.
func TestNoAnswer(t *testing.T) {
	dir := t.TempDir()
	k := startKubelet(t, dir)
	p := start(t, dir, 50*time.Millisecond, blue1, blue2)
	k.devices("vnicd.io/blue", "blue1 Healthy, blue2 Healthy")
	p.set(errors.New("no vnicd"))
	p.logged(t, "no vnicd")
	if _, err := k.allocate("vnicd.io/blue", []string{"blue1"}); err != nil {
		t.Error(err)
	}
	k.devices("vnicd.io/blue", "blue1 Unhealthy, blue2 Unhealthy")
	p.set(nil, blue2)
	k.devices("vnicd.io/blue", "blue2 Healthy")
	p.logged(t, "no longer: cannot learn the applications of vnicd")
}

// A name that Kubernetes does not permit leaves its network out, and no other one.
func TestResourceNames(t *testing.T) {
	for name, want := range map[string]bool{"blue": true, "b": true, "Tenant-1_x.y": true, "": false, "blue-": false,
		".x": false, "a b": false, strings.Repeat("x", 63): true, strings.Repeat("x", 64): false} {
		if _, ok := resourceOf(name); ok != want {
			t.Errorf("%q: %v", name, ok)
		}
	}
	dir := t.TempDir()
	k := startKubelet(t, dir)
	p := start(t, dir, time.Hour, Application{"x", "bad_", "/x"}, blue1)
	k.devices("vnicd.io/blue", "blue1 Healthy")
	p.logged(t, "network=bad_")
}

// A second plugin takes the place of the first one, which ends and leaves its socket alone.
func TestReplaced(t *testing.T) {
	dir := t.TempDir()
	k := startKubelet(t, dir)
	first := start(t, dir, time.Hour, blue1)
	k.devices("vnicd.io/blue", "blue1 Healthy")
	second := start(t, dir, time.Hour, blue1, blue2)
	k.devices("vnicd.io/blue", "blue1 Healthy, blue2 Healthy")
	if err := first.wait(); err == nil || !strings.Contains(err.Error(), "another process serves vnicd.io/blue") {
		t.Errorf("the first one: %v", err)
	}
	second.set(nil, blue2) // it has looked again when the kubelet knows
	k.devices("vnicd.io/blue", "blue2 Healthy")
	if _, err := k.allocate("vnicd.io/blue", []string{"blue2"}); err != nil {
		t.Error(err)
	}
	second.mu.Lock()
	defer second.mu.Unlock()
	if text := second.log.String(); strings.Count(text, "registered") != 1 {
		t.Errorf("the second one has not kept its socket:\n%s", text)
	}
}

func TestNoDirectory(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for dir, want := range map[string]string{"/nonexistent": "is this a node of a cluster?", file: "is not a directory"} {
		if err := Run(t.Context(), Config{Dir: dir}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", dir, err)
		}
	}
	if !strings.HasPrefix(Kubelet, "/var/lib/kubelet/") || len(socketOf(Kubelet, fmt.Sprintf("%063d", 0))) > 107 {
		t.Error("the socket's path is longer than the kernel permits")
	}
}
