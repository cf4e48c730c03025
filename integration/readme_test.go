package integration

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/integration/rig"
	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

var (
	fence   = regexp.MustCompile("(?ms)^```(\\w*)\n(.*?)^```$")
	inline  = regexp.MustCompile("`((?:vnicd|make|sudo)\\s[^`]+)`")
	comment = regexp.MustCompile(`\s+# .*$`)
)

// userPages are the documents that a new user follows, in this order.
var userPages = []string{"README.md", "docs/attach.md", "docs/limits.md", "docs/troubleshooting.md"}

// commandsOf splits a line of a block at each && outside quotes.
func commandsOf(line string) (commands []string) {
	line = comment.ReplaceAllString(strings.TrimRight(line, "\n"), "")
	quoted, from := false, 0
	for i := range line {
		switch {
		case line[i] == '\'':
			quoted = !quoted
		case !quoted && strings.HasPrefix(line[i:], " && "):
			commands, from = append(commands, strings.TrimSpace(line[from:i])), i+len(" && ")
		}
	}
	return append(commands, strings.TrimSpace(line[from:]))
}

// readme returns the commands of the user's pages, first those in blocks, then those in sentences, and the
// configuration.
func readme(t *testing.T) (commands []string, configuration string) {
	t.Helper()
	text := ""
	for _, page := range userPages {
		text += string(must[[]byte](t)(os.ReadFile("../" + page)))
	}
	seen := map[string]bool{}
	add := func(c string) {
		if c != "" && !seen[c] {
			seen[c] = true
			commands = append(commands, c)
		}
	}
	for _, m := range fence.FindAllStringSubmatch(text, -1) {
		switch m[1] {
		case "":
			for line := range strings.Lines(m[2]) {
				for _, c := range commandsOf(line) {
					add(c)
				}
			}
		case "yaml":
			configuration += m[2]
		}
	}
	for _, m := range inline.FindAllStringSubmatch(text, -1) {
		add(strings.ReplaceAll(strings.Join(strings.Fields(m[1]), " "), `\|`, "|"))
	}
	return commands, configuration
}

// TestREADMESteps: TestREADME has a step for each command, and none for a command that is on no page.
func TestREADMESteps(t *testing.T) {
	commands, _ := readme(t)
	checkSteps(t, commands)
}

func checkSteps(t *testing.T, commands []string) {
	steps := readmeSteps
	left := map[string]bool{}
	for c := range steps {
		left[c] = true
	}
	for _, c := range commands {
		if steps[c] == nil {
			t.Errorf("command %q of the user's pages has no step in this test", c)
		}
		delete(left, c)
	}
	for c := range left {
		t.Errorf("the user's pages have no command %q", c)
	}
	if t.Failed() {
		t.FailNow()
	}
}

// TestREADME runs every command of the README and its linked pages as a new user on a clean machine (a container:
// Debian with systemd and libvirt). A command without a step here fails the test, and so does a step whose command is
// on none of these pages. Then it inspects the service as an operator would while VMs transfer data, upgrades it by a
// restart, and removes it.
func TestREADME(t *testing.T) {
	commands, configuration := readme(t)
	checkSteps(t, commands)
	u := newUser(t, configuration)
	for _, c := range commands {
		if !t.Run(c, func(t *testing.T) { readmeSteps[c](u, t, c) }) {
			t.Fatal("later steps need this one")
		}
	}
	t.Run("back ends", func(t *testing.T) { testBackends(u, t) })
	t.Run("page", func(t *testing.T) { testDashboard(u, t) })
	u.look(t)
}

