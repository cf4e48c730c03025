package confine

import (
	"errors"
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"
)

// Rule allows a system call if all its conditions hold. Several rules for one call are alternatives.
type Rule struct {
	Number uintptr // SYS_...
	If     []Condition
}

// Condition compares the lower 32 bits of an argument, which are all that the kernel uses of an int.
type Condition struct {
	Arg  int    // 0 to 5
	Mask uint32 // 0: all bits
	Is   uint32 // value of the masked bits
}

// Only leaves this process the system calls that a rule allows, on all threads and for good. Others fail with EPERM;
// clone3(2) with ENOSYS, because its flags are in memory, where a filter cannot see them, and the C library uses
// clone(2) in its place then.
func Only(rules []Rule) error {
	f, err := allowing(rules)
	if err != nil {
		return err
	}
	return install(f)
}

// maxFilter is the number of instructions that the kernel accepts (BPF_MAXINSNS).
const maxFilter = 4096

// allowing makes the filter of Only.
func allowing(rules []Rule) (f []unix.SockFilter, err error) {
	arch, ok := architectures[runtime.GOARCH]
	if !ok {
		return nil, errors.New("not known how to filter system calls on " + runtime.GOARCH)
	}
	const refuse = unix.SECCOMP_RET_ERRNO
	load := func(at uint32) { f = append(f, unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: at}) }
	ret := func(v uint32) { f = append(f, unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: v}) }
	// unless skips the next n instructions unless the loaded value is k.
	unless := func(k uint32, n int) {
		f = append(f, unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: k, Jf: uint8(n)})
	}
	load(atArch)
	f = append(f, unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: arch, Jt: 1})
	ret(refuse | uint32(unix.EPERM))
	load(atNumber) // numbers of the x32 ABI are equal to none in the rules
	for _, r := range rules {
		// For each condition: load, mask, compare; then allow; then the number again for the next rule.
		n := 1
		if len(r.If) > 0 {
			n = 3*len(r.If) + 2
		}
		if r.Number >= x32 || n > 100 {
			return nil, fmt.Errorf("system call %d: %d conditions, at most 32", r.Number, len(r.If))
		}
		unless(uint32(r.Number), n)
		for i, c := range r.If {
			if c.Arg < 0 || c.Arg > 5 {
				return nil, fmt.Errorf("system call %d: argument %d, at most 5", r.Number, c.Arg)
			}
			mask := c.Mask
			if mask == 0 {
				mask = ^uint32(0)
			}
			load(uint32(atArgument + 8*c.Arg))
			f = append(f, unix.SockFilter{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: mask})
			unless(c.Is, 3*(len(r.If)-1-i)+1)
		}
		ret(unix.SECCOMP_RET_ALLOW)
		if len(r.If) > 0 {
			load(atNumber)
		}
	}
	unless(unix.SYS_CLONE3, 1)
	ret(refuse | uint32(unix.ENOSYS))
	ret(refuse | uint32(unix.EPERM))
	if len(f) > maxFilter {
		return nil, fmt.Errorf("%d rules make %d instructions, at most %d", len(rules), len(f), maxFilter)
	}
	return f, nil
}

// Any makes rules without conditions.
func Any(calls ...uintptr) (rules []Rule) {
	for _, c := range calls {
		rules = append(rules, Rule{Number: c})
	}
	return rules
}
