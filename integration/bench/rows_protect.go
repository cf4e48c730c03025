package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

// What it costs that WireGuard encrypts what the hosts exchange (TR-4).

// protectedRow is the name of the row of protectedWrite, by which a guest is asked for it.
const protectedRow = "protected_write_64k"

// protectedWrite is the stream of remote_write_64k between two hosts whose underlay WireGuard protects. The anchor is
// the same one in cleartext. Where the kernel has no WireGuard both are measured in a VM, whose kernel has.
func protectedWrite(ctx context.Context, b *Bench) (m Meter, err error) {
	if ok, err := kernelHasWireGuard(ctx); err != nil {
		return m, err
	} else if !ok {
		return b.withinGuest(ctx, protectedRow)
	}
	keys := [2]wgtypes.Key{}
	for i := range keys {
		if keys[i], err = wgtypes.GeneratePrivateKey(); err != nil {
			return m, err
		}
	}
	if m.Ours, err = b.underlayStream(ctx, func(h *lab.Host, i int) (string, error) {
		file := filepath.Join(h.Dir, "key")
		return protectedBy(i, file, keys[1-i].PublicKey()), os.WriteFile(file, []byte(keys[i].String()+"\n"), 0o600)
	}); err != nil {
		return m, err
	}
	m.Anchor, err = b.underlayStream(ctx, func(_ *lab.Host, i int) (string, error) { return peered(i), nil })
	return m, err
}

// kernelHasWireGuard reports whether this host's kernel can make an interface of WireGuard.
func kernelHasWireGuard(ctx context.Context) (ok bool, err error) {
	ns, err := harness.NewNamespace("probe")
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, ns.Close()) }()
	_, err = ns.Run(ctx, "ip", "link", "add", "wg", "type", "wireguard")
	if err != nil && strings.Contains(err.Error(), "Unknown device type") {
		return false, nil
	}
	return err == nil, err
}

// protectedAddr is host i's VTEP on WireGuard's interface.
func protectedAddr(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 9, 0, byte(i + 1)}) }

// protectedBy is peered for hosts with WireGuard.
func protectedBy(i int, keyFile string, peer wgtypes.Key) string {
	return fmt.Sprintf("vtep: {local: %s}\nnetworks: [{name: blue, vni: 100, peers: [%s]}]\n"+
		"underlay:\n  protect: wireguard\n  private-key-file: %s\n"+
		"  peers:\n    - {vtep: %[2]s, endpoint: \"%[4]s:51820\", public-key: \"%[5]s\"}\n",
		protectedAddr(i), protectedAddr(1-i), keyFile, underlayAddr(1-i), peer)
}

// underlayStream prepares a stream of WRITEs of 64 KiB between two hosts with that configuration of the underlay.
func (b *Bench) underlayStream(ctx context.Context, underlay func(*lab.Host, int) (string, error)) (sampler, error) {
	hosts, nodes, err := b.remoteWith(ctx, 1500, 32<<20, underlay)
	if err != nil {
		return nil, err
	}
	s, err := newCheckedStream(nodes[0], nodes[1], 64<<10, 16, signalled)
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context, d time.Duration) (Sample, error) { return s.gigabits(ctx, hosts, d) }, nil
}

// withinGuest measures a row of this program with the daemon in a VM, where both are built for that.
func (b *Bench) withinGuest(ctx context.Context, row string) (m Meter, err error) {
	l, err := lab.New(context.WithoutCancel(ctx), os.Stderr, false)
	if err != nil {
		return m, err
	}
	b.Add(l.Run)
	h, err := l.Host("outer")
	if err != nil {
		return m, err
	}
	if err := b.daemon(ctx, h, 0, 1, ""); err != nil {
		return m, err
	}
	l.Share = filepath.Join(b.Dir, "share")
	for name, p := range map[string]string{"bench": "./integration/bench", "vnicd": "./cmd/vnicd"} {
		c := exec.CommandContext(ctx, "go", "build", "-trimpath", "-pgo",
			filepath.Join(l.Root, "cmd/vnicd/default.pgo"), "-o", filepath.Join(l.Share, name), p)
		c.Dir, c.Env = l.Root, append(os.Environ(), "CGO_ENABLED=0") // it must not need the host's C library
		if out, err := c.CombinedOutput(); err != nil {
			return m, fmt.Errorf("building %s for the VM: %w\n%s", name, err, out)
		}
	}
	cfg, err := h.Config(ctx, lab.VM{Name: vmName(0), MAC: vmMAC(0), Addr: guestAddr(0), CPUs: 2, NoHCA: true})
	if err != nil {
		return m, err
	}
	vms, err := l.Boot(ctx, cfg)
	if err != nil {
		return m, err
	}
	if _, err := vms[0].Run(ctx, "modprobe veth && mkdir /tmp/bench && cp /host/bench /host/vnicd /tmp/bench/"); err != nil {
		return m, err
	}
	var both innerRow
	side := func(f func(*innerRow) *Sample) sampler {
		return func(ctx context.Context, d time.Duration) (s Sample, err error) {
			if f(&both).Work.units == 0 {
				if both, err = runInner(ctx, vms[0], row, d); err != nil {
					return s, err
				}
			}
			s, *f(&both) = *f(&both), Sample{}
			accel(l.Accel).mark(&s)
			return s, nil
		}
	}
	m.Ours = side(func(r *innerRow) *Sample { return &r.ours })
	m.Anchor = side(func(r *innerRow) *Sample { return &r.anchor })
	return m, nil
}

// innerRow is a round of a row that was measured in a VM. The sample that has been used is empty.
type innerRow struct{ ours, anchor Sample }

// runInner measures one round in a VM.
func runInner(ctx context.Context, vm *qemu.Machine, row string, d time.Duration) (r innerRow, err error) {
	out, err := vm.Run(ctx, fmt.Sprintf("cd /tmp/bench && ./bench -vnicd ./vnicd -only %s -rounds 1 -time %v -json out.jsonl >&2 "+
		"&& cat out.jsonl", row, d))
	if err != nil {
		return r, err
	}
	return parseInner(out, row)
}

// parseInner reads a row's figures from the file of results.
func parseInner(out, row string) (r innerRow, err error) {
	for l := range strings.Lines(out) {
		var f line
		if err := json.Unmarshal([]byte(l), &f); err != nil {
			return r, fmt.Errorf("the results of the VM: %w: %q", err, l)
		}
		if f.Row != row {
			continue
		}
		if f.Ours <= 0 || f.Anchor <= 0 {
			return r, fmt.Errorf("the results of the VM: %s", l)
		}
		// One unit, as the cost per unit is all that is known.
		r.ours = Sample{Value: f.Ours, Extra: f.Extra, Work: work{unit: f.Per, units: 1}}
		r.ours.Work.cost.busy = time.Duration(f.CPU)
		r.anchor = Sample{Value: f.Anchor, Work: work{unit: f.Per, units: 1}}
		r.anchor.Work.cost.busy = time.Duration(f.AnchorCPU)
		return r, nil
	}
	return r, fmt.Errorf("the VM has not measured %s: %q", row, out)
}
