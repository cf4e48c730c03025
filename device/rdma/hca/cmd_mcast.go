// Side: control

package hca

import (
	"slices"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/roce"
	"github.com/vnicd/vnicd/translate"
)

// Commands about multicast groups.

func (c *cmd) mcast() (*qpObject, [16]byte, error) {
	var r abi.Mcast
	if err := r.Decode(c.in); err != nil {
		return nil, r.GID, err
	}
	o, err := c.t.qp(r.QPN)
	switch {
	case err != nil:
		return nil, r.GID, err
	case o.q.typ != roce.UD:
		return nil, r.GID, refuse(abi.StatusInvalid, "QP %#x is not of type UD", r.QPN)
	case !isMulticast(&r.GID):
		return nil, r.GID, refuse(abi.StatusInvalid, "GID %x is not a multicast GID", r.GID)
	}
	return o, r.GID, nil
}

func attachMcast(c *cmd) error {
	o, gid, err := c.mcast()
	if err != nil {
		return err
	}
	t := c.d.data.groups.Load()
	m, known := t.groups[gid]
	switch {
	case slices.Contains(m, o.q):
		return nil // attached already: success, as verbs have it
	case !known && len(t.groups) >= c.d.lim.McastGroups:
		return &limitError{what: "multicast groups", n: uint64(len(t.groups)) + 1, max: uint64(c.d.lim.McastGroups)}
	case len(m) >= c.d.lim.McastMembers:
		return &limitError{what: "members of a multicast group", n: uint64(len(m)) + 1, max: uint64(c.d.lim.McastMembers)}
	}
	return c.replaceGroups(t, t.with(gid, append(slices.Clone(m), o.q)), &o.mcast, 1)
}

func detachMcast(c *cmd) error {
	o, gid, err := c.mcast()
	if err != nil {
		return err
	}
	t := c.d.data.groups.Load()
	i := slices.Index(t.groups[gid], o.q)
	if i < 0 {
		return refuse(abi.StatusNotFound, "QP %#x is not attached to %x", o.q.n, gid)
	}
	return c.replaceGroups(t, t.with(gid, slices.Delete(slices.Clone(t.groups[gid]), i, i+1)), &o.mcast, -1)
}

// replaceGroups publishes a table of groups in place of old, and adds n to the memberships of a QP. It charges, or
// credits, the difference of what they cost.
func (c *cmd) replaceGroups(old, next *mcastTable, memberships *int, n int) error {
	now, before := next.cost(), old.cost()
	if now > before {
		if err := c.d.account.Charge(translate.CostObjects, now-before); err != nil {
			return memoryError(err)
		}
	} else {
		c.d.account.Credit(translate.CostObjects, before-now)
	}
	c.d.data.groups.Store(next)
	*memberships += n
	c.touch(recGroups, 0)
	return nil
}
