package rstream

import (
	"time"

	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/guestdrv/rdmacm"
)

// Config configures connections. The zero value is usable: it has the sizes of rsockets.
type Config struct {
	// SendBuffer and ReceiveBuffer are the bytes that a connection holds in each direction, rounded up to multiples of
	// 8 KiB, within 8 KiB and 256 MiB; 0 means 128 KiB. They are part of the device's memory (guestdrv.Config.Memory).
	SendBuffer, ReceiveBuffer int
	// SendQueue and ReceiveQueue are numbers of messages under way in each direction, 16..16000; 0 means 384. A Write
	// makes a message, or several if it is long.
	SendQueue, ReceiveQueue int
	// Maps is the number of mappings of the peer's that this end can write to (WriteAt), 0..128; with 0 the peer's Map
	// and riomap fail. It is RDMA_IOMAPSIZE of rsockets.
	Maps int
	// Backlog is the number of connections that wait for Listener.Accept, those being set up included, 1..4096; 0 means
	// 128. Further requests wait in the connection manager, which has a backlog of the same size.
	Backlog int
	// HandshakeTimeout bounds how long a Listener waits for a peer to complete a connection; 0 means 30 s.
	HandshakeTimeout time.Duration
	// CloseTimeout bounds how long Conn.Close waits until the peer's device has received what was written; 0 means 10 s.
	CloseTimeout time.Duration
}

const (
	defaultBuffer = 128 << 10
	minBuffer     = 8 << 10
	maxBuffer     = 256 << 20
	bufferStep    = 8 << 10 // both halves of a buffer are whole pages

	defaultQueue = 384
	minQueue     = 16 // RS_QP_MIN_SIZE
	maxQueue     = 16000

	defaultBacklog = 128
	maxBacklog     = 4096

	defaultHandshakeTimeout = 30 * time.Second
	defaultCloseTimeout     = 10 * time.Second
)

func (c Config) withDefaults(m *rdmacm.Manager) (Config, error) {
	for _, x := range []struct {
		name                  string
		n                     *int
		standard, least, most int
		step                  int
	}{
		{"SendBuffer", &c.SendBuffer, defaultBuffer, minBuffer, maxBuffer, bufferStep},
		{"ReceiveBuffer", &c.ReceiveBuffer, defaultBuffer, minBuffer, maxBuffer, bufferStep},
		{"SendQueue", &c.SendQueue, defaultQueue, minQueue, maxQueue, 1},
		{"ReceiveQueue", &c.ReceiveQueue, defaultQueue, minQueue, maxQueue, 1},
		{"Backlog", &c.Backlog, defaultBacklog, 1, maxBacklog, 1},
	} {
		if *x.n == 0 {
			*x.n = x.standard
		}
		if *x.n < x.least || *x.n > x.most {
			return c, invalid("%s of %d, expected %d..%d", x.name, *x.n, x.least, x.most)
		}
		*x.n = (*x.n + x.step - 1) / x.step * x.step
	}
	if c.Maps < 0 || c.Maps > maxIOMaps {
		return c, invalid("Maps of %d, expected 0..%d", c.Maps, maxIOMaps)
	}
	if c.HandshakeTimeout == 0 {
		c.HandshakeTimeout = defaultHandshakeTimeout
	}
	if c.CloseTimeout == 0 {
		c.CloseTimeout = defaultCloseTimeout
	}
	if c.HandshakeTimeout < 0 || c.CloseTimeout < 0 {
		return c, invalid("HandshakeTimeout %v, CloseTimeout %v: expected no negative durations", c.HandshakeTimeout,
			c.CloseTimeout)
	}
	if a := m.Device().Attr(); int64(a.MaxQPWR) < int64(max(c.SendQueue, c.ReceiveQueue)+controlSlots) ||
		a.MaxInline < maxInline {
		return c, invalid("the device has %d requests in a queue and %d bytes inline, expected %d and %d", a.MaxQPWR,
			a.MaxInline, max(c.SendQueue, c.ReceiveQueue)+controlSlots, maxInline)
	}
	return c, nil
}

// maxInline is the number of bytes up to which data is sent inline, as rsockets do by default. Entries of the target
// SGL, 16 bytes, are always sent so.
const maxInline = 64

// queuePair describes a connection's queue pair. Every send request is signaled, as with rsockets: the completions
// free the send buffer in order.
func (c *Config) queuePair() guestdrv.QPConfig {
	return guestdrv.QPConfig{MaxSendWR: c.SendQueue + controlSlots, MaxRecvWR: c.ReceiveQueue + controlSlots,
		MaxInline: maxInline, SigAll: true}
}
