package rstream

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"

	"github.com/vnicd/vnicd/guestdrv"
)

// Iomaps: an end maps memory, the peer writes into it at offsets that the end has chosen, by WRITEs of which the end is
// not told. Each end has a table of what the peer has mapped, behind its target SGL.

// iomap is an rs_iomap: memory that a peer has mapped at an offset.
type iomap struct {
	offset uint64
	sge
}

const (
	iomapLen = 24
	// maxIOMaps bounds a table: up to there its length is a byte of the private data as it is.
	maxIOMaps = 128
)

func (m iomap) encode(b []byte, o binary.ByteOrder) {
	o.PutUint64(b, m.offset)
	m.sge.encode(b[8:], o)
}

func decodeIOMap(b []byte, o binary.ByteOrder) iomap {
	return iomap{offset: o.Uint64(b), sge: decodeSGE(b[8:], o)}
}

// iomaps is a stream's part for them. Both tables are what the private data says.
type iomaps struct {
	table []iomap // copies of this end's entries, as of the messages that announced them
	read  func(i int) iomap

	theirs sge // the peer's table; its length is a number of entries, at most maxIOMaps
}

// arrive handles the message that an entry has been written.
func (m *iomaps) arrive(i uint32) error {
	if uint64(i) >= uint64(len(m.table)) {
		return violation("iomap update of entry %d, but this end has announced %d iomaps", i, len(m.table))
	}
	x := m.read(int(i))
	if n := uint64(x.length); !x.holds(n) || n > 0 && x.offset > math.MaxUint64-(n-1) {
		return violation("iomap of %d bytes at %#x, offset %#x, exceeds the address space", n, x.addr, x.offset)
	}
	m.table[i] = x
	return nil
}

// find returns where the byte at an offset is, and how many bytes follow it there.
func (m *iomaps) find(offset uint64) (to guestdrv.Remote, n uint32, ok bool) {
	for _, x := range m.table {
		if d := offset - x.offset; d < uint64(x.length) {
			return x.remote(d), x.length - uint32(d), true
		}
	}
	return to, 0, false
}

// announce returns the WRITE of entry i of the peer's table. output.ready permits it.
func (s *stream) announce(i int) post {
	return s.out.message(s.iomaps.theirs.remote(uint64(i)*iomapLen), newMessage(opIOMap, uint32(i)))
}

// Mapping is memory into which the peer writes.
type Mapping struct {
	c     *Conn
	index int // in the peer's table
	mr    *guestdrv.MR
}

// Map lets the peer write to n bytes of b from off on, as riomap of rsockets does with PROT_WRITE: what it writes at an
// offset from at on (WriteAt, riowrite) goes there, and this end is not told. What it sends afterwards arrives
// afterwards, so that a message can tell. Data that this end writes after Map has returned reaches the peer when it
// knows of the mapping. Ranges of offsets should not overlap: the peer takes the first one.
//
// Map waits as Write does. It fails with ErrNoRoom if the peer has room for no more mappings (Config.Maps,
// RDMA_IOMAPSIZE of rsockets). rsockets do not give back the credit that announcing a mapping takes: as often as a
// connection has credits (384, unless the peer's program sets another number) it may be called with such a peer.
//
// b must not be closed before the Mapping, which ends with the connection at the latest.
func (c *Conn) Map(b *guestdrv.Buffer, off, n int, at int64) (*Mapping, error) {
	m, err := c.mapBuffer(b, off, n, at)
	if err != nil {
		return nil, c.opError("map", err)
	}
	return m, nil
}

func (c *Conn) mapBuffer(b *guestdrv.Buffer, off, n int, at int64) (_ *Mapping, err error) {
	if n <= 0 || int64(n) > math.MaxUint32 || at < 0 || at > math.MaxInt64-int64(n) {
		return nil, invalid("mapping of %d bytes at offset %d", n, at)
	}
	c.writing.Lock()
	defer c.writing.Unlock()
	m := &Mapping{c: c}
	if err := c.reserve(m); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.Close())
		}
	}()
	mr, err := c.mem.pd.RegisterRange(c.ctx, b, off, n, guestdrv.AccessLocalWrite|guestdrv.AccessRemoteWrite)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	m.mr = mr
	c.mu.Unlock()
	first := mr.Remote(0)
	var entry [iomapLen]byte
	iomap{uint64(at), sge{addr: first.Addr, key: first.RKey, length: uint32(n)}}.encode(entry[:], c.order)
	err = c.whenReady(func() (bool, error) {
		if !c.s.out.ready() {
			return false, nil
		}
		c.post(c.s.announce(m.index), dataID, entry[:], guestdrv.SGE{})
		return true, c.err
	})
	return m, err
}

