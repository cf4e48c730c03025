package cluster

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/vnicd/vnicd/lab"
)

// Bounds of a host's capture of the underlay: packets, and bytes of each. The headers of tunnel and RoCE, and of the
// payload's beginning, fit.
const (
	capturePackets = 100_000
	captureBytes   = 256
)

// captureFile is the file name of a capture.
const captureFile = "underlay.pcapng"

// capture begins to capture the tunnels' datagrams of a host.
func (c *cluster) capture(h *lab.Host) error {
	p, err := h.NS.Start(filepath.Join(h.Dir, "capture.log"), nil, c.VNICD, "-c", filepath.Join(h.Dir, "vnicd.yaml"),
		"capture", "vtep", "-w", filepath.Join(h.Dir, captureFile), "-n", strconv.Itoa(capturePackets),
		"-s", strconv.Itoa(captureBytes))
	if err != nil {
		return err
	}
	c.lab.Add(p.Kill)
	c.captures = append(c.captures, p)
	return nil
}

// logTime bounds the time for each host's and each guest's answers.
const logTime = time.Minute

// keepLogs copies logs and captures into the directory for logs, and returns it; "" if there is none.
func (c *cluster) keepLogs() (string, error) {
	ctx := context.Background() // logs matter most after a failure
	dir, err := c.Logs, error(nil)
	if dir == "" {
		dir, err = os.MkdirTemp("/tmp", "vnicd-lab-")
	} else {
		err = os.MkdirAll(dir, 0o755)
	}
	if err != nil {
		return "", err
	}
	var errs []error
	for _, p := range c.captures {
		ctx, cancel := context.WithTimeout(ctx, logTime)
		errs = append(errs, p.Stop(ctx))
		cancel()
	}
	for _, h := range c.hosts {
		if h.Proc == nil {
			continue // its vnicd was not started
		}
		ctx, cancel := context.WithTimeout(ctx, logTime)
		status, err := h.CLI(ctx, "status", "-j")
		cancel()
		errs = append(errs, err, save(dir, h.Name+".status.json", []byte(status)),
			keep(dir, h.Name+".vnicd.yaml", filepath.Join(h.Dir, "vnicd.yaml")),
			keep(dir, h.Name+".vnicd.log", filepath.Join(h.Dir, "vnicd.log")),
			keep(dir, h.Name+"."+captureFile, filepath.Join(h.Dir, captureFile)))
	}
	for _, v := range c.vms {
		ctx, cancel := context.WithTimeout(ctx, logTime)
		log, err := v.Run(ctx, "dmesg")
		cancel()
		errs = append(errs, err, save(dir, v.name+".dmesg", []byte(log)))
	}
	for _, v := range vmsOf(c.plan) {
		for _, name := range []string{"console.log", "qemu.log"} {
			errs = append(errs, keep(dir, v.name+"."+name, filepath.Join(c.lab.Dir, v.name, name)))
		}
	}
	return dir, errors.Join(errs...)
}

func save(dir, name string, data []byte) error {
	return os.WriteFile(filepath.Join(dir, name), data, 0o644)
}

// keep copies a file; one that does not exist is left out, because the cluster has not come so far.
func keep(dir, name, from string) error {
	in, err := os.Open(from)
	if err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		return err
	}
	defer in.Close()
	out, err := os.Create(filepath.Join(dir, name))
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}
