//go:build ignore

// Package verbs is a small binding of libibverbs, which verbs_test.go tests.
package verbs

// #cgo LDFLAGS: -libverbs
// #include <stdlib.h>
// #include <infiniband/verbs.h>
import "C"

import "fmt"

// Device is an open RDMA device with a protection domain.
type Device struct {
	ctx *C.struct_ibv_context
	pd  *C.struct_ibv_pd
}

// Open opens the first device.
func Open() (*Device, error) {
	list, err := C.ibv_get_device_list(nil)
	if list == nil {
		return nil, fmt.Errorf("ibv_get_device_list: %w", err)
	}
	defer C.ibv_free_device_list(list)
	if *list == nil {
		return nil, fmt.Errorf("no RDMA device")
	}
	ctx, err := C.ibv_open_device(*list)
	if ctx == nil {
		return nil, fmt.Errorf("ibv_open_device: %w", err)
	}
	pd, err := C.ibv_alloc_pd(ctx)
	if pd == nil {
		C.ibv_close_device(ctx)
		return nil, fmt.Errorf("ibv_alloc_pd: %w", err)
	}
	return &Device{ctx, pd}, nil
}

// Name returns the device's name.
func (d *Device) Name() string { return C.GoString(C.ibv_get_device_name(d.ctx.device)) }

// Close closes the device, whose memory must have been deregistered.
func (d *Device) Close() error {
	if n := C.ibv_dealloc_pd(d.pd); n != 0 {
		return fmt.Errorf("ibv_dealloc_pd: error %d", n)
	}
	C.ibv_close_device(d.ctx)
	return nil
}

// Memory is registered memory.
type Memory struct{ mr *C.struct_ibv_mr }

// Allocate makes n bytes of memory and registers them for reading by the device.
func (d *Device) Allocate(n int) (*Memory, error) {
	p := C.calloc(1, C.size_t(n))
	if p == nil {
		return nil, fmt.Errorf("no memory for %d bytes", n)
	}
	mr, err := C.ibv_reg_mr(d.pd, p, C.size_t(n), 0)
	if mr == nil {
		C.free(p)
		return nil, fmt.Errorf("ibv_reg_mr of %d bytes: %w", n, err)
	}
	return &Memory{mr}, nil
}

// Len returns how many bytes are registered.
func (m *Memory) Len() int { return int(m.mr.length) }

// LKey returns the memory's local key.
func (m *Memory) LKey() uint32 { return uint32(m.mr.lkey) }

// Free deregisters and frees the memory.
func (m *Memory) Free() error {
	p := m.mr.addr
	if n := C.ibv_dereg_mr(m.mr); n != 0 {
		return fmt.Errorf("ibv_dereg_mr: error %d", n)
	}
	C.free(p)
	return nil
}
