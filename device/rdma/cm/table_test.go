package cm

// invariants returns a violated invariant of the table, or "".
func (t *Table) invariants() string {
	seen := map[*Conn]bool{}
	for i, l := range [...]*list{&t.open, &t.half, &t.past} {
		n := 0
		var last *Conn
		for c := l.first; c != nil; last, c = c, c.next {
			n++
			switch {
			case c.list != l || c.prev != last || seen[c]:
				return "links"
			case c.bound != (i == 0):
				return "a connection is in the wrong list for being bound or not"
			case i == 2 && !c.State.over():
				return "past without being over"
			}
			seen[c] = true
		}
		if l.n != n || l.last != last {
			return "length of a list"
		}
	}
	if t.Len() > t.max {
		return "too many"
	}
	for k, c := range t.byLocal {
		if !seen[c] || c.LocalID != k.id || c.sidr != k.sidr {
			return "byLocal"
		}
	}
	for k, c := range t.byRemote {
		if !seen[c] || c.RemoteID != k.id || c.Remote != k.gid {
			return "byRemote"
		}
	}
	for k, c := range t.byQP {
		if !seen[c] || c.LocalQPN != k || !c.bound {
			return "byQP"
		}
	}
	for k, c := range t.byPeerQP {
		if !seen[c] || c.RemoteQPN != k.id || c.Remote != k.gid {
			return "byPeerQP"
		}
	}
	for c := range seen {
		if c.bound && t.byQP[c.LocalQPN] != c {
			return "bound, but not found by its queue pair"
		}
	}
	return ""
}

// Invariants is for tests of other packages of this folder.
func (t *Table) Invariants() string { return t.invariants() }
