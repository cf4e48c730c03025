package vhostuser

import (
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/virtio"
)

// What a process keeps was given by front ends, and a state that ends one process would end the next, too, until the
// service manager gives up. So the state has a mark, which is written before anything else is read of it:
//
//	         adopted beside others           crash          adopted alone            crash
//	served ────────────────────────▶ together ────▶ (waits) ─────────────▶ alone ──────────▶ dropped
//	   ▲                                │  ▲                                │
//	   └────────────────────────────────┘  └────────────────────────────────┘
//	     after settleTime, or orderly end       after aloneTime
//
// After a crash all connections that were being resumed, or had been for less than settleTime, are suspects. Each is
// resumed alone, one after the other, so that a second crash tells which one is guilty. The others keep their devices.
//
// A process that somebody else has killed (Config.Blameless) casts no suspicion, up to maxSpared times in a row.
//
// The state of a virtio.Survivor may be what ends processes, and comes back after each crash. So instead of being
// dropped, such a device has to begin anew, alone (markAnew); only after another crash it is dropped.
type mark byte

const (
	markServed   mark = iota // served well; or kept by a release without marks
	markTogether             // resumed lately
	markAlone                // being resumed alone
	markAnew                 // the same, without the device's state

	markSpared mark = 16 // and up to maxSpared-1 more: resumed so often after processes that somebody else had killed
)

// maxSpared bounds how often in a row that casts no suspicion: what a process adopts may make the system kill it.
const maxSpared = 20

// markOff is the place of the mark: the last byte of the first half of the state's file, which was all of it once.
const markOff = oldKeptSize - 1

// Times for which a connection must be served before it is cleared of suspicion; changed by tests.
var (
	settleTime = 10 * time.Second
	aloneTime  = 2 * time.Second
)

// firstTime is how long the first suspect waits for connections above suspicion; changed by tests.
var firstTime = 2 * time.Second

// alone has a token of the suspect that is being resumed.
var alone = make(chan struct{}, 1)

// errGuilty ends the connection of which two processes have died, or three.
var errGuilty = errors.New("vnicd ended twice while it resumed this VM")

// trial is a connection that is being resumed, until it is cleared of suspicion.
type trial struct {
	fd   int  // of the state, its own
	anew bool // the device has to begin anew

	mu    sync.Mutex // guards the fields below
	turn  bool       // it has the token
	timer *time.Timer
	over  bool
}

// try marks a connection that is about to be resumed; of a suspect, it waits until no other suspect is being resumed.
// The error is errGuilty if the connection must not be resumed.
func (s *Server) try(kept Kept) (*trial, error) {
	fd, ok := kept[s.cfg.KeepAs+"/state"]
	if !ok {
		return nil, nil // which adopt reports
	}
	own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("state of the connection: %w", err)
	}
	t := &trial{fd: own}
	_, survives := s.dev.(virtio.Survivor)
	was, err := t.read()
	switch {
	case err != nil:
	case s.cfg.Blameless && was == markServed:
		err = t.write(markTogether)
	case s.cfg.Blameless && was == markTogether:
		err = t.write(markSpared)
	case s.cfg.Blameless && was >= markSpared && was < markSpared+maxSpared-1:
		err = t.write(was + 1)
	case was == markAnew || was == markAlone && !survives:
		err = errGuilty
	case was == markAlone:
		s.log.Warn("vnicd ended twice while it resumed this VM: the VM's driver has to begin anew", "socket", s.cfg.Path)
		t.anew = true
		err = t.wait(s, markAnew)
	case was == markTogether || was >= markSpared && was < markSpared+maxSpared:
		s.log.Warn("vnicd ended while it resumed this VM, or soon after: the VM is resumed when no other is", "socket",
			s.cfg.Path)
		err = t.wait(s, markAlone)
	default:
		err = t.write(markTogether)
	}
	if err != nil {
		t.end(false)
		return nil, err
	}
	return t, nil
}

// wait takes the token. Before the first suspect, connections above suspicion are resumed, and cause no doubt later.
func (t *trial) wait(s *Server, m mark) error {
	if !s.pause(firstTime) {
		return s.ctx.Err()
	}
	select {
	case alone <- struct{}{}:
	case <-s.ctx.Done():
		return s.ctx.Err()
	}
	t.mu.Lock()
	t.turn = true
	t.mu.Unlock()
	return t.write(m)
}

// adopted begins the time after which the connection is cleared.
func (t *trial) adopted() {
	t.mu.Lock()
	defer t.mu.Unlock()
	after, then := settleTime, t.settled
	if t.turn {
		after, then = aloneTime, t.endTurn
	}
	t.timer = time.AfterFunc(after, then)
}

func (t *trial) endTurn() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.over {
		return
	}
	_ = t.write(markTogether)
	t.releaseLocked()
	t.timer = time.AfterFunc(settleTime, t.settled)
}

func (t *trial) settled() { t.end(true) }

// end ends the trial, if it has not ended: the connection is cleared, or has ended, or the process ends in good order.
func (t *trial) end(cleared bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.over {
		return
	}
	t.over = true
	if t.timer != nil {
		t.timer.Stop()
	}
	if cleared {
		_ = t.write(markServed)
	}
	t.releaseLocked()
	_ = unix.Close(t.fd)
}

func (t *trial) releaseLocked() {
	if t.turn {
		t.turn = false
		<-alone
	}
}

func (t *trial) read() (mark, error) {
	var b [1]byte
	n, err := unix.Pread(t.fd, b[:], markOff)
	if err == nil && n == 0 {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return 0, fmt.Errorf("state of the connection: %w", err)
	}
	return mark(b[0]), nil
}

func (t *trial) write(m mark) error {
	if _, err := unix.Pwrite(t.fd, []byte{byte(m)}, markOff); err != nil {
		return fmt.Errorf("state of the connection: %w", err)
	}
	return nil
}
