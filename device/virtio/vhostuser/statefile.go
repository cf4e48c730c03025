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

// The state file has a fixed size, and starts with keptState as JSON. A process can be killed between two pages of a
// write, so the state is written to the file's second half first: if the sum of the first one is wrong, the second is
// whole. Remains of a longer state, behind the JSON, are not read. Older vnicds wrote no sum, and only the first half.
const (
	keptSize = 32 << 10
	copyOff  = keptSize / 2
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
	second := b
	switch {
	case len(b) > markOff:
		return fmt.Errorf("%d bytes, at most %d fit", len(b), markOff)
	case len(b) > markOff-copyOff: // of over a hundred regions: without the protection of a copy
		second = []byte{0}
	}
	if _, err := pwrite(fd, second, copyOff); err != nil {
		return err
	}
	_, err = pwrite(fd, b, 0)
	return err
}

// readState returns the state that was stored last.
func readState(fd int) (keptState, error) {
	s, err := stateAt(fd, 0, markOff)
	if errors.Is(err, errTorn) {
		return stateAt(fd, copyOff, markOff-copyOff)
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
