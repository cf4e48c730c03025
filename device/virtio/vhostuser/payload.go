package vhostuser

import "encoding/binary"

// Sizes of the payloads in bytes.
const (
	u64Size      = 8
	stateSize    = 8
	addrSize     = 40
	regionSize   = 32
	tableHeader  = 8
	singleSize   = 8 + regionSize
	configHeader = 12
)

var ne = binary.NativeEndian

// ParseU64 decodes a payload that is a single number.
func ParseU64(b []byte) (uint64, error) {
	if len(b) != u64Size {
		return 0, protoErr("u64 of %d bytes", len(b))
	}
	return ne.Uint64(b), nil
}

// AppendU64 encodes a number.
func AppendU64(b []byte, v uint64) []byte { return ne.AppendUint64(b, v) }

// VringState is "a vring state description": a queue index and a number.
type VringState struct {
	Index, Num uint32
}

// ParseVringState decodes a VringState.
func ParseVringState(b []byte) (VringState, error) {
	if len(b) != stateSize {
		return VringState{}, protoErr("vring state of %d bytes, want %d", len(b), stateSize)
	}
	return VringState{Index: ne.Uint32(b[0:4]), Num: ne.Uint32(b[4:8])}, nil
}

// Append encodes s.
func (s VringState) Append(b []byte) []byte {
	return ne.AppendUint32(ne.AppendUint32(b, s.Index), s.Num)
}

// VringAddr is "a vring address description"; the addresses are user addresses of the front end, except Log, which is a
// guest address.
type VringAddr struct {
	Index, Flags           uint32
	Desc, Used, Avail, Log uint64
}

// VringLog is VHOST_VRING_F_LOG in VringAddr.Flags. A device that logs its writes logs those to rings, too, whatever
// the flag is.
const VringLog = 1

// ParseVringAddr decodes a VringAddr and checks its flags and alignment
// (virtio 1.2, 2.7).
func ParseVringAddr(b []byte) (VringAddr, error) {
	if len(b) != addrSize {
		return VringAddr{}, protoErr("vring address of %d bytes, want %d", len(b), addrSize)
	}
	a := VringAddr{
		Index: ne.Uint32(b[0:4]), Flags: ne.Uint32(b[4:8]),
		Desc: ne.Uint64(b[8:16]), Used: ne.Uint64(b[16:24]), Avail: ne.Uint64(b[24:32]), Log: ne.Uint64(b[32:40]),
	}
	switch {
	case a.Flags&^VringLog != 0:
		return a, protoErr("vring %d: address flags %#x, want 0 or %d", a.Index, a.Flags, VringLog)
	case a.Desc%16 != 0:
		return a, protoErr("vring %d: descriptor table at %#x, want a multiple of 16", a.Index, a.Desc)
	case a.Avail%2 != 0:
		return a, protoErr("vring %d: available ring at %#x, want a multiple of 2", a.Index, a.Avail)
	case a.Used%4 != 0:
		return a, protoErr("vring %d: used ring at %#x, want a multiple of 4", a.Index, a.Used)
	}
	return a, nil
}

// Append encodes a.
func (a VringAddr) Append(b []byte) []byte {
	b = ne.AppendUint32(ne.AppendUint32(b, a.Index), a.Flags)
	b = ne.AppendUint64(ne.AppendUint64(b, a.Desc), a.Used)
	return ne.AppendUint64(ne.AppendUint64(b, a.Avail), a.Log)
}

// VringFD is the payload of SET_VRING_KICK, _CALL and _ERR.
type VringFD struct {
	Index uint32 // 0..255
	NoFD  bool   // without a descriptor: the other side polls
}

const vringNoFD = 1 << 8 // VHOST_USER_VRING_NOFD_MASK

// ParseVringFD decodes a VringFD that came with fds descriptors.
func ParseVringFD(b []byte, fds int) (VringFD, error) {
	v, err := ParseU64(b)
	if err != nil {
		return VringFD{}, err
	}
	if v&^uint64(vringNoFD|0xff) != 0 {
		return VringFD{}, protoErr("vring descriptor word %#x, want nothing above bit 8", v)
	}
	f := VringFD{Index: uint32(v & 0xff), NoFD: v&vringNoFD != 0}
	want := 1
	if f.NoFD {
		want = 0
	}
	if fds != want {
		return f, protoErr("vring %d: %d file descriptors, want %d", f.Index, fds, want)
	}
	return f, nil
}

// Append encodes f.
func (f VringFD) Append(b []byte) []byte {
	v := uint64(f.Index & 0xff)
	if f.NoFD {
		v |= vringNoFD
	}
	return ne.AppendUint64(b, v)
}

// Region is "a memory region description": Size bytes at Offset of a file are
// the guest's memory at GuestPA and the front end's at UserAddr.
type Region struct {
	GuestPA, Size, UserAddr, Offset uint64
}

const pageMask = 4096 - 1

