package ivshmem

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/loop/eventfd"
	"github.com/vnicd/vnicd/device/virtio"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
	"github.com/vnicd/vnicd/translate"
)

// session is the attachment of one QEMU. Server.mu guards it, but for bar, whose words are atomic.
type session struct {
	srv     *Server
	qemu    *net.UnixConn
	bar     *bar
	in, out []int           // eventfds: doorbells of the device's peer, and interrupts of QEMU's, by vector
	bell    *eventfd.Waiter // in[0]
	hint    eventfd.Hint    // of out[0]
	dev     *frontend.Client
	channel *net.UnixConn // of notices from the device
	config  []byte

	unsure   bool               // the previous process may not have answered the newest request
	answered uint32             // number of the newest request
	offered  uint64             // features
	features uint64             // acknowledged, while the status has FEATURES_OK
	has      []vhostuser.Region // guest memory that the device knows
	was      *vhostuser.Resumed // of the previous process's session
	status   uint32             // virtio's device status
	queues   [MaxQueues]queue
	bases    [MaxQueues]uint32
	movable  bool          // the device's state can be saved and loaded
	running  bool          // the device has the queues
	ran      bool          // it had, or the driver has asked for something: no state is to come from elsewhere
	ready    bool          // false: it is being resumed, which only the goroutine that does so is to disturb
	begun    chan struct{} // closed when it is ready, or has failed to become so
	failed   error
}

const (
	protocol = vhostuser.ProtoMQ | vhostuser.ProtoReplyAck | vhostuser.ProtoBackendReq | vhostuser.ProtoConfig |
		vhostuser.ProtoStatus | vhostuser.ProtoConfigureMemSlots | vhostuser.ProtoLogSHMFD | vhostuser.ProtoDeviceState

	// What the registers can express: split rings, no vIOMMU.
	driverFeatures = 1<<24 - 1 | virtio.FeatureIndirectDesc | virtio.FeatureEventIdx | virtio.FeatureVersion1

	statusBits = virtio.StatusAcknowledge | virtio.StatusDriver | virtio.StatusDriverOK | virtio.StatusFeaturesOK |
		virtio.StatusFailed
)

// newSession connects with the device, and gives QEMU what it needs. The caller holds Server.mu; after an error c is
// the caller's.
func newSession(s *Server, c *net.UnixConn) (*session, error) {
	se := &session{srv: s, qemu: c, ready: true, begun: make(chan struct{})}
	if err := se.begin(); err != nil {
		se.qemu = nil
		se.close()
		return nil, err
	}
	return se, nil
}

// begin does the work of newSession; what it has made is in se, also after an error.
func (se *session) begin() (err error) {
	if se.bar, err = newBar(); err != nil {
		return err
	}
	for range Vectors(se.srv.cfg.Queues) {
		for _, list := range []*[]int{&se.in, &se.out} {
			fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
			if err != nil {
				return os.NewSyscallError("eventfd", err)
			}
			*list = append(*list, fd)
		}
	}
	if err := se.makeBell(); err != nil {
		return err
	}
	if err := se.connect(); err != nil {
		return err
	}
	se.describe()
	kerr := se.keepParts()
	if err := se.introduce(); err != nil {
		return err
	}
	if kerr == nil {
		kerr = se.keepConnection()
	}
	if kerr != nil {
		se.srv.log.Warn("the VM will lose its HCA when vnicd restarts", "socket", se.srv.cfg.Path, "error", kerr)
		se.forget()
	}
	return nil
}

func (se *session) makeBell() (err error) {
	se.bell, err = eventfd.Dup(se.in[0])
	return err
}

// connect makes the device's connection, with the guest memory that is known.
func (se *session) connect() error {
	conn, err := se.srv.cfg.Device.Connect()
	if err != nil {
		return err
	}
	se.dev = frontend.NewClient(conn)
	if err := se.dev.SetOwner(); err != nil {
		return err
	}
	if err := se.ask(); err != nil {
		return err
	}
	if err := se.openChannel(); err != nil {
		return err
	}
	for _, r := range se.srv.regions {
		se.addMemory(r)
	}
	se.setLog()
	return nil
}

// ask learns what the device offers.
func (se *session) ask() error {
	all, err := se.dev.GetFeatures()
	if err != nil {
		return err
	}
	se.offered = all & driverFeatures
	may, err := se.dev.GetProtocolFeatures()
	if err != nil {
		return err
	}
	se.movable = may&vhostuser.ProtoDeviceState != 0
	if err := se.dev.SetProtocolFeatures(protocol & may); err != nil {
		return err
	}
	se.config = make([]byte, maxConfig/2)
	return se.dev.GetConfig(se.config, 0)
}

// openChannel lets the device send notices.
func (se *session) openChannel() error {
	theirs, ours, err := socketpair()
	if err != nil {
		return err
	}
	defer unix.Close(theirs)
	se.channel = ours
	return se.dev.SetBackendReqFD(theirs)
}

func socketpair() (theirs int, ours *net.UnixConn, err error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, nil, os.NewSyscallError("socketpair", err)
	}
	f := os.NewFile(uintptr(pair[1]), "vhost-user channel")
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		_ = unix.Close(pair[0])
		return -1, nil, err
	}
	return pair[0], c.(*net.UnixConn), nil
}

