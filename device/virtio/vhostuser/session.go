package vhostuser

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/virtio"
	"github.com/vnicd/vnicd/hypervisor/hostdriver"
	"github.com/vnicd/vnicd/hypervisor/worktime"
	"github.com/vnicd/vnicd/translate"
)

// session is one connection. The connection's goroutine owns it, except for the back-end channel.
type session struct {
	srv *Server
	dev virtio.Device
	log hclog.Logger
	t   *Transport

	space   *translate.Space
	mem     *hostdriver.Driver
	regions []mapped
	stored  []mapped // the regions that the state file has: those before a change, until it is complete
	files   []fileID // that are kept

	features   uint64 // acknowledged
	negotiated bool   // features were accepted by the device
	offer      uint64 // virtio features
	protos     uint64 // protocol features that are offered
	proto      uint64
	status     uint8
	rings      []ring

	warnedMemory bool // logged that no memory is shared
	sealed       bool // the memory files are sealed against holes, see seal
	gave         bool // a memory file, see giveMemory

	dirty    *dirtyLog // as SET_LOG_BASE has named it; nil: none
	logs     bool      // the front end wants the device's writes to be logged
	unlogged bool      // it did, and some may not be
	transfer *transfer // of the device's state; nil: none

	backend backend
	ran     bool           // as the follower knows
	pipe    int            // for replies, see reply.go; -1: none
	again   bool           // the previous process may have handled the next message already, in whole or in part
	watch   worktime.Watch // of the message that is being handled

	kept    keeping
	running running
	trial   *trial        // nil: the connection is not resumed
	silence time.Duration // for which the device stood still before it went on here; 0: it has not gone on
	counted bool          // by Continuity
	oldLive bool          // the front end's rings run since the previous process, and have not run here yet
	wasLive bool          // the running driver does not know yet that the process was replaced
	untold  bool          // the driver was not told yet that the device lost its state
	revived bool          // the device goes on where the previous process was killed
	drove   bool          // the previous process's device had a driver
	goesOn  bool          // the device goes on where the previous process stopped, however that ended
	refused bool          // the front end's last message ended the connection
	leaving bool          // the state for the next process is complete
}

// errRefused is wrapped by errors of one request: the state is unchanged and the connection continues. The front end is
// told if it asked for an acknowledgement.
var errRefused = errors.New("refused")

func refuse(format string, a ...any) error {
	return fmt.Errorf("%w: %s", errRefused, fmt.Sprintf(format, a...))
}

// errAdvisory is wrapped by refusals after which the connection continues even if the front end did not ask for an
// acknowledgement: its next messages do not depend on the request.
var errAdvisory = fmt.Errorf("%w (advisory)", errRefused)

// newSession makes the session of a connection; inner: with a front end in this process, which may migrate any device.
func newSession(s *Server, t *Transport, inner bool) *session {
	se := &session{srv: s, dev: s.dev, log: s.log, t: t, space: translate.NewSpace(s.gvmi), pipe: -1, offer: s.offer,
		protos: s.protos}
	if s.cfg.Migrates || inner {
		se.offer |= FeatureLogAll
		se.protos |= ProtoLogSHMFD
	}
	if _, ok := s.dev.(virtio.Continuer); ok && inner {
		se.protos |= ProtoDeviceState
	}
	se.space.Epochs().SetNamer(s.cfg.SlotName)
	// A bug met by one of its goroutines ends the connection.
	se.mem = hostdriver.New(se.space, s.log, hostdriver.Options{Budget: s.cfg.Budget, Broken: t.Stop})
	se.kept = keeping{to: s.cfg.Keeper, name: s.cfg.KeepAs, log: s.log, state: -1, lives: &s.keeps, inner: inner,
		loss: "the VM will lose this device when vnicd restarts"}
	if s.cfg.Reconnects {
		se.kept.loss = "the device's link will go down for a moment when vnicd restarts"
	}
	se.rings = make([]ring, s.queues)
	for i := range se.rings {
		se.rings[i].init()
	}
	return se
}

// run serves the connection until it ends. It returns nil if the front end closed it between two messages. kept is not
// nil if another process started it. A panic ends the connection and not the process (TR-6): the error has its stack.
func (se *session) run(kept Kept) error {
	defer se.t.Close()
	if t := se.srv.cfg.VMs; t != nil {
		if err := t.Bind(se.space); err != nil {
			return err
		}
		defer t.Release(se.space)
	}
	if a := se.srv.cfg.Attribute; a != nil {
		a.Bind(se.space)
		defer a.Release(se.space)
	}
	err := translate.Contain(func() error { return se.converse(kept) })
	se.refused = errors.Is(err, ErrProtocol) || errors.Is(err, errRefused)
	// A device that cannot be torn down may still access the memory: neither of them is used again.
	if bad := translate.Contain(func() error { se.teardown(); return nil }); bad != nil {
		return &wreckError{err: errors.Join(err, bad)}
	}
	return err
}

