package overlay

import "net/netip"

// Static is the source of one network's configuration.
type Static struct {
	Peers []netip.Addr
	// LearnPeers lets the data path add peers that no source names.
	LearnPeers bool
}

// Name implements TableSource.
func (*Static) Name() string { return "static" }

// Rank implements TableSource.
func (*Static) Rank() int { return RankStatic }

// Attach implements TableSource. It sets all routes or none.
func (s *Static) Attach(t *Table) error {
	for _, a := range s.Peers {
		if err := t.Set(s, Route{Key: Key{Kind: Peer, VTEP: a}}); err != nil {
			return err
		}
	}
	if s.LearnPeers {
		if t.vt == nil {
			return ErrNoTunnel
		}
		return t.vt.SetLearnPeers(t.net.VNI(), true)
	}
	return nil
}

// Detach implements TableSource.
func (s *Static) Detach(t *Table) {
	if s.LearnPeers && t.vt != nil {
		_ = t.vt.SetLearnPeers(t.net.VNI(), false) // the network may be gone
	}
}

// API is the source for operators at run time. The control API calls the table's methods on its behalf. One API serves
// all networks.
type API struct{}

// Name implements TableSource.
func (*API) Name() string { return "api" }

// Rank implements TableSource.
func (*API) Rank() int { return RankAPI }

// Attach implements TableSource.
func (*API) Attach(*Table) error { return nil }

// Detach implements TableSource.
func (*API) Detach(*Table) {}