// reserve finds a place for a mapping in the peer's table.
func (c *Conn) reserve(m *Mapping) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.writeState(); err != nil {
		return err
	}
	for i, x := range c.mappings {
		if x == nil {
			m.index, c.mappings[i] = i, m
			return nil
		}
	}
	return fmt.Errorf("%w: it has room for %d mappings", ErrNoRoom, len(c.mappings))
}

// Close takes the memory back, as riounmap does. When it returns nil, the peer writes to it no more (EP-3); the peer is
// not told: a WriteAt of its ends the connection then. It may be repeated.
func (m *Mapping) Close() error {
	m.c.mu.Lock()
	mr := m.mr
	m.c.mu.Unlock()
	if mr != nil {
		if err := mr.Close(); err != nil && m.c.cm.Manager().Device().Err() == nil {
			return m.c.opError("unmap", err)
		}
	}
	m.c.mu.Lock()
	defer m.c.mu.Unlock()
	if m.c.mappings[m.index] == m {
		m.c.mappings[m.index] = nil
	}
	return nil
}

// unmap ends all mappings.
func (c *Conn) unmap() error {
	c.mu.Lock()
	all := append([]*Mapping(nil), c.mappings...)
	c.mu.Unlock()
	for _, m := range all {
		if m == nil {
			continue
		}
		if err := m.Close(); err != nil {
			return err
		}
	}
	return nil
}

var _ io.WriterAt = (*Conn)(nil)

// WriteAt writes b into the memory that the peer has mapped at offset off and behind it (Map, riomap), as riowrite of
// rsockets does. It returns when the data is on its way; what Write sends afterwards arrives afterwards. It fails with
// ErrNotMapped where the peer has mapped nothing, as far as its messages have arrived: n bytes have been written then.
// Memory that the peer has unmapped meanwhile ends the connection.
func (c *Conn) WriteAt(b []byte, off int64) (n int, err error) {
	if off < 0 {
		return 0, c.opError("write", invalid("offset %d", off))
	}
	c.writing.Lock()
	defer c.writing.Unlock()
	for n < len(b) && err == nil {
		err = c.whenReady(func() (bool, error) {
			k, err := c.writeDirect(b[n:], uint64(off)+uint64(n))
			n += k
			return k > 0, err
		})
	}
	if err != nil {
		return n, c.opError("write", err)
	}
	return n, nil
}

// writeDirect posts a WRITE of the first bytes of b, as far as there is room. c.writing and c.mu are held.
func (c *Conn) writeDirect(b []byte, offset uint64) (n int, err error) {
	to, room, ok := c.s.iomaps.find(offset)
	if !ok {
		return 0, fmt.Errorf("%w at offset %#x", ErrNotMapped, offset)
	}
	n, inline := c.s.out.planDirect(int(min(uint64(len(b)), uint64(room))))
	if n == 0 {
		return 0, nil
	}
	off, err := c.stage(b[:n], inline)
	if err != nil {
		return 0, err
	}
	c.postStaged(c.s.out.direct(to, n, inline), b[:n], off, inline)
	return n, c.err
}

// whenReady calls try, with c.mu held, until it reports that it is done, whenever the connection's state has changed.
// It fails as Write does. c.writing is held.
func (c *Conn) whenReady(try func() (done bool, err error)) error {
	for {
		c.mu.Lock()
		err := c.writeState()
		done := false
		if err == nil {
			done, err = try()
		}
		c.mu.Unlock()
		if done || err != nil {
			return err
		}
		select {
		case <-c.writable:
		case <-c.writeDeadline.done():
		case <-c.closing:
		}
	}
}
