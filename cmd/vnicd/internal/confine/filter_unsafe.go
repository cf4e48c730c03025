package confine

import (
	"errors"
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Call is a system call that is forbidden.
type Call struct {
	Number uintptr // SYS_...
	// Except are the values of the first argument, an int, with which the call stays allowed.
	Except []uint32
	// Flags, if not 0, are bits of the first argument: without any of them the call stays allowed.
	Flags uint32
	// Errno is the error; 0: EPERM.
	Errno unix.Errno
}

// AfterStart are the calls that vnicd never makes once it serves: it starts no program, and what it maps, mounts or
// loads into the kernel is there by then. The unit forbids others, but not those that systemd itself or the start needs
// (execve, the loading of programs for the short path), and does not exist where vnicd runs without systemd.
var AfterStart = []Call{
	// New programs, and the memory of others.
	{Number: unix.SYS_EXECVE}, {Number: unix.SYS_EXECVEAT}, {Number: unix.SYS_PTRACE},
	{Number: unix.SYS_PROCESS_VM_READV}, {Number: unix.SYS_PROCESS_VM_WRITEV},
	// Keyrings.
	{Number: unix.SYS_KEYCTL}, {Number: unix.SYS_ADD_KEY}, {Number: unix.SYS_REQUEST_KEY},
	// Mounts and namespaces.
	{Number: unix.SYS_MOUNT}, {Number: unix.SYS_UMOUNT2}, {Number: unix.SYS_PIVOT_ROOT}, {Number: unix.SYS_CHROOT},
	{Number: unix.SYS_OPEN_TREE}, {Number: unix.SYS_MOVE_MOUNT}, {Number: unix.SYS_FSOPEN}, {Number: unix.SYS_FSCONFIG},
	{Number: unix.SYS_FSMOUNT}, {Number: unix.SYS_FSPICK}, {Number: unix.SYS_MOUNT_SETATTR},
	{Number: unix.SYS_UNSHARE}, {Number: unix.SYS_SETNS}, {Number: unix.SYS_CLONE, Flags: namespaces},
	// Its flags are in memory, where a filter cannot see them. The C library uses clone(2) in its place then.
	{Number: unix.SYS_CLONE3, Errno: unix.ENOSYS},
	// The kernel's code, and interfaces with a history of bugs.
	{Number: unix.SYS_INIT_MODULE}, {Number: unix.SYS_FINIT_MODULE}, {Number: unix.SYS_DELETE_MODULE},
	{Number: unix.SYS_KEXEC_LOAD}, {Number: unix.SYS_KEXEC_FILE_LOAD}, {Number: unix.SYS_REBOOT},
	{Number: unix.SYS_PERF_EVENT_OPEN}, {Number: unix.SYS_USERFAULTFD}, {Number: unix.SYS_IO_URING_SETUP},
	// The short path keeps its tables, attaches its loaded programs to new ports and asks for what is attached.
	{Number: unix.SYS_BPF, Except: []uint32{unix.BPF_MAP_LOOKUP_ELEM, unix.BPF_MAP_UPDATE_ELEM, unix.BPF_MAP_DELETE_ELEM,
		unix.BPF_MAP_GET_NEXT_KEY, unix.BPF_LINK_CREATE, unix.BPF_LINK_DETACH, unix.BPF_OBJ_GET_INFO_BY_FD,
		unix.BPF_PROG_QUERY}},
}

// namespaces are the flags of clone(2) that make them.
const namespaces = unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC |
	unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNET

// Forbid makes system calls fail, on all threads and for good, also in the programs that they start. On an
// error nothing has changed but that the caller can gain no privileges from a program that it starts
// (PR_SET_NO_NEW_PRIVS).
func Forbid(calls []Call) error {
	f, err := program(calls)
	if err != nil {
		return err
	}
	return install(f)
}

// install installs a filter on all threads.
func install(f []unix.SockFilter) error {
	runtime.LockOSThread() // the first call concerns this thread; the second extends it to all
	defer runtime.UnlockOSThread()
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("PR_SET_NO_NEW_PRIVS: %w", err)
	}
	p := unix.SockFprog{Len: uint16(len(f)), Filter: &f[0]}
	r, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC,
		uintptr(unsafe.Pointer(&p)))
	runtime.KeepAlive(f)
	switch {
	case errno != 0:
		return fmt.Errorf("seccomp: %w", errno)
	case r != 0: // seccomp(2), SECCOMP_FILTER_FLAG_TSYNC
		return fmt.Errorf("seccomp: thread %d has a filter of its own", r)
	}
	return nil
}

// architectures are the kernel's numbers of those whose system calls Forbid knows (AUDIT_ARCH_...).
var architectures = map[string]uint32{"amd64": unix.AUDIT_ARCH_X86_64, "arm64": unix.AUDIT_ARCH_AARCH64}

// Offsets in struct seccomp_data (seccomp(2)); the first argument's low half on a little-endian processor.
const (
	atNumber   = 0
	atArch     = 4
	atArgument = 16
)

// x32 is the lowest number of the x32 ABI's calls, which are others for the same kernel functions (seccomp(2)).
const x32 = 0x40000000

// program makes the filter, in classic BPF.
func program(calls []Call) (f []unix.SockFilter, err error) {
	arch, ok := architectures[runtime.GOARCH]
	if !ok {
		return nil, errors.New("not known how to filter system calls on " + runtime.GOARCH)
	}
	const allow = unix.SECCOMP_RET_ALLOW
	deny := func(e unix.Errno) uint32 {
		if e == 0 {
			e = unix.EPERM
		}
		return unix.SECCOMP_RET_ERRNO | uint32(e)
	}
	load := func(at uint32) { f = append(f, unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: at}) }
	ret := func(v uint32) { f = append(f, unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: v}) }
	// skip continues after the next n instructions unless the loaded value compares to k.
	skip := func(compare uint16, k uint32, n int) {
		f = append(f, unix.SockFilter{Code: unix.BPF_JMP | compare | unix.BPF_K, K: k, Jf: uint8(n)})
	}
	load(atArch)
	f = append(f, unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: arch, Jt: 1})
	ret(deny(0))
	load(atNumber)
	skip(unix.BPF_JGE, x32, 1)
	ret(deny(0))
	for _, c := range calls {
		if len(c.Except) > 100 {
			return nil, fmt.Errorf("system call %d: %d exceptions, at most 100", c.Number, len(c.Except))
		}
		n := 1
		if len(c.Except) > 0 || c.Flags != 0 {
			n += 1 + 2*len(c.Except)
		}
		if c.Flags != 0 {
			n += 2
		}
		skip(unix.BPF_JEQ, uint32(c.Number), n)
		if n > 1 {
			load(atArgument)
		}
		for _, v := range c.Except {
			skip(unix.BPF_JEQ, v, 1)
			ret(allow)
		}
		if c.Flags != 0 {
			f = append(f, unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K, K: c.Flags, Jt: 1})
			ret(allow)
		}
		ret(deny(c.Errno))
	}
	ret(allow)
	return f, nil
}
