// Side: control

package hca

import (
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/cm"
	"github.com/vnicd/vnicd/device/virtio/virtq"
	"github.com/vnicd/vnicd/translate"
)

// What the guest's objects cost the host. Every command that makes an object charges the VM's account first, and is
// refused with ENOMEM beyond its limit; the object keeps the figure and credits it when it is destroyed. Regions,
// windows and their entries are charged by translate.VM, holds by newHeld. TestAccount compares the figures with the
// heap.

// cost is what an object is charged with.
type cost struct {
	kind   translate.Cost
	object uint64 // charged as kind
	list   uint64 // page lists of its rings
}

// charge charges all of it or, with an error, nothing.
func (c cost) charge(a *translate.Account) error {
	if err := a.Charge(c.kind, c.object); err != nil {
		return memoryError(err)
	}
	if err := a.Charge(translate.CostPageList, c.list); err != nil {
		a.Credit(c.kind, c.object)
		return memoryError(err)
	}
	return nil
}

func (c cost) credit(a *translate.Account) {
	a.Credit(c.kind, c.object)
	a.Credit(translate.CostPageList, c.list)
}

// swapList replaces the page list by that of next, which is charged already.
func (c *cost) swapList(a *translate.Account, next cost) {
	a.Credit(translate.CostPageList, c.list)
	c.list = next.list
}

// listCost is the cost of a ring's page list alone.
func listCost(r *ring) cost { return cost{list: r.mem.Footprint()} }

func pdCost() cost {
	return cost{kind: translate.CostObjects, object: translate.AllocatedFor[pd](1) + translate.MapEntry}
}

func cqCost(r *ring) cost {
	return cost{
		kind: translate.CostObjects,
		object: translate.AllocatedFor[cq](1) + translate.AllocatedFor[cqObject](1) + translate.MapEntry +
			translate.AllocatedFor[moderation](1) + translate.AllocatedFor[loop.Timer](1) + cqCallback,
		list: r.mem.Footprint(),
	}
}

func srqCost(r *ring, maxSGE int) cost {
	return cost{
		kind: translate.CostObjects,
		object: translate.AllocatedFor[srq](1) + translate.AllocatedFor[srqObject](1) + translate.MapEntry +
			translate.Allocated(uint64(recvWQESize(maxSGE))),
		list: r.mem.Footprint(),
	}
}

// qpCost is the cost of a QP whose capabilities and rings are set. The transport makes its rings when the QP leaves
// RESET; they are charged from the beginning.
func qpCost(q *qp) cost {
	return cost{
		kind: translate.CostQPs,
		object: translate.AllocatedFor[qp](1) + translate.AllocatedFor[qpObject](1) + translate.MapEntry +
			translate.Allocated(uint64(q.scratchSize())) + q.transport(nil).Footprint() + translate.AllocatedFor[counters](1) +
			translate.AllocatedFor[loop.Timer](1) + translate.AllocatedFor[sourceFilter](1) + qpCallbacks +
			2*translate.AllocatedFor[abi.WC](maxUnposted) + 2*translate.AllocatedFor[*byte](maxKept), // append may double
		list: q.sq.mem.Footprint() + q.rq.mem.Footprint(),
	}
}

// qpCallbacks bounds the function values that a QP registers with its loop and the host driver.
const qpCallbacks = 512

// cqCallback bounds the function value of a CQ's timer.
const cqCallback = 64

// stageOne returns the limits of the VM's regions.
func (l *Limits) stageOne(a *translate.Account) translate.Limits {
	return translate.Limits{MaxRegions: l.MRs, MaxPages: l.MTTs, Account: a}
}

// fixed bounds the tables of a device with these limits, which it has, or fills, whatever objects there are: the
// indices of QPs and keys, observed connections, doorbells, GIDs, and commands under way.
func (l *Limits) fixed(engines int) uint64 {
	qps := l.QPs + firstQPIndex
	// A connection is in four maps, whose keys and values take up to 40 bytes and half of whose slots may be free.
	conn := translate.AllocatedFor[cm.Conn](1) + 4*2*40
	command := translate.AllocatedFor[job](1) + abi.CmdMax + translate.AllocatedFor[virtq.Seg](virtq.MaxChain)
	bells := 2 * translate.AllocatedFor[int](qps/slotsPerWord+wordsPerSum)
	return l.stageOne(nil).Fixed() +
		translate.AllocatedFor[[3]uint64](qps) + // data.qps, faultCounts, and free, which append may double
		translate.AllocatedFor[uint64](qpPlaces(qps)) + translate.AllocatedFor[uint32](qpPlaces(qps)) + // numbers, last
		uint64(2*l.QPs)*conn + maxJobs*command + uint64(engines)*bells + 4*translate.AllocatedFor[gid](l.GIDs)
}
