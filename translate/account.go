package translate

import (
	"fmt"
	"reflect"
	"sync"
)

// Account counts the memory of this process that exists because of one VM's commands, and bounds it: every object, page
// list and table entry is charged with what it really occupies when it is made, and credited with exactly that when it
// is destroyed. What is charged is live memory; the garbage collector lets a heap grow to twice that (GOGC=100).
//
// It does not count guest memory itself (hostdriver.Budget), nor frame buffers, which all VMs share.
//
// Methods are called from any goroutine but loops. A nil Account counts nothing and has no limit.
type Account struct {
	limit uint64 // bytes; 0: none

	mu         sync.Mutex // guards the fields below
	used, most uint64
	by         [NumCosts]uint64
	refused    uint64
	miscounted uint64
}

// Cost is the kind of what is charged.
type Cost uint8

// The kinds.
const (
	CostDevice   Cost = iota // tables whose size follows from the limits, for as long as the device exists
	CostObjects              // protection domains, completion queues, shared receive queues, members of multicast groups
	CostQPs                  // queue pairs with their copies of work requests
	CostRegions              // memory regions and windows without their entries
	CostEntries              // translation entries (MTT)
	CostPageList             // page lists of rings and of the address handle table
	CostHolds                // memory that must stay resident: completion rings, doorbells, address handles
	CostJournal              // the device's state in shared memory, for the next process
	NumCosts
)

var costNames = [NumCosts]string{"device", "objects", "qps", "regions", "entries", "page-lists", "holds", "journal"}

// String returns the name that status output and metrics use.
func (c Cost) String() string {
	if c >= NumCosts {
		return "unknown"
	}
	return costNames[c]
}

// NewAccount returns an Account with a limit in bytes; 0: none.
func NewAccount(limit uint64) *Account { return &Account{limit: limit} }

// Charge adds n bytes, or returns an error that wraps ErrLimit and changes nothing.
func (a *Account) Charge(c Cost, n uint64) error {
	if a == nil {
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.limit != 0 && n > a.limit-min(a.used, a.limit) {
		a.refused++
		return fmt.Errorf("memory of the host for this VM: %d bytes of %d in use, %d more requested for %v: %w", a.used,
			a.limit, n, c, ErrLimit)
	}
	a.addLocked(c, n)
	return nil
}

// Take is Charge without regard to the limit: for what exists already, or what a limit of its own bounds.
func (a *Account) Take(c Cost, n uint64) {
	if a == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.addLocked(c, n)
}

func (a *Account) addLocked(c Cost, n uint64) {
	a.used += n
	a.by[c] += n
	a.most = max(a.most, a.used)
}

// Credit returns n bytes that were charged.
func (a *Account) Credit(c Cost, n uint64) {
	if a == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if n > a.by[c] { // a bug; it must not become a limit that is never reached
		a.miscounted++
		n = a.by[c]
	}
	a.used -= n
	a.by[c] -= n
}

// refuse counts a charge of n bytes that was not attempted, if there is no room for it.
func (a *Account) refuse(n uint64) {
	if n > a.Room() {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.refused++
	}
}

// Room returns how much may still be charged.
func (a *Account) Room() uint64 {
	if a == nil || a.limit == 0 {
		return 1 << 63
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.limit - min(a.used, a.limit)
}

// AccountStatus is a snapshot of an Account. Figures are bytes unless their names say otherwise.
type AccountStatus struct {
	Limit   uint64            `json:"limit"` // 0: none
	Used    uint64            `json:"used"`
	Most    uint64            `json:"most"`    // that was ever used
	Refused uint64            `json:"refused"` // charges beyond the limit
	By      map[string]uint64 `json:"by"`      // Used by Cost; only those that are not 0
	// Miscounted counts credits of more than was charged: a bug in vnicd.
	Miscounted uint64 `json:"miscounted,omitempty"`
}

// Status returns a snapshot.
func (a *Account) Status() AccountStatus {
	if a == nil {
		return AccountStatus{}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	s := AccountStatus{Limit: a.limit, Used: a.used, Most: a.most, Refused: a.refused, Miscounted: a.miscounted,
		By: make(map[string]uint64)}
	for c, n := range a.by {
		if n > 0 {
			s.By[Cost(c).String()] = n
		}
	}
	return s
}

// Allocated returns what an allocation of n bytes occupies at most: the Go heap rounds up to a size class, which adds
// at most an eighth, and beyond 32 KiB to pages of 8 KiB.
func Allocated(n uint64) uint64 {
	const large, page = 32 << 10, 8 << 10
	switch {
	case n == 0:
		return 0
	case n > large:
		return (n + page - 1) &^ (page - 1)
	}
	return n + n/8 + 16
}

// AllocatedFor is Allocated for a slice of n elements of type T in one allocation.
func AllocatedFor[T any](n int) uint64 {
	return Allocated(uint64(n) * uint64(reflect.TypeFor[T]().Size()))
}

// MapEntry bounds what an entry of a map with 4-byte keys and values of at most 8 bytes occupies: a slot, its control
// byte, and the free slots of a table that has just grown.
const MapEntry = 64
