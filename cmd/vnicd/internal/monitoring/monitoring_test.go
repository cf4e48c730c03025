package monitoring

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/goleak"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/worker"
	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/guestdrv"
)

func TestMain(m *testing.M) {
	if status, is := worker.Main(kinds, os.Args[1:]); is {
		os.Exit(status)
	}
	goleak.VerifyTestMain(m)
}

// newSpawner returns what starts processes.
func newSpawner(t *testing.T) *worker.Spawner {
	t.Helper()
	s, err := worker.Start(hclog.NewNullLogger())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// filled returns a status in which every number is different, every list has one element and every text is its path.
func filled() *daemon.Status {
	s := &daemon.Status{}
	next := int64(1000)
	var fill func(v reflect.Value, path string)
	fill = func(v reflect.Value, path string) {
		switch v.Kind() {
		case reflect.Pointer:
			v.Set(reflect.New(v.Type().Elem()))
			fill(v.Elem(), path)
		case reflect.Struct:
			if v.Type() == reflect.TypeFor[netip.Addr]() {
				v.Set(reflect.ValueOf(netip.MustParseAddr("192.0.2.1")))
				return
			}
			if v.Type() == reflect.TypeFor[netip.AddrPort]() {
				v.Set(reflect.ValueOf(netip.MustParseAddrPort("192.0.2.1:1")))
				return
			}
			if v.Type() == reflect.TypeFor[time.Time]() {
				next++
				v.Set(reflect.ValueOf(time.Unix(next, 0)))
				return
			}
			for i := range v.NumField() {
				fill(v.Field(i), path+"."+v.Type().Field(i).Name)
			}
		case reflect.Slice:
			v.Set(reflect.MakeSlice(v.Type(), 1, 1))
			fill(v.Index(0), path)
		case reflect.Array:
			for i := range v.Len() {
				fill(v.Index(i), path)
			}
		case reflect.String:
			v.SetString(path)
		case reflect.Bool:
			v.SetBool(true)
		case reflect.Float64:
			next++
			v.SetFloat(float64(next))
		case reflect.Int, reflect.Int64:
			next++
			v.SetInt(next)
		case reflect.Uint8:
			v.SetUint(2)
		case reflect.Uint16, reflect.Uint32, reflect.Uint64:
			next++
			v.SetUint(uint64(next))
		case reflect.Map:
			v.Set(reflect.MakeMap(v.Type()))
			e := reflect.New(v.Type().Elem()).Elem()
			fill(e, path)
			v.SetMapIndex(reflect.ValueOf("reason"), e)
		default:
			panic(fmt.Sprintf("%s is a %v: this test does not know it", path, v.Kind()))
		}
	}
	fill(reflect.ValueOf(s).Elem(), "")
	delete(s.VMs[0].HCA.Stats, "reason")
	drops := func(n uint64) map[string]uint64 {
		return map[string]uint64{vswitch.Storm.String(): n, vswitch.NoBuffer.String(): n + 1}
	}
	s.VTEP.Drops, s.Networks[0].Drops, s.Networks[0].Ports[0].Drops = drops(101), drops(201), drops(301)
	s.VMs[0].HCA.Drops = map[string]uint64{"header": 401}
	for i := range guestdrv.NumStats {
		s.VMs[0].HCA.Stats[i.String()] = uint64(500 + i)
	}
	s.VMs[0].HCA.Stats["local_messages"], s.VMs[0].HCA.Stats["local_bytes"] = 701, 702
	for i, name := range []string{"np_ecn_marked_roce_packets", "np_cnp_sent", "rp_cnp_handled", "kept_packets",
		"selective_acks_sent", "selective_acks_received"} {
		s.VMs[0].HCA.Stats[name] = uint64(711 + i)
	}
	s.VMs[0].HCA.Busy = false
	s.VMs[0].HCA.Faults.Guest.Buckets = []uint64{1, 2, 4}
	s.VMs[0].HCA.Faults.Host.Buckets = make([]uint64, 32)
	s.VMs[0].HCA.Faults.Host.Buckets[31] = 5
	return s
}

// notExported are the numbers of a status that are not metrics, and why.
var notExported = regexp.MustCompile(`^(` + strings.Join([]string{
	`(keeper\.)?pid`,                                           // process_* has it
	`engines\.(CPUs|Nice)`,                                     // configuration
	`vms\.control\.percent`,                                    // likewise
	`networks\.fdb\..*`,                                        // per address: unbounded
	`networks\.(neighbours|flapping)\..*`,                      // likewise
	`networks\.multicast\.(queriers|list)\..*`,                 // per VLAN, per group
	`networks\.entries`,                                        // exported as learnt and static
	`networks\.ports\.loop`,                                    // a place, not a measurement
	`vtep\.(source_ports|refused\..*)`,                         // per sender: unbounded
	`vtep\.networks\.(vni|peers\..*)`,                          // counted
	`vms\.hca\.qps\..*`,                                        // per queue pair: counted by state
	`vms\.hca\.host_memory\.by\..*`,                            // one VM's detail: `vnicd status VM` has it
	`vms\.hca\.faults\.\w+\.(raised|resumed|failed)`,           // counters of the HCA or the memory have it
	`vms\.hca\.faults\.invalidations`,                          // likewise
	`vms\.hca\.faults\.\w+\.(mean|median|p99|max|estimate)_ns`, // a histogram has more
	`vms\.memory\.fault_time\..*`,                              // the same faults as those of the HCA's host level
}, "|") + `)$`)

// numbers lists every number of a JSON value by its path.
func numbers(v any, path string, out map[string]float64) {
	switch v := v.(type) {
	case map[string]any:
		for k, x := range v {
			numbers(x, strings.TrimPrefix(path+"."+k, "."), out)
		}
	case []any:
		if len(v) > 0 && path != "vms.hca.faults.guest.buckets" && path != "vms.hca.faults.host.buckets" {
			numbers(v[0], path, out)
		}
	case float64:
		out[path] = v
	}
}

// Every number of the status is a metric or listed in notExported, so that a new number is not forgotten.
func TestEveryNumberIsExported(t *testing.T) {
	s := filled()
	text, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	var tree any
	if err := json.Unmarshal(text, &tree); err != nil {
		t.Fatal(err)
	}
	want := map[string]float64{}
	numbers(tree, "", want)
	fams, err := registryOf(s).Gather()
	if err != nil {
		t.Fatal(err)
	}
	have, labels := map[float64]bool{}, map[string]bool{}
	for _, f := range fams {
		if !strings.HasPrefix(f.GetName(), "vnicd_") {
			continue // of the process: any numbers
		}
		for _, m := range f.Metric {
			for _, l := range m.Label {
				labels[l.GetValue()] = true
			}
			have[m.GetCounter().GetValue()+m.GetGauge().GetValue()] = true
			have[m.GetHistogram().GetSampleSum()] = true
		}
	}
	for _, path := range slices.Sorted(maps.Keys(want)) {
		v := want[path]
		if strings.HasSuffix(path, "_ns") {
			v = time.Duration(v).Seconds()
		}
		found := have[v] || labels[fmt.Sprint(v)]
		if path == "networks.static" { // exported as entries - static, too
			found = found && have[want["networks.entries"]-v]
		}
		if skip := notExported.MatchString(path); found == skip {
			t.Errorf("%s = %v: exported %v, meant to be left out %v", path, v, found, skip)
		}
	}
}

// registryOf has the metrics of a status and, beside them, of a certificate.
func registryOf(s *daemon.Status) *prometheus.Registry {
	at := time.Unix(1234567890, 0)
	return registry(func() *daemon.Status { return s }, func() *time.Time { return &at })
}

func TestNames(t *testing.T) {
	s := filled()
	r := registryOf(s)
	problems, err := testutil.GatherAndLint(r)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
	fams, _ := r.Gather()
	own := 0
	for _, f := range fams {
		if strings.HasPrefix(f.GetName(), "vnicd_") {
			own++
		}
		if f.GetHelp() == "" {
			t.Errorf("%s has no explanation", f.GetName())
		}
	}
	if own != len(families) {
		t.Errorf("%d families for a full status, %d declared", own, len(families))
	}
}

// Values that a status omits because the device was busy are missing in the metrics, not 0.
func TestBusy(t *testing.T) {
	s := filled()
	s.VMs[0].HCA.Busy = true
	fams, err := registryOf(s).Gather()
	if err != nil {
		t.Fatal(err)
	}
	have := map[string]bool{}
	for _, f := range fams {
		have[f.GetName()] = true
	}
	for name, want := range map[string]bool{
		"vnicd_hca_busy": true, "vnicd_hca_rx_packets_total": true, "vnicd_memory_resident_bytes": true,
		"vnicd_hca_objects": false, "vnicd_hca_queue_pairs": false, "vnicd_vm_fault_duration_seconds": false,
		"vnicd_fault_duration_seconds": true,
		"vnicd_epoch_flips_total":      false,
	} {
		if have[name] != want {
			t.Errorf("%s: %v", name, have[name])
		}
	}
}

// stage is a daemon with a VM whose HCA works on on-demand memory.
type stage struct {
	t      *testing.T
	d      *daemon.Daemon
	client http.Client
}

func newStage(t *testing.T, pprof bool) *stage { return makeStage(t, fmt.Sprintf("pprof: %v", pprof)) }

func newPageStage(t *testing.T) *stage { return makeStage(t, "page: true") }

func makeStage(t *testing.T, what string) *stage {
	t.Helper()
	dir := t.TempDir()
	cfg, err := config.Parse("test", fmt.Appendf(nil, `
run-dir: %s
engines: 2
monitoring: {listen: %s/mon, %s}
networks: [{name: blue, vni: 100}]
vms: [{name: one, network: blue, mac: "02:00:00:00:00:01", memory-budget: 64MiB}]
`, dir, dir, what))
	if err != nil {
		t.Fatal(err)
	}
	s := &stage{t: t}
	if s.d, err = daemon.Start(cfg, "v1.2.3", hclog.NewNullLogger()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.d.Close() })
	srv, err := Serve(cfg.Monitoring, s.d, newSpawner(t), hclog.NewNullLogger())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(srv.Close)
	s.client.Transport = unixTransport(filepath.Join(dir, "mon"))
	s.traffic(filepath.Join(dir, "one.hca"))
	return s
}

