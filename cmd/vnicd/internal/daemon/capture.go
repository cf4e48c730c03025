package daemon

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/vnicd/vnicd/device/ethernet/capture"
	"github.com/vnicd/vnicd/device/ethernet/vswitch"
)

// maxCaptures bounds concurrent captures: each has buffers.
const maxCaptures = 8

// stall is how long a capture's reader may read nothing before the capture ends.
const stall = 10 * time.Second

// Trailers of a capture's answer.
const (
	trailerTaken   = "Capture-Packets"
	trailerDropped = "Capture-Dropped"
	headerID       = "Capture-Id"
)

// captures are the running captures. Daemon.capMu guards them; it is a leaf in the lock order.
type captures struct {
	serial int
	stop   map[int]context.CancelFunc
}

// capture serves GET /v1/capture?port=NAME[&network=NAME][&count=N][&snaplen=N]. The answer is a pcapng stream that
// lasts until count packets were sent, the client disconnects, or DELETE /v1/capture/ID (ID is in the Capture-Id
// header) ends it cleanly. Port "vtep" is the outer side of the tunnels.
func (d *Daemon) capture(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	var count, snap uint64
	for _, x := range []struct {
		key string
		max uint64
		v   *uint64
	}{{"count", 1 << 40, &count}, {"snaplen", capture.DefaultSnapLen, &snap}} {
		var err error
		if s := q.Get(x.key); s != "" {
			if *x.v, err = strconv.ParseUint(s, 10, 64); err != nil || *x.v < 1 || *x.v > x.max {
				d.refuse(w, r, badRequest{fmt.Errorf("%s must be 1 to %d, found %q", x.key, x.max, s)})
				return
			}
		}
	}
	name := q.Get("port")
	k := capture.New(capture.Config{Name: name, Link: capture.LinkEthernet, SnapLen: int(snap), Count: count,
		Program: "vnicd " + d.version}, d.loops)
	var remove func()
	var err error
	if name == "vtep" {
		k, remove, err = d.captureVTEP(int(snap), count)
	} else {
		remove, err = d.capturePort(q.Get("network"), name, k)
	}
	if err != nil {
		d.refuse(w, r, err)
		return
	}
	defer remove()
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	id, err := d.enlist(cancel)
	if err != nil {
		d.refuse(w, r, err)
		return
	}
	defer d.dismiss(id)

	ctl := http.NewResponseController(w)
	h := w.Header()
	h.Set("Content-Type", "application/x-pcapng")
	h.Set("Trailer", trailerTaken+", "+trailerDropped)
	h.Set(headerID, strconv.Itoa(id))
	w.WriteHeader(http.StatusOK)
	_ = ctl.Flush() // send the header: the client sees that the capture runs
	d.log.Info("capture begins", "port", name, "id", id)
	err = k.Run(ctx, deadlineWriter{w, ctl}, func() { _ = ctl.Flush() })
	h.Set(trailerTaken, strconv.FormatUint(k.Taken(), 10))
	h.Set(trailerDropped, strconv.FormatUint(k.Dropped(), 10))
	d.log.Info("capture ends", "port", name, "id", id, "packets", k.Taken(), "dropped", k.Dropped(), "error", err)
}

// deadlineWriter gives each write its own deadline.
type deadlineWriter struct {
	w   io.Writer
	ctl *http.ResponseController
}

func (w deadlineWriter) Write(p []byte) (int, error) {
	if err := w.ctl.SetWriteDeadline(time.Now().Add(stall)); err != nil {
		return 0, err
	}
	return w.w.Write(p)
}

func (d *Daemon) captureVTEP(snap int, count uint64) (*capture.Capture, func(), error) {
	if d.vtep == nil {
		return nil, nil, fmt.Errorf("%w: this host has no vtep", errNotFound)
	}
	k := capture.New(capture.Config{Name: "vtep", Link: capture.LinkRaw, SnapLen: snap, Count: count, Program: "vnicd " +
		d.version}, d.loops)
	if err := d.vtep.SetMonitor(k); err != nil {
		return nil, nil, err
	}
	return k, d.vtep.RemoveMonitor, nil
}