// wreckError ends a connection whose device could not be disconnected.
type wreckError struct{ err error }

// Error implements error.
func (e *wreckError) Error() string {
	return fmt.Sprintf("device cannot be disconnected, and is not offered any more until vnicd restarts: %v", e.err)
}

// Unwrap returns the cause.
func (e *wreckError) Unwrap() error { return e.err }

// converse handles requests until the connection ends.
func (se *session) converse(kept Kept) error {
	se.backend.offered = se.dev.ConfigSize() > 0
	se.dev.Connected(se)
	if kept != nil {
		if err := se.adoptCounted(kept); err != nil {
			return fmt.Errorf("connection of the previous vnicd cannot be resumed: %w", err)
		}
		if se.trial != nil {
			se.trial.adopted()
		}
		if err := se.catchUp(); err != nil {
			return err
		}
	} else if err := se.begin(); err != nil {
		return err
	}
	var m Message
	defer m.Close()
	for held := true; ; {
		if held && !se.t.Pending() {
			held = false
			se.backend.release(se.log)
		}
		se.announce()
		if err := se.t.Peek(&m, Header.Check); err != nil {
			if errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) {
				return nil
			}
			return err
		}
		if err := se.handle(&m); err != nil {
			return err
		}
	}
}

// begin prepares a new connection, and begins to keep it.
func (se *session) begin() (err error) {
	if se.pipe, err = openPipe(); err != nil {
		return err
	}
	if err := se.kept.begin(se.t.c, se.pipe, se.state()); err != nil {
		return err
	}
	se.follow()
	return nil
}

// teardown releases everything of this connection, in the order of dependence: queues, device, memory, channel.
func (se *session) teardown() {
	defer se.measure()()
	se.handOver()
	to := se.kept.to
	se.kept.end(se.files, se.running.names(&se.kept))
	// What the next process gets is its own to refuse: this one may have refused a message because it ends.
	if se.refused && (to == nil || !to.Ending()) {
		se.t.discard()
	}
	se.stopAll()
	if err := se.flushLog(); err != nil {
		se.log.Error("a migration of this VM must not go on: the last writes of its device are unknown", "reason", err)
	}
	se.closeLog()
	se.transfer.end()
	if f := se.srv.cfg.Follower; f != nil {
		f.Log(LogBase{}, -1)
		for _, r := range se.regions {
			f.RemoveMemory(r.Region)
		}
	}
	se.dev.Disconnected()
	_ = se.watch.Without(func() error { se.mem.Close(); return nil })
	for i := range se.rings {
		se.rings[i].close()
	}
	if se.pipe >= 0 {
		_ = unix.Close(se.pipe)
		se.pipe = -1
	}
	// This tells the front end that its memory is no longer accessed, so it comes last.
	se.backend.close()
}

// measure counts the work of the connection's goroutine until stop.
func (se *session) measure() (stop func()) {
	se.watch = se.srv.cfg.Work.Start(worktime.Messages)
	return se.watch.Stop
}

// Space implements Conn.
func (se *session) Space() *translate.Space { return se.space }

// Hold implements Conn.
func (se *session) Hold(ctx context.Context, ranges []translate.Range) (release func(), err error) {
	h, err := se.mem.HoldRanges(ctx, ranges)
	if err != nil {
		return nil, err
	}
	return h.Release, nil
}

// Memory implements Conn.
func (se *session) Memory() hostdriver.Status { return se.mem.Status() }

// ConfigChanged implements Conn.
func (se *session) ConfigChanged() { se.backend.configChanged(se.log) }

// handle executes one request and replies. An error ends the connection.
func (se *session) handle(m *Message) error {
	defer se.measure()()
	ru := rules[m.Request]
	if ru.proto != 0 && se.proto&ru.proto == 0 {
		return protoErr("%v without protocol feature %#x, which it belongs to", m.Request, ru.proto)
	}
	if se.log.IsTrace() {
		se.log.Trace("vhost-user", "request", m.Request, "size", m.Size, "fds", len(m.FDs), "flags", m.Flags)
	}
	reply, err := se.dispatch(m)
	se.describe()
	se.told()
	waits := ru.replies || se.wantsAck(m)
	switch {
	case err != nil && (!errors.Is(err, errRefused) || !waits && !errors.Is(err, errAdvisory)):
		return fmt.Errorf("%v: %w", m.Request, err)
	case err != nil:
		se.log.Warn("request refused", "request", m.Request, "reason", err)
		if reply = nil; !ru.replies { // GET_CONFIG reports a refusal by an empty payload
			reply = AppendU64(nil, 1)
		}
	case !ru.replies:
		reply = AppendU64(nil, 0)
	}
	if len(m.FDs) > 0 && ru.gives {
		return se.give(m, reply)
	}
	return se.conclude(m, reply, waits)
}