func unixTransport(path string) http.RoundTripper {
	return &http.Transport{DisableKeepAlives: true, DialContext: func(context.Context, string, string) (net.Conn, error) {
		return net.Dial("unix", path)
	}}
}

// traffic makes the VM write to itself, through pages that are absent at first.
func (s *stage) traffic(socket string) {
	must := func(err error) {
		s.t.Helper()
		if err != nil {
			s.t.Fatal(err)
		}
	}
	dev, err := guestdrv.Open(context.Background(), socket, guestdrv.Config{Memory: 16 << 20})
	must(err)
	s.t.Cleanup(func() { _ = dev.Close() })
	gid := guestdrv.IPGID(netip.MustParseAddr("10.0.0.1"))
	must(dev.SetGID(context.Background(), 0, gid, guestdrv.GIDOptions{}))
	pd, err := dev.AllocPD(context.Background())
	must(err)
	cq, err := dev.CreateCQ(context.Background(), 64, guestdrv.CQOptions{})
	must(err)
	qp, err := pd.CreateQP(context.Background(), guestdrv.QPConfig{Type: guestdrv.QPTypeRC, MaxSendWR: 8, MaxRecvWR: 8,
		MaxSendSGE: 1, MaxRecvSGE: 1, SendCQ: cq, RecvCQ: cq})
	must(err)
	must(qp.Connect(context.Background(), guestdrv.Peer{QPN: qp.Number(), Path: guestdrv.Path{GID: gid, MAC: dev.MAC()}},
		guestdrv.ConnectOptions{Access: guestdrv.AccessRemoteWrite, MinRNRTimer: 5, Timeout: 18}))
	buf, err := dev.Alloc(64 << 10)
	must(err)
	const access = guestdrv.AccessLocalWrite | guestdrv.AccessRemoteWrite
	mr, err := pd.RegisterOnDemand(context.Background(), 1<<40, 64<<10, access,
		guestdrv.PagerFunc(func(_ context.Context, f guestdrv.PageFault, pas []uint64) error {
			for i := range pas {
				pas[i] = buf.PA() + f.VA - 1<<40 + uint64(i)<<12
			}
			return nil
		}))
	must(err)
	must(qp.PostSend(guestdrv.NewWrite(1, mr.Remote(8192), mr.SGEAt(1<<40, 4096)).With(guestdrv.SendSignaled)))
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	wcs := make([]guestdrv.Completion, 1)
	if n, err := cq.PollWait(ctx, wcs); n != 1 || err != nil || wcs[0].Status != guestdrv.WCSuccess {
		s.t.Fatalf("write: %d, %+v, %v", n, wcs, err)
	}
}

