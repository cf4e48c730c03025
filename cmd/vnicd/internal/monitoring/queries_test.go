package monitoring

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/vnicd/vnicd/device/testutil/nstest"
)

// Prometheus adds these labels to every series.
var targetLabels = []string{"instance", "job"}

// declared returns the labels of a series that the declared families have in a classic scrape, and the values of those
// labels whose values are known.
func declared(series string) (labels []string, values map[string][]string, ok bool) {
	for _, m := range families {
		var of []string // the names of its series
		switch m.name {
		case allFaultTime.name:
			of = []string{m.name + "_bucket", m.name + "_sum", m.name + "_count"}
		case faultTime.name: // native: no buckets
			of = []string{m.name, m.name + "_sum", m.name + "_count"}
		default:
			of = []string{m.name}
		}
		if !slices.Contains(of, series) {
			continue
		}
		labels, values = slices.Concat(m.labels, targetLabels), m.values
		if strings.HasSuffix(series, "_bucket") {
			labels = append(labels, "le")
		}
		if m.name == port.drops.name {
			values = map[string][]string{"reason": networkReasons()}
		}
		return labels, values, true
	}
	return nil, nil, false
}

var (
	selectors = regexp.MustCompile(`\b(vnicd_\w+)(?:\{([^}]*)\})?`)
	matchers  = regexp.MustCompile(`(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"`)
	groupings = regexp.MustCompile(`\b(?:by|without|on|ignoring)\s*\(([^)]*)\)`)
	words     = regexp.MustCompile(`\w+`)
)

// checkQuery returns what a query in PromQL names that does not exist: metrics, labels, and values of labels whose
// values are declared. out are the labels that its result has at most.
func checkQuery(expr string) (out, wrong []string) {
	found := selectors.FindAllStringSubmatch(expr, -1)
	var used []string // labels of the metrics in it
	for _, s := range found {
		labels, values, ok := declared(s[1])
		if !ok {
			wrong = append(wrong, "no metric "+s[1])
			continue
		}
		used = append(used, labels...)
		pairs := matchers.FindAllStringSubmatch(s[2], -1)
		if s[2] != "" && len(pairs) == 0 {
			wrong = append(wrong, "cannot read {"+s[2]+"}")
		}
		for _, p := range pairs {
			if !slices.Contains(labels, p[1]) {
				wrong = append(wrong, s[1]+" has no label "+p[1])
			}
			known := values[p[1]]
			for v := range strings.SplitSeq(p[3], "|") {
				if known != nil && !strings.Contains(v, "$") && !slices.Contains(known, v) {
					wrong = append(wrong, fmt.Sprintf("%s has no %s=%q", s[1], p[1], v))
				}
			}
		}
	}
	if strings.Contains(expr, "up{") {
		used = append(used, targetLabels...)
	} else if len(found) == 0 {
		wrong = append(wrong, "no metric of vnicd in it")
	}
	out = used
	for i, g := range groupings.FindAllStringSubmatch(expr, -1) {
		names := words.FindAllString(g[1], -1)
		for _, l := range names {
			if !slices.Contains(used, l) {
				wrong = append(wrong, "no metric in it has the label "+l)
			}
		}
		if i == 0 {
			out = names
		}
	}
	return out, wrong
}

// The checks below find what they must.
func TestCheckQuery(t *testing.T) {
	for expr, want := range map[string]string{
		"vnicd_lost_hcas > 0": "",
		`sum by (instance, reason) (rate(vnicd_network_dropped_frames_total{reason=~"storm|too-big"}[5m]))`: "",
		`rate(vnicd_fault_duration_seconds_bucket{le="1"}[5m])`:                                             "",
		"vnicd_lost > 0": "no metric vnicd_lost",
		`rate(vnicd_network_dropped_frames_total{reason="strom"}[5m])`:         `no reason="strom"`,
		`rate(vnicd_network_dropped_frames_total{reason=~"storm|to-big"}[5m])`: `no reason="to-big"`,
		`vnicd_lost_hcas{vm="a"}`:                             "vnicd_lost_hcas has no label vm",
		`sum by (vm) (vnicd_lost_hcas)`:                       "no metric in it has the label vm",
		`rate(vnicd_vm_fault_duration_seconds_bucket[5m])`:    "no metric vnicd_vm_fault_duration_seconds_bucket",
		`vnicd_vm_fault_duration_seconds_sum{le="1"}`:         "has no label le",
		`vnicd_lost_hcas / on (instance, vm) vnicd_lost_hcas`: "no metric in it has the label vm",
		`node_load1 > 2`:                                      "no metric of vnicd",
		`vnicd_lost_hcas{nonsense}`:                           "cannot read",
	} {
		_, wrong := checkQuery(expr)
		if text := strings.Join(wrong, "; "); want == "" && text != "" || !strings.Contains(text, want) {
			t.Errorf("%s: %q, want %q", expr, text, want)
		}
	}
}

func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// The metrics that the operators' document names exist.
func TestDocumentedNames(t *testing.T) {
	names := regexp.MustCompile(`\bvnicd_[a-z0-9_]+`).FindAllString(read(t, "../../OPERATING.md"), -1)
	if len(names) < 10 {
		t.Errorf("it names %d metrics", len(names))
	}
	for _, n := range names {
		family := slices.ContainsFunc(families, func(m metric) bool { return m.name == n })
		if _, _, ok := declared(n); !ok && !family {
			t.Errorf("%s does not exist", n)
		}
	}
}

