package daemon

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"strconv"
	"time"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/device/ethernet/overlay"
	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/ethernet/vxlan"
	"github.com/vnicd/vnicd/translate"
)

// The control API: HTTP with JSON on the control socket. Bodies of networks, TAPs and VMs have the keys of the
// configuration file. Errors are {"error": "..."} with status 400 (bad request), 403 (the socket does not give the
// right), 404 (not found), 409 (conflict with the present state) or 500.
//
// The status socket answers the requests marked with *, the control socket all.
//
//	* GET    /v1/status
//	  POST   /v1/reload                                read the configuration file again: ["what changed", ...]
//	  POST   /v1/networks?file=                        a network; file: the fragment that has it, too
//	  DELETE /v1/networks/{network}
//	  PUT    /v1/networks/{network}/tap                a TAP
//	  DELETE /v1/networks/{network}/tap
//	  PUT    /v1/networks/{network}/peers/{address}
//	  DELETE /v1/networks/{network}/peers/{address}
//	  PUT    /v1/networks/{network}/fdb/{mac}?vlan=    {"vtep": address} or {"port": name}
//	  DELETE /v1/networks/{network}/fdb/{mac}?vlan=
//	  PUT    /v1/networks/{network}/neighbours/{address}?vlan=   {"mac": mac}
//	  DELETE /v1/networks/{network}/neighbours/{address}?vlan=
//	  POST   /v1/vms?file=                             a VM; likewise
//	  DELETE /v1/vms/{vm}
//	* GET    /v1/vms/{vm}/capabilities                 what this host has for the VM: Capabilities
//	  PUT    /v1/vms/{vm}/network                      {"network": name}
//	  PUT    /v1/vms/{vm}/dma                          {"dma": "rw", "ro" or "blocked"}: answered when accesses under the
//	                                                   previous attribute have ended, with a DMAChange
//	  GET    /v1/capture?port=[&network=][&count=][&snaplen=]    a pcapng stream; see capture
//	  DELETE /v1/capture/{id}
//	* GET    /v1/connections                           ?vm= for one
//	* GET    /v1/evpn                                  sessions and networks
//	* GET    /v1/evpn/routes                           ?network= for one
//	  DELETE /v1/networks/{network}/duplicates/{mac}   the duplicate is gone: EVPN uses the MAC again
//	* GET    /v1/ports, /v1/fdb, /v1/neighbours, /v1/routes     ?network= for one

const maxBody = 1 << 20

// answerTime bounds a client's time to read an answer.
const answerTime = 30 * time.Second

// badRequest marks mistakes of the client.
type badRequest struct{ error }

func (e badRequest) Unwrap() error { return e.error }

// errNoRight is the refusal of a request to which the socket gives no right.
var errNoRight = errors.New("no right")

