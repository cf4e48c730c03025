package frontend

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/virtio"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
)

// Config describes a connection.
type Config struct {
	Path   string  // the back end's socket
	Memory *Memory // owned by the caller, may be planned only; close it after the device

	Features  uint64 // features to accept if offered, beside VERSION_1, EVENT_IDX and INDIRECT_DESC
	Refuse    uint64 // features not to accept, whatever is offered
	NumQueues int    // 0: as many as the back end offers
	QueueSize int    // 0: 256
}

// ringFeatures are the optional features of virtqueues that Queue implements.
const ringFeatures = virtio.FeatureEventIdx | virtio.FeatureIndirectDesc

// Device is a connection with all of its queues running.
type Device struct {
	client   *Client
	mem      *Memory
	features uint64
	proto    uint64
	queues   []*Queue

	changed chan struct{} // capacity 1: configuration changed
	gone    chan struct{} // closed when the back end has closed its channel
	backend *vhostuser.Transport
	wg      sync.WaitGroup
	once    sync.Once
}

// wantProto are the protocol features that this front end understands.
const wantProto = vhostuser.ProtoMQ | vhostuser.ProtoReplyAck | vhostuser.ProtoBackendReq | vhostuser.ProtoConfig |
	vhostuser.ProtoResetDevice | vhostuser.ProtoConfigureMemSlots | vhostuser.ProtoStatus |
	vhostuser.ProtoMemory | vhostuser.ProtoLogSHMFD

// Open connects, negotiates, passes the memory and starts the queues, in QEMU's order.
func Open(ctx context.Context, cfg Config) (_ *Device, err error) {
	c, err := Dial(ctx, cfg.Path)
	if err != nil {
		return nil, err
	}
	d := &Device{client: c, mem: cfg.Memory, changed: make(chan struct{}, 1), gone: make(chan struct{})}
	defer func() {
		if err != nil {
			d.Close()
		}
	}()
	if cfg.QueueSize == 0 {
		cfg.QueueSize = 256
	}
	if err := d.negotiate(cfg); err != nil {
		return nil, err
	}
	n := cfg.NumQueues
	if n == 0 {
		num, err := c.QueueNum()
		if err != nil {
			return nil, err
		}
		if num == 0 || num > vhostuser.MaxQueues {
			return nil, fmt.Errorf("frontend: back end has %d queues, want 1 to %d", num, vhostuser.MaxQueues)
		}
		n = int(num)
	}
	for i := range n {
		q, err := newQueue(d.mem, i, cfg.QueueSize, d.features&virtio.FeatureRingPacked != 0,
			d.features&virtio.FeatureEventIdx != 0, d.features&virtio.FeatureIndirectDesc != 0)
		if err != nil {
			return nil, err
		}
		d.queues = append(d.queues, q)
	}
	for i := range d.queues {
		if err := d.StartQueue(i); err != nil {
			return nil, fmt.Errorf("frontend: start queue %d: %w", i, err)
		}
	}
	return d, d.driverOK()
}

func (d *Device) driverOK() error {
	if d.proto&vhostuser.ProtoStatus == 0 {
		return nil
	}
	return d.client.SetStatus(virtio.StatusAcknowledge | virtio.StatusDriver | virtio.StatusFeaturesOK |
		virtio.StatusDriverOK)
}

func (d *Device) negotiate(cfg Config) error {
	c := d.client
	offered, err := c.GetFeatures()
	if err != nil {
		return err
	}
	if offered&virtio.FeatureVersion1 == 0 || offered&vhostuser.FeatureProtocolFeatures == 0 {
		return fmt.Errorf("frontend: back end offers features %#x, want VERSION_1 and PROTOCOL_FEATURES among them", offered)
	}
	proto, err := c.GetProtocolFeatures()
	if err != nil {
		return err
	}
	d.proto = proto & wantProto
	if err := c.SetProtocolFeatures(d.proto); err != nil {
		return err
	}
	if err := c.SetOwner(); err != nil {
		return err
	}
	if d.proto&vhostuser.ProtoBackendReq != 0 {
		if err := d.openBackend(); err != nil {
			return err
		}
	}
	if d.proto&vhostuser.ProtoStatus != 0 {
		if err := c.SetStatus(0); err != nil {
			return err
		}
		if err := c.SetStatus(virtio.StatusAcknowledge | virtio.StatusDriver); err != nil {
			return err
		}
	}
	want := cfg.Features | virtio.FeatureVersion1 | vhostuser.FeatureProtocolFeatures | ringFeatures
	d.features = offered & want &^ cfg.Refuse
	if err := c.SetFeatures(d.features); err != nil {
		return err
	}
	if d.proto&vhostuser.ProtoStatus != 0 {
		s := uint8(virtio.StatusAcknowledge | virtio.StatusDriver | virtio.StatusFeaturesOK)
		if err := c.SetStatus(s); err != nil {
			return err
		}
		got, err := c.GetStatus()
		if err != nil {
			return err
		}
		if got&virtio.StatusFeaturesOK == 0 {
			return fmt.Errorf("frontend: back end does not accept features %#x", d.features)
		}
	}
	if err := d.makeMemory(); err != nil {
		return err
	}
	return d.setMemory()
}

// makeMemory gives planned memory a file, of the back end if that offers it (vhostuser.ReqGetMemory).
func (d *Device) makeMemory() error {
	switch {
	case d.mem.fd >= 0:
		return nil
	case d.proto&vhostuser.ProtoMemory == 0:
		return d.mem.Make()
	}
	fd, err := d.client.GetMemory(d.mem.size)
	if err != nil {
		return err
	}
	return d.mem.use(fd)
}

