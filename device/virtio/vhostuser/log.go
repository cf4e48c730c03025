package vhostuser

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/translate"
)

// The log of pages that the device writes to, which a front end asks for to migrate a VM while the device works
// (CO-5): a bit for each page of 4 KiB from guest address 0 on, in a file that it shares (SET_LOG_BASE), set as long as
// it has VHOST_F_LOG_ALL among its features. It clears bits and copies the pages at any time. So the device's writes
// are collected (translate.WriteLog), and set in the file once they have been made: all the time, and before the reply
// to GET_VRING_BASE, after which the front end looks for the last time.
//
// Where it is not known what was written, all of the memory is: if the front end names the file after it has wanted a
// log, as on a connection that replaces another one, and in a process that takes the connection over, because the
// previous one may have been killed before it set the last bits.

// FeatureLogAll is VHOST_F_LOG_ALL: the device's writes are logged.
const FeatureLogAll = 1 << 26

// ProtoLogSHMFD is VHOST_USER_PROTOCOL_F_LOG_SHMFD: the log is in a file.
const ProtoLogSHMFD = 1 << 1

// LogBase is the payload of SET_LOG_BASE: where the log is in its file, in bytes.
type LogBase struct{ Size, Offset uint64 }

const logBaseSize = 16

// maxLog bounds the size of a log: that of the largest guest address, of 52 bits. It depends on where the guest has put
// the BARs of its devices; only pages of the log that have a bit take memory.
const maxLog = 1 << (52 - 12 - 3)

// ParseLogBase decodes a LogBase and checks it.
func ParseLogBase(b []byte) (LogBase, error) {
	if len(b) != logBaseSize {
		return LogBase{}, protoErr("log base of %d bytes, want %d", len(b), logBaseSize)
	}
	l := LogBase{ne.Uint64(b), ne.Uint64(b[8:])}
	if l.Size == 0 || l.Size > maxLog || l.Size%8 != 0 || l.Offset%4096 != 0 || l.Offset > 1<<62 {
		return l, protoErr("log of %d bytes at %#x of its file, want a multiple of 8 up to %d, at a multiple of 4096", l.Size,
			l.Offset, maxLog)
	}
	return l, nil
}

// Append encodes l.
func (l LogBase) Append(b []byte) []byte {
	return ne.AppendUint64(ne.AppendUint64(b, l.Size), l.Offset)
}

// WriteLog is a log of pages that were written to, in a front end's file. Any goroutine may set bits.
type WriteLog struct {
	base  LogBase
	fd    int
	mem   []byte
	words []atomic.Uint64 // of mem
}

// dirtyLog is the log that a front end has named.
type dirtyLog struct {
	*WriteLog
	notes *translate.WriteLog
	end   context.CancelFunc // of the goroutine that sets bits
	done  chan struct{}
}

// OpenWriteLog maps a log, and takes over fd.
func OpenWriteLog(fd int, base LogBase) (l *WriteLog, err error) {
	defer func() {
		if err != nil {
			_ = unix.Close(fd)
		}
	}()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("log file: %w", err)
	}
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil || seals&unix.F_SEAL_SHRINK == 0 {
		return nil, protoErr("log file is no memfd that is sealed against shrinking")
	}
	if uint64(st.Size) < base.Offset+base.Size {
		return nil, protoErr("log file of %d bytes, the log is %d bytes at %#x", st.Size, base.Size, base.Offset)
	}
	mem, err := unix.Mmap(fd, int64(base.Offset), int(base.Size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("log file: %w", err)
	}
	return &WriteLog{base: base, fd: fd, mem: mem, words: words(mem)}, nil
}

// Close unmaps the log.
func (l *WriteLog) Close() {
	_ = unix.Munmap(l.mem)
	_ = unix.Close(l.fd)
}

func openLog(fd int, base LogBase) (*dirtyLog, error) {
	l, err := OpenWriteLog(fd, base)
	if err != nil {
		return nil, err
	}
	return &dirtyLog{WriteLog: l}, nil
}

// mark sets the bits of pages, as translate.WriteLog.Flush reports them.
func (l *WriteLog) mark(first translate.PA, pages uint64) {
	if i := uint64(first) / translate.PageSize / 64; i < uint64(len(l.words)) {
		l.words[i].Or(littleEndian(pages))
	}
}

// littleEndian returns v as it is in memory: the log is bytes, the lowest bit first.
func littleEndian(v uint64) uint64 { return ne.Uint64(binary.LittleEndian.AppendUint64(nil, v)) }

// MarkRange sets the bits of all pages of [pa, pa+n), n > 0.
func (l *WriteLog) MarkRange(pa, n uint64) error {
	return translate.Guard(func() error { l.markRange(pa, n); return nil })
}

func (l *WriteLog) markRange(pa, n uint64) {
	for page, last := pa/translate.PageSize, (pa+n-1)/translate.PageSize; page <= last; {
		n := min(last-page+1, 64-page%64)
		l.mark(translate.PA(page-page%64)*translate.PageSize, ^uint64(0)>>(64-n)<<(page%64))
		page += n
	}
}

// flush sets the bits of all pages that have been written to.
func (d *dirtyLog) flush(ctx context.Context) error {
	err := translate.Guard(func() error { return d.notes.Flush(ctx, d.mark) })
	if err != nil {
		return fmt.Errorf("log of written pages: %w", err)
	}
	return nil
}