// readmeSteps maps each command of the README to its step. Commands without placeholders run unchanged (asIs).
var readmeSteps = map[string]func(u *user, t *testing.T, command string){
	"make demo": inSource(""),
	// These targets run this test.
	"make test": func(u *user, t *testing.T, command string) {
		if ci := string(must[[]byte](t)(os.ReadFile("../.ci/run"))); !strings.Contains(ci, "\n"+command+"\n") {
			t.Errorf(".ci/run does not run `%s`:\n%s", command, ci)
		}
	},
	"make test-long": func(u *user, t *testing.T, command string) {
		long := regexp.MustCompile(`(?m)^LONG = \^\((.*)\)\$\$$`).FindSubmatch(must[[]byte](t)(os.ReadFile("../Makefile")))
		if long == nil || !regexp.MustCompile(`^(`+string(long[1])+`)$`).MatchString("TestREADME") {
			t.Errorf("`%s` does not run this test", command)
		}
	},
	"make test-kernels":           inSource("--dry-run"), // hours of VM tests, each of which can run alone
	"make bench ONLY=journal_":    inSource(`ROUNDS=1 TIME=50ms`),
	"make bench":                  inSource(`ONLY=local_write_lat ROUNDS=1 TIME=50ms`),
	"make image":                  inSource(""),
	"make module":                 inSource("BUILD=%s"),
	"make package guest-packages": inSource("BUILD=%s"),

	"sudo apt-get install ./build/vnicd_*.deb":  asIs,
	"sudoedit /etc/vnicd/vnicd.yaml":            asIs,
	"sudo vnicd check":                          asIs,
	"sudo systemctl enable --now vnicd":         asIs,
	"sudo usermod -aG vnicd,vnicd-status $USER": asIs,
	"sudo adduser libvirt-qemu vnicd":           asIs,

	"qemu-system-x86_64 … $(vnicd qemu-args vm1)": func(u *user, t *testing.T, command string) {
		u.startQEMU(t, "vm1", strings.Replace(command, "…", u.machineArgs("vm1"), 1))
	},
	"cloud-hypervisor … $(vnicd vmm-args cloud-hypervisor vm1)": func(u *user, t *testing.T, command string) {
		// That VMM needs KVM. What is printed is tried.
		_, inner, _ := strings.Cut(strings.TrimSuffix(command, ")"), "$(")
		if out := u.run(t, inner); !strings.Contains(out, "--generic-vhost-user id=vm1-hca,") {
			t.Errorf("%s: %s", inner, out)
		}
	},
	"scp build/vnicd-dkms_*.deb guest:": func(u *user, t *testing.T, command string) {
		u.tryGuestPackage(t)
	},
	"ssh guest 'apt-get install ./vnicd-dkms_*.deb && modprobe vnicd && ibv_devinfo'": func(u *user, t *testing.T,
		command string) {
		u.installModule(t, "vm1")
		if out := run(u.ctx, t, u.vms["vm1"], "modprobe vnicd && ibv_devinfo"); !strings.Contains(out, "PORT_ACTIVE") {
			t.Error(out)
		}
		run(u.ctx, t, u.vms["vm1"], "ping -c 3 -W 10 10.0.0.254")
		u.stopQEMU(t, "vm1")
	},
	"vnicd attach --qmp SOCKET vm1": func(u *user, t *testing.T, command string) {
		u.startQEMU(t, "vm1", "qemu-system-x86_64 "+u.machineArgs("vm1")+" "+
			strings.Join(append([]string{"-M", qemu.MachineType}, qemu.MemoryArgs(768, false)...), " ")+
			" -device pcie-root-port,id=rp1,chassis=1 -device pcie-root-port,id=rp2,chassis=2 -qmp unix:vm1.qmp,server=on,wait=off")
		u.installModule(t, "vm1")
		run(u.ctx, t, u.vms["vm1"], "modprobe -a virtio_net vnicd rdma_ucm")
		u.run(t, strings.Replace(command, "SOCKET", "vm1.qmp", 1))
	},
	"vnicd detach --qmp SOCKET vm1": func(u *user, t *testing.T, command string) {
		command = strings.Replace(command, "SOCKET", "vm1.qmp", 1)
		u.run(t, command)
		run(u.ctx, t, u.vms["vm1"], "! ibv_devinfo && ! ip link show eth0")
		u.run(t, strings.Replace(command, "detach", "attach", 1))
		run(u.ctx, t, u.vms["vm1"], "ip link set eth0 up && ip addr add 10.0.0.1/24 dev eth0")
		check(t, lab.WaitRDMA(u.ctx, u.vms["vm1"], lab.Device))
	},
	"vnicd libvirt-xml vm2": func(u *user, t *testing.T, command string) {
		u.startDomain(t, "vm2", u.run(t, command))
		u.installModule(t, "vm2")
		run(u.ctx, t, u.vms["vm2"], "modprobe -a vnicd rdma_ucm")
		check(t, lab.WaitRDMA(u.ctx, u.vms["vm2"], lab.Device))
	},
	"ssh vm1 ib_write_bw -R": func(u *user, t *testing.T, command string) {
		u.server = must[*qemu.Process](t)(lab.Listen(u.ctx, u.vms["vm1"], strings.TrimPrefix(command, "ssh vm1 "), 0))
	},
	"ssh vm2 ib_write_bw -R 10.0.0.1": func(u *user, t *testing.T, command string) {
		out := run(u.ctx, t, u.vms["vm2"], strings.TrimPrefix(command, "ssh vm2 "))
		if rate, err := lab.Bandwidth(out); err != nil || rate <= 0 {
			t.Errorf("%v MB/s, %v:\n%s", rate, err, out)
		}
		if r := must[qemu.Result](t)(u.server.Wait(u.ctx)); r.ExitCode != 0 {
			t.Errorf("the server ended with %d: %s%s", r.ExitCode, r.Stdout, r.Stderr)
		}
	},
	"vnicd status vm1": asIs,

	// Commands in sentences.
	"vnicd top": func(u *user, t *testing.T, command string) { u.run(t, "timeout --preserve-status -s INT 3 "+command) },
	"vnicd qemu-args --qemu PATH": func(u *user, t *testing.T, command string) {
		u.run(t, strings.Replace(command, "PATH", "/usr/bin/qemu-system-x86_64 vm1", 1))
	},
	"vnicd qemu-args --qemu": func(u *user, t *testing.T, command string) {
		u.run(t, command+" /usr/bin/qemu-system-x86_64 vm1")
	},
	"vnicd qemu-args": func(u *user, t *testing.T, command string) { u.run(t, command+" vm1") },
	"sudo vnicd fdb add": func(u *user, t *testing.T, command string) {
		u.run(t, command+" 02:00:00:00:00:99 network blue vtep 192.0.2.2")
	},
	"vnicd check": asIs,
	// TestUpgradeKept and TestHandover run it; here the service runs.
	"vnicd run --keep": func(u *user, t *testing.T, command string) { u.run(t, command+" --help") },
	// TestLabCommand runs it; this machine cannot build images.
	"vnicd lab run -- CMD": func(u *user, t *testing.T, command string) {
		u.run(t, strings.Replace(command, "-- CMD", "--help", 1))
	},
	"sudo vnicd reload": asIs,
	"vnicd connection":  asIs,
	"vnicd network|vm|fdb|neigh --help": func(u *user, t *testing.T, command string) {
		for _, what := range []string{"network", "vm", "fdb", "neigh"} {
			u.run(t, "vnicd "+what+" --help")
		}
	},
	"vnicd status VM": func(u *user, t *testing.T, command string) { u.run(t, strings.Replace(command, "VM", "vm1", 1)) },
	"sudo vnicd capture vm1 -w - | wireshark -k -i -": func(u *user, t *testing.T, command string) {
		ping := must[*qemu.Process](t)(u.vms["vm1"].StartShell(u.ctx, "ping -i 0.2 10.0.0.254"))
		defer ping.Kill(u.ctx)
		out := filepath.Join(t.TempDir(), "packets")
		check(t, os.WriteFile(out,
			[]byte(u.run(t, strings.Replace(strings.Replace(command, "-w -", "-n 4 -w -", 1), "| wireshark -k -i -", "| base64",
				1))), 0o644))
		if text := must[string](t)((&harness.Namespace{}).Shell(u.ctx, "base64 -d <"+out+
			" | tshark -r -")); !strings.Contains(text, "ICMP") {
			t.Error(text)
		}
	},
}

