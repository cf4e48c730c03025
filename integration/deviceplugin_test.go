package integration

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

// registrations are what plugins register with a kubelet.
type registrations struct {
	api.UnimplementedRegistrationServer
	arrived chan *api.RegisterRequest
}

// Register implements api.RegistrationServer.
func (r registrations) Register(_ context.Context, q *api.RegisterRequest) (*api.Empty, error) {
	r.arrived <- q
	return &api.Empty{}, nil
}

// allocated asks `vnicd device-plugin`, as a kubelet does, for a container with one device, and returns the options for
// podman that do what the answer says. The plugin runs until the test ends.
func allocated(ctx context.Context, t *testing.T, l *lab.Lab, h *lab.Host, resource, device string) []string {
	t.Helper()
	dir := filepath.Join(l.Dir, "kubelet")
	check(t, os.Mkdir(dir, 0o755))
	listener := must[net.Listener](t)(net.Listen("unix", filepath.Join(dir, "kubelet.sock")))
	r := registrations{arrived: make(chan *api.RegisterRequest, 10)}
	s := grpc.NewServer()
	api.RegisterRegistrationServer(s, r)
	go func() { _ = s.Serve(listener) }()
	t.Cleanup(s.Stop)
	log := filepath.Join(l.Dir, "device-plugin.log")
	p := must[*harness.Process](t)(h.NS.Start(log, nil, l.VNICD, "-c", filepath.Join(h.Dir, "vnicd.yaml"),
		"device-plugin", "--kubelet-dir", dir))
	t.Cleanup(p.Kill)
	for {
		select {
		case q := <-r.arrived:
			if q.ResourceName != resource {
				continue
			}
			conn := must[*grpc.ClientConn](t)(grpc.NewClient("unix:"+filepath.Join(dir, q.Endpoint),
				grpc.WithTransportCredentials(insecure.NewCredentials())))
			defer conn.Close()
			answer, err := api.NewDevicePluginClient(conn).Allocate(ctx, &api.AllocateRequest{
				ContainerRequests: []*api.ContainerAllocateRequest{{DevicesIds: []string{device}}}})
			check(t, err)
			var options []string
			for _, c := range answer.ContainerResponses {
				for name, value := range c.Envs {
					options = append(options, "--env="+name+"="+value)
				}
				for _, m := range c.Mounts {
					way := "rw"
					if m.ReadOnly {
						way = "ro"
					}
					options = append(options, "--volume="+m.HostPath+":"+m.ContainerPath+":"+way)
				}
			}
			return options
		case <-p.Done():
			t.Fatalf("vnicd device-plugin has ended: %s", p.LogTail())
		case <-ctx.Done():
			t.Fatalf("%s was not registered: %s", resource, p.LogTail())
		}
	}
}