// check verifies one region on its own. The file's length is checked when it is mapped.
func (r Region) check() error {
	switch {
	case r.Size == 0:
		return protoErr("memory region at PA %#x is empty", r.GuestPA)
	case (r.GuestPA|r.Size|r.UserAddr|r.Offset)&pageMask != 0:
		return protoErr("memory region PA %#x, size %#x, user address %#x, offset %#x: want multiples of 4096",
			r.GuestPA, r.Size, r.UserAddr, r.Offset)
	case r.GuestPA+r.Size-1 < r.GuestPA || r.UserAddr+r.Size-1 < r.UserAddr || r.Offset+r.Size-1 < r.Offset:
		return protoErr("memory region PA %#x, size %#x, user address %#x, offset %#x wraps around",
			r.GuestPA, r.Size, r.UserAddr, r.Offset)
	}
	return nil
}

// overlaps reports whether two regions overlap, in guest or in user addresses. Both have passed check.
func (r Region) overlaps(o Region) bool {
	meet := func(a, an, b, bn uint64) bool { return a <= b+bn-1 && b <= a+an-1 }
	return meet(r.GuestPA, r.Size, o.GuestPA, o.Size) || meet(r.UserAddr, r.Size, o.UserAddr, o.Size)
}

func parseRegion(b []byte) (Region, error) {
	r := Region{GuestPA: ne.Uint64(b[0:8]), Size: ne.Uint64(b[8:16]), UserAddr: ne.Uint64(b[16:24]),
		Offset: ne.Uint64(b[24:32])}
	return r, r.check()
}

// Append encodes r.
func (r Region) Append(b []byte) []byte {
	b = ne.AppendUint64(ne.AppendUint64(b, r.GuestPA), r.Size)
	return ne.AppendUint64(ne.AppendUint64(b, r.UserAddr), r.Offset)
}

// ParseMemTable decodes SET_MEM_TABLE, which came with fds descriptors, and checks that the regions do not overlap.
func ParseMemTable(b []byte, fds int) ([]Region, error) {
	if len(b) < tableHeader {
		return nil, protoErr("memory table of %d bytes, want at least %d", len(b), tableHeader)
	}
	n := ne.Uint32(b[0:4])
	if n > MaxTableRegions {
		return nil, protoErr("memory table with %d regions, want at most %d", n, MaxTableRegions)
	}
	// Some front ends always send room for eight regions.
	if len(b) < tableHeader+int(n)*regionSize {
		return nil, protoErr("memory table of %d bytes is too short for %d regions", len(b), n)
	}
	if fds != int(n) {
		return nil, protoErr("memory table with %d regions and %d file descriptors", n, fds)
	}
	t := make([]Region, n)
	for i := range t {
		var err error
		if t[i], err = parseRegion(b[tableHeader+i*regionSize:][:regionSize]); err != nil {
			return nil, err
		}
		for j := range i {
			if t[i].overlaps(t[j]) {
				return nil, protoErr("memory regions %d and %d overlap (PA %#x and %#x)", j, i, t[j].GuestPA, t[i].GuestPA)
			}
		}
	}
	return t, nil
}

// AppendMemTable encodes SET_MEM_TABLE.
func AppendMemTable(b []byte, t []Region) []byte {
	b = ne.AppendUint32(ne.AppendUint32(b, uint32(len(t))), 0)
	for _, r := range t {
		b = r.Append(b)
	}
	return b
}

// ParseMemReg decodes ADD_MEM_REG and REM_MEM_REG.
func ParseMemReg(b []byte) (Region, error) {
	if len(b) != singleSize {
		return Region{}, protoErr("memory region of %d bytes, want %d", len(b), singleSize)
	}
	return parseRegion(b[8:])
}

// AppendMemReg encodes ADD_MEM_REG and REM_MEM_REG.
func AppendMemReg(b []byte, r Region) []byte { return r.Append(ne.AppendUint64(b, 0)) }

// ConfigSpace is "virtio device config space": part of it, at an offset.
type ConfigSpace struct {
	Offset, Flags uint32
	Data          []byte
}

// ParseConfigSpace decodes GET_CONFIG, SET_CONFIG and the former's reply. Data
// is part of b.
func ParseConfigSpace(b []byte) (ConfigSpace, error) {
	if len(b) < configHeader {
		return ConfigSpace{}, protoErr("configuration of %d bytes, want at least %d", len(b), configHeader)
	}
	c := ConfigSpace{Offset: ne.Uint32(b[0:4]), Flags: ne.Uint32(b[8:12]), Data: b[configHeader:]}
	size := ne.Uint32(b[4:8])
	if uint64(size) != uint64(len(c.Data)) {
		return c, protoErr("configuration of %d bytes in a payload with room for %d", size, len(c.Data))
	}
	if uint64(c.Offset)+uint64(size) > MaxConfigSize {
		return c, protoErr("configuration bytes %d to %d, want at most %d", c.Offset, uint64(c.Offset)+uint64(size),
			MaxConfigSize)
	}
	return c, nil
}

// Append encodes c.
func (c ConfigSpace) Append(b []byte) []byte {
	b = ne.AppendUint32(ne.AppendUint32(b, c.Offset), uint32(len(c.Data)))
	return append(ne.AppendUint32(b, c.Flags), c.Data...)
}