// inSource runs a command in the source tree with additional arguments; %s is the directory of the user's packages.
func inSource(more string) func(u *user, t *testing.T, command string) {
	return func(u *user, t *testing.T, command string) {
		if strings.Contains(more, "%s") {
			command += " " + fmt.Sprintf(more, u.build)
		} else {
			command += " " + more
		}
		out, err := (&harness.Namespace{}).Shell(u.ctx, fmt.Sprintf("cd '%s' && %s 2>&1", u.l.Root, command))
		if err != nil {
			t.Fatalf("%v\n%s", err, tail(out, 4000))
		}
		t.Log(tail(strings.TrimSpace(out), 1500))
	}
}

// asIs runs a command unchanged as the user.
func asIs(u *user, t *testing.T, command string) {
	if out := strings.TrimSpace(u.run(t, command)); out != "" {
		t.Log(tail(out, 1500))
	}
}

// user follows the README.
type user struct {
	ctx    context.Context
	l      *lab.Lab
	ns     *harness.Namespace
	c      *rig.Container
	build  string // directory of the packages: build/ in the user's directory
	pkg    string // the host's package as apt-get knows it
	vms    map[string]*qemu.Machine
	server *qemu.Process

	running sync.WaitGroup // programs started in the container
}

const home = "/home/alice"

