package daemon

import (
	"fmt"
	"net/netip"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"github.com/hashicorp/go-hclog"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/device/ethernet/overlay"
)

// Reload reads the configuration file and its fragments again and applies its changes. It returns the changes as text.
//
// It makes a plan first: a file with mistakes, or with changes that a running daemon cannot make, changes nothing. The
// steps of the plan can still fail (an address in use); the list then has the changes made before the error. Things
// added at run time stay, unless the configuration now has something of that name.
func (d *Daemon) Reload() ([]string, error) {
	d.reloading.Lock()
	defer d.reloading.Unlock()
	d.mu.RLock()
	path := d.cfg.Path
	d.mu.RUnlock()
	next, err := config.Load(path)
	if err != nil {
		return nil, err
	}
	if err := next.CheckFiles(); err != nil {
		return nil, err
	}
	d.mu.RLock()
	steps, err := d.plan(next)
	d.mu.RUnlock()
	if err != nil {
		return nil, err
	}
	done := []string{}
	defer d.settle()
	for _, s := range steps {
		if err := s.do(); err != nil {
			return done, fmt.Errorf("%s: %w (done before: %s)", s.what, err, list(done))
		}
		done = append(done, s.what)
	}
	d.adoptPlaces(next)
	d.log.Info("configuration reloaded", "changes", len(done))
	return done, nil
}

// adoptPlaces notes where things stand now. What was added at run time and stands in a file now is no longer of that
// kind: it goes when the file does.
func (d *Daemon) adoptPlaces(next *config.Config) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, n := range next.Networks {
		if old := d.cfg.Network(n.Name); old != nil {
			old.At = n.At
			if old.TAP != nil && n.TAP != nil {
				old.TAP.At = n.TAP.At
			}
		}
	}
	for _, v := range next.VMs {
		if old, err := d.cfg.VM(v.Name); err == nil {
			old.At = v.At
		}
	}
	now := d.cfg.Clone()
	now.Files, now.Overrides, now.Keys = next.Files, next.Overrides, next.Keys
	d.cfg = now
}

// step is one change.
type step struct {
	what string
	do   func() error
}

// fixed returns the top-level keys that differ and that a running daemon cannot change: all but networks, VMs,
// log-level, and the underlay, for which planUnderlay decides.
func fixed(was, is *config.Config) (keys []string) {
	a, b := reflect.ValueOf(was).Elem(), reflect.ValueOf(is).Elem()
	for i := range a.NumField() {
		name, same := a.Type().Field(i).Name, false
		switch name {
		case "Path", "Files", "Overrides", "Keys", "LogLevel", "Networks", "VMs", "Underlay":
			continue
		case "EVPN":
			same = was.EVPN.Equal(is.EVPN)
		default:
			same = reflect.DeepEqual(a.Field(i).Interface(), b.Field(i).Interface())
		}
		if !same {
			keys = append(keys, strings.ToLower(wordStart.ReplaceAllString(name, "$1-$2")))
		}
	}
	return keys
}

// wordStart is where the next word of a field's name begins: RunDir becomes run-dir.
var wordStart = regexp.MustCompile(`([a-z])([A-Z])`)

// plan compares the file with the configuration in force. mu is held for reading.
func (d *Daemon) plan(next *config.Config) ([]step, error) {
	var wrong []string
	for _, k := range fixed(d.cfg, next) {
		wrong = append(wrong, fmt.Sprintf("`%s` cannot change while vnicd runs", k))
	}
	protectFirst, protectLast, ok := d.planUnderlay(next)
	if !ok {
		wrong = append(wrong, "`underlay` can change its keys and peers only while vnicd runs")
	}
	var levels, dmas, memories, delVMs, addNets, moves, delNets, nets, addVMs []step
	if next.LogLevel != d.cfg.LogLevel {
		levels = append(levels, step{"log level " + next.LogLevel, func() error { return d.setLogLevel(next.LogLevel) }})
	}

	for _, n := range next.Networks {
		old := d.cfg.Network(n.Name)
		if old == nil {
			addNets = append(addNets, step{"network " + n.Name + " added", func() error { return d.addNetwork(n, n.At) }})
			continue
		}
		a, b := *old, *n
		a.At, a.Peers, a.LearnPeers, a.TAP = config.Place{}, nil, false, nil
		b.At, b.Peers, b.LearnPeers, b.TAP = config.Place{}, nil, false, nil
		if !reflect.DeepEqual(a, b) {
			wrong = append(wrong,
				fmt.Sprintf("%v: network %q can change its peers and its tap; for other keys remove it and add it again",
					n.At, n.Name))
			continue
		}
		nets = append(nets, d.planNetwork(old, n)...)
	}
	for _, old := range d.cfg.Networks {
		if old.At != config.Runtime && next.Network(old.Name) == nil {
			delNets = append(delNets, step{"network " + old.Name + " removed",
				func() error { return d.RemoveNetwork(old.Name) }})
		}
	}

	for _, v := range next.VMs {
		old, err := d.cfg.VM(v.Name)
		if err != nil {
			addVMs = append(addVMs, step{"VM " + v.Name + " added", func() error { return d.addVM(v, v.At) }})
			continue
		}
		if v.FileDMA == old.FileDMA {
			v.DMA = old.DMA // an operator's change stays
		}
		a, b := *old, *v
		a.At, a.Network, b.At, b.Network = config.Place{}, "", config.Place{}, ""
		a.DMA, a.FileDMA = b.DMA, b.FileDMA
		a.MemoryBudget, a.MemoryWeight = b.MemoryBudget, b.MemoryWeight
		switch {
		case reflect.DeepEqual(a, b):
			if old.Network != v.Network {
				moves = append(moves, step{"VM " + v.Name + " moved to network " + v.Network,
					func() error { return d.MoveVM(v.Name, v.Network) }})
			}
			if old.FileDMA != v.FileDMA {
				dmas = append(dmas, step{"VM " + v.Name + " dma " + v.DMA.String(), func() error {
					_, err := d.setDMA(v.Name, v.DMA, true)
					return err
				}})
			}
			if old.MemoryBudget != v.MemoryBudget || old.MemoryWeight != v.MemoryWeight {
				if why := d.vms[v.Name].checkMemory(v); why != "" {
					wrong = append(wrong, why)
				}
				memories = append(memories, step{memoryText(old, v), func() error {
					return d.setMemory(v.Name, v.MemoryBudget, v.MemoryWeight)
				}})
			}
		case d.vms[v.Name].attached():
			wrong = append(wrong, fmt.Sprintf("%v: %s %q is attached; only its network, dma, memory-budget and "+
				"memory-weight can change now", v.At, v.What(), v.Name))
		default:
			delVMs = append(delVMs, step{"VM " + v.Name + " removed to be changed", func() error { return d.RemoveVM(v.Name) }})
			addVMs = append(addVMs, step{"VM " + v.Name + " added as changed", func() error { return d.addVM(v, v.At) }})
		}
	}
	for _, old := range d.cfg.VMs {
		if _, err := next.VM(old.Name); err != nil && old.At != config.Runtime {
			delVMs = append(delVMs, step{"VM " + old.Name + " removed", func() error { return d.RemoveVM(old.Name) }})
		}
	}
	if len(wrong) > 0 {
		slices.Sort(wrong)
		return nil, fmt.Errorf("%w: nothing was changed: %s", errConflict, strings.Join(wrong, "; "))
	}
	return slices.Concat(levels, protectFirst, dmas, memories, delVMs, addNets, moves, delNets, nets, addVMs,
		protectLast), nil
}