func (d *Daemon) capturePort(network, name string, k *capture.Capture) (remove func(), err error) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	var found []*vswitch.Attachment
	var where, have []string
	for _, c := range d.cfg.Networks {
		if network != "" && c.Name != network {
			continue
		}
		for _, p := range d.nets[c.Name].sw.Ports() {
			have = append(have, p.Name)
		}
		if a := d.nets[c.Name].sw.Port(name); a != nil {
			found, where = append(found, a), append(where, c.Name)
		}
	}
	switch {
	case len(found) == 0:
		return nil, fmt.Errorf("%w: no port %q; there are: vtep, %s", errNotFound, name, list(have))
	case len(found) > 1:
		return nil, fmt.Errorf("%w: networks %s each have a port %q; name the network", errConflict,
			strings.Join(where, ", "), name)
	}
	if err := found[0].SetMonitor(k); err != nil {
		return nil, err
	}
	return found[0].RemoveMonitor, nil
}

func (d *Daemon) enlist(cancel context.CancelFunc) (id int, err error) {
	d.capMu.Lock()
	defer d.capMu.Unlock()
	if d.caps.stop == nil {
		d.caps.stop = map[int]context.CancelFunc{}
	}
	if len(d.caps.stop) >= maxCaptures {
		return 0, fmt.Errorf("%w: %d captures run already", errConflict, maxCaptures)
	}
	d.caps.serial++
	d.caps.stop[d.caps.serial] = cancel
	return d.caps.serial, nil
}

func (d *Daemon) dismiss(id int) {
	d.capMu.Lock()
	defer d.capMu.Unlock()
	delete(d.caps.stop, id)
}

// endCapture ends a capture cleanly; id 0: all.
func (d *Daemon) endCapture(id int) error {
	d.capMu.Lock()
	defer d.capMu.Unlock()
	for n, cancel := range d.caps.stop {
		if id == 0 || n == id {
			cancel()
		}
	}
	if id != 0 && d.caps.stop[id] == nil {
		return fmt.Errorf("%w: no capture %d", errNotFound, id)
	}
	return nil
}

// CaptureOptions select what to capture. Zero values: no limit, or the default.
type CaptureOptions struct {
	Port, Network  string
	Count, SnapLen uint64
}

// Capture copies a capture's stream to w until the capture ends or ctx does. It returns the numbers of packets captured
// and of packets lost in the daemon. It calls began when the capture runs.
func (c *Client) Capture(ctx context.Context, o CaptureOptions, w io.Writer, began func()) (taken, dropped uint64,
	err error) {
	q := url.Values{"port": {o.Port}}
	if o.Network != "" {
		q.Set("network", o.Network)
	}
	if o.Count > 0 {
		q.Set("count", strconv.FormatUint(o.Count, 10))
	}
	if o.SnapLen > 0 {
		q.Set("snaplen", strconv.FormatUint(o.SnapLen, 10))
	}
	resp, err := c.send(context.Background(), http.MethodGet, "/v1/capture?"+q.Encode(), nil)
	if err != nil {
		return 0, 0, err
	}
	defer resp.Body.Close()
	began()
	end := context.AfterFunc(ctx, func() {
		late, cancel := context.WithTimeout(context.Background(), stall)
		defer cancel()
		if c.Do(late, http.MethodDelete, "/v1/capture/"+resp.Header.Get(headerID), nil, nil) != nil {
			_ = resp.Body.Close() // not a clean end
		}
	})
	defer end()
	if _, err := io.Copy(w, resp.Body); err != nil {
		return 0, 0, fmt.Errorf("capture: %w", err)
	}
	taken, _ = strconv.ParseUint(resp.Trailer.Get(trailerTaken), 10, 64)
	dropped, _ = strconv.ParseUint(resp.Trailer.Get(trailerDropped), 10, 64)
	return taken, dropped, nil
}