func newUser(t *testing.T, configuration string) *user {
	t.Helper()
	l, ctx := newLabWithoutModule(t)
	u := &user{ctx: ctx, l: l, build: t.TempDir(), pkg: "./build/vnicd_*.deb", vms: map[string]*qemu.Machine{}}
	root := must[string](t)(l.Builder.Host(ctx))
	u.ns = must[*harness.Namespace](t)(harness.NewNamespace("vnicd-readme"))
	l.Add(func() { check(t, u.ns.Close()) })
	l.Add(u.running.Wait)
	dir := filepath.Join(l.Dir, "host")
	check(t, os.Mkdir(dir, 0o755))
	u.c = must[*rig.Container](t)(rig.NewContainer(ctx, u.ns, root, dir, u.build+"="+home+"/vnicd/build",
		filepath.Dir(l.Images.Rootfs)+"=/srv/vm"))
	l.Add(func() { check(t, u.c.Close()) })
	t.Cleanup(func() {
		for _, m := range u.vms {
			m.Kill()
		}
		if t.Failed() {
			out, _ := u.c.Run(context.Background(),
				"systemctl status vnicd; journalctl -n 60 --no-pager; vnicd status; tail -n 20 /var/log/libvirt/qemu/* /home/alice/vnicd/*.log")
			t.Log(tail(out, 8000))
		}
	})
	must[string](t)(u.c.Run(ctx, `
set -e
ip link add ul type veth peer name wire && ip link set ul up && ip link set wire up && ip addr add 192.0.2.1/24 dev ul
useradd --shell /bin/bash alice
chown alice: `+home+` `+home+`/vnicd
echo 'alice ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/alice
printf '#!/bin/sh\ncp /etc/new.yaml "$1"\n' >/usr/local/bin/edit
chmod 755 /usr/local/bin/edit
cat >/etc/new.yaml <<'Y'
`+configuration+"\nY"))
	return u
}

// run runs a line in the user's shell, in the directory with the packages.
func (u *user) run(t *testing.T, line string) string {
	t.Helper()
	return must[string](t)(u.c.Run(u.ctx, u.as(line)))
}

func (u *user) as(line string) string {
	return "runuser -l alice -c '" +
		strings.ReplaceAll("cd vnicd && export EDITOR=edit USER=alice DEBIAN_FRONTEND=noninteractive && "+line, "'", `'\''`) +
		"'"
}

const macOf = "02:00:00:00:00:0"

// kernelArgs returns the guest's kernel command line; vm1 has 10.0.0.1.
func kernelArgs(vm string) string {
	n := strings.TrimPrefix(vm, "vm")
	return fmt.Sprintf("console=ttyS0 quiet loglevel=5 panic=-1 net.ifnames=0 vnicd.hostname=%s vnicd.net=%s%s,10.0.0.%s/24,name=eth0", vm, macOf, n, n)
}

// machineArgs returns a VM's arguments without its memory.
func (u *user) machineArgs(vm string) string {
	return fmt.Sprintf("-nodefaults -display none -accel %[2]s -cpu max -pidfile %[1]s.pid -serial file:%[1]s.log -kernel /srv/vm/vmlinuz -initrd /srv/vm/initrd -append \"%[3]s\""+
		" -drive file=/srv/vm/rootfs.ext4,format=raw,if=virtio,snapshot=on -device virtio-serial-pci,romfile="+
		" -chardev socket,id=agent,path=%[1]s.agent,server=on,wait=off -device virtserialport,chardev=agent,name=%[4]s", vm,
		u.l.Accel, kernelArgs(vm), qemu.AgentPort)
}

// start starts a line in the user's shell.
func (u *user) start(t *testing.T, line string) {
	t.Helper()
	cmd := u.c.Command(u.ctx, u.as("exec "+line))
	check(t, cmd.Start())
	u.running.Go(func() { _ = cmd.Wait() })
}

func (u *user) startQEMU(t *testing.T, vm, command string) {
	t.Helper()
	u.start(t, command+" >"+vm+".qemu.log 2>&1")
	u.adopt(t, vm, filepath.Join(home, "vnicd", vm+".agent"))
}

