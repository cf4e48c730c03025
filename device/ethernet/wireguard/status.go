package wireguard

import (
	"fmt"
	"net"
	"net/netip"
	"time"
)

// Status is a snapshot for `vnicd status`.
type Status struct {
	Interface  string `json:"interface"`
	PublicKey  string `json:"public_key"`
	ListenPort uint16 `json:"listen_port"`
	MTU        int    `json:"mtu"`
	// Problem is why nothing is sent or received; "": the interface is up.
	Problem string `json:"problem,omitempty"`
	// InErrors counts packets that the interface refused after decryption: malformed, or with a source that is not their
	// peer's. The kernel does not count packets that fail to decrypt.
	InErrors uint64 `json:"in_errors"`
	// OutErrors counts packets that were not sent: no peer has their destination, or the peer has not answered.
	OutErrors uint64       `json:"out_errors"`
	Peers     []PeerStatus `json:"peers"`
}

// PeerStatus is one peer.
type PeerStatus struct {
	VTEP      netip.Addr     `json:"vtep"`
	Endpoint  netip.AddrPort `json:"endpoint"` // from which it was last heard; the configured one before that
	PublicKey string         `json:"public_key"`
	// Handshake is when the latest session began; zero: there was none. Sessions are renewed every two minutes while there
	// is traffic.
	Handshake time.Time `json:"last_handshake,omitzero"`
	InBytes   uint64    `json:"in_bytes"` // of encrypted packets
	OutBytes  uint64    `json:"out_bytes"`
}

// SessionLife is how old a session gets; afterwards nothing is accepted from it (WireGuard's REJECT_AFTER_TIME).
const SessionLife = 3 * time.Minute

// Status returns a snapshot.
func (d *Device) Status() Status {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := Status{Interface: d.cfg.Interface, ListenPort: d.cfg.ListenPort, MTU: d.mtu, Peers: []PeerStatus{}}
	if d.set.PrivateKey != (Secret{}) {
		s.PublicKey = d.set.PrivateKey.Public().String()
	}
	at := map[PublicKey]int{}
	for i, p := range d.set.Peers {
		at[p.PublicKey] = i
		s.Peers = append(s.Peers, PeerStatus{VTEP: p.Addr, Endpoint: p.Endpoint, PublicKey: p.PublicKey.String()})
	}
	if err := d.read(&s, at); err != nil {
		s.Problem = err.Error()
	}
	return s
}

// read adds what the kernel knows.
func (d *Device) read(s *Status, at map[PublicKey]int) error {
	if d.closed {
		return fmt.Errorf("wireguard: interface %s: closed", d.cfg.Interface)
	}
	if err := d.own(); err != nil {
		return err
	}
	link, err := d.nl.LinkByIndex(d.index)
	if err != nil {
		return fmt.Errorf("wireguard: interface %s: %w", d.cfg.Interface, err)
	}
	if n := link.Attrs().Statistics; n != nil {
		s.InErrors, s.OutErrors = n.RxErrors, n.TxErrors
	}
	k, err := d.wg.Device(d.cfg.Interface)
	if err != nil {
		return fmt.Errorf("wireguard: interface %s: %w", d.cfg.Interface, err)
	}
	for _, p := range k.Peers {
		i, ok := at[p.PublicKey]
		if !ok {
			continue
		}
		x := &s.Peers[i]
		x.Handshake, x.InBytes, x.OutBytes = p.LastHandshakeTime, uint64(p.ReceiveBytes), uint64(p.TransmitBytes)
		if p.Endpoint != nil {
			e := p.Endpoint.AddrPort()
			x.Endpoint = netip.AddrPortFrom(e.Addr().Unmap(), e.Port())
		}
	}
	if link.Attrs().Flags&net.FlagUp == 0 {
		return fmt.Errorf("wireguard: interface %s is down", d.cfg.Interface)
	}
	return nil
}
