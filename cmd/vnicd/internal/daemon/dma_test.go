package daemon

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/translate"
)

// TestQuarantine: PUT /v1/vms/a/dma restricts a host application, which is attached, and releases it; the answer, the
// status, and what its peer sees (PF-3).
func TestQuarantine(t *testing.T) {
	d := applications(t)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	control := NewClient(d.cfg.Control)
	put := func(name, body string) (c DMAChange, err error) {
		return c, control.Do(ctx, http.MethodPut, "/v1/vms/"+name+"/dma", rawJSON(body), &c)
	}
	for body, want := range map[string]string{
		`{"dma": "none"}`: `want rw, ro or blocked, found "none"`,
		`{}`:              "`dma` is missing",
		`{"dmb": "ro"}`:   "unknown field",
	} {
		if _, err := put("a", body); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", body, err, want)
		}
	}
	if _, err := put("z", `{"dma": "ro"}`); err == nil || !strings.Contains(err.Error(), `no VM "z"; there are: a, b`) {
		t.Errorf("an unknown VM: %v", err)
	}
	// Not attached: the attribute applies from the beginning.
	if c, err := put("a", `{"dma": "ro"}`); err != nil || c.Attached || c.DMA != translate.UplinkReadOnly || c.VM != "a" {
		t.Errorf("%+v, %v", c, err)
	}
	a, b := open(t, d, "a", "10.0.0.10"), open(t, d, "b", "10.0.0.11")
	if err := errors.Join(a.to(ctx, b), b.to(ctx, a)); err != nil {
		t.Fatal(err)
	}
	write := func() guestdrv.WCStatus {
		t.Helper()
		copy(b.buf.Bytes(), "written")
		clear(a.buf.Bytes())
		wr := guestdrv.NewWrite(7, a.mr.Remote(0), b.mr.SGE(0, 7)).With(guestdrv.SendSignaled)
		if err := b.qp.PostSend(wr); err != nil {
			t.Fatal(err)
		}
		wcs := make([]guestdrv.Completion, 1)
		if n, err := b.cq.PollWait(ctx, wcs); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		if arrived := bytes.HasPrefix(a.buf.Bytes(), []byte("written")); arrived != (wcs[0].Status == guestdrv.WCSuccess) {
			t.Errorf("status %v, written: %v", wcs[0].Status, arrived)
		}
		return wcs[0].Status
	}
	if st := write(); st != guestdrv.WCRemAccessErr {
		t.Errorf("a WRITE to a read-only application: %v", st)
	}
	s := d.application(t, "a")
	if s.DMA.Attribute != translate.UplinkReadOnly || s.DMA.Refused.Writes == 0 || !s.HCA.Link {
		t.Errorf("status %+v, link %v", s.DMA, s.HCA.Link)
	}
	for range 2 { // the second time changes nothing
		if c, err := put("a", `{"dma": "blocked"}`); err != nil || !c.Attached || c.Took <= 0 {
			t.Fatalf("%+v, %v", c, err)
		}
	}
	if s := d.application(t, "a"); s.DMA.Attribute != translate.UplinkBlocked || s.HCA.Link {
		t.Errorf("status %+v, link %v", s.DMA, s.HCA.Link)
	}
	if s := d.application(t, "b"); s.DMA.Attribute != translate.UplinkReadWrite || !s.HCA.Link {
		t.Errorf("status of the other one: %+v, link %v", s.DMA, s.HCA.Link)
	}
	if c, err := put("a", `{"dma": "rw"}`); err != nil || c.Was != translate.UplinkBlocked {
		t.Fatalf("%+v, %v", c, err)
	}
	// New connections work.
	for _, x := range []*client{a, b} {
		if err := x.qp.Reset(ctx); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(a.to(ctx, b), b.to(ctx, a)); err != nil {
		t.Fatal(err)
	}
	if st := write(); st != guestdrv.WCSuccess {
		t.Errorf("after the release: %v", st)
	}
}

// rawJSON is a request's body as it stands.
type rawJSON string

func (r rawJSON) MarshalJSON() ([]byte, error) { return []byte(r), nil }

// TestQuarantineWaits: the command is answered when the last access that began before it has ended (EP-3), and not
// before. Status and changes of others do not wait for that.
func TestQuarantineWaits(t *testing.T) {
	d := applications(t)
	open(t, d, "a", "10.0.0.10")
	epochs := d.gvms.Spaces(0)[0].Epochs()
	token := epochs.Enter(translate.ByLoop(15))
	answered := make(chan *DMAChange, 1)
	go func() {
		c, err := d.SetDMA("a", translate.UplinkBlocked)
		if err != nil {
			t.Error(err)
		}
		answered <- c
	}()
	for d.application(t, "a").DMA.Attribute != translate.UplinkBlocked {
		time.Sleep(time.Millisecond)
	}
	if _, err := d.SetDMA("b", translate.UplinkReadOnly); err != nil {
		t.Error(err)
	}
	select {
	case c := <-answered:
		t.Errorf("answered while an access is in progress: %+v", c)
	case <-time.After(20 * time.Millisecond):
	}
	epochs.Leave(15, token)
	if c := <-answered; c == nil || c.Took < 20*time.Millisecond {
		t.Errorf("%+v", c)
	}
}

// TestReloadDMA: the file changes a VM's attribute while a program is attached. What an operator has set since stays
// as long as the file says the same as before; other changes of the file do not end a quarantine.
func TestReloadDMA(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "vnicd.yaml")
	load := func(level, dma, rate string) *config.Config {
		t.Helper()
		text := fmt.Sprintf(`
run-dir: %s
log-level: %s
networks: [{name: n, vni: 1, mtu: 1500}]
applications:
  - {name: a, network: n, mac: "02:00:00:00:00:0a"%s}
  - {name: b, network: n, mac: "02:00:00:00:00:0b"%s}
`, dir, level, dma, rate)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := config.Load(path)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	d, err := Start(load("info", ", dma: ro", ""), "v0.0.0", hclog.NewNullLogger())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	open(t, d, "a", "10.0.0.10")
	reload := func(want ...string) {
		t.Helper()
		got, err := d.Reload()
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%q, %v; want %q", got, err, want)
		}
	}
	is := func(name string, want translate.Uplink) {
		t.Helper()
		if s := d.application(t, name); s.DMA.Attribute != want || s.HCA.Link != (want != translate.UplinkBlocked) {
			t.Errorf("%s: %v, link %v; want %v", name, s.DMA.Attribute, s.HCA.Link, want)
		}
	}
	set := func(name string, u translate.Uplink) {
		t.Helper()
		if _, err := d.SetDMA(name, u); err != nil {
			t.Fatal(err)
		}
	}
	is("a", translate.UplinkReadOnly)
	load("info", ", dma: blocked", "")
	reload("VM a dma blocked")
	is("a", translate.UplinkBlocked)
	set("a", translate.UplinkReadOnly)
	load("warn", ", dma: blocked", "")
	reload("log level warn")
	is("a", translate.UplinkReadOnly)
	load("warn", "", "")
	reload("VM a dma rw")
	is("a", translate.UplinkReadWrite)
	set("b", translate.UplinkBlocked)
	load("warn", "", ", rate: 1G") // b is not attached: it is made anew
	reload("VM b removed to be changed", "VM b added as changed")
	is("b", translate.UplinkBlocked)
	load("warn", ", rate: 1G", ", rate: 1G")
	if _, err := d.Reload(); err == nil || !strings.Contains(err.Error(), "only its network, dma, memory-budget and memory-weight can") {
		t.Errorf("an attached VM's rate: %v", err)
	}
}
