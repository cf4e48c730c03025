package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
	"github.com/vnicd/vnicd/lab/wirefault"
)

// underlayMTU is the MTU of the underlay, in bytes; the VMs' is 50 less, for the tunnels' headers.
const underlayMTU = 1500

// cluster is a running Spec.
type cluster struct {
	*Spec
	lab   *lab.Lab
	plan  []hostPlan
	hosts []*lab.Host
	vms   []*vm // by rank
	keys  *keys
	// captures write the underlay's datagrams of each host; empty on one host.
	captures []*harness.Process
}

// vm is a running VM.
type vm struct {
	vmPlan
	*qemu.Machine
	host *lab.Host
}

// serve runs the cluster from its beginning to its end and returns the exit status of its command, or with a door, that
// of none: the cluster lasts until it is taken down. If it keeps logs, it returns their directory.
func (s *Spec) serve(ctx context.Context, d *door, stdin io.Reader, stdout, stderr io.Writer) (r result, err error) {
	env, err := harness.Open(ctx, s.builder(stderr))
	if err != nil {
		return r, err
	}
	c := &cluster{Spec: s, lab: lab.Open(env, s.VNICD, s.Module), plan: plan(s.Hosts, s.VMsPerHost)}
	defer c.lab.Run()
	c.lab.KernelArgs = harness.KernelArgs()
	say := func(format string, args ...any) { fmt.Fprintf(stderr, "vnicd: lab: "+format+"\n", args...) }
	start := time.Now()
	say("hosts: %d, VMs on each: %d (kernel %s, %s)", s.Hosts, s.VMsPerHost, env.Images.KVer, env.Accel)
	if err = c.up(ctx); err == nil {
		say("up after %d s", int(time.Since(start).Seconds()))
		if d != nil {
			err = d.attend(ctx, c)
		} else {
			r.Status, err = c.command(ctx, &job{Command: s.Command, dir: s.Dir, stdin: stdin, stdout: stdout, stderr: stderr})
		}
	}
	if ctx.Err() != nil {
		return result{}, context.Cause(ctx)
	}
	// A shell has the status of its last command, which need not be a failure.
	if err != nil || r.Status != 0 && (len(s.Argv) > 0 || s.Logs != "") || d != nil && s.Logs != "" {
		var lerr error
		if r.Logs, lerr = c.keepLogs(); lerr != nil {
			say("not all logs could be kept: %v", lerr)
		}
		if r.Logs != "" {
			say("logs: %s", r.Logs)
		}
	}
	return r, err
}

// up makes hosts and VMs. The HCAs are up when it returns.
func (c *cluster) up(ctx context.Context) error {
	var err error
	if c.keys, err = newKeys(ctx, filepath.Join(c.lab.Dir, "ssh"), vmsOf(c.plan)); err != nil {
		return err
	}
	if err := c.makeHosts(ctx); err != nil {
		return err
	}
	if err := c.boot(ctx); err != nil {
		return err
	}
	return c.all(func(v *vm) error { return c.setUp(ctx, v) })
}

// makeHosts makes the hosts with their vnicds, joined by a bridge in a namespace of its own.
func (c *cluster) makeHosts(ctx context.Context) error {
	bridge, err := harness.NewNamespace("underlay")
	if err != nil {
		return err
	}
	c.lab.Add(func() { _ = bridge.Close() })
	if _, err := bridge.Shell(ctx, "ip link add br0 type bridge && ip link set br0 up"); err != nil {
		return err
	}
	for i, p := range c.plan {
		h, err := c.lab.Host(p.name)
		if err != nil {
			return err
		}
		c.hosts = append(c.hosts, h)
		if err := errors.Join(harness.AddVeth(h.NS, "ul", bridge, p.name, underlayMTU), c.plug(ctx, bridge, p.name, i),
			h.NS.AddAddress("ul", p.underlay), h.RealWire()); err != nil {
			return err
		}
		if err := h.Run(ctx, configuration(c.plan, i)); err != nil {
			return err
		}
		if len(c.plan) > 1 {
			if err := c.capture(h); err != nil {
				return err
			}
		}
	}
	return nil
}

// plug joins an interface to the bridge, by a wire with faults if there are to be any. Only what the host sends meets
// them, so that packets between two hosts meet them once.
func (c *cluster) plug(ctx context.Context, bridge *harness.Namespace, ifname string, seed int) error {
	port := ifname
	if c.Loss > 0 || c.Delay > 0 {
		port = ifname + "-port"
		if _, err := bridge.Shell(ctx, fmt.Sprintf("ip link add %[1]s-wire type veth peer name %[1]s-port && "+
			"ip link set %[1]s-wire up && ip link set %[1]s-port up && ethtool -K %[1]s-port tx off", ifname)); err != nil {
			return err
		}
		w, err := wirefault.Start(bridge.Name, ifname, ifname+"-wire", wirefault.Policy{Drop: int(c.Loss*10 + 0.5),
			Delay: c.Delay, OneWay: true, Seed: int64(seed) + 1})
		if err != nil {
			return err
		}
		c.lab.Add(func() { _ = w.Close() })
	}
	_, err := bridge.Run(ctx, "ip", "link", "set", port, "master", "br0")
	return err
}

// workTag is the tag of the shared directory.
const workTag = "work"

// boot boots the VMs of all hosts.
func (c *cluster) boot(ctx context.Context) error {
	var cfgs []qemu.Config
	var vms []*vm
	for i, p := range c.plan {
		for _, v := range p.vms {
			cfg, err := c.hosts[i].Config(ctx, lab.VM{Name: v.name, MAC: v.mac, Addr: v.addr.String(), CPUs: c.CPUs,
				MemoryMiB: c.MemoryMiB, Shares: []qemu.Share{{Tag: workTag, Dir: c.Dir}}})
			if err != nil {
				return err
			}
			cfgs, vms = append(cfgs, cfg), append(vms, &vm{vmPlan: v, host: c.hosts[i]})
		}
	}
	ms, err := c.lab.Boot(ctx, cfgs...)
	if err != nil {
		return err
	}
	for i, m := range ms {
		vms[i].Machine = m
	}
	c.vms = vms
	return nil
}

// all calls f for all VMs at once and joins the errors.
func (c *cluster) all(f func(v *vm) error) error {
	errs := make([]error, len(c.vms))
	var wg sync.WaitGroup
	for i, v := range c.vms {
		wg.Go(func() { errs[i] = f(v) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// quote protects a word of a shell's command line.
func quote(word string) string { return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'" }
