package cluster

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

// guestKeys is the guests' directory of the files for ssh. It is not in the home directory, over which the caller's may
// be mounted.
const guestKeys = "/etc/ssh/lab"

// guestClient is the guests' configuration of ssh(1).
const guestClient = "/etc/ssh/ssh_config.d/vnicd-lab.conf"

// Files of ssh in the host's directory and the guests'.
const (
	userKey    = "id"
	hostKey    = "host_key"
	authorized = "authorized_keys"
	knownHosts = "known_hosts"
)

// keys are the files of ssh of one cluster. All VMs have the same host key and accept the same user key, with which
// they also reach each other.
type keys struct {
	dir   string // on the host
	files map[string][]byte
}

// newKeys makes the keys in dir.
func newKeys(ctx context.Context, dir string, vms []vmPlan) (*keys, error) {
	k := &keys{dir: dir, files: map[string][]byte{}}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	for _, name := range []string{userKey, hostKey} {
		out, err := exec.CommandContext(ctx, "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "vnicd lab", "-f",
			filepath.Join(dir, name)).CombinedOutput()
		if err != nil {
			return nil, fmt.Errorf("making a key for ssh: %w: %s", err, out)
		}
		for _, file := range []string{name, name + ".pub"} {
			if k.files[file], err = os.ReadFile(filepath.Join(dir, file)); err != nil {
				return nil, err
			}
		}
	}
	k.files[authorized] = k.files[userKey+".pub"]
	k.files[knownHosts] = fmt.Appendf(nil, "%s %s", strings.Join(names(vms), ","), k.files[hostKey+".pub"])
	if err := os.WriteFile(filepath.Join(dir, knownHosts), k.files[knownHosts], 0o600); err != nil {
		return nil, err
	}
	return k, os.WriteFile(k.clientFile(), []byte(client(dir)), 0o600)
}

// names returns the VMs' names and addresses.
func names(vms []vmPlan) (words []string) {
	for _, v := range vms {
		words = append(words, v.name, v.addr.Addr().String())
	}
	return words
}

// clientFile is the path of the host's configuration of ssh(1).
func (k *keys) clientFile() string { return filepath.Join(k.dir, "config") }

// client returns a configuration of ssh(1) that uses the files in dir.
func client(dir string) string {
	return fmt.Sprintf(`Host *
	User root
	IdentityFile %[1]s/%[2]s
	IdentitiesOnly yes
	GlobalKnownHostsFile %[1]s/%[3]s
	UserKnownHostsFile /dev/null
	StrictHostKeyChecking yes
	BatchMode yes
	LogLevel ERROR
	ServerAliveInterval 60
	ServerAliveCountMax 10
`, dir, userKey, knownHosts)
}

// server returns the configuration of sshd(8) in a VM. Without PAM sessions have the limits of the guest agent, which
// are none for locked memory.
func server(env []string) string {
	var set strings.Builder
	for _, v := range env {
		fmt.Fprintf(&set, " %q", v)
	}
	return fmt.Sprintf(`HostKey %[1]s/%[2]s
AuthorizedKeysFile %[1]s/%[3]s
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PidFile none
PrintMotd no
PrintLastLog no
MaxStartups 256
MaxSessions 256
Subsystem sftp internal-sftp
SetEnv%[4]s
`, guestKeys, hostKey, authorized, set.String())
}

// setUp mounts the shared directory in a guest, makes the VMs reach each other by name and ssh, and brings its HCA up.
func (c *cluster) setUp(ctx context.Context, v *vm) error {
	vms := vmsOf(c.plan)
	files := map[string][]byte{
		guestKeys + "/sshd_config": []byte(server(environment(c.Dir, vms, v.vmPlan))),
		guestClient:                []byte(client(guestKeys)),
	}
	for _, name := range []string{userKey, hostKey, authorized, knownHosts} {
		files[guestKeys+"/"+name] = c.keys.files[name]
	}
	var hosts strings.Builder
	for _, o := range vms {
		fmt.Fprintf(&hosts, "%s %s\n", o.addr.Addr(), o.name)
	}
	files["/etc/hosts"] = fmt.Appendf(nil, "127.0.0.1 localhost\n::1 localhost ip6-localhost\n%s", hosts.String())
	if _, err := v.Run(ctx, fmt.Sprintf("umask 077 && mkdir -p %s /run/sshd", guestKeys)); err != nil {
		return err
	}
	for path, data := range files {
		if err := v.WriteFile(ctx, path, data); err != nil {
			return err
		}
	}
	// Without a cache, all VMs and the host see each other's writes at once.
	if _, err := v.Run(ctx, fmt.Sprintf("chmod 600 %[1]s/* && chmod 644 %[4]s && mkdir -p %[2]s && "+
		"mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144,cache=none %[3]s %[2]s && "+
		"/usr/sbin/sshd -f %[1]s/sshd_config", guestKeys, quote(c.Dir), workTag, guestClient)); err != nil {
		return err
	}
	if err := lab.LoadModule(ctx, v.Machine); err != nil {
		return err
	}
	return harness.WaitGuest(ctx, v.Machine, "ss -ltnH | grep -q :22")
}
