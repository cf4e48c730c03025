package daemon

import (
	"errors"
	"fmt"
	"reflect"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/device/ethernet/wireguard"
)

// protect makes the WireGuard interface that the VTEP uses, if configured (TR-4).
func (d *Daemon) protect() (err error) {
	u, v := d.cfg.Underlay, d.cfg.VTEP
	if u == nil {
		if err := wireguard.Sweep(d.cfg.RunDir); err != nil {
			d.log.Warn("a rule for WireGuard may keep this host from its peers", "error", err)
		}
		return nil
	}
	d.guard, err = wireguard.Open(wireguard.Config{Interface: u.Interface, ListenPort: u.Port, Local: v.Local,
		Port: v.Port, Owner: d.cfg.RunDir, Settings: u.Settings(), Log: d.log.Named("wireguard")})
	if err != nil {
		advice := ""
		if errors.Is(err, unix.EPERM) {
			advice = hint(err)
		}
		return fmt.Errorf("%v: underlay: %w%s", u.At, err, advice)
	}
	d.onClose(d.guard.Close)
	return nil
}

// planUnderlay compares keys and peers of WireGuard. The first steps are to be done before other changes, the last ones
// after them, so that each network's peers are protected at all times. ok is false if something else differs.
func (d *Daemon) planUnderlay(next *config.Config) (first, last []step, ok bool) {
	was, is := d.cfg.Underlay, next.Underlay
	if was == nil || is == nil {
		return nil, nil, was == is
	}
	if was.Interface != is.Interface || was.Port != is.Port {
		return nil, nil, false
	}
	if reflect.DeepEqual(was.Settings(), is.Settings()) {
		return nil, nil, true
	}
	// All that is new, and those of the old peers that no new one replaces.
	both := *is
	both.Peers = slices.Clone(is.Peers)
	for _, p := range was.Peers {
		if !slices.ContainsFunc(is.Peers, func(x config.UnderlayPeer) bool {
			return x.Addr == p.Addr || x.PublicKey == p.PublicKey || x.Endpoint == p.Endpoint
		}) {
			both.Peers = append(both.Peers, p)
		}
	}
	first = []step{{"WireGuard keys and peers", func() error { return d.setUnderlay(&both) }}}
	if n := len(both.Peers) - len(is.Peers); n > 0 {
		last = []step{{fmt.Sprintf("WireGuard peers removed: %d", n), func() error { return d.setUnderlay(is) }}}
	}
	return first, last, true
}

// setUnderlay replaces keys and peers of WireGuard.
func (d *Daemon) setUnderlay(u *config.Underlay) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.changeLocked(func(next *config.Config) { next.Underlay = u },
		func() error { return d.guard.Set(u.Settings()) })
}