func (u *user) stopQEMU(t *testing.T, vm string) {
	t.Helper()
	u.vms[vm].Kill()
	delete(u.vms, vm)
	must[string](t)(u.c.Run(u.ctx,
		fmt.Sprintf("cd %s/vnicd && p=$(cat %s.pid) && kill $p && while kill -0 $p 2>/dev/null; do sleep 0.1; done", home,
			vm)))
}

// adopt waits until a VM's guest answers.
func (u *user) adopt(t *testing.T, vm, socket string) {
	t.Helper()
	m := must[*qemu.Machine](t)(qemu.Adopt(u.ctx, vm, u.c.Path(socket)))
	u.vms[vm] = m
	ctx, cancel := context.WithTimeout(u.ctx, harness.BootTimeout)
	defer cancel()
	check(t, m.WaitReady(ctx))
}

// startDomain defines and starts a domain from what `vnicd libvirt-xml` printed.
func (u *user) startDomain(t *testing.T, vm, printed string) {
	t.Helper()
	const agent = "/var/lib/libvirt/qemu/%s.agent"
	insert := func(after, text string) {
		t.Helper()
		if !strings.Contains(printed, after) {
			t.Fatalf("no %s in\n%s", after, printed)
		}
		printed = strings.Replace(printed, after, after+"\n"+text, 1)
	}
	insert(`xmlns:qemu="http://libvirt.org/schemas/domain/qemu/1.0">`,
		fmt.Sprintf(`<name>%s</name><memory unit="MiB">768</memory><vcpu>1</vcpu><cpu mode="maximum"/>
<os><type arch="x86_64" machine="q35">hvm</type><kernel>/srv/vm/vmlinuz</kernel><initrd>/srv/vm/initrd</initrd><cmdline>%s</cmdline></os>
<features><acpi/><apic/></features>`, vm, kernelArgs(vm)))
	insert("<devices>", fmt.Sprintf(`<emulator>/usr/bin/qemu-system-x86_64</emulator>
<disk type="file" device="disk"><driver name="qemu" type="qcow2"/><source file="/var/lib/libvirt/images/%s.qcow2"/><target dev="vda" bus="virtio"/></disk>
<memballoon model="none"/>`, vm))
	insert("<qemu:commandline>", fmt.Sprintf(`<qemu:arg value="-chardev"/><qemu:arg value="socket,id=agent,path=`+agent+
		`,server=on,wait=off"/>
<qemu:arg value="-device"/><qemu:arg value='{"driver":"virtio-serial-pci","romfile":""}'/>
<qemu:arg value="-device"/><qemu:arg value='{"driver":"virtserialport","chardev":"agent","name":"%s"}'/>`, vm, qemu.AgentPort))
	if u.l.Accel == qemu.TCG {
		printed = strings.Replace(printed, `type="kvm"`, `type="qemu"`, 1)
	}
	must[string](t)(u.c.Run(u.ctx, fmt.Sprintf(`set -e
qemu-img create -q -f qcow2 -b /srv/vm/rootfs.ext4 -F raw /var/lib/libvirt/images/%[1]s.qcow2
cat >/root/%[1]s.xml <<'X'
%[2]s
X
virsh -q define --validate /root/%[1]s.xml
virsh -q start %[1]s`, vm, printed)))
	u.adopt(t, vm, fmt.Sprintf(agent, vm))
}

// tryGuestPackage installs the guest's package in a clean root of the guest's release, with its compiler and headers,
// and keeps the module built there.
func (u *user) tryGuestPackage(t *testing.T) {
	t.Helper()
	out, err := (&harness.Namespace{}).Shell(u.ctx,
		fmt.Sprintf("'%s/cmd/vnicd/packaging/try-guest' '%[2]s'/vnicd-dkms_*.deb '%[2]s' 2>&1", u.l.Root, u.build))
	if err != nil {
		t.Fatalf("%v\n%s", err, tail(out, 4000))
	}
	t.Log(tail(strings.TrimSpace(out), 200))
}

// installModule copies that module into a guest, to DKMS's directory.
func (u *user) installModule(t *testing.T, vm string) {
	t.Helper()
	m := u.vms[vm]
	dir := "/lib/modules/" + u.l.Images.KVer + "/updates/dkms"
	run(u.ctx, t, m, "mkdir -p "+dir)
	check(t, m.WriteFile(u.ctx, dir+"/vnicd.ko", must[[]byte](t)(os.ReadFile(filepath.Join(u.build, "vnicd.ko")))))
	run(u.ctx, t, m, "depmod && modprobe -a ib_uverbs")
}
