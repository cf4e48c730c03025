//go:build !amd64

package confine

// older are calls of the runtime that newer architectures do not have.
var older []uintptr