func (s *stage) get(method, path string) (int, string) {
	s.t.Helper()
	req, err := http.NewRequest(method, "http://localhost"+path, nil)
	if err != nil {
		s.t.Fatal(err)
	}
	resp, err := s.client.Do(req)
	if err != nil {
		s.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	return resp.StatusCode, string(text)
}

// A scrape has the same values as `vnicd status -j`, for a daemon with traffic.
func TestScrape(t *testing.T) {
	s := newStage(t, false)
	status, text := s.get("GET", "/metrics")
	if status != http.StatusOK {
		t.Fatalf("%d %s", status, text)
	}
	vm := s.d.Status().VMs[0]
	for line, n := range map[string]any{
		`vnicd_build_info{version="v1.2.3"}`:                             1,
		`vnicd_vm_info{mac="02:00:00:00:00:01",network="blue",vm="one"}`: 1,
		`vnicd_vm_attached{face="hca",vm="one"}`:                         1,
		`vnicd_vm_attached{face="net",vm="one"}`:                         0,
		`vnicd_hca_queue_pairs{state="RTS",vm="one"}`:                    1,
		`vnicd_hca_queue_pairs{state="ERROR",vm="one"}`:                  0,
		`vnicd_hca_guest_faults_total{vm="one"}`:                         vm.HCA.Stats["guest_faults"],
		`vnicd_hca_tx_packets_total{vm="one"}`:                           vm.HCA.Stats["tx_packets"],
		`vnicd_vm_fault_duration_seconds_count{level="guest",vm="one"}`:  vm.HCA.Faults.Guest.Resumed,
		`vnicd_vm_fault_duration_seconds_sum{level="host",vm="one"}`:     vm.HCA.Faults.Host.Sum.Seconds(),
		`vnicd_fault_duration_seconds_count{level="guest"}`:              vm.HCA.Faults.Guest.Resumed,
		`vnicd_fault_duration_seconds_sum{level="host"}`:                 vm.HCA.Faults.Host.Sum.Seconds(),
		`vnicd_memory_resident_bytes{vm="one"}`:                          float64(vm.Memory.Resident),
		`vnicd_memory_budget_bytes{vm="one"}`:                            float64(64 << 20),
		`vnicd_hca_registered_pages{vm="one"}`:                           vm.HCA.MTTs,
		`vnicd_vm_host_memory_limit_bytes{vm="one"}`:                     float64(vm.HCA.HostMemory.Limit),
		`vnicd_vm_host_memory_used_bytes{vm="one"}`:                      float64(vm.HCA.HostMemory.Used),
		`vnicd_vm_host_memory_refused_total{vm="one"}`:                   0,
		`vnicd_vm_control_delayed_commands_total{vm="one"}`:              0,
		`vnicd_network_info{network="blue",vni="100"}`:                   1,

		`vnicd_port_dropped_frames_total{kind="vm",network="blue",port="one",reason="not-ready"}`: 0,
	} {
		want := fmt.Sprintf("%s %v\n", line, n)
		if !strings.Contains(text, want) {
			t.Errorf("scrape and %q do not agree; it has: %s", want, grep(text, line[:strings.IndexByte(line, '{')]))
		}
	}
	for name := range vm.HCA.Stats {
		if !strings.Contains(text, "\nvnicd_hca_"+name+"_total{") {
			t.Errorf("the HCA's counter %s is not exported", name)
		}
	}
	if c := vm.Control; c.Commands == 0 || c.Messages == 0 || c.Paging == 0 {
		t.Errorf("no processor time: %+v", c)
	}
	for _, series := range []string{`control_seconds_total{kind="commands",vm="one"}`,
		`control_seconds_total{kind="messages",vm="one"}`, `control_seconds_total{kind="paging",vm="one"}`,
		`engine_seconds_total{face="hca",vm="one"}`, `engine_seconds_total{face="net",vm="one"}`} {
		if !strings.Contains(text, "vnicd_vm_"+series) {
			t.Errorf("vnicd_vm_%s is not exported", series)
		}
	}
	if vm.HCA.Stats["guest_faults"] == 0 || vm.HCA.Faults.Host.Sum == 0 {
		t.Errorf("the stage raised no faults: %+v", vm.HCA.Faults)
	}
	for _, c := range []struct {
		method, path string
		status       int
	}{{"POST", "/metrics", 405}, {"GET", "/", 404}, {"GET", "/debug/pprof/", 404}, {"GET", "/v1/status", 404},
		{"GET", "/healthz", 200}} {
		if status, text := s.get(c.method, c.path); status != c.status {
			t.Errorf("%s %s: %d %s, want %d", c.method, c.path, status, text, c.status)
		}
	}
}

func grep(text, word string) string {
	var b bytes.Buffer
	for l := range strings.Lines(text) {
		if strings.Contains(l, word) {
			b.WriteString(l)
		}
	}
	return b.String()
}

func TestProfiles(t *testing.T) {
	s := newStage(t, true)
	for path, want := range map[string]string{
		"goroutine?debug=1": "goroutine profile", "heap?gc=1": "\x1f\x8b", "heap?seconds=1": "\x1f\x8b",
		"profile?seconds=1": "\x1f\x8b", "trace?seconds=0.1": "go 1.", "cmdline": os.Args[0], "": "goroutine",
	} {
		if status, text := s.get("GET", "/debug/pprof/"+path); status != 200 || !strings.Contains(text, want) {
			t.Errorf("%s: %d %.100q", path, status, text)
		}
	}
	if status, text := s.get("GET", "/debug/pprof/heap?seconds=1&debug=1"); status != 400 ||
		!strings.Contains(text, "incompatible") {
		t.Errorf("arguments that exclude each other: %d %.100q", status, text)
	}
}

// stuck is a daemon with an engine that does not answer.
type stuck struct{ Source }

func (stuck) Healthy(ctx context.Context) error { return errors.New("no answer from loop 1") }

func TestUnhealthy(t *testing.T) {
	path := filepath.Join(t.TempDir(), "mon")
	srv, err := Serve(config.Monitoring{Listen: path}, stuck{}, newSpawner(t), hclog.NewNullLogger())
	if err != nil {
		t.Fatal(err)
	}
	defer srv.Close()
	s := &stage{t: t}
	s.client.Transport = unixTransport(path)
	if status, text := s.get("GET", "/healthz"); status != 503 || text != "no answer from loop 1\n" {
		t.Errorf("%d %q", status, text)
	}
}

func TestListenErrors(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if _, err := Serve(config.Monitoring{Listen: l.Addr().String()}, stuck{}, nil, hclog.NewNullLogger()); err == nil ||
		!strings.Contains(err.Error(), "address already in use") {
		t.Errorf("an address in use: %v", err)
	}
	if s, err := Serve(config.Monitoring{}, stuck{}, nil, hclog.NewNullLogger()); s != nil || err != nil {
		t.Errorf("no address: %v, %v", s, err)
	} else {
		s.Close()
	}
}
