package integration

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vnicd/vnicd/lab/harness"
)

// somebody is a temporary unprivileged user, unknown to the machine's own files.
type somebody struct {
	dir string // holds passwd, group, subuid, subgid
}

const somebodysID = 61234

// ranges of subordinate IDs for the user, and for another user within them.
const ranges = "somebody:1000000000:65536\ndaemon:1000000000:65536\n"

func newSomebody(t *testing.T) *somebody {
	t.Helper()
	s := &somebody{dir: t.TempDir()}
	check(t, os.Chmod(filepath.Dir(s.dir), 0o755))
	for file, line := range map[string]string{
		"passwd": fmt.Sprintf("somebody:x:%[1]d:%[1]d::%[2]s:/bin/sh\n", somebodysID, s.dir),
		"group":  fmt.Sprintf("somebody:x:%d:\n", somebodysID),
		"subuid": ranges, "subgid": ranges,
	} {
		have, _ := os.ReadFile("/etc/" + file)
		check(t, os.WriteFile(filepath.Join(s.dir, file), append(have, line...), 0o644))
	}
	return s
}

// argv returns the command that runs a line in the user's shell. before runs first, as root in the same mount
// namespace.
func (s *somebody) argv(before, line string) []string {
	return []string{"unshare", "--mount", "sh", "-ec", fmt.Sprintf(`
for f in passwd group subuid subgid; do [ -e /etc/$f ] || continue; mount --bind '%[1]s'/$f /etc/$f; done
cd '%[1]s'
%[3]s
exec setpriv --reuid %[2]d --regid %[2]d --clear-groups env -i HOME='%[1]s' USER=somebody PATH="$PATH" %[4]s sh -c "$0"`, s.dir, somebodysID, before, kept("VNICD_MIRROR", "GOFLAGS")) + "\n", line}
}

// kept returns settings of this process that the user inherits.
func kept(names ...string) (words string) {
	for _, n := range names {
		if v, ok := os.LookupEnv(n); ok {
			words += " " + n + "='" + v + "'"
		}
	}
	return words
}

// refusal runs a line that must fail and returns its output.
func (s *somebody) refusal(ctx context.Context, t *testing.T, before, line string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	argv := s.argv(before, line)
	c := exec.CommandContext(ctx, argv[0], argv[1:]...)
	c.WaitDelay = time.Second
	out, err := c.CombinedOutput()
	if err == nil || ctx.Err() != nil {
		t.Errorf("%s: no error, or a timeout: %v: %s", line, err, out)
	}
	return string(out)
}

// TestOrdinaryUser: `make demo` as an unprivileged user, on a clean clone, without images: images are built, and hosts
// and VMs run, in a user namespace. If that is not possible the message says why and what to do.
func TestOrdinaryUser(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*testTimeout()) // includes building images
	defer cancel()
	s := newSomebody(t)
	// The current source tree without build results.
	must[string](t)((&harness.Namespace{}).Shell(ctx, fmt.Sprintf(`set -e
mkdir '%[1]s/vnicd' '%[1]s/bin'
git -C .. ls-files -z --cached --others --exclude-standard | tar -C .. --null -T - -c | tar -x -C '%[1]s/vnicd'
for p in bash awk id; do ln -s "$(command -v $p)" '%[1]s/bin/'; done
chmod 755 '%[1]s'
chown -R %[2]d:%[2]d '%[1]s'`, s.dir, somebodysID)))

	for what, x := range map[string]struct{ before, line, want string }{
		"no newuidmap": {"", "PATH=$HOME/bin vnicd/vm-images/rootless true", "apt-get install uidmap"},
		"no range of IDs": {"umount /etc/subuid; : >empty; mount --bind empty /etc/subuid", "vnicd/vm-images/rootless true",
			"usermod --add-subuids"},
		// Run in a namespace whose users may not create namespaces.
		"not by the kernel": {"",
			`vnicd/vm-images/rootless sh -c 'echo 0 >/proc/sys/user/max_user_namespaces && exec setpriv --reuid 1 --regid 1 --clear-groups vnicd/vm-images/rootless true'`,
			"user.max_user_namespaces=0"},
		"no package": {"", "cd vnicd && PATH=$HOME/bin .ci/deps", "sudo apt-get install"},
	} {
		t.Run(what, func(t *testing.T) {
			if out := s.refusal(ctx, t, x.before, x.line); !strings.Contains(out, x.want) {
				t.Errorf("no %q in the message: %s", x.want, out)
			}
		})
	}
	t.Run("demo", func(t *testing.T) { s.demo(ctx, t) })
}

func (s *somebody) demo(ctx context.Context, t *testing.T) {
	// Reuse the modules downloaded for this test.
	env := strings.Fields(must[string](t)((&harness.Namespace{}).Shell(ctx, "go env GOMODCACHE GOPROXY")))
	log := filepath.Join(t.TempDir(), "log")
	argv := s.argv("mkdir -p modules; mount --bind '"+env[0]+"/cache/download' modules",
		"cd vnicd && GOPROXY=file://$HOME/modules,"+env[1]+" make demo")
	p := must[*harness.Process](t)((&harness.Namespace{}).Start(log, nil, argv...))
	defer p.Kill()
	err := p.Wait(ctx)
	text := string(must[[]byte](t)(os.ReadFile(log)))
	if err != nil || !strings.Contains(text, "Every step worked.") {
		t.Fatalf("%v\n%s", err, tail(text, 6000))
	}
	t.Log(tail(text, 1500))
	if st, err := os.Stat(filepath.Join(s.dir, "vnicd/build/page.png")); err != nil || st.Size() == 0 {
		t.Errorf("the picture of the page: %v", err)
	}
	// The namespace's processes end with it.
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		left := lines("process", fmt.Sprintf("ps -o pid=,args= -U %d,1000000000 || true", somebodysID))
		if len(left) == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("left behind: %v", left)
		}
	}
}
