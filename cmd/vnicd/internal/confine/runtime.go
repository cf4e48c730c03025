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
		unix.SYS_EXIT, unix.SYS_EXIT_GROUP, unix.SYS_GETSOCKNAME,
		unix.SYS_GETPEERNAME, unix.SYS_GETSOCKOPT, unix.SYS_GETRLIMIT,
		// Not sendmsg, which passes descriptors: whoever drops one closes it, and close(2) waits if SO_LINGER is set.
		unix.SYS_RECVFROM)
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
		// To shut down reading would end a listening socket that others have, too.
		Rule{unix.SYS_SHUTDOWN, []Condition{{Arg: 1, Is: unix.SHUT_WR}}},
		Rule{unix.SYS_TGKILL, []Condition{{Arg: 0, Is: uint32(pid)}}},
		// Names of mappings, and of threads (the C library's).
		Rule{unix.SYS_PRCTL, []Condition{{Arg: 0, Is: unix.PR_SET_VMA}}},
		Rule{unix.SYS_PRCTL, []Condition{{Arg: 0, Is: unix.PR_SET_NAME}}},
	)
}

// Connections are the calls for accepting on listening sockets that a program has, and using the connections.
func Connections() []Rule {
	return append(Any(unix.SYS_ACCEPT4, unix.SYS_SENDTO), options(
		option{unix.SOL_SOCKET, unix.SO_KEEPALIVE}, option{unix.IPPROTO_TCP, unix.TCP_NODELAY},
		option{unix.IPPROTO_TCP, unix.TCP_KEEPIDLE}, option{unix.IPPROTO_TCP, unix.TCP_KEEPINTVL},
		option{unix.IPPROTO_TCP, unix.TCP_KEEPCNT})...)
}

// TCPClient are the calls for making TCP connections: those of Go's net, and of gobgp with its passwords and distances.
func TCPClient() (rules []Rule) {
	for _, family := range []uint32{unix.AF_INET, unix.AF_INET6} {
		for _, protocol := range []uint32{0, unix.IPPROTO_TCP} {
			rules = append(rules, Rule{unix.SYS_SOCKET, []Condition{{Arg: 0, Is: family},
				{Arg: 1, Mask: ^uint32(unix.SOCK_CLOEXEC | unix.SOCK_NONBLOCK), Is: unix.SOCK_STREAM},
				{Arg: 2, Is: protocol}}})
		}
	}
	rules = append(rules, Any(unix.SYS_BIND, unix.SYS_CONNECT)...)
	return append(rules, options(
		option{unix.SOL_SOCKET, unix.SO_BROADCAST}, option{unix.SOL_SOCKET, unix.SO_REUSEADDR},
		option{unix.IPPROTO_IP, unix.IP_TTL}, option{unix.IPPROTO_IP, unix.IP_MINTTL}, option{unix.IPPROTO_IP, unix.IP_TOS},
		option{unix.IPPROTO_IPV6, unix.IPV6_V6ONLY}, option{unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS},
		option{unix.IPPROTO_IPV6, unix.IPV6_MINHOPCOUNT}, option{unix.IPPROTO_IPV6, unix.IPV6_TCLASS},
		option{unix.IPPROTO_TCP, unix.TCP_MD5SIG}, option{unix.IPPROTO_TCP, unix.TCP_MD5SIG_EXT},
		option{unix.IPPROTO_TCP, unix.TCP_MAXSEG})...)
}

// option is an option of a socket.
type option struct{ level, name uint32 }

// options allow to set these: not filters, SO_LINGER, and what else concerns others that have the socket.
func options(list ...option) (rules []Rule) {
	for _, o := range list {
		rules = append(rules, Rule{unix.SYS_SETSOCKOPT, []Condition{{Arg: 1, Is: o.level}, {Arg: 2, Is: o.name}}})
	}
	return rules
}
