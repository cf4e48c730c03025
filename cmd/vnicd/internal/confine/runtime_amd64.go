package confine

import "golang.org/x/sys/unix"

// older are calls of the runtime that newer architectures do not have.
var older = []uintptr{unix.SYS_EPOLL_WAIT, unix.SYS_TIME, unix.SYS_ARCH_PRCTL}
