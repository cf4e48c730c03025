package cm

import (
	"fmt"

	"github.com/vnicd/vnicd/device/rdma/record"
)

// Record describes a connection for a Table in another process: all but Path, which is found again by address, and
// whether it is bound, which its queue pair decides (Bind). now is this process's clock.
func (c *Conn) Record(r *record.Codec, now int64) {
	age := uint64(max(now-c.Began, 0))
	record.Max(r, &c.State, Resolved, "state of a connection")
	r.Bool(&c.Active)
	record.Num(r, &c.Service)
	record.Max(r, &c.Transport, 3, "transport service")
	record.Max(r, &c.PathMTU, 15, "path MTU")
	for _, p := range []*uint32{&c.LocalID, &c.RemoteID} {
		record.Num(r, p)
	}
	record.Max(r, &c.LocalQPN, 0xffffff, "local QP number")
	record.Max(r, &c.RemoteQPN, 0xffffff, "remote QP number")
	r.Fixed(c.Local[:])
	r.Fixed(c.Remote[:])
	r.Fixed(c.RemoteMAC[:])
	record.Max(r, &c.VLAN, 4095, "VLAN")
	record.Num(r, &c.Reject)
	record.Max(r, &age, 1<<62, "age")
	for _, p := range []*bool{&c.localForever, &c.remoteForever, &c.haveLocal, &c.haveRemote, &c.sidr} {
		r.Bool(p)
	}
	if !r.Reading() {
		return
	}
	c.Began = now - int64(age)
	if datagrams := c.State >= SIDRSent; c.State == 0 || datagrams && !c.sidr {
		r.Fail("a connection in state %d, for datagrams: %v", c.State, c.sidr)
	}
}

// Add adds a connection that was recorded. Its queue pair binds it; otherwise it expires as if its last message had
// just been seen. Each key belongs to one connection.
func (t *Table) Add(now int64, recorded *Conn) error {
	c := *recorded
	c.Path, c.bound, c.prev, c.next, c.list = recorded.Path, false, nil, nil, nil
	local, remote := idKey{c.LocalID, c.sidr}, peerKey{c.Remote, idKey{c.RemoteID, c.sidr}}
	switch {
	case t.Len() >= t.max:
		return fmt.Errorf("more than %d connections", t.max)
	case !c.haveLocal && !c.haveRemote,
		c.haveLocal && t.byLocal[local] != nil:
		return fmt.Errorf("connection %#x, %#x has no ID, or that of another one", c.LocalID, c.RemoteID)
	}
	if c.haveLocal {
		t.byLocal[local] = &c
	}
	if c.haveRemote && t.byRemote[remote] == nil { // as in learnIDs
		t.byRemote[remote] = &c
	}
	if k := (peerKey{c.Remote, idKey{id: c.RemoteQPN}}); c.RemoteQPN != 0 && !c.sidr && t.byPeerQP[k] == nil {
		t.byPeerQP[k] = &c
	}
	t.settle(now, &c)
	return nil
}
