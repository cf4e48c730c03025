package rstream

import (
	"context"

	"github.com/vnicd/vnicd/guestdrv"
)

// memory is the memory of a connection, one after the other: the receive buffer, a page with the target SGL and the
// table of iomaps, the send buffer. The peer may write to the first two. The protection domain is the connection's own,
// so that no other peer can use its keys.
type memory struct {
	pd      *guestdrv.PD
	buf     *guestdrv.Buffer
	exposed *guestdrv.MR // receive buffer and target SGL
	out     *guestdrv.MR // send buffer
	receive int          // bytes
	made    []interface{ Close() error }
}

const pageSize = 4096

func newMemory(ctx context.Context, dev *guestdrv.Device, cfg *Config) (_ *memory, err error) {
	m := &memory{receive: cfg.ReceiveBuffer}
	defer func() {
		if err != nil {
			_ = m.close() // err is the first error; Device.Close releases what is left
		}
	}()
	if m.pd, err = dev.AllocPD(ctx); err != nil {
		return nil, err
	}
	m.made = append(m.made, m.pd)
	shared := m.receive + pageSize
	if m.buf, err = dev.Alloc(shared + cfg.SendBuffer); err != nil {
		return nil, err
	}
	m.made = append(m.made, m.buf)
	if m.exposed, err = m.pd.RegisterRange(ctx, m.buf, 0, shared,
		guestdrv.AccessLocalWrite|guestdrv.AccessRemoteWrite); err != nil {
		return nil, err
	}
	m.made = append(m.made, m.exposed)
	if m.out, err = m.pd.RegisterRange(ctx, m.buf, shared, cfg.SendBuffer, 0); err != nil {
		return nil, err
	}
	m.made = append(m.made, m.out)
	return m, nil
}

// buffer describes the receive buffer.
func (m *memory) buffer() sge {
	return sge{addr: m.exposed.Addr(), key: m.exposed.RKey(), length: uint32(m.receive)}
}

// sgl describes the target SGL.
func (m *memory) sgl() sge {
	return sge{addr: m.exposed.Addr() + uint64(m.receive), key: m.exposed.RKey()}
}

// received returns n bytes of the receive buffer.
func (m *memory) received(off, n uint32) []byte { return m.buf.Bytes()[off:][:n] }

// outgoing returns n bytes of the send buffer.
func (m *memory) outgoing(off, n int) []byte { return m.buf.Bytes()[m.receive+pageSize+off:][:n] }

// take is stream's: it reads an entry of the target SGL, which is little-endian as this machine is, and clears its
// length. The peer's device writes an entry in ascending order of addresses, so that the address is there if key and
// length are. It does not write it again before data has gone to the buffer that the entry describes.
func (m *memory) take(i int) sge {
	off := m.receive + i*sgeLen
	word := m.buf.Load64(off + 8)
	t := sge{addr: m.buf.Load64(off), key: uint32(word), length: uint32(word >> 32)}
	if t.length != 0 {
		clear(m.buf.Bytes()[off+12:][:4])
	}
	return t
}

// readIOMap is stream's: it reads an entry of the table of iomaps.
func (m *memory) readIOMap(i int) iomap {
	off := m.receive + sglEntries*sgeLen + i*iomapLen
	word := m.buf.Load64(off + 16)
	return iomap{m.buf.Load64(off), sge{addr: m.buf.Load64(off + 8), key: uint32(word), length: uint32(word >> 32)}}
}

// close releases the memory, last first. It may be repeated after an error.
func (m *memory) close() error {
	for len(m.made) > 0 {
		i := len(m.made) - 1
		if err := m.made[i].Close(); err != nil {
			return err
		}
		m.made = m.made[:i]
	}
	return nil
}
