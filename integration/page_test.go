package integration

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/testutil/ways"
	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/integration/rig"
	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

var screenshots = flag.String("screenshots", "", "`directory` to which TestPage writes screenshots")

// player is a VM's driver on the host. It has a region that loses pages now and then, and a connection to another
// player.
type player struct {
	dev *guestdrv.Device
	gid guestdrv.GID
	pd  *guestdrv.PD
	cq  *guestdrv.CQ
	mr  *guestdrv.OnDemandMR
}

const playVA, playSize = 1 << 40, 48 << 20

func newPlayer(t *testing.T, h *lab.Host, name string, n int) *player {
	t.Helper()
	p := &player{gid: guestdrv.IPGID(netip.AddrFrom4([4]byte{10, 0, 0, byte(n)}))}
	p.dev = must[*guestdrv.Device](t)(guestdrv.Open(context.Background(), filepath.Join(h.Dir, name+".hca"),
		guestdrv.Config{Memory: 64 << 20}))
	check(t, p.dev.SetGID(context.Background(), 0, p.gid, guestdrv.GIDOptions{}))
	p.pd = must[*guestdrv.PD](t)(p.dev.AllocPD(context.Background()))
	p.cq = must[*guestdrv.CQ](t)(p.dev.CreateCQ(context.Background(), 64, guestdrv.CQOptions{}))
	buf := must[*guestdrv.Buffer](t)(p.dev.Alloc(playSize))
	p.mr = must[*guestdrv.OnDemandMR](t)(p.pd.RegisterOnDemand(context.Background(), playVA, playSize,
		guestdrv.AccessLocalWrite|guestdrv.AccessRemoteWrite,
		guestdrv.PagerFunc(func(_ context.Context, f guestdrv.PageFault, pas []uint64) error {
			for i := range pas {
				pas[i] = buf.PA() + f.VA - playVA + uint64(i)<<12
			}
			return nil
		})))
	return p
}

func (p *player) qp(t *testing.T) *guestdrv.QP {
	t.Helper()
	return must[*guestdrv.QP](t)(p.pd.CreateQP(context.Background(),
		guestdrv.QPConfig{Type: guestdrv.QPTypeRC, MaxSendWR: 8, MaxRecvWR: 8, MaxSendSGE: 1, MaxRecvSGE: 1, SendCQ: p.cq,
			RecvCQ: p.cq}))
}

// play connects two players and writes small messages from one to the other until stop is closed.
func play(t *testing.T, stop <-chan struct{}, a, b *player) (done <-chan error) {
	t.Helper()
	x, y := a.qp(t), b.qp(t)
	o := guestdrv.ConnectOptions{Access: guestdrv.AccessRemoteWrite, MinRNRTimer: 5, Timeout: 18}
	check(t, x.Connect(context.Background(), guestdrv.Peer{QPN: y.Number(),
		Path: guestdrv.Path{GID: b.gid, MAC: b.dev.MAC()}}, o))
	check(t, y.Connect(context.Background(), guestdrv.Peer{QPN: x.Number(),
		Path: guestdrv.Path{GID: a.gid, MAC: a.dev.MAC()}}, o))
	out := make(chan error, 1)
	go func() {
		defer close(out)
		ctx, cancel := context.WithTimeout(context.Background(), testTimeout())
		defer cancel()
		wcs := make([]guestdrv.Completion, 1)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			case <-time.After(5 * time.Millisecond):
			}
			// Mostly near the beginning, so that the heat map has several colours.
			at := uint64(rand.ExpFloat64()*playSize/8) % (playSize - 32<<10) &^ 4095
			if i%4 == 0 {
				if err := a.mr.Invalidate(context.Background(), playVA+at, 32<<10); err != nil {
					out <- err
					return
				}
			}
			err := x.PostSend(guestdrv.NewWrite(uint64(i), guestdrv.Remote{Addr: playVA + at, RKey: b.mr.RKey()},
				a.mr.SGEAt(playVA+at, 32<<10)).With(guestdrv.SendSignaled))
			if n, perr := a.cq.PollWait(ctx, wcs); err != nil || perr != nil || n != 1 || wcs[0].Status != guestdrv.WCSuccess {
				out <- fmt.Errorf("write %d: %w, %+v", i, errors.Join(err, perr), wcs[0])
				return
			}
		}
	}()
	return out
}

