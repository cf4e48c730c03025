package vhostuser

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc64"
	"io"
	"strings"

	"golang.org/x/sys/unix"
)

// The state file has a fixed size, and keptState as JSON twice, each in half of it. A process can be killed between two
// pages of a write, so the state is written to the second half first: if the sum of the first one is wrong, the second
// is whole. Remains of a longer state, behind the JSON, are not read.
//
//	keptSize      first half, ending with the mark (suspect.go); second half
//	oldKeptSize   the same of an older vnicd, in which a state of more than half of that has one copy only
//
// An older vnicd that takes over a file of keptSize uses its first oldKeptSize bytes as one of its own. Still older
// ones wrote no sum, and only the first half. The size of a file cannot change, so one of oldKeptSize stays so.
const (
	keptSize    = 64 << 10
	oldKeptSize = 32 << 10
)

// sumPrefix and sumLen are the start of a state with a sum, which covers what follows.
const (
	sumPrefix = `{"sum":"`
	sumLen    = 16
)

var (
	sumTable = crc64.MakeTable(crc64.ECMA)
	errTorn  = errors.New("a sum is wrong")

	pwrite = unix.Pwrite // changed by tests
)

func sumOf(state []byte) string {
	return fmt.Sprintf("%0*x", sumLen, crc64.Checksum(state[len(sumPrefix)+sumLen:], sumTable))
}

// writeState stores s, so that a process killed meanwhile leaves the old or the new state.
func writeState(fd int, s *keptState) error {
	s.Sum = strings.Repeat("0", sumLen)
	b, err := json.Marshal(s)
	if err != nil {
		return err
	}
	copy(b[len(sumPrefix):], sumOf(b))
	half, err := halfOf(fd)
	if err != nil {
		return err
	}
	second := b
	switch {
	case len(b) > markOff:
		return fmt.Errorf("%d bytes, at most %d fit", len(b), markOff)
	case half < keptSize/2 && len(b) > markOff-half:
		second = []byte{0}
	}
	if err := writeAll(fd, second, int64(half)); err != nil {
		return err
	}
	if half == keptSize/2 { // an older vnicd may have left a copy there; from now on the second half counts
		if err := writeAll(fd, []byte{0}, oldKeptSize/2); err != nil {
			return err
		}
	}
	return writeAll(fd, b, 0)
}

// writeAll writes b at an offset of the file, which may take several calls.
func writeAll(fd int, b []byte, off int64) error {
	for len(b) > 0 {
		n, err := pwrite(fd, b, off)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return err
		case n == 0:
			return io.ErrShortWrite
		}
		b, off = b[n:], off+int64(n)
	}
	return nil
}

// halfOf returns the place of the file's second half.
func halfOf(fd int) (int, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return 0, err
	}
	if st.Size < keptSize {
		return oldKeptSize / 2, nil
	}
	return keptSize / 2, nil
}

// readState returns the state that was stored last. If the first half is torn, it gets the state again, before the next
// write may be torn in the second one.
func readState(fd int) (keptState, error) {
	s, _, err := stateAt(fd, 0)
	for _, half := range []int64{oldKeptSize / 2, keptSize / 2} { // an older vnicd may have written last
		if !errors.Is(err, errTorn) {
			break
		}
		var b []byte
		if s, b, err = stateAt(fd, half); err == nil {
			err = writeAll(fd, b, 0)
		}
	}
	return s, err
}

// stateAt returns the state at an offset of the file, also in its encoded form.
func stateAt(fd int, off int64) (s keptState, b []byte, err error) {
	if b, err = io.ReadAll(io.NewSectionReader(stateFile(fd), off, markOff)); err != nil {
		return s, nil, err
	}
	summed := bytes.HasPrefix(b, []byte(sumPrefix))
	dec := json.NewDecoder(bytes.NewReader(b))
	err = dec.Decode(&s)
	b = b[:dec.InputOffset()]
	switch {
	case !summed && off == 0: // the very first versions; copies have had sums from the beginning
		return s, b, err
	case !summed || err != nil || len(b) < len(sumPrefix)+sumLen || sumOf(b) != s.Sum:
		return keptState{}, nil, errTorn
	}
	return s, b, nil
}

// stateFile is an io.ReaderAt of the state file.
type stateFile int

// ReadAt implements io.ReaderAt.
func (f stateFile) ReadAt(b []byte, off int64) (int, error) {
	n, err := unix.Pread(int(f), b, off)
	if n == 0 && err == nil {
		err = io.EOF
	}
	return max(n, 0), err
}