// flushEvery is how often bits are set at most. More often than the front end looks has no use.
const flushEvery = 20 * time.Millisecond

// start begins to log the writes to space. Those that are not logged have ended when it returns. broken is called if
// the log cannot be written any more.
func (d *dirtyLog) start(ctx context.Context, space *translate.Space, broken func(error)) error {
	notes, drain, err := space.LogWrites(translate.PA(d.base.Size * 8 * translate.PageSize))
	if err != nil {
		return err
	}
	if err := drain.Wait(ctx); err != nil {
		notes.Stop()
		return err
	}
	d.notes, d.done = notes, make(chan struct{})
	ctx, d.end = context.WithCancel(ctx)
	go func() {
		defer close(d.done)
		for wait := flushEvery; ; {
			select {
			case <-ctx.Done():
				return
			case <-time.After(wait):
			}
			began := time.Now()
			if err := d.flush(ctx); err != nil {
				if ctx.Err() == nil {
					broken(err)
				}
				return
			}
			wait = max(flushEvery, 50*time.Since(began)) // a fiftieth of a core, however large the log is
		}
	}()
	return nil
}

// stop ends the logging.
func (d *dirtyLog) stop() {
	if d.notes != nil {
		d.end()
		<-d.done
		d.notes.Stop()
		d.notes = nil
	}
}

func (d *dirtyLog) close() {
	d.stop()
	d.Close()
}

func (k *keeping) writeLog() string { return k.name + "/log" }

// keptLog is a log in the state for the next process.
type keptLog struct {
	Size   uint64 `json:"size"`
	Offset uint64 `json:"offset"`
}

// setLogBase replaces the log. The front end looks into the old one once more when it has the reply.
func (se *session) setLogBase(m *Message) ([]byte, error) {
	base, err := ParseLogBase(m.Body)
	if err != nil {
		return nil, err
	}
	next, err := openLog(m.TakeFD(0), base)
	if err != nil {
		return nil, err
	}
	logged := se.dirty != nil && se.dirty.notes != nil
	if err := se.flushLog(); err != nil {
		next.close()
		return nil, err
	}
	if se.dirty != nil {
		se.dirty.close()
	}
	se.dirty = next
	if !se.kept.inner { // a keeper has no file twice, and this is the one of the VM's network card
		se.kept.forget(se.kept.writeLog())
		se.kept.keep(se.kept.writeLog(), next.fd)
	}
	if se.logs {
		if err := se.startLog(!logged); err != nil {
			return nil, err
		}
	}
	se.saveState()
	se.tellLog()
	return AppendU64(nil, 0), nil
}

// setLogging begins to log, or ends it.
func (se *session) setLogging(on bool) error {
	if se.logs == on {
		return nil
	}
	se.logs = on
	defer se.tellLog()
	defer se.saveState()
	switch {
	case on && se.dirty != nil:
		return se.startLog(false)
	case !on && se.dirty != nil:
		se.dirty.stop()
	}
	return nil
}

// startLog begins to log. all: nobody knows what was written before.
func (se *session) startLog(all bool) error {
	d := se.dirty
	err := d.start(se.srv.ctx, se.space, func(err error) {
		se.log.Error("connection ends", "reason", err)
		se.t.Stop()
	})
	if err == nil && (all || se.unlogged) {
		se.unlogged = false
		err = translate.Guard(func() error {
			for _, r := range se.regions {
				d.markRange(r.GuestPA, r.Size)
			}
			return nil
		})
	}
	return err
}

// tellLog tells the follower where to log.
func (se *session) tellLog() {
	f := se.srv.cfg.Follower
	switch d := se.dirty; {
	case f == nil:
	case d == nil || !se.logs:
		f.Log(LogBase{}, -1)
	default:
		f.Log(d.base, d.fd)
	}
}

// flushLog sets the bits of all that was written, once the device writes no more or the log is exchanged.
func (se *session) flushLog() error {
	if d := se.dirty; d != nil && d.notes != nil {
		return d.flush(se.srv.ctx)
	}
	return nil
}

// closeLog ends the log with the connection.
func (se *session) closeLog() {
	if d := se.dirty; d != nil {
		se.dirty = nil
		d.close()
	}
}

// adoptLog continues the previous process's log. The memory is known, and no ring runs. A front end within this process
// names the log again, and until then nobody takes note of what is written.
func (se *session) adoptLog(s *keptState, kept Kept) error {
	if se.kept.inner {
		se.logs, se.unlogged = s.Logging, s.Logging
		return nil
	}
	fd, ok := kept.Take(se.kept.writeLog())
	se.logs = s.Logging
	switch {
	case s.Log == nil:
		if ok {
			_ = unix.Close(fd)
			se.kept.forget(se.kept.writeLog())
		}
		return nil
	case !ok:
		return errors.New("the log of written pages was not kept")
	}
	base, err := ParseLogBase(LogBase{s.Log.Size, s.Log.Offset}.Append(nil))
	if err != nil {
		_ = unix.Close(fd)
		return err
	}
	if se.dirty, err = openLog(fd, base); err != nil || !s.Logging {
		return err
	}
	defer se.tellLog()
	return se.startLog(true)
}
