package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// registerLimit is how long the kubelet may take to register a plugin.
const registerLimit = 10 * time.Second

// server is the device plugin of one resource.
type server struct {
	api.UnimplementedDevicePluginServer
	c        Config
	resource string
	path     string // of its socket

	// Of the goroutine of Run.
	grpc    *grpc.Server
	served  chan struct{} // closed when grpc has ended
	socket  fs.FileInfo   // of path, while it is registered
	kubelet fs.FileInfo   // of the kubelet's socket at that time

	mu        sync.Mutex
	dirs      map[string]string // of the applications, by name
	unhealthy bool
	changed   chan struct{} // closed at each change, and replaced
}

func newServer(c Config, network, resource string) *server {
	return &server{c: c, resource: resource, path: socketOf(c.Dir, network), changed: make(chan struct{})}
}

// set says which applications there are, with their directories.
func (s *server) set(dirs map[string]string) { s.change(dirs, false) }

// setUnhealthy says that nobody knows.
func (s *server) setUnhealthy() {
	s.mu.Lock()
	dirs := s.dirs
	s.mu.Unlock()
	s.change(dirs, true)
}

func (s *server) change(dirs map[string]string, unhealthy bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.unhealthy == unhealthy && maps.Equal(s.dirs, dirs) {
		return
	}
	s.dirs, s.unhealthy = dirs, unhealthy
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *server) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.dirs)
}

// devices returns the list for the kubelet, and what is closed when it has changed.
func (s *server) devices() (*api.ListAndWatchResponse, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := &api.ListAndWatchResponse{}
	health := api.Healthy
	if s.unhealthy {
		health = api.Unhealthy
	}
	for _, name := range slices.Sorted(maps.Keys(s.dirs)) {
		r.Devices = append(r.Devices, &api.Device{ID: name, Health: health})
	}
	return r, s.changed
}

// registered reports whether the kubelet with which the plugin is registered still runs, and has left it its socket. It
// is an error if another process has a socket in its place.
func (s *server) registered() (bool, error) {
	if s.grpc == nil {
		return false, nil
	}
	switch own, err := os.Stat(s.path); {
	case errors.Is(err, fs.ErrNotExist):
		return false, nil
	case err != nil:
		return false, err
	case !os.SameFile(own, s.socket):
		return false, fmt.Errorf("another process serves %s at %s now", s.resource, s.path)
	}
	kubelet, err := os.Stat(s.kubeletSocket())
	return err == nil && os.SameFile(kubelet, s.kubelet) && kubelet.ModTime().Equal(s.kubelet.ModTime()), nil
}

func (s *server) kubeletSocket() string {
	return filepath.Join(s.c.Dir, filepath.Base(api.KubeletSocket))
}

// register serves the plugin at a new socket, and has the kubelet connect to it.
func (s *server) register(ctx context.Context) (err error) {
	s.close()
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	// Before the call: a kubelet that is replaced meanwhile is noticed.
	kubelet, err := os.Stat(s.kubeletSocket())
	if err != nil {
		return err
	}
	l, err := s.listen()
	if err != nil {
		return err
	}
	s.kubelet = kubelet
	s.grpc, s.served = grpc.NewServer(), make(chan struct{})
	api.RegisterDevicePluginServer(s.grpc, s)
	go func() {
		defer close(s.served)
		_ = s.grpc.Serve(l) // it ends by close only
	}()
	ctx, cancel := context.WithTimeout(ctx, registerLimit)
	defer cancel()
	conn, err := grpc.NewClient("unix:"+s.kubeletSocket(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = api.NewRegistrationClient(conn).Register(ctx, &api.RegisterRequest{Version: api.Version,
		Endpoint: filepath.Base(s.path), ResourceName: s.resource, Options: &api.DevicePluginOptions{}})
	return err
}

// listen makes the socket. It replaces that of another process at once: whoever looks sees one of the two.
func (s *server) listen() (net.Listener, error) {
	path := filepath.Join(s.c.Dir, fmt.Sprintf(".vnicd-%08x.sock", rand.Uint32()))
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false)   // its path may be another process's then
	err = os.Chmod(path, 0o600) // as the kubelet's directory is
	if err == nil {
		s.socket, err = os.Stat(path)
	}
	if err == nil {
		err = os.Rename(path, s.path)
	}
	if err != nil {
		_ = os.Remove(path)
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// close ends the connections and removes the socket, if it is still this one's. Idempotent.
func (s *server) close() {
	if s.grpc == nil {
		return
	}
	s.grpc.Stop()
	<-s.served
	s.grpc = nil
	if own, err := os.Stat(s.path); err == nil && os.SameFile(own, s.socket) {
		if err := os.Remove(s.path); err != nil {
			s.c.Log.Warn("cannot remove the plugin's socket", "error", err)
		}
	}
}

// GetDevicePluginOptions implements api.DevicePluginServer: no options.
func (s *server) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return &api.DevicePluginOptions{}, nil
}

// ListAndWatch implements api.DevicePluginServer.
func (s *server) ListAndWatch(_ *api.Empty, to grpc.ServerStreamingServer[api.ListAndWatchResponse]) error {
	for {
		list, changed := s.devices()
		if err := to.Send(list); err != nil {
			return err
		}
		select {
		case <-to.Context().Done():
			return nil
		case <-changed:
		}
	}
}

// Allocate implements api.DevicePluginServer: each container gets the directory of its application.
func (s *server) Allocate(_ context.Context, q *api.AllocateRequest) (*api.AllocateResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := &api.AllocateResponse{}
	for _, c := range q.ContainerRequests {
		if len(c.DevicesIds) != 1 {
			return nil, status.Error(codes.InvalidArgument, fmt.Sprintf("a container has one application, at %s; found a limit "+
				"of %d %s: ask for 1", s.c.Mount, len(c.DevicesIds), s.resource))
		}
		name := c.DevicesIds[0]
		dir := s.dirs[name]
		if dir == "" {
			return nil, status.Error(codes.NotFound, fmt.Sprintf("vnicd has no application %q of %s any more", name, s.resource))
		}
		r.ContainerResponses = append(r.ContainerResponses, &api.ContainerAllocateResponse{Envs: s.c.Variables,
			Mounts: []*api.Mount{{ContainerPath: s.c.Mount, HostPath: dir, ReadOnly: true}}})
	}
	return r, nil
}