// wantsAck reports whether the sender of m waits for its result.
func (se *session) wantsAck(m *Message) bool {
	return m.NeedReply() && se.proto&ProtoReplyAck != 0
}

// dispatch is the last stage: the request's own checks, then the change.
func (se *session) dispatch(m *Message) (reply []byte, err error) {
	switch m.Request {
	case ReqGetFeatures:
		return AppendU64(nil, se.offer&^se.srv.cfg.Hide), nil
	case ReqGetProtocolFeatures:
		return AppendU64(nil, se.protos), nil
	case ReqGetQueueNum:
		// Of network devices, too, it is the number of virtqueues. Cloud Hypervisor compares it with that, and refuses a card
		// with fewer. QEMU and DPDK compare it with pairs, so that what they want in excess is refused later.
		return AppendU64(nil, uint64(se.srv.queues)), nil
	case ReqGetMaxMemSlots:
		return AppendU64(nil, MaxMemSlots), nil
	case ReqGetStatus:
		return AppendU64(nil, uint64(se.status)), nil
	case ReqSetOwner:
		return nil, nil // a Unix connection has only one owner
	case ReqResetOwner:
		// "Ignore this message, or use it to disable all rings."
		se.disableAll()
		return nil, nil
	case ReqResetDevice:
		se.reset()
		if f := se.srv.cfg.MachineReset; f != nil {
			f()
		}
		return nil, nil
	case ReqSetMemTable:
		return nil, se.setMemTable(m)
	case ReqSetLogBase:
		return se.setLogBase(m)
	case ReqSetDeviceStateFD:
		return se.moveState(m)
	case ReqCheckDeviceState:
		return se.checkState(), nil
	case ReqAddMemReg:
		return nil, se.addMemReg(m)
	case ReqRemMemReg:
		return nil, se.remMemReg(m)
	case ReqGetMemory:
		return se.giveMemory(m)
	case ReqSetBackendReqFD:
		return nil, se.setChannel(m.TakeFD(0))
	case ReqGetConfig:
		return se.getConfig(m)
	case ReqSetConfig:
		return nil, se.setConfig(m)
	case ReqSetFeatures, ReqSetProtocolFeatures, ReqSetStatus, ReqSendRARP, ReqNetSetMTU:
		v, err := ParseU64(m.Body)
		if err != nil {
			return nil, err
		}
		return nil, se.setWord(m.Request, v)
	case ReqSetVringNum, ReqSetVringBase, ReqGetVringBase, ReqSetVringEnable:
		s, err := ParseVringState(m.Body)
		if err != nil {
			return nil, err
		}
		r, err := se.ring(s.Index)
		if err != nil {
			return nil, err
		}
		return se.vringState(m, r, s)
	case ReqSetVringAddr:
		a, err := ParseVringAddr(m.Body)
		if err != nil {
			return nil, err
		}
		r, err := se.ring(a.Index)
		if err != nil {
			return nil, err
		}
		return nil, se.setVringAddr(r, a)
	case ReqSetVringKick, ReqSetVringCall, ReqSetVringErr:
		f, err := ParseVringFD(m.Body, len(m.FDs))
		if err != nil {
			return nil, err
		}
		r, err := se.ring(f.Index)
		if err != nil {
			return nil, err
		}
		return nil, se.vringFD(r, f, m)
	}
	return nil, protoErr("no handler") // cannot happen: rules and this switch list the same requests
}

// setChannel takes over the back-end channel.
func (se *session) setChannel(fd int) error {
	if err := se.backend.set(fd, se.log); err != nil {
		return err
	}
	if !se.kept.inner {
		se.kept.forget(se.kept.channel())
		se.kept.keep(se.kept.channel(), fd)
	}
	return nil
}

// setWord handles the requests whose payload is one number.
func (se *session) setWord(req Request, v uint64) error {
	switch req {
	case ReqSetFeatures:
		return se.setFeatures(v)
	case ReqSetProtocolFeatures:
		if extra := v &^ se.protos; extra != 0 {
			return protoErr("protocol features %#x were not offered", extra)
		}
		se.proto = v
		se.saveState()
	case ReqSetStatus:
		return se.setStatus(v)
	case ReqSendRARP:
		var mac [6]byte
		copy(mac[:], AppendU64(nil, v)) // the payload is six bytes of address, two of padding
		se.dev.(virtio.NetDevice).SendRARP(mac)
	case ReqNetSetMTU:
		if v < 68 || v > 65535 { // virtio 1.2, 5.1.4.1
			return protoErr("MTU %d, want 68 to 65535", v)
		}
		se.dev.(virtio.NetDevice).SetMTU(uint16(v))
	}
	return nil
}

