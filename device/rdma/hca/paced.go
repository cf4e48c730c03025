// Side: control

package hca

import (
	"github.com/vnicd/vnicd/device/rdma/abi"
)

// Commands beyond the VM's share of processor time (Config.Work) wait, and nothing fails: their chains are popped, so
// that the commands behind them can be read, and their requests are read, validated and executed when the share
// permits, in the order of the queue. Commands that give pages of the guest back overtake them, because a guest waits
// for these before it frees the pages (EP-3, TR-5). For a CLEAR_MTT that overtakes a SET_MTT, see aside.go.
//
// Commands are charged after they have run, so one costs what it costs, and the next one waits.

const (
	// maxPaced bounds the commands that wait for their share; the next one is then not read. Drivers have fewer
	// commands under way, and so have releases overtake all others.
	maxPaced = 256
	// chargeEvery is after how many commands of a round the work is charged: reading a thread's clock is a system call.
	chargeEvery = 8
)

// pacedJobs are the commands that wait for their share, oldest first.
type pacedJobs struct {
	jobs []*job
	stop func() bool // ends the timer that wakes the goroutine; nil: none
}

// releases reports whether a request gives pages of the guest back.
func releases(req []byte) bool {
	var h abi.Req
	return h.Decode(req) == nil && (h.Opcode == abi.CmdClearMTT || h.Opcode == abi.CmdDestroyMR)
}

// exceeds reports whether a command has to wait for its share.
func (c *commandLoop) exceeds(req []byte) bool {
	return (len(c.paced.jobs) > 0 || c.d.cfg.Work.Delay() > 0) && !releases(req)
}

// pace makes j, whose request counts as not read, wait for its share.
func (c *commandLoop) pace(j *job) {
	if len(c.paced.jobs) == 0 {
		c.d.data.warn("commands are delayed: the VM uses more than its share of processor time (limits.control-time)")
	}
	c.d.cfg.Work.Delayed()
	c.signal() // the wait may take long
	j.stage = stageRead
	c.paced.jobs = append(c.paced.jobs, j)
}

// admit returns the oldest command that has waited, if the share permits it; else nil.
func (c *commandLoop) admit() *job {
	p := &c.paced
	if len(p.jobs) == 0 || c.d.cfg.Work.Delay() > 0 {
		return nil
	}
	j := p.jobs[0]
	p.jobs[0] = nil
	p.jobs = p.jobs[1:]
	j.admitted = true
	return j
}

// wakeForPaced wakes the goroutine when the next command may begin.
func (c *commandLoop) wakeForPaced() {
	p := &c.paced
	if p.stop != nil {
		p.stop()
		p.stop = nil
	}
	if len(p.jobs) > 0 && len(c.waiting)+len(c.aside) < maxJobs && c.q.Broken() == nil {
		p.stop = c.d.cfg.Work.After(c.d.cfg.Work.Delay(), c.wake.Signal)
	}
}

// finishPaced ends the wait when the queue stops: the commands return to the queue, or are executed now if a later one
// was answered.
func (c *commandLoop) finishPaced() {
	p := &c.paced
	if p.stop != nil {
		p.stop()
		p.stop = nil
	}
	for n := len(p.jobs); n > 0 && c.unpop(p.jobs); n = len(p.jobs) {
		p.jobs = p.jobs[:n-1]
	}
	for _, j := range p.jobs {
		j.admitted = true
		c.begin(j)
	}
	p.jobs = nil
}
