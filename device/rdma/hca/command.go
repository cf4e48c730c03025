// Side: control

package hca

import (
	"errors"
	"slices"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/translate"
)

// commandTable lists every command: the size of the request's fixed part, whether
// a list of PAs may follow it, and the size of the reply's payload. Commands that
// are not listed are refused with EOPNOTSUPP. A request without a list may be longer if the rest is zero: it comes from
// a driver of a later release (CO-6).
var commandTable = [...]struct {
	fixed int
	more  bool
	reply int
	run   func(*cmd) error
}{
	abi.CmdQueryDevice:  {0, false, abi.SizeDeviceAttr, queryDevice},
	abi.CmdQueryPort:    {0, false, abi.SizePortAttr, queryPort},
	abi.CmdSetGID:       {abi.SizeSetGID, false, 0, setGID},
	abi.CmdClearGID:     {abi.SizeClearGID, false, 0, clearGID},
	abi.CmdSetDoorbells: {abi.SizeSetDoorbells, false, 0, setDoorbells},
	abi.CmdSetAHTable:   {abi.SizeSetAHTable, true, 0, setAHTable},
	abi.CmdCreatePD:     {0, false, abi.SizeHandle, createPD},
	abi.CmdDestroyPD:    {abi.SizeHandle, false, 0, destroyPD},
	abi.CmdCreateCQ:     {abi.SizeCreateCQ, true, abi.SizeHandle, createCQ},
	abi.CmdResizeCQ:     {abi.SizeResizeCQ, true, 0, resizeCQ},
	abi.CmdDestroyCQ:    {abi.SizeHandle, false, 0, destroyCQ},
	abi.CmdCreateSRQ:    {abi.SizeCreateSRQ, true, abi.SizeHandle, createSRQ},
	abi.CmdModifySRQ:    {abi.SizeModifySRQ, true, 0, modifySRQ},
	abi.CmdQuerySRQ:     {abi.SizeHandle, false, abi.SizeSRQAttr, querySRQ},
	abi.CmdDestroySRQ:   {abi.SizeHandle, false, 0, destroySRQ},
	abi.CmdCreateQP:     {abi.SizeCreateQP, true, abi.SizeCreateQPResp, createQP},
	abi.CmdModifyQP:     {abi.SizeQPAttr, false, 0, modifyQP},
	abi.CmdQueryQP:      {abi.SizeHandle, false, abi.SizeQPAttr, queryQP},
	abi.CmdDestroyQP:    {abi.SizeHandle, false, 0, destroyQP},
	abi.CmdCreateMR:     {abi.SizeCreateMR, false, abi.SizeCreateMRResp, createMR},
	abi.CmdSetMTT:       {abi.SizeSetMTT, true, 0, setMTT},
	abi.CmdDestroyMR:    {abi.SizeHandle, false, 0, destroyMR},
	abi.CmdAttachMcast:  {abi.SizeMcast, false, 0, attachMcast},
	abi.CmdDetachMcast:  {abi.SizeMcast, false, 0, detachMcast},
	abi.CmdQueryStats:   {0, false, abi.SizeStats, queryStats},
	abi.CmdClearMTT:     {abi.SizeClearMTT, false, 0, clearMTT},
	abi.CmdResumeFault:  {abi.SizeResumeFault, false, 0, resumeFault},
	abi.CmdCreateMW:     {abi.SizeCreateMW, false, abi.SizeHandle, createMW},
	abi.CmdDestroyMW:    {abi.SizeHandle, false, 0, destroyMW},
	abi.CmdResolve:      {abi.SizeResolve, false, abi.SizeResolveResp, resolveGID},
	abi.CmdCountQP:      {abi.SizeCountQP, false, abi.SizeStats, countQP},
	abi.CmdModifyCQ:     {abi.SizeModifyCQ, false, 0, modifyCQ},
}

const maxReply = 256 // at least the largest of the table

// execute runs the request of j and encodes the response. If the command needs host memory that is absent, or has just
// run, it returns what to wait for and where to go on (aside.go); j.drain is the release that the answer has to wait
// for (EP-3), usually nil.
func (d *Device) execute(j *job) (next stage, w *hostWait) {
	c := cmd{d: d, t: &d.tables, out: j.resp[abi.SizeResp:], overtaken: j.wasOvertaken, waited: j.waited, job: j}
	again := j.again
	j.waited, j.again = nil, nil
	err := c.dispatch(j.req, j.room, again)
	if c.waited != nil { // it needs them no more
		c.waited.drop()
	}
	var aside *waitError
	switch m, absent := hostMiss(err); {
	case errors.As(err, &aside):
		j.again = aside.again
		return stageRun, aside.wait
	case absent:
		return stageRun, &hostWait{miss: m}
	}
	s := statusOf(err)
	// A RESUME_FAULT that is too late or too early has lost a race; it is not an error of the driver.
	if err != nil && !(c.op == abi.CmdResumeFault && s == abi.StatusNotFound) {
		d.data.warn("command refused", "command", c.op, "status", s, "reason", err)
	}
	if err != nil {
		c.n, c.drain, c.warming, c.clears = 0, nil, nil, false
	}
	j.respond(s, c.n)
	if err == nil && len(c.touched) > 0 {
		d.mu.Lock()
		d.commandExecuted(j, c.touched)
		d.mu.Unlock()
	}
	j.drain, j.cleared, j.clears = c.drain, c.cleared, c.clears
	return stageWarm, c.warming
}

// dispatch checks a request against the table and runs it, or continues it by again.
func (c *cmd) dispatch(req []byte, room uint64, again func(*cmd, error) error) error {
	var h abi.Req
	err := h.Decode(req)
	c.op = h.Opcode
	if err != nil {
		return err
	}
	c.in = req[abi.SizeReq:]
	if uint64(h.Length) != uint64(len(c.in)) {
		return refuse(abi.StatusInvalid, "length is %d, the payload has %d bytes", h.Length, len(c.in))
	}
	if int(c.op) >= len(commandTable) || commandTable[c.op].run == nil {
		return opcodeError(c.op)
	}
	e := &commandTable[c.op]
	switch {
	case len(c.in) < e.fixed:
		return refuse(abi.StatusInvalid, "payload of %d bytes, need %d", len(c.in), e.fixed)
	case !e.more && slices.ContainsFunc(c.in[e.fixed:], func(b byte) bool { return b != 0 }):
		return refuse(abi.StatusUnsupported, "fields of a later release are set: payload of %d bytes, known are %d", len(c.in),
			e.fixed)
	case room < uint64(abi.SizeResp+e.reply):
		return refuse(abi.StatusInvalid, "response buffer of %d bytes, need %d", room, abi.SizeResp+e.reply)
	case c.d.data.broken.Load():
		return refuse(abi.StatusIO, "the guest's memory vanished earlier")
	}
	run := e.run
	if w := c.waited; w != nil && (w.err != nil || again != nil) {
		var failed error
		if w.err != nil {
			failed = w.failure()
		}
		run = func(c *cmd) error { return failed }
		if again != nil {
			run = func(c *cmd) error { return again(c, failed) }
		}
	}
	c.d.mu.Lock()
	defer c.d.mu.Unlock()
	// A command touches guest memory here and through Loop.Do; Guard catches the
	// fault of a vanished page from both.
	err = translate.Guard(func() error { return run(c) })
	if errors.Is(err, translate.ErrMemoryGone) {
		err = &statusError{status: abi.StatusIO, msg: err.Error()}
	}
	return err
}