// api serves the requests that a right includes: with mayRead, those that are registered by ask. control is the socket
// that gives every right.
func (d *Daemon) api(has right, control string) http.Handler {
	mux := http.NewServeMux()
	need := func(needs right, pattern string, f http.HandlerFunc) {
		if needs > has {
			f = func(w http.ResponseWriter, r *http.Request) {
				d.refuse(w, r, fmt.Errorf("%w for %s %s on this socket, which only answers questions: full control is needed. Use %s, %s",
					errNoRight, r.Method, r.URL.Path, control, asWhom(control)))
			}
		}
		mux.HandleFunc(pattern, f)
	}
	serve := func(needs right, pattern string, f func(r *http.Request) (any, error)) {
		need(needs, pattern, func(w http.ResponseWriter, r *http.Request) {
			r.Body = http.MaxBytesReader(w, r.Body, maxBody)
			_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(answerTime)) // unix sockets support deadlines
			v, err := f(r)
			if err != nil {
				d.refuse(w, r, err)
				return
			}
			d.answer(w, http.StatusOK, v)
		})
	}
	ask := func(pattern string, f func(r *http.Request) (any, error)) { serve(mayRead, pattern, f) }
	handle := func(pattern string, f func(r *http.Request) (any, error)) { serve(mayChange, pattern, f) }
	ask("GET /v1/status", func(*http.Request) (any, error) { return d.Status(), nil })
	ask("GET /v1/ports", func(r *http.Request) (any, error) { return d.Ports(r.URL.Query().Get("network")) })
	ask("GET /v1/fdb", func(r *http.Request) (any, error) { return d.FDB(r.URL.Query().Get("network")) })
	ask("GET /v1/neighbours", func(r *http.Request) (any, error) { return d.Neighbours(r.URL.Query().Get("network")) })
	ask("GET /v1/routes", func(r *http.Request) (any, error) { return d.Routes(r.URL.Query().Get("network")) })

	ask("GET /v1/evpn", func(*http.Request) (any, error) { return d.EVPN() })
	ask("GET /v1/evpn/routes", func(r *http.Request) (any, error) { return d.EVPNRoutes(r.URL.Query().Get("network")) })
	handle("DELETE /v1/networks/{network}/duplicates/{mac}", func(r *http.Request) (any, error) {
		m, err := vswitch.ParseMAC(r.PathValue("mac"))
		if err != nil {
			return nil, badRequest{err}
		}
		return done(d.ClearDuplicate(r.PathValue("network"), m))
	})

	ask("GET /v1/connections", func(r *http.Request) (any, error) { return d.Connections(r.URL.Query().Get("vm")) })

	handle("POST /v1/reload", func(*http.Request) (any, error) { return d.Reload() })
	handle("POST /v1/networks", func(r *http.Request) (any, error) {
		return done(with(r, config.ParseNetwork, func(c *config.Network) error { return d.addNetwork(c, requested(r)) }))
	})
	handle("DELETE /v1/networks/{network}", func(r *http.Request) (any, error) {
		return done(d.RemoveNetwork(r.PathValue("network")))
	})
	handle("PUT /v1/networks/{network}/tap", func(r *http.Request) (any, error) {
		return done(with(r, config.ParseTAP, func(c *config.TAP) error { return d.AddTAP(r.PathValue("network"), c) }))
	})
	handle("DELETE /v1/networks/{network}/tap", func(r *http.Request) (any, error) {
		return done(d.RemoveTAP(r.PathValue("network")))
	})
	handle("POST /v1/vms", func(r *http.Request) (any, error) {
		return done(with(r, config.ParseVM, func(c *config.VM) error { return d.addVM(c, requested(r)) }))
	})
	handle("DELETE /v1/vms/{vm}", func(r *http.Request) (any, error) { return done(d.RemoveVM(r.PathValue("vm"))) })
	ask("GET /v1/vms/{vm}/capabilities", func(r *http.Request) (any, error) { return d.Capabilities(r.PathValue("vm")) })
	handle("PUT /v1/vms/{vm}/network", func(r *http.Request) (any, error) {
		var to struct{ Network string }
		if err := decode(r, &to); err != nil {
			return nil, err
		}
		return done(d.MoveVM(r.PathValue("vm"), to.Network))
	})

	handle("PUT /v1/vms/{vm}/dma", func(r *http.Request) (any, error) {
		var to struct{ DMA *translate.Uplink }
		if err := decode(r, &to); err != nil {
			return nil, err
		}
		if to.DMA == nil {
			return nil, badRequest{errors.New("`dma` is missing")}
		}
		return d.SetDMA(r.PathValue("vm"), *to.DMA)
	})

	for kind, pattern := range map[overlay.Kind]string{
		overlay.Peer: "peers/{key}", overlay.MAC: "fdb/{key}", overlay.IP: "neighbours/{key}",
	} {
		handle("PUT /v1/networks/{network}/"+pattern, func(r *http.Request) (any, error) {
			route, err := readRoute(r, kind)
			if err != nil {
				return nil, err
			}
			return done(d.SetRoute(r.PathValue("network"), route))
		})
		handle("DELETE /v1/networks/{network}/"+pattern, func(r *http.Request) (any, error) {
			key, err := readKey(r, kind)
			if err != nil {
				return nil, err
			}
			return done(d.RemoveRoute(r.PathValue("network"), key))
		})
	}
	need(mayChange, "GET /v1/capture", d.capture)
	handle("DELETE /v1/capture/{id}", func(r *http.Request) (any, error) {
		id, err := strconv.Atoi(r.PathValue("id"))
		if err != nil || id < 1 {
			return nil, badRequest{fmt.Errorf("%q is not the number of a capture", r.PathValue("id"))}
		}
		return done(d.endCapture(id))
	})
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		d.refuse(w, r, fmt.Errorf("%w: no %s %s in this API", errNotFound, r.Method, r.URL.Path))
	})
	return mux
}

