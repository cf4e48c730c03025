package integration

import (
	"context"
	"encoding/json"
	"fmt"
	"path"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
)

// counter returns one of the port's hw_counters.
func counter(ctx context.Context, t *testing.T, e lab.End, name string) (n int) {
	t.Helper()
	_, err := fmt.Sscan(run(ctx, t, e.VM, "cat /sys/class/infiniband/"+e.Device+"/ports/1/hw_counters/"+name), &n)
	check(t, err)
	return n
}

// verbsErrors runs the table of errors (integration/guest/errors) in both directions. Accesses with an invalid R_Key
// are counted.
func verbsErrors(ctx context.Context, t *testing.T, a, b lab.End) {
	const port, forgedKeys = 18519, 14
	for _, x := range [][2]lab.End{{a, b}, {b, a}} {
		line := func(e lab.End) string { return fmt.Sprintf("/host/errors %s %d", e.Device, e.GID) }
		before := counter(ctx, t, x[1], "access_errors")
		_, out, err := lab.Pair(ctx, x[1].VM, line(x[1]), x[0].VM, line(x[0])+" "+x[1].Addr, port)
		check(t, err)
		if n := counter(ctx, t, x[1], "access_errors") - before; n < forgedKeys {
			t.Errorf("%d access errors were counted, want at least %d", n, forgedKeys)
		}
		t.Log(strings.TrimSpace(out))
	}
}

// tools runs the programs that inspect devices while other programs have objects there. Counters count traffic, and
// asynchronous events of the port reach their listeners.
func tools(ctx context.Context, t *testing.T, a, b lab.End) {
	m, d := a.VM, a.Device
	listener := must[*qemu.Process](t)(lab.Listen(ctx, m, "rping -s -a "+a.Addr, 0))
	line := fmt.Sprintf("ibv_srq_pingpong -e -q 2 -n 100000000 -g %d -d ", a.GID)
	server := must[*qemu.Process](t)(lab.Listen(ctx, m, line+d, 18515))
	client := must[*qemu.Process](t)(b.VM.StartShell(ctx, "exec "+line+b.Device+" "+a.Addr))
	eventually(ctx, t, "the pingpong runs", func() bool {
		// the GSI queue pair, too
		return strings.Count(run(ctx, t, m, "rdma resource show qp link "+d+"/1"), "state RTS") >= 3
	})
	for _, x := range [][2]string{
		{"ibv_devices", `(?m)^\s+` + d + `\s+[0-9a-f]{16}$`},
		{"ibv_devinfo -v -d " + d, `(?s)hca_id:\s+` + d + `.*PORT_ACTIVE.*GID\[`},
		{"rdma dev show " + d, `node_type ca.*node_guid`},
		{"rdma link show " + d + "/1", `state ACTIVE physical_state LINK_UP netdev eth0`},
		{"rdma resource show " + d, `pd \d+ cq \d+ qp \d+ cm_id \d+ mr \d+ ctx \d+ srq 1`},
		{"rdma resource show qp link " + d + "/1", `type RC state RTS.*comm ibv_srq_pingpon`},
		{"rdma resource show cq dev " + d, `cqe \d+.*comm ibv_srq_pingpon`},
		{"rdma resource show mr dev " + d, `mrlen \d+.*comm ibv_srq_pingpon`},
		{"rdma -dd resource show cq dev " + d, `drv_cqn \d+ .*drv_armed \d+`},
		{"rdma -dd resource show qp link " + d + "/1", `(?s)type RC .*drv_engine 0 .*drv_sq_max_wr \d+ .*drv_srqn \d+`},
		{"rdma -dd resource show qp link " + d + "/1", `(?s)type GSI .*drv_sq_outstanding \d+ .*drv_rq_outstanding [1-9]`},
		{"rdma -dd resource show mr dev " + d, `drv_kind pinned .*drv_handle 0x`},
		{"rdma resource show pd dev " + d, `pdn \d+.*comm ibv_srq_pingpon`},
		// iproute2 6.1 prints the queue pairs in place of the name
		{"rdma resource show srq dev " + d, `type BASIC.*pid \d+ comm`},
		{"rdma resource show cm_id", `state LISTEN.*comm rping`},
	} {
		if out := run(ctx, t, m, x[0]); !regexp.MustCompile(x[1]).MatchString(out) {
			t.Errorf("%s lacks %s:\n%s", x[0], x[1], out)
		}
	}
	for _, p := range []*qemu.Process{listener, server, client} {
		_ = p.Signal(ctx, "KILL")
		_, err := p.Wait(ctx)
		check(t, err)
	}

	// Traffic is counted, and both interfaces agree.
	const sent = 40 << 16
	bytes := func() int { return counter(ctx, t, a, "tx_bytes") }
	before := bytes()
	must[string](t)(lab.Perftest(ctx, a, b, "ib_write_bw", "-s", "65536", "-n", "40"))
	eventually(ctx, t, "the counter grows", func() bool { return bytes() >= before+sent })
	eventually(ctx, t, "rdma statistic and hw_counters agree", func() bool {
		return strings.Contains(run(ctx, t, m, "rdma statistic show link "+d+"/1"), fmt.Sprintf(" tx_bytes %d ", bytes()))
	})

	watch := must[*qemu.Process](t)(m.StartShell(ctx, "exec stdbuf -oL ibv_asyncwatch -d "+d+" >/tmp/asyncwatch"))
	reported := func(event string) {
		t.Helper()
		eventually(ctx, t, "ibv_asyncwatch reports  "+event, func() bool {
			return strings.Contains(run(ctx, t, m, "cat /tmp/asyncwatch"), event)
		})
	}
	reported(d)
	run(ctx, t, m, "ip address add 10.99.0.1/24 dev eth0")
	reported("IBV_EVENT_GID_CHANGE")
	run(ctx, t, m, "ip address del 10.99.0.1/24 dev eth0; ip link set eth0 down")
	reported("IBV_EVENT_PORT_ERR")
	run(ctx, t, m, "ip link set eth0 up")
	reported("IBV_EVENT_PORT_ACTIVE")
	check(t, watch.Signal(ctx, "TERM"))
	_, err := watch.Wait(ctx)
	check(t, err)
	check(t, lab.WaitRDMA(ctx, m, d))
}