// setFeatures accepts the driver's choice. With an unusable choice rings do not start and FEATURES_OK is not set, but
// the connection continues: front ends send partial sets before the guest runs, and a guest with an old driver should
// cause a log line, not lose its device.
func (se *session) setFeatures(v uint64) error {
	if extra := v &^ se.offer; extra != 0 {
		return protoErr("features %#x were not offered", extra)
	}
	// It changes while rings run, and the device does not know it.
	if err := se.setLogging(v&FeatureLogAll != 0); err != nil {
		return err
	}
	return se.accept(v &^ FeatureLogAll)
}

// accept is setFeatures for what concerns the device.
func (se *session) accept(v uint64) error {
	if se.negotiated && v == se.features {
		return nil
	}
	for i := range se.rings {
		if se.rings[i].q != nil {
			return refuse("features change from %#x to %#x while ring %d runs", se.features, v, i)
		}
	}
	se.features, se.negotiated = v, false
	if v&virtio.FeatureVersion1 == 0 {
		se.log.Info("driver has not accepted VERSION_1; rings stay stopped (legacy virtio is not supported)", "features",
			fmt.Sprintf("%#x", v))
		return nil
	}
	if err := se.dev.SetFeatures(v); err != nil {
		se.log.Warn("features refused by the device", "features", fmt.Sprintf("%#x", v), "reason", err)
		return fmt.Errorf("%w: %w", errAdvisory, err)
	}
	se.negotiated = true
	se.startReady()
	return nil
}

// setStatus processes the virtio device status (virtio 1.2, 2.1).
func (se *session) setStatus(v uint64) error {
	const known = virtio.StatusAcknowledge | virtio.StatusDriver | virtio.StatusDriverOK | virtio.StatusFeaturesOK |
		virtio.StatusNeedsReset | virtio.StatusFailed
	if v&^known != 0 {
		return protoErr("device status %#x, want bits within %#x", v, known)
	}
	if v == 0 {
		se.reset()
		return nil
	}
	s := uint8(v)
	var err error
	if s&virtio.StatusFeaturesOK != 0 && !se.negotiated {
		s &^= virtio.StatusFeaturesOK // 2.2.2: the driver reads it back and fails
		err = fmt.Errorf("%w: FEATURES_OK with unusable features %#x", errAdvisory, se.features)
	}
	se.status = s
	if w, ok := se.dev.(virtio.StatusWatcher); ok {
		w.SetStatus(s)
	}
	return err
}

// reset returns the device and its rings to the initial state. Memory, call and error descriptors are kept: QEMU passes
// them once per connection.
func (se *session) reset() {
	se.endLive()
	se.stopAll()
	for i := range se.rings {
		se.rings[i].reset()
	}
	se.status = 0
	se.features, se.negotiated = 0, false
	se.describe() // first: the state of a device without a driver is not continued
	se.dev.Reset()
	if w, ok := se.dev.(virtio.StatusWatcher); ok {
		w.SetStatus(0)
	}
}

func (se *session) getConfig(m *Message) ([]byte, error) {
	c, err := ParseConfigSpace(m.Body)
	if err != nil {
		return nil, err
	}
	if end := uint64(c.Offset) + uint64(len(c.Data)); end > uint64(se.dev.ConfigSize()) {
		return nil, refuse("configuration bytes %d to %d, device has %d", c.Offset, end, se.dev.ConfigSize())
	}
	clear(c.Data)
	if err := se.dev.ReadConfig(c.Data, c.Offset); err != nil {
		return nil, fmt.Errorf("%w: %w", errRefused, err)
	}
	return ConfigSpace{Offset: c.Offset, Data: c.Data}.Append(nil), nil
}

func (se *session) setConfig(m *Message) error {
	c, err := ParseConfigSpace(m.Body)
	if err != nil {
		return err
	}
	if end := uint64(c.Offset) + uint64(len(c.Data)); end > uint64(se.dev.ConfigSize()) {
		return refuse("configuration bytes %d to %d, device has %d", c.Offset, end, se.dev.ConfigSize())
	}
	if err := se.dev.WriteConfig(c.Offset, c.Data); err != nil {
		return fmt.Errorf("%w: %w", errAdvisory, err)
	}
	return nil
}