// done returns the answer to a change: an empty object.
func done(err error) (any, error) { return struct{}{}, err }

// requested returns the place of what a request adds: the file that has it, too, or none.
func requested(r *http.Request) config.Place {
	if file := r.URL.Query().Get("file"); file != "" {
		return config.Place{File: file}
	}
	return config.Runtime
}

// with parses a request's body and passes it to do.
func with[T any](r *http.Request, parse func([]byte) (*T, error), do func(*T) error) error {
	data, err := io.ReadAll(r.Body)
	if err != nil {
		return badRequest{err}
	}
	v, err := parse(data)
	if err != nil {
		return err
	}
	return do(v)
}

func decode(r *http.Request, v any) error {
	dec := json.NewDecoder(r.Body)
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil {
		return badRequest{fmt.Errorf("the body is wrong: %w", err)}
	}
	return nil
}

// readKey reads the entry that a request names in its path and query.
func readKey(r *http.Request, kind overlay.Kind) (k overlay.Key, err error) {
	k.Kind = kind
	text := r.PathValue("key")
	switch kind {
	case overlay.MAC:
		k.MAC, err = vswitch.ParseMAC(text)
	case overlay.Peer:
		k.VTEP, err = netip.ParseAddr(text)
	default:
		k.IP, err = netip.ParseAddr(text)
	}
	if v := r.URL.Query().Get("vlan"); err == nil && v != "" {
		n, nerr := strconv.ParseUint(v, 10, 16)
		if nerr != nil || n < 1 || n > 4094 {
			err = fmt.Errorf("vlan must be 1 to 4094, found %q", v)
		}
		k.VLAN = uint16(n)
	}
	if err != nil {
		err = badRequest{err}
	}
	return k, err
}

func readRoute(r *http.Request, kind overlay.Kind) (overlay.Route, error) {
	k, err := readKey(r, kind)
	if err != nil {
		return overlay.Route{}, err
	}
	var body struct {
		VTEP netip.Addr  `json:"vtep"`
		Port string      `json:"port"`
		MAC  vswitch.MAC `json:"mac"`
	}
	if kind != overlay.Peer {
		if err := decode(r, &body); err != nil {
			return overlay.Route{}, err
		}
	}
	return overlay.Route{Key: k, Behind: body.VTEP, Port: body.Port, At: body.MAC}, nil
}

func (d *Daemon) answer(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	if err := json.NewEncoder(w).Encode(v); err != nil {
		d.log.Debug("cannot write the response on the control socket", "error", err)
	}
}

// refuse answers with an error, and the status of its kind.
func (d *Daemon) refuse(w http.ResponseWriter, r *http.Request, err error) {
	status := http.StatusInternalServerError
	var bad badRequest
	var wrong *config.Errors
	switch {
	case errors.As(err, &bad), errors.As(err, &wrong), isAny(err, overlay.ErrInvalid, vxlan.ErrPeer, vxlan.ErrPeerFamily):
		status = http.StatusBadRequest
	case errors.Is(err, errNoRight):
		status = http.StatusForbidden
	case errors.Is(err, errNotFound), errors.Is(err, overlay.ErrNoPort):
		status = http.StatusNotFound
	case isAny(err, errConflict, vswitch.ErrMonitored, vswitch.ErrMACInUse, vswitch.ErrIPInUse, vswitch.ErrTooManyPorts,
		vxlan.ErrMTU, vxlan.ErrTooManyPeers, overlay.ErrNoPeer, overlay.ErrNoTunnel, overlay.ErrLimit):
		status = http.StatusConflict
	}
	d.log.Debug("request refused", "method", r.Method, "path", r.URL.Path, "status", status, "error", err)
	d.answer(w, status, errorBody{err.Error()})
}

type errorBody struct {
	Error string `json:"error"`
}

func isAny(err error, targets ...error) bool {
	for _, t := range targets {
		if errors.Is(err, t) {
			return true
		}
	}
	return false
}
