package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime/pprof"
	"slices"
	"sync"
	"time"

	"github.com/vnicd/vnicd/lab"
)

// profileTime is the length of a profile. Go samples 100 times a second, so a shorter profile tells little.
const profileTime = 5 * time.Second

// monitoringSocket is the path of the socket where a daemon serves profiles or metrics.
func monitoringSocket(h *lab.Host) string { return filepath.Join(h.Dir, "monitoring.sock") }

// monitored returns the beginning of a configuration, for daemon, with metrics at monitoringSocket. With -profile start
// enables them.
func (b *Bench) monitored(h *lab.Host) string {
	const network = "networks: [{name: blue, vni: 100}]\n"
	if b.profiles != "" {
		return network
	}
	return network + fmt.Sprintf("monitoring: {listen: %q}\n", monitoringSocket(h))
}

// start runs a daemon with configuration y. With -profile it enables the daemon's profiles.
func (b *Bench) start(ctx context.Context, h *lab.Host, y string) error {
	if b.profiles != "" {
		b.daemons = append(b.daemons, h)
		y += fmt.Sprintf("monitoring: {listen: %q, pprof: true}\n", monitoringSocket(h))
	}
	return h.Run(ctx, y)
}

// stop stops a daemon that start started.
func (b *Bench) stop(ctx context.Context, h *lab.Host) error {
	b.daemons = slices.DeleteFunc(b.daemons, func(d *lab.Host) bool { return d == h })
	return h.Stop(ctx)
}

// profile takes processor profiles during an additional run of f that is not counted: one of each daemon,
// ROW.HOST.pprof, and one of this process, which runs the native driver and posts the requests, ROW.driver.pprof.
func (b *Bench) profile(ctx context.Context, row string, f func(context.Context, time.Duration) (Sample, error)) error {
	if err := os.MkdirAll(b.profiles, 0o755); err != nil {
		return err
	}
	own, err := os.Create(filepath.Join(b.profiles, row+".driver.pprof"))
	if err != nil {
		return err
	}
	defer own.Close()
	if err := pprof.StartCPUProfile(own); err != nil {
		return err
	}
	defer pprof.StopCPUProfile()
	errs := make([]error, len(b.daemons)+1)
	var wg sync.WaitGroup
	for i, h := range b.daemons {
		wg.Go(func() {
			errs[i] = fetchProfile(ctx, monitoringSocket(h), filepath.Join(b.profiles, row+"."+h.Name+".pprof"))
		})
	}
	_, errs[len(b.daemons)] = f(ctx, profileTime)
	wg.Wait()
	return errors.Join(errs...)
}

// fetchProfile requests a profile from the daemon behind the socket and writes it to a file.
func fetchProfile(ctx context.Context, socket, to string) error {
	body, err := get(ctx, socket, fmt.Sprintf("/debug/pprof/profile?seconds=%d", profileTime/time.Second))
	if err != nil {
		return err
	}
	return os.WriteFile(to, body, 0o644)
}

// get requests a path from the monitoring server behind a socket.
func get(ctx context.Context, socket, path string) ([]byte, error) {
	c := http.Client{Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		}}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://localhost"+path, nil)
	if err != nil {
		return nil, err
	}
	resp, err := c.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s of %s: %s: %s", path, socket, resp.Status, body)
	}
	return body, nil
}