func (d *Daemon) planNetwork(old, n *config.Network) (steps []step) {
	if tapChanged(old.TAP, n.TAP) {
		if old.TAP != nil {
			steps = append(steps, step{"host port " + old.TAP.Name + " removed", func() error { return d.RemoveTAP(n.Name) }})
		}
		if n.TAP != nil {
			steps = append(steps, step{"host port " + n.TAP.Name + " added",
				func() error { return d.addTAP(n.Name, n.TAP, n.TAP.At) }})
		}
	}
	for _, p := range n.Peers {
		if !slices.Contains(old.Peers, p) {
			steps = append(steps, step{fmt.Sprintf("peer %s of network %s added", p, n.Name),
				func() error { return d.setPeer(n.Name, p, true) }})
		}
	}
	for _, p := range old.Peers {
		if !slices.Contains(n.Peers, p) {
			steps = append(steps, step{fmt.Sprintf("peer %s of network %s removed", p, n.Name),
				func() error { return d.setPeer(n.Name, p, false) }})
		}
	}
	if n.LearnPeers != old.LearnPeers {
		steps = append(steps, step{fmt.Sprintf("network %s learns peers: %v", n.Name, n.LearnPeers),
			func() error { return d.setLearnPeers(n.Name, n.LearnPeers) }})
	}
	return steps
}

func tapChanged(a, b *config.TAP) bool {
	if a == nil || b == nil {
		return a != b
	}
	x, y := *a, *b
	x.At, y.At = config.Place{}, config.Place{}
	return !reflect.DeepEqual(x, y)
}

// setPeer adds or removes a peer of the file.
func (d *Daemon) setPeer(name string, peer netip.Addr, on bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	n, err := d.network(name)
	if err != nil {
		return err
	}
	key := overlay.Key{Kind: overlay.Peer, VTEP: peer}
	defer func() { n.setTunnels(d.cfg.Network(name)) }()
	return d.changeLocked(func(next *config.Config) {
		replaceNetwork(next, name, func(c *config.Network) {
			c.Peers = slices.DeleteFunc(slices.Clone(c.Peers), func(a netip.Addr) bool { return a == peer })
			if on {
				c.Peers = append(c.Peers, peer)
			}
		})
	}, func() error {
		if !on {
			n.table.Withdraw(n.static, key)
			return nil
		}
		err := n.table.Set(n.static, overlay.Route{Key: key})
		if err != nil {
			n.table.Withdraw(n.static, key)
		}
		return err
	})
}

func (d *Daemon) setLearnPeers(name string, on bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	n, err := d.network(name)
	if err != nil {
		return err
	}
	defer func() { n.setTunnels(d.cfg.Network(name)) }()
	return d.changeLocked(func(next *config.Config) {
		replaceNetwork(next, name, func(c *config.Network) { c.LearnPeers = on })
	}, func() error {
		n.static.LearnPeers = on
		return d.vtep.SetLearnPeers(n.sw.VNI(), on)
	})
}

// setLogLevel changes the level of all loggers of the daemon.
func (d *Daemon) setLogLevel(level string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.changeLocked(func(next *config.Config) { next.LogLevel = level }, func() error {
		d.log.SetLevel(hclog.LevelFromString(level))
		return nil
	})
}
