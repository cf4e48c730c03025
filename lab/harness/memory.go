package harness

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// MemoryGroup is a memory cgroup of version 1 or 2, depending on the machine. A page is charged to the group whose
// process touches it first: guest memory therefore to QEMU's or vnicd's.
type MemoryGroup struct {
	dir          string
	limit, usage string // file names
	mount        string // arguments of mount(8) that show the groups
}

const cgroups = "/sys/fs/cgroup"

// NewMemoryGroup creates a group called NAME-PID without a limit. It needs root.
func NewMemoryGroup(name string) (*MemoryGroup, error) {
	g := &MemoryGroup{limit: "memory.limit_in_bytes", usage: "memory.usage_in_bytes", mount: "-t cgroup -o memory"}
	root := filepath.Join(cgroups, "memory")
	if _, err := os.Stat(filepath.Join(root, "tasks")); err != nil {
		root = cgroups
		g.limit, g.usage, g.mount = "memory.max", "memory.current", "-t cgroup2"
		if err := os.WriteFile(filepath.Join(root, "cgroup.subtree_control"), []byte("+memory"), 0); err != nil {
			return nil, fmt.Errorf("harness: no memory cgroups: %w", err)
		}
	}
	g.dir = filepath.Join(root, fmt.Sprintf("%s-%d", name, os.Getpid()))
	if err := os.Mkdir(g.dir, 0o755); err != nil {
		return nil, fmt.Errorf("harness: %w", err)
	}
	return g, nil
}

// Enter returns a command for `ip netns exec`, which hides the cgroups: it shows the memory cgroups again, as programs
// of a host see them, and runs argv in the group.
func (g *MemoryGroup) Enter(argv ...string) []string {
	return append([]string{"sh", "-c", fmt.Sprintf(`mount %s none %s && echo $$ >'%[2]s/%s/cgroup.procs' && exec "$@"`,
		g.mount, cgroups, filepath.Base(g.dir)), "sh"}, argv...)
}

// Wrap writes a script that runs program in the group, and returns its path.
func (g *MemoryGroup) Wrap(dir, program string) (string, error) {
	p := filepath.Join(dir, filepath.Base(g.dir)+"-"+filepath.Base(program))
	return p, os.WriteFile(p, fmt.Appendf(nil, "#!/bin/sh\necho $$ >'%s/cgroup.procs' && exec '%s' \"$@\"\n", g.dir,
		program), 0o755)
}

// SetLimit bounds the group's memory, in bytes; 0: no limit. The kernel first swaps out the excess, which may take a
// while.
func (g *MemoryGroup) SetLimit(ctx context.Context, bytes uint64) error {
	text := strconv.FormatUint(bytes, 10)
	if bytes == 0 {
		text = map[bool]string{true: "max", false: "-1"}[g.limit == "memory.max"]
	}
	for {
		err := os.WriteFile(filepath.Join(g.dir, g.limit), []byte(text), 0)
		if err == nil || ctx.Err() != nil {
			return err
		}
		// EBUSY: the kernel gave up; try again.
		time.Sleep(50 * time.Millisecond)
	}
}

// Usage returns the group's memory in bytes, page cache included.
func (g *MemoryGroup) Usage() (uint64, error) {
	b, err := os.ReadFile(filepath.Join(g.dir, g.usage))
	if err != nil {
		return 0, err
	}
	return strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
}

// Close removes the group; its processes must have ended. A reaped process may count for an instant more.
func (g *MemoryGroup) Close() error {
	deadline := time.Now().Add(10 * time.Second)
	for {
		err := os.Remove(g.dir)
		if err == nil || time.Now().After(deadline) {
			return err
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// AddSwap creates a swap file and enables it until the returned function is called, which brings its contents back into
// memory.
func AddSwap(path string, mib int) (remove func() error, err error) {
	ctx := context.Background()
	// Not sparse: the kernel refuses a swap file with holes.
	if _, err := command(ctx, "dd", "if=/dev/zero", "of="+path, "bs=1M", "count="+strconv.Itoa(mib),
		"status=none"); err != nil {
		return nil, err
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, err
	}
	if _, err := command(ctx, "mkswap", path); err != nil {
		return nil, err
	}
	if _, err := command(ctx, "swapon", path); err != nil {
		return nil, err
	}
	return func() error {
		_, err := command(ctx, "swapoff", path)
		return errors.Join(err, os.Remove(path))
	}, nil
}
