// Package deviceplugin offers the host applications of a vnicd to a kubelet, as extended resources of the node:
// Kubernetes' device plugin API, version v1beta1. There is a resource for each network, so that a pod asks for an
// application of its tenant, and each application is one device of it, which one container has at a time.
//
//	Config.Applications ──▶ Run, every 2 s ──▶ server, one per network ──▶ kubelet: the devices, whenever they change
//	                                                     ◀── Allocate: the container gets the application's directory
//
// A kubelet that starts removes all sockets in its directory and forgets the plugins: they register again. A second
// plugin takes the place of the first one, which ends.
package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"time"

	"github.com/hashicorp/go-hclog"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// Application is a host application of the running vnicd.
type Application struct {
	Name    string
	Network string // its resource is Domain/Network
	Dir     string // the host's directory with nothing but the application's socket
}

// Domain is what the names of the resources begin with.
const Domain = "vnicd.io"

// APIVersion is the version of the API.
const APIVersion = api.Version

// Kubelet is the kubelet's directory for the sockets of plugins.
const Kubelet = api.DevicePluginPath

// Config says what Run offers, and to whom.
type Config struct {
	Dir string // the kubelet's directory for the sockets of plugins: Kubelet
	// Applications returns those of the running vnicd.
	Applications func(context.Context) ([]Application, error)
	// A container gets Mount, read-only, with the application's directory, and the variables.
	Mount     string
	Variables map[string]string
	Log       hclog.Logger

	Every    time.Duration // between two looks; 0: 2 s
	Patience time.Duration // for how long vnicd may not answer before its devices are unhealthy; 0: 30 s
}

// resourceName is what Kubernetes permits behind the slash of a resource's name, among the names of networks.
var resourceName = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$`)

// resourceOf returns the resource of a network, and whether Kubernetes permits its name.
func resourceOf(network string) (string, bool) {
	return Domain + "/" + network, resourceName.MatchString(network)
}

// Run offers the applications until ctx ends. It returns an error if there is no kubelet's directory, or another
// process has taken its place; it goes on while vnicd or the kubelet does not answer.
func Run(ctx context.Context, c Config) error {
	if c.Every == 0 {
		c.Every = 2 * time.Second
	}
	if c.Patience == 0 {
		c.Patience = 30 * time.Second
	}
	if st, err := os.Stat(c.Dir); err != nil {
		return fmt.Errorf("the kubelet's directory: %w; is this a node of a cluster?", err)
	} else if !st.IsDir() {
		return fmt.Errorf("the kubelet's directory: %s is not a directory", c.Dir)
	}
	r := &runner{Config: c, servers: map[string]*server{}, said: map[string]string{}, answered: time.Now()}
	defer r.stop()
	t := time.NewTicker(c.Every)
	defer t.Stop()
	for {
		if err := r.look(ctx); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		}
	}
}

type runner struct {
	Config
	servers  map[string]*server // by network
	answered time.Time          // when vnicd answered last
	said     map[string]string  // the last message about a subject
}

// look compares the servers with the applications, and with the kubelet.
func (r *runner) look(ctx context.Context) error {
	apps, err := r.Applications(ctx)
	switch {
	case err == nil:
		r.answered = time.Now()
		r.offer(apps)
	case ctx.Err() != nil:
		return nil
	case time.Since(r.answered) >= r.Patience:
		for _, s := range r.servers {
			s.setUnhealthy()
		}
		err = fmt.Errorf("its applications are unhealthy now: %w", err)
	}
	r.say("cannot learn the applications of vnicd", err)
	for _, network := range slices.Sorted(maps.Keys(r.servers)) {
		s := r.servers[network]
		is, err := s.registered()
		if err != nil {
			return err
		}
		if is {
			continue
		}
		err = s.register(ctx)
		if r.say("cannot register with the kubelet", err, "resource", s.resource); err == nil {
			r.Log.Info("registered with the kubelet", "resource", s.resource, "devices", s.count())
		}
	}
	return nil
}

// offer has each network's server offer its applications.
func (r *runner) offer(apps []Application) {
	byNetwork := map[string]map[string]string{} // directories, by name
	for _, a := range apps {
		if byNetwork[a.Network] == nil {
			byNetwork[a.Network] = map[string]string{}
		}
		byNetwork[a.Network][a.Name] = a.Dir
	}
	for network := range byNetwork {
		resource, ok := resourceOf(network)
		if !ok {
			r.say("applications of the network are left out", errors.New("a resource's name is of at most 63 letters, "+
				"digits, '-', '_' and '.', and begins and ends with a letter or a digit"), "network", network)
			continue
		}
		if r.servers[network] == nil {
			r.servers[network] = newServer(r.Config, network, resource)
		}
	}
	for network, s := range r.servers {
		s.set(byNetwork[network])
	}
}

// say logs an error about a subject when it comes, changes or goes.
func (r *runner) say(what string, err error, subject ...any) {
	key := fmt.Sprint(what, subject)
	text := ""
	if err != nil {
		text = err.Error()
	}
	if r.said[key] == text {
		return
	}
	r.said[key] = text
	if err != nil {
		r.Log.Warn(what, append(subject, "error", err)...)
	} else {
		r.Log.Info("no longer: "+what, subject...)
	}
}

func (r *runner) stop() {
	for _, s := range r.servers {
		s.close()
	}
}

// socketOf is the name of a plugin's socket in the kubelet's directory.
func socketOf(dir, network string) string { return filepath.Join(dir, "vnicd-"+network+".sock") }