// pageTime bounds the test.
const pageTime = 5 * time.Minute

// TestPage checks the web page in a browser while VMs transfer data: all elements are present, their figures change,
// the page reports no error and requests nothing from other origins.
func TestPage(t *testing.T) {
	vnicd, err := filepath.Abs("../build/vnicd")
	check(t, err)
	if _, err := os.Stat(vnicd); err != nil {
		t.Fatalf("no daemon; run `make build` first: %v", err)
	}
	l := &lab.Lab{Env: &harness.Env{Dir: t.TempDir()}, VNICD: vnicd}
	t.Cleanup(l.Run)
	ctx, cancel := context.WithTimeout(context.Background(), pageTime)
	defer cancel()

	h1, h2 := must[*lab.Host](t)(l.Host("p1")), must[*lab.Host](t)(l.Host("p2"))
	check(t, l.Underlay(h1, netip.MustParsePrefix("192.0.2.1/24"), h2, netip.MustParsePrefix("192.0.2.2/24"), 1500))
	more := ""
	for i := range 17 {
		more += fmt.Sprintf("  - {name: idle%02d, network: %s, mac: \"02:00:00:00:01:%02x\"}\n", i,
			[]string{"blue", "green"}[i%2], i)
	}
	check(t, h1.Run(ctx, `
vtep: {local: 192.0.2.1}
monitoring: {page: true}
networks:
  - {name: blue, vni: 100, peers: [192.0.2.2], tap: {name: blue0, addresses: [10.0.0.254/24]}}
  - {name: green, vni: 200, peers: [192.0.2.2, 192.0.2.77]}
vms:
  - {name: one, network: blue, mac: "02:00:00:00:00:01", memory-budget: 24MiB}
  - {name: two, network: blue, mac: "02:00:00:00:00:02"}
  - {name: three, network: green, mac: "02:00:00:00:00:03"}
`+more))
	check(t, h2.Run(ctx, `
vtep: {local: 192.0.2.2}
networks: [{name: blue, vni: 100, peers: [192.0.2.1]}]
vms: [{name: far, network: blue, mac: "02:00:00:00:00:04"}]
`))
	one, two, far := newPlayer(t, h1, "one", 1), newPlayer(t, h1, "two", 2), newPlayer(t, h2, "far", 4)
	stop := make(chan struct{})
	near, away := play(t, stop, one, two), play(t, stop, two, far)
	end := sync.OnceFunc(func() {
		close(stop)
		for _, c := range []<-chan error{near, away} {
			if err := <-c; err != nil {
				t.Error(err)
			}
		}
		for _, p := range []*player{one, two, far} {
			_ = p.dev.Close()
		}
	})
	defer end()

	b := must[*rig.Browser](t)(rig.NewBrowser(ctx, h1.NS))
	defer b.Close()
	const where = "http://127.0.0.1:9469/"
	check(t, b.Window(ctx, 1280, 900, false))
	check(t, b.Open(ctx, where))
	wait := func(expression string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		if err := b.Wait(ctx, expression); err != nil {
			var text string
			late, cancel := context.WithTimeout(context.Background(), 20*time.Second)
			defer cancel()
			_ = b.Eval(late, "document.body.innerText", &text)
			t.Fatalf("%v\nerrors: %q\npage:\n%s\ndaemon:\n%s", err, b.Complaints(), text, tail(h1.Log(), 2000))
		}
	}
	// text returns an element's text; rate returns its first number that is not 0.
	const helpers = `
		window.text = (q) => document.querySelector(q)?.textContent ?? "";
		window.rate = (vm, label) => parseFloat(text('#vms tr[data-vm="' + vm + '"] td[data-label="' + label + '"]'));
		true`
	eventually(ctx, t, "the page's script", func() bool { return b.Eval(ctx, helpers, nil) == nil })
	wait(`text("#live") === "live"`)
	wait(`text("#host") === "p1" && text("#about").includes("up ")`)
	// The picture and the table show every VM.
	for _, name := range []string{"one", "two", "three", "idle00", "idle16"} {
		wait(fmt.Sprintf(`document.querySelector('#topology [data-vm="%[1]s"]') && document.querySelector('#vms tr[data-vm="%[1]s"]')`, name))
	}
	for _, words := range []string{"blue", "green", "VNI 100", "VNI 200", "blue0", "192.0.2.2", "192.0.2.77",
		"tunnels from 192.0.2.1"} {
		wait(fmt.Sprintf(`text("#topology").includes(%q)`, words))
	}
	wait(`document.querySelectorAll("#topology .conn.busy").length === 2 && document.querySelectorAll("#topology .tunnel").length === 3`)
	// Rates are shown, and change.
	rates := [][2]string{{"one", "RDMA in, out"}, {"two", "RDMA in, out"}, {"one", "Packets/s in, out"},
		{"one", "Faults/s guest, host"}}
	if ways.LocalCopy() {
		rates = append(rates, [2]string{"one", "Messages/s copied"})
	}
	for _, x := range rates {
		wait(fmt.Sprintf(`document.querySelector('#vms tr[data-vm="%s"] td[data-label="%s"]').textContent.match(/[1-9]/)`,
			x[0], x[1]))
	}
	check(t, b.Eval(ctx, `window.was = text("#tile-rdma") + text("#tile-faults"), true`, nil))
	wait(`text("#tile-rdma") + text("#tile-faults") !== was`)
	// The heat map and the histogram of the selected VM, at both stages.
	wait(`(document.querySelector('#vms tr[data-vm="one"]').click(), text("#t-detail") === "one")`)
	for _, level := range []string{"guest", "host"} {
		wait(fmt.Sprintf(`document.querySelectorAll("svg.%[1]s .h0, svg.%[1]s .h1, svg.%[1]s .h2, svg.%[1]s .h3").length > 3`,
			level))
		wait(fmt.Sprintf(`[...document.querySelectorAll("#memory svg.%s rect")].some((r) => /h[1-5]/.test(r.getAttribute("class")))`, level))
		wait(fmt.Sprintf(`[...document.querySelectorAll("#memory rect.f-%s")].some((r) => r.getAttribute("height") > 0)`,
			level))
	}
	wait(`document.querySelectorAll("#charts path.line[d^=M]").length === 8`)

	for _, view := range []struct {
		name          string
		width, height int
		dark          bool
	}{{"light", 1280, 900, false}, {"dark", 1280, 900, true}, {"narrow", 390, 844, false}} {
		check(t, b.Window(ctx, view.width, view.height, view.dark))
		wait(fmt.Sprintf(`innerWidth === %d && document.querySelector("#topology svg").viewBox.baseVal.width <= %d`,
			view.width, view.width))
		// Nothing is wider than the window.
		var over int
		check(t, b.Eval(ctx, `document.documentElement.scrollWidth - innerWidth`, &over))
		if over > 0 {
			t.Errorf("%s: %d pixels wider than the window", view.name, over)
		}
		if *screenshots != "" {
			check(t, b.Screenshot(ctx, filepath.Join(*screenshots, "page-"+view.name+".png")))
		}
	}
	check(t, b.Window(ctx, 1280, 900, false))

	// Failures are shown with the VM and the time.
	end()
	wait(`[...document.querySelectorAll('#vms tr[data-vm="one"] .c-down')].length === 2`)
	if bad := b.Complaints(); len(bad) > 0 {
		t.Errorf("the page reports errors: %q", bad)
	}
	for _, r := range b.Requests() {
		if !strings.HasPrefix(r, where) {
			t.Errorf("the page requests %s", r)
		}
	}
	if len(b.Requests()) < 8 {
		t.Errorf("requests: %q", b.Requests())
	}

	// A stopped daemon is reported, and shown again once it is back.
	check(t, h1.Stop(ctx))
	wait(`text("#live").startsWith("no answer since")`)
	check(t, h1.Start(ctx))
	wait(`text("#live") === "live" && rate("one", "RDMA in, out") === 0`)
	for _, bad := range b.Complaints() {
		if !strings.Contains(bad, "ERR_CONNECTION_REFUSED") && !strings.Contains(bad, "503") {
			t.Errorf("the page reports errors: %s", bad)
		}
	}
}