// The metrics, labels and values of labels that the dashboard names exist.
func TestDashboard(t *testing.T) {
	var dashboard struct {
		Templating struct {
			List []struct{ Name, Type, Query string }
		}
		Panels []struct {
			Title   string
			Targets []struct{ Expr, LegendFormat string }
		}
	}
	if err := json.Unmarshal([]byte(read(t, "../../packaging/grafana.json")), &dashboard); err != nil {
		t.Fatal(err)
	}
	if len(dashboard.Panels) < 10 {
		t.Errorf("%d panels", len(dashboard.Panels))
	}
	values := regexp.MustCompile(`^label_values\((.*), (\w+)\)$`)
	for _, v := range dashboard.Templating.List {
		if v.Type != "query" {
			continue
		}
		m := values.FindStringSubmatch(v.Query)
		if m == nil {
			t.Errorf("variable %s: cannot read %s", v.Name, v.Query)
			continue
		}
		if labels, wrong := checkQuery(m[1]); len(wrong) > 0 || !slices.Contains(labels, m[2]) {
			t.Errorf("variable %s: %v, labels %v, wants %s", v.Name, wrong, labels, m[2])
		}
	}
	legend := regexp.MustCompile(`\{\{(\w+)\}\}`)
	for _, p := range dashboard.Panels {
		if len(p.Targets) == 0 {
			t.Errorf("%s has no query", p.Title)
		}
		for _, x := range p.Targets {
			labels, wrong := checkQuery(x.Expr)
			for _, w := range wrong {
				t.Errorf("%s: %s: %s", p.Title, x.Expr, w)
			}
			for _, l := range legend.FindAllStringSubmatch(x.LegendFormat, -1) {
				if !slices.Contains(labels, l[1]) {
					t.Errorf("%s: the legend names %s, which %s does not have", p.Title, l[1], x.Expr)
				}
			}
		}
	}
}

// TestAlerts: each alert names metrics, labels and values that exist, explains itself, has a runbook, and is tested.
func TestAlerts(t *testing.T) {
	var rules struct {
		Groups []struct {
			Rules []struct {
				Alert, Expr         string
				Labels, Annotations map[string]string
			}
		}
	}
	if err := yaml.Unmarshal([]byte(read(t, "../../packaging/alerts.yaml")), &rules); err != nil {
		t.Fatal(err)
	}
	var tests struct {
		Tests []struct {
			Rules []struct {
				Name     string      `yaml:"alertname"`
				Expected []yaml.Node `yaml:"exp_alerts"`
			} `yaml:"alert_rule_test"`
		}
	}
	if err := yaml.Unmarshal([]byte(read(t, "../../packaging/alerts_test.yaml")), &tests); err != nil {
		t.Fatal(err)
	}
	fires, quiet := map[string]bool{}, map[string]bool{}
	for _, x := range tests.Tests {
		for _, r := range x.Rules {
			if len(r.Expected) > 0 {
				fires[r.Name] = true
			} else {
				quiet[r.Name] = true
			}
		}
	}
	runbooks := map[string]bool{}
	for _, h := range regexp.MustCompile(`(?m)^### (Vnicd\w+)$`).FindAllStringSubmatch(read(t, "../../OPERATING.md"), -1) {
		runbooks[h[1]] = true
	}
	template := regexp.MustCompile(`\$labels\.(\w+)`)
	seen := map[string]bool{}
	for _, g := range rules.Groups {
		for _, r := range g.Rules {
			if r.Alert == "" || seen[r.Alert] {
				t.Errorf("alert %q has no name of its own", r.Alert)
			}
			seen[r.Alert] = true
			labels, wrong := checkQuery(r.Expr)
			for _, w := range wrong {
				t.Errorf("%s: %s", r.Alert, w)
			}
			if s := r.Labels["severity"]; !slices.Contains([]string{"critical", "warning", "info"}, s) {
				t.Errorf("%s: severity %q", r.Alert, s)
			}
			for _, key := range []string{"summary", "description"} {
				if r.Annotations[key] == "" {
					t.Errorf("%s has no %s", r.Alert, key)
				}
				for _, l := range template.FindAllStringSubmatch(r.Annotations[key], -1) {
					if !slices.Contains(labels, l[1]) {
						t.Errorf("%s: its %s names the label %s, its expression has %v", r.Alert, key, l[1], labels)
					}
				}
			}
			if !strings.HasSuffix(r.Annotations["runbook"], "OPERATING.md#"+strings.ToLower(r.Alert)) || !runbooks[r.Alert] {
				t.Errorf("%s: no runbook at %q", r.Alert, r.Annotations["runbook"])
			}
			if !fires[r.Alert] || !quiet[r.Alert] {
				t.Errorf("%s: tested that it fires %v, that it is quiet %v", r.Alert, fires[r.Alert], quiet[r.Alert])
			}
		}
	}
	if len(seen) < 10 {
		t.Errorf("%d alerts", len(seen))
	}
	for name := range runbooks {
		if !seen[name] {
			t.Errorf("a runbook for %s, which does not exist", name)
		}
	}
}

// TestAlertRules has Prometheus' own tool check the alerts, and run the tests of each.
func TestAlertRules(t *testing.T) {
	nstest.Require(t, "promtool", "prometheus")
	for _, args := range [][]string{{"check", "rules", "alerts.yaml"}, {"test", "rules", "alerts_test.yaml"}} {
		cmd := exec.Command("promtool", args...)
		cmd.Dir = "../../packaging"
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
}