// rdmaTool returns what rdma(8) lists.
func rdmaTool[T any](ctx context.Context, t *testing.T, m *qemu.Machine, question string) (list []T) {
	t.Helper()
	check(t, json.Unmarshal([]byte(run(ctx, t, m, "rdma -j "+question)), &list))
	return list
}

// queuePairCounters: queue pairs count apart, by rule and by hand, and each byte is counted once (rdma-statistic(8)).
func queuePairCounters(ctx context.Context, t *testing.T, a, b lab.End) {
	m, link := a.VM, "link "+a.Device+"/1"
	type apart struct {
		ID      int   `json:"cntn"`
		TxBytes int   `json:"tx_bytes"`
		QPs     []int `json:"lqpn"`
	}
	show := func() []apart {
		return rdmaTool[apart](ctx, t, m, "statistic qp show "+link)
	}
	pingpong := func() (stop func()) {
		line := fmt.Sprintf("ibv_rc_pingpong -n 100000000 -g %d -d ", a.GID)
		server := must[*qemu.Process](t)(lab.Listen(ctx, m, line+a.Device, 18515))
		client := must[*qemu.Process](t)(b.VM.StartShell(ctx, "exec "+line+b.Device+" "+a.Addr))
		return func() {
			for _, p := range []*qemu.Process{client, server} {
				_ = p.Signal(ctx, "TERM") // the server may have ended when its peer had gone
				_, err := p.Wait(ctx)
				check(t, err)
			}
		}
	}
	counts := func(what string) (x apart) {
		t.Helper()
		eventually(ctx, t, what+" counts", func() bool {
			before := x.TxBytes
			if now := show(); len(now) == 1 && len(now[0].QPs) == 1 {
				x = now[0]
			}
			return before > 0 && x.TxBytes > before
		})
		return x
	}
	none := func(when string) {
		t.Helper()
		if x := show(); len(x) > 0 {
			t.Errorf("%s there are counters: %+v", when, x)
		}
	}

	none("at first")
	run(ctx, t, m, "rdma statistic qp set "+link+" auto type on")
	stop := pingpong()
	counts("a queue pair of type RC")
	stop()
	none("when the program has ended")
	const size, n = 65536, 40
	before := counter(ctx, t, a, "tx_bytes")
	must[string](t)(lab.Perftest(ctx, a, b, "ib_write_bw", "-s", strconv.Itoa(size), "-n", strconv.Itoa(n)))
	if sent := counter(ctx, t, a, "tx_bytes") - before; sent < n*size || sent >= 2*n*size {
		t.Errorf("%d bytes are counted of at least %d that a queue pair sent apart", sent, n*size)
	}
	run(ctx, t, m, "rdma statistic qp set "+link+" auto off")

	stop = pingpong()
	bound := 0
	for _, q := range rdmaTool[struct {
		LQPN int
		Type string
	}](ctx, t, m, "resource show qp "+link) {
		if q.Type == "RC" {
			bound = q.LQPN
		}
	}
	run(ctx, t, m, fmt.Sprintf("rdma statistic qp bind %s lqpn %d", link, bound))
	x := counts("a queue pair that is bound by hand")
	if x.QPs[0] != bound {
		t.Errorf("queue pair %d counts, %d is bound", x.QPs[0], bound)
	}
	run(ctx, t, m, fmt.Sprintf("rdma statistic qp unbind %s cntn %d lqpn %d", link, x.ID, bound))
	none("when the queue pair is not bound any more")
	before = counter(ctx, t, a, "tx_bytes")
	eventually(ctx, t, "the port counts instead", func() bool { return counter(ctx, t, a, "tx_bytes") > before })
	stop()
}