// describe fills in the device's part of the registers.
func (se *session) describe() {
	b, cfg := se.bar, &se.srv.cfg
	b.put32(offVersion, version)
	b.put32(offVirtioID, cfg.VirtioID)
	b.put32(offPeer, devicePeer)
	b.put32(offNumQueues, uint32(cfg.Queues))
	b.put32(offNumVectors, uint32(len(se.in)))
	b.put32(offConfigSize, uint32(len(se.config)))
	le.PutUint64(b.mem[offFeatures:], se.offered)
	le.PutUint16(b.mem[offMaxSize:], maxSize)
	b.setConfig(se.config)
	le.PutUint64(b.mem[offMagic:], magic)
}

// introduce sends QEMU the memory and the eventfds: those of the device's peer, whose doorbells the guest rings, then
// QEMU's own, which are its interrupts.
func (se *session) introduce() error {
	if err := se.qemu.SetWriteDeadline(time.Now().Add(sendTimeout)); err != nil {
		return err
	}
	send := func(v int64, fds ...int) error {
		var oob []byte
		if len(fds) > 0 {
			oob = unix.UnixRights(fds...)
		}
		n, _, err := se.qemu.WriteMsgUnix(le.AppendUint64(nil, uint64(v)), oob, nil)
		if err == nil && n < 8 {
			err = io.ErrShortWrite
		}
		return err
	}
	err := errors.Join(send(0), send(0), send(-1, se.bar.fd)) // version, QEMU's peer number, memory
	for _, fd := range se.in {
		err = errors.Join(err, send(devicePeer, fd))
	}
	for _, fd := range se.out {
		err = errors.Join(err, send(0, fd))
	}
	if err != nil {
		return fmt.Errorf("telling QEMU about the device: %w", err)
	}
	return nil
}

// run serves the session until QEMU closes the connection.
func (se *session) run() error {
	var wg sync.WaitGroup
	serve := func(f func()) {
		wg.Add(1)
		go func() {
			defer wg.Done()
			// A bug ends the session and not the process (TR-6).
			if err := translate.Contain(func() error { f(); return nil }); err != nil {
				se.srv.mu.Lock()
				defer se.srv.mu.Unlock()
				se.fail(err)
			}
		}()
	}
	serve(func() {
		se.requests() // the previous process may have left one
		_ = se.bell.Wait(func() bool { se.requests(); return false })
	})
	serve(func() {
		for buf := make([]byte, 256); ; { // the sender is this process: what it sends says that config space has changed
			_, err := se.channel.Read(buf)
			if errors.Is(err, io.EOF) {
				se.srv.mu.Lock()
				se.fail(errors.New("connection closed"))
				se.srv.mu.Unlock()
			}
			if err != nil {
				return
			}
			se.configChanged()
		}
	})
	err := se.drainQEMU()
	se.bell.Close()
	_ = se.channel.SetReadDeadline(time.Now()) // close reads on
	wg.Wait()
	return err
}

// drainQEMU waits for the end of QEMU's connection. QEMU sends nothing.
func (se *session) drainQEMU() error {
	n, err := se.qemu.Read(make([]byte, 1))
	switch {
	case n > 0:
		return errors.New("it has sent data, which QEMU's ivshmem device never does")
	case err == nil, errors.Is(err, io.EOF), errors.Is(err, net.ErrClosed), errors.Is(err, unix.ECONNRESET):
		return nil
	}
	return err
}

// release disconnects the device, and reports whether it accesses no guest memory any more: it closes its channel then.
func (se *session) release() bool {
	defer se.dev.Close()
	if se.channel == nil {
		return false
	}
	_ = se.dev.Finish() // it may have ended the connection itself
	if err := se.channel.SetReadDeadline(time.Now().Add(releaseTimeout)); err != nil {
		return false
	}
	_, err := io.Copy(io.Discard, se.channel)
	return err == nil
}

// close ends the session, and tells the driver once the device accesses no guest memory any more. The caller holds
// Server.mu, or nobody else has the session.
func (se *session) close() {
	se.forget()
	switch released := se.dev == nil || se.release(); {
	case !released:
		se.srv.log.Error("device is not disconnected: it may still access the memory of the VM", "socket", se.srv.cfg.Path)
	case se.bar != nil && !se.srv.ending():
		se.bar.put32(offAnswer, ended)
	}
	if se.channel != nil {
		_ = se.channel.Close()
	}
	if se.bell != nil {
		se.bell.Close()
	}
	for _, fd := range append(se.in, se.out...) {
		_ = unix.Close(fd)
	}
	if se.bar != nil {
		se.bar.close()
	}
	if se.qemu != nil {
		_ = se.qemu.Close()
	}
}

// fail ends the session because the device's connection is broken, or because of a bug. The caller holds Server.mu.
func (se *session) fail(err error) {
	if se.failed == nil {
		se.failed = fmt.Errorf("device: %w", err)
		_ = se.qemu.CloseRead()
	}
}
