package confine

import (
	"golang.org/x/sys/unix"
)

// Runtime are the calls with which a Go program (with cgo, too, as the race detector needs) computes, waits, starts
// threads, and reads and writes the descriptors that it has. It opens nothing, makes no socket, maps no file and no
// code, and sends signals to its own threads only. pid is the caller's.
func Runtime(pid int) []Rule {
	rules := Any(
		unix.SYS_READ, unix.SYS_WRITE, unix.SYS_READV, unix.SYS_WRITEV, unix.SYS_PREAD64, unix.SYS_CLOSE,
		unix.SYS_FUTEX, unix.SYS_MUNMAP, unix.SYS_MADVISE, unix.SYS_MINCORE, unix.SYS_BRK,
		unix.SYS_RT_SIGACTION, unix.SYS_RT_SIGPROCMASK, unix.SYS_RT_SIGRETURN, unix.SYS_SIGALTSTACK,
		unix.SYS_SET_ROBUST_LIST, unix.SYS_RSEQ, unix.SYS_SCHED_YIELD, unix.SYS_SCHED_GETAFFINITY,
		unix.SYS_NANOSLEEP, unix.SYS_CLOCK_NANOSLEEP, unix.SYS_CLOCK_GETTIME, unix.SYS_GETTIMEOFDAY,
		unix.SYS_EPOLL_CREATE1, unix.SYS_EPOLL_CTL, unix.SYS_EPOLL_PWAIT, unix.SYS_EVENTFD2, unix.SYS_PIPE2,
		unix.SYS_GETPID, unix.SYS_GETPPID, unix.SYS_GETTID, unix.SYS_GETUID, unix.SYS_GETEUID, unix.SYS_GETGID,
		unix.SYS_GETEGID, unix.SYS_UNAME, unix.SYS_GETRANDOM, unix.SYS_RESTART_SYSCALL, unix.SYS_FSTAT,
		unix.SYS_EXIT, unix.SYS_EXIT_GROUP, unix.SYS_SHUTDOWN, unix.SYS_GETSOCKNAME,
		unix.SYS_GETPEERNAME, unix.SYS_GETSOCKOPT, unix.SYS_GETRLIMIT,
		// On descriptors that it has; it cannot make others with file names.
		unix.SYS_RECVFROM, unix.SYS_RECVMSG, unix.SYS_SENDMSG)
	rules = append(rules, Any(older...)...)
	// Not F_SETOWN, which sends signals to others.
	for _, c := range []uint32{unix.F_GETFL, unix.F_SETFL, unix.F_GETFD, unix.F_SETFD, unix.F_DUPFD_CLOEXEC} {
		rules = append(rules, Rule{unix.SYS_FCNTL, []Condition{{Arg: 1, Is: c}}})
	}
	return append(rules,
		Rule{unix.SYS_CLONE, []Condition{{Arg: 0, Mask: unix.CLONE_THREAD | namespaces, Is: unix.CLONE_THREAD}}},
		Rule{unix.SYS_MMAP, []Condition{{Arg: 2, Mask: unix.PROT_EXEC, Is: 0}, {Arg: 3, Mask: unix.MAP_ANONYMOUS,
			Is: unix.MAP_ANONYMOUS}}},
		Rule{unix.SYS_MPROTECT, []Condition{{Arg: 2, Mask: unix.PROT_EXEC, Is: 0}}},
		Rule{unix.SYS_TGKILL, []Condition{{Arg: 0, Is: uint32(pid)}}},
		// Names of mappings, and of threads (the C library's).
		Rule{unix.SYS_PRCTL, []Condition{{Arg: 0, Is: unix.PR_SET_VMA}}},
		Rule{unix.SYS_PRCTL, []Condition{{Arg: 0, Is: unix.PR_SET_NAME}}},
	)
}

// Connections are the calls for accepting on listening sockets that a program has, and using the connections.
func Connections() []Rule { return Any(unix.SYS_ACCEPT4, unix.SYS_SETSOCKOPT, unix.SYS_SENDTO) }

// TCPClient are the calls for making TCP connections.
func TCPClient() (rules []Rule) {
	for _, family := range []uint32{unix.AF_INET, unix.AF_INET6} {
		rules = append(rules, Rule{unix.SYS_SOCKET, []Condition{{Arg: 0, Is: family},
			{Arg: 1, Mask: ^uint32(unix.SOCK_CLOEXEC | unix.SOCK_NONBLOCK), Is: unix.SOCK_STREAM}}})
	}
	return append(rules, Any(unix.SYS_BIND, unix.SYS_CONNECT)...)
}