func (d *Device) setMemory() error {
	regions := d.mem.Regions()
	if d.proto&vhostuser.ProtoConfigureMemSlots != 0 {
		for _, r := range regions {
			if err := d.client.AddMemReg(r, d.mem.FD()); err != nil {
				return err
			}
		}
		return nil
	}
	fds := make([]int, len(regions))
	for i := range fds {
		fds[i] = d.mem.FD()
	}
	return d.client.SetMemTable(regions, fds...)
}

// AddMemory gives the back end another range, in the file fd from offset on. Those of the device's own Memory stay.
func (d *Device) AddMemory(r Range, fd int, offset uint64) error {
	if d.proto&vhostuser.ProtoConfigureMemSlots == 0 {
		return errors.New("frontend: the back end cannot be given memory while it runs (CONFIGURE_MEM_SLOTS)")
	}
	v := r.region()
	v.Offset = offset
	return d.client.AddMemReg(v, fd)
}

// RemoveMemory takes a range back, and returns when the back end does not access it any more.
func (d *Device) RemoveMemory(r Range) error { return d.client.RemMemReg(r.region()) }

// StartQueue describes queue i to the device and starts it at the ring's position. Open does so for all queues; call it
// after a reset or StopQueue.
func (d *Device) StartQueue(i int) error {
	q, c := d.queues[i], d.client
	if err := c.SetVringNum(i, uint32(q.size)); err != nil {
		return err
	}
	if err := c.SetVringBase(i, q.resumeAt()); err != nil {
		return err
	}
	err := c.SetVringAddr(vhostuser.VringAddr{
		Index: uint32(i), Desc: d.mem.UserAddr(q.descPA), Avail: d.mem.UserAddr(q.availPA), Used: d.mem.UserAddr(q.usedPA),
	})
	if err != nil {
		return err
	}
	if err := c.SetVringCall(i, q.CallFD()); err != nil {
		return err
	}
	if err := c.SetVringKick(i, q.kickFD); err != nil {
		return err
	}
	return c.SetVringEnable(i, true)
}

// openBackend makes the channel for the back end's own messages.
func (d *Device) openBackend() error {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("frontend: socketpair: %w", err)
	}
	f := os.NewFile(uintptr(fds[0]), "backend channel")
	conn, err := net.FileConn(f)
	_ = f.Close()
	if err != nil {
		_ = unix.Close(fds[1])
		return fmt.Errorf("frontend: back-end channel: %w", err)
	}
	d.backend = vhostuser.NewTransport(conn.(*net.UnixConn))
	err = d.client.SetBackendReqFD(fds[1])
	_ = unix.Close(fds[1])
	if err != nil {
		_ = d.backend.Close()
		d.backend = nil // Close does not wait for a back end that has not got it
		return err
	}
	d.wg.Add(1)
	go d.listen()
	return nil
}

// listen reads the back end's messages until the channel closes.
func (d *Device) listen() {
	defer d.wg.Done()
	defer close(d.gone)
	var m vhostuser.Message
	for {
		err := d.backend.Recv(&m, func(h vhostuser.Header) error {
			if h.Request != vhostuser.BackendConfigChange || h.Size != 0 {
				return fmt.Errorf("frontend: unexpected back-end request %d", uint32(h.Request))
			}
			return nil
		})
		if err != nil {
			return
		}
		select {
		case d.changed <- struct{}{}:
		default:
		}
		if m.NeedReply() {
			h := vhostuser.Header{Request: m.Request, Flags: vhostuser.FlagVersion | vhostuser.FlagReply}
			if err := d.backend.Send(h, vhostuser.AppendU64(nil, 0)); err != nil {
				return
			}
		}
	}
}

// Client is the connection, for single messages.
func (d *Device) Client() *Client { return d.client }

// Features are the negotiated features.
func (d *Device) Features() uint64 { return d.features }

// NumQueues is the number of queues that were started.
func (d *Device) NumQueues() int { return len(d.queues) }

// Queue returns queue i.
func (d *Device) Queue(i int) *Queue { return d.queues[i] }

// ConfigChanged delivers one value after one or more changes of the configuration space.
func (d *Device) ConfigChanged() <-chan struct{} { return d.changed }

// Gone is closed when the back end has closed its channel.
func (d *Device) Gone() <-chan struct{} { return d.gone }

// ReadConfig reads the configuration space.
func (d *Device) ReadConfig(dst []byte, off uint32) error { return d.client.GetConfig(dst, off) }

// StopQueue stops queue i in the device. StartQueue resumes it.
func (d *Device) StopQueue(i int) error {
	if err := d.client.SetVringEnable(i, false); err != nil {
		return err
	}
	base, err := d.client.GetVringBase(i)
	if err != nil {
		return err
	}
	return d.queues[i].stoppedAt(base)
}

// closePatience is how long Close waits for the back end to stop using the memory.
const closePatience = 10 * time.Second

// Close closes the connection, joins what Open started and frees the queues' memory. With a back-end channel it waits
// until the back end has stopped using the memory, which then closes that channel. It may be called twice.
func (d *Device) Close() error {
	var err error
	d.once.Do(func() {
		if d.backend != nil && d.client.Finish() == nil {
			t := time.NewTimer(closePatience)
			defer t.Stop()
			select {
			case <-d.gone:
			case <-t.C:
			}
		}
		err = d.client.Close()
		if errors.Is(err, net.ErrClosed) {
			err = nil
		}
		if d.backend != nil {
			_ = d.backend.Close()
			d.wg.Wait()
		}
		for _, q := range d.queues {
			q.close()
		}
	})
	return err
}
