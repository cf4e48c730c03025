// Package pressure reports how short of memory the host is. A Reader reads the bounds that this process is subject to
// (the host's memory, and each memory cgroup with a limit, of version 2 or 1) and the kernel's pressure stall
// information (PSI). A Watch wakes its owner when the kernel reports stalls. Policy is the caller's.
package pressure