// eachGID: every kind of GID of an interface, RoCE v1 and v2, IPv4 and IPv6, connects RC and UD queue pairs.
func eachGID(ctx context.Context, t *testing.T, a, b lab.End) {
	kinds := func(e lab.End) map[string]int {
		family, found := map[string]string{}, map[string]int{} // by index; the index by family and type
		out := run(ctx, t, e.VM, "cd /sys/class/infiniband/"+e.Device+
			"/ports/1 && grep -s . gids/* gid_attrs/types/* | grep -v :0000:0000$")
		for line := range strings.Lines(out) {
			file, value, _ := strings.Cut(strings.TrimSpace(line), ":")
			switch index := path.Base(file); {
			case strings.HasPrefix(file, "gids/"):
				family[index] = map[string]string{"0000": "IPv4", "fe80": "IPv6"}[value[:4]]
			case family[index] != "":
				n, err := strconv.Atoi(index)
				check(t, err)
				found[family[index]+" "+value] = n
			}
		}
		return found
	}
	// After its interface comes up an IPv6 address appears within a second, and for up to two more it is checked for a
	// duplicate (RFC 4862 5.4): no neighbour is told its MAC. The kernel asks for one second when a queue pair connects.
	for _, e := range []lab.End{a, b} {
		eventually(ctx, t, "VM "+e.VM.Name()+" answers for its link-local address", func() bool {
			return run(ctx, t, e.VM, "ip -6 address show scope link -tentative") != ""
		})
	}
	near, far := kinds(a), kinds(b)
	for _, kind := range []string{"IPv4 IB/RoCE v1", "IPv6 IB/RoCE v1", "IPv4 RoCE v2", "IPv6 RoCE v2"} {
		t.Run(kind, func(t *testing.T) {
			x, y := a, b
			var ok, too bool
			x.GID, ok = near[kind]
			y.GID, too = far[kind]
			if !ok || !too {
				t.Fatalf("no such GID: %v, %v", near, far)
			}
			must[string](t)(lab.Pingpong(ctx, x, y, "ibv_rc_pingpong", "-c", "-n", "100"))
			must[string](t)(lab.Pingpong(ctx, x, y, "ibv_ud_pingpong", "-c", "-s", "1024", "-n", "100"))
		})
	}
}
