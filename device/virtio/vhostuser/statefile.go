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
	if _, err := pwrite(fd, second, int64(half)); err != nil {
		return err
	}
	if half == keptSize/2 && len(b) <= oldKeptSize/2 { // an older vnicd may have left a copy there
		if _, err := pwrite(fd, []byte{0}, oldKeptSize/2); err != nil {
			return err
		}
	}
	_, err = pwrite(fd, b, 0)
	return err
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

// readState returns the state that was stored last.
func readState(fd int) (keptState, error) {
	s, err := stateAt(fd, 0, markOff)
	for _, half := range []int64{oldKeptSize / 2, keptSize / 2} { // an older vnicd may have written last
		if errors.Is(err, errTorn) {
			s, err = stateAt(fd, half, markOff)
		}
	}
	return s, err
}

func stateAt(fd int, off, n int64) (s keptState, err error) {
	b, err := io.ReadAll(io.NewSectionReader(stateFile(fd), off, n))
	if err != nil {
		return s, err
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	err = dec.Decode(&s)
	if !bytes.HasPrefix(b, []byte(sumPrefix)) {
		if off > 0 {
			err = errTorn // copies have had sums from the beginning
		}
		return s, err
	}
	if end := int(dec.InputOffset()); err != nil || end < len(sumPrefix)+sumLen || sumOf(b[:end]) != s.Sum {
		return keptState{}, errTorn
	}
	return s, nil
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
