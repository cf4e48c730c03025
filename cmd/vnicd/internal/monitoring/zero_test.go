package monitoring

import (
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/hashicorp/go-hclog"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
	"github.com/vnicd/vnicd/device/testutil/nstest"
)

// gather returns the metrics of vnicd for a status: for each family its series, by their labels in the order of names.
func gather(t *testing.T, status *daemon.Status) map[string]map[string]*dto.Metric {
	t.Helper()
	fams, err := registryOf(status).Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]map[string]*dto.Metric{}
	for _, f := range fams {
		if !strings.HasPrefix(f.GetName(), "vnicd_") {
			continue
		}
		out[f.GetName()] = map[string]*dto.Metric{}
		for _, m := range f.Metric {
			out[f.GetName()][labelText(labelMap(m))] = m
		}
	}
	return out
}

func labelMap(m *dto.Metric) map[string]string {
	out := map[string]string{}
	for _, l := range m.Label {
		out[l.GetName()] = l.GetValue()
	}
	return out
}

func labelText(labels map[string]string) string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(labels)) {
		out = append(out, fmt.Sprintf("%s=%q", name, labels[name]))
	}
	return strings.Join(out, ",")
}

// checkEach reports counters that lack a series: for each series there is one for each value that a label may have.
func checkEach(t *testing.T, m metric, have map[string]*dto.Metric) {
	t.Helper()
	for _, one := range slices.Sorted(maps.Keys(have)) {
		labels := labelMap(have[one])
		values := maps.Clone(m.values)
		if m.name == port.drops.name {
			values["reason"] = portReasons[labels["kind"]]
		}
		for label, all := range values {
			if len(all) == 0 {
				t.Errorf("%s: no values of %s are declared", m.name, label)
			}
			for _, v := range all {
				labels[label] = v
				if have[labelText(labels)] == nil {
					t.Errorf("%s has {%s} and lacks {%s}", m.name, one, labelText(labels))
				}
			}
			labels = labelMap(have[one])
		}
	}
}

// absent are the families whose objects the daemon of TestFromZero does not have; TestEachValue has them all.
func absent(name string) bool {
	return strings.HasPrefix(name, "vnicd_keeper_") || strings.HasPrefix(name, "vnicd_protection_") ||
		strings.HasPrefix(name, "vnicd_evpn_")
}

// TestFromZero: a counter is 0 before its first event, not absent. A daemon that has just started, with one VM, has
// every counter of the daemon, its network, its ports and the VM, with each value that a label may have; and what
// happens later adds none.
func TestFromZero(t *testing.T) {
	dir := t.TempDir()
	cfg, err := config.Parse("test", fmt.Appendf(nil, `
run-dir: %s
engines: 2
vtep: {local: 127.0.0.1}
networks: [{name: blue, vni: 100}]
vms: [{name: one, network: blue, mac: "02:00:00:00:00:01"}]
`, dir))
	if err != nil {
		t.Fatal(err)
	}
	var d *daemon.Daemon
	nstest.New(t, "mon").Do(func() { d, err = daemon.Start(cfg, "v1.2.3", hclog.NewNullLogger()) })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	fresh := gather(t, d.Status())
	for _, m := range families {
		have := fresh[m.name]
		if m.kind != prometheus.CounterValue || absent(m.name) {
			continue
		}
		if len(have) == 0 {
			t.Errorf("%s does not exist yet", m.name)
		}
		if slices.Contains(m.labels, "reason") && m.name != port.drops.name && len(m.values["reason"]) == 0 {
			t.Errorf("the reasons of %s are not declared", m.name)
		}
		checkEach(t, m, have)
		if slices.Contains(m.labels, "vm") && !slices.ContainsFunc(slices.Collect(maps.Keys(have)),
			func(l string) bool { return strings.Contains(l, `vm="one"`) }) {
			t.Errorf("%s is missing for the VM", m.name)
		}
	}
	s := &stage{t: t, d: d}
	s.traffic(filepath.Join(dir, "one.hca"))
	after := gather(t, d.Status())
	if n := after["vnicd_hca_tx_bytes_total"][`vm="one"`].GetCounter().GetValue(); n == 0 {
		t.Error("the VM sent nothing")
	}
	for _, m := range families {
		if m.kind != prometheus.CounterValue {
			continue
		}
		for labels := range after[m.name] {
			if fresh[m.name][labels] == nil {
				t.Errorf("%s{%s} appeared with its first event", m.name, labels)
			}
		}
	}
}

// TestEachValue is TestFromZero for a status that has every object, and in which no reason has occurred.
func TestEachValue(t *testing.T) {
	s := filled()
	s.VTEP.Drops, s.Networks[0].Drops, s.VMs[0].HCA.Drops, s.EVPN.Refused = nil, nil, nil, nil
	s.Networks[0].Ports = nil
	for kind := range portReasons {
		p := filled().Networks[0].Ports[0]
		p.Kind, p.Drops = kind, nil
		s.Networks[0].Ports = append(s.Networks[0].Ports, p)
	}
	all := gather(t, s)
	for _, m := range families {
		if m.kind == prometheus.CounterValue && len(all[m.name]) == 0 {
			t.Errorf("%s does not exist", m.name)
		}
		checkEach(t, m, all[m.name])
	}
	for kind, reasons := range portReasons {
		n := 0
		for labels := range all[port.drops.name] {
			if strings.Contains(labels, fmt.Sprintf("kind=%q", kind)) {
				n++
			}
		}
		if n != len(reasons) || n < 20 {
			t.Errorf("a port of kind %s has %d reasons, %d declared", kind, n, len(reasons))
		}
	}
}

// TestUndeclaredReason: one that occurs without being declared is not lost.
func TestUndeclaredReason(t *testing.T) {
	s := filled()
	s.VMs[0].HCA.Drops = map[string]uint64{"surprise": 7}
	labels := labelText(map[string]string{"vm": s.VMs[0].Name, "reason": "surprise"})
	if m := gather(t, s)[hcaDrops.name][labels]; m.GetCounter().GetValue() != 7 {
		t.Errorf("%s{%s}: %v", hcaDrops.name, labels, m)
	}
}
