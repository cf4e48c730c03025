// Side: data

package hca

import "github.com/vnicd/vnicd/translate"

// mcastTable maps group GIDs to the UD QPs attached (IBTA 10.5). It is a snapshot
// that the command goroutine replaces; loops read it without locks. QPs leave
// their groups before they are destroyed, and destruction visits the QP's loop
// afterwards, so no snapshot that a loop can still see names a destroyed QP.
type mcastTable struct {
	groups map[[16]byte][]*qp
}

func newMcastTable() *mcastTable { return &mcastTable{groups: map[[16]byte][]*qp{}} }

// cost bounds the bytes that the table occupies.
func (t *mcastTable) cost() (n uint64) {
	if t == nil {
		return 0
	}
	const group = 48 // key and slice header in a slot of the map, at most half of which are free
	for _, qs := range t.groups {
		n += 2*group + 2*translate.AllocatedFor[*qp](len(qs)) // append may double
	}
	return n
}

// with returns a copy in which group gid has the members m (none: no group).
func (t *mcastTable) with(gid [16]byte, m []*qp) *mcastTable {
	n := newMcastTable()
	for g, qs := range t.groups {
		n.groups[g] = qs
	}
	if len(m) == 0 {
		delete(n.groups, gid)
	} else {
		n.groups[gid] = m
	}
	return n
}

// Joined implements vswitch.GroupMember: a QP is attached to the group.
func (d *dataSide) Joined(gid [16]byte) bool {
	_, ok := d.groups.Load().groups[gid]
	return ok
}
