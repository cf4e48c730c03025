package frontend

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/vnicd/vnicd/translate"
)

// Uint32 returns the aligned word of memory at pa, which is shared with the device.
func (m *Memory) Uint32(pa translate.PA) (*atomic.Uint32, error) {
	if pa%4 != 0 {
		return nil, fmt.Errorf("frontend: %v is no multiple of 4", pa)
	}
	b, err := m.Bytes(pa, 4)
	if err != nil {
		return nil, err
	}
	// The mapping is page-aligned, pa is 4-aligned, and b spans 4 bytes.
	return (*atomic.Uint32)(unsafe.Pointer(unsafe.SliceData(b))), nil
}
