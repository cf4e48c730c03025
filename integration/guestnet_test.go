package integration

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

// TestGuestNetwork: operations of a VM's owner on a network card: checksum and segmentation offloads on and off, one
// queue pair and two, another MTU, a network whose MTU shrinks, a reboot, rebinding the driver, and packed rings, with
// which vnicd is killed too. After each step TCP and UDP run in both directions between the VM and a container on
// another host, and transferred data is compared.
func TestGuestNetwork(t *testing.T) {
	w := newTenantLab(t)
	var err error
	me := w.vm(0)
	w.cli(w.hosts[0], "vm del "+me.Name)
	w.cli(w.hosts[0], fmt.Sprintf("vm add %s network blue mac %s queues 2", me.Name, me.MAC))
	me.CPUs, me.Queues = 2, 2
	w.ms, err = w.Boot(w.ctx, must[qemu.Config](t)(w.hosts[0].Config(w.ctx, me)))
	check(t, err)
	vm, far := w.ms[0], w.ends[0][1]
	srv := must[*harness.Process](t)(far.ns.Start(filepath.Join(w.Dir, "iperf3.log"), nil, "iperf3", "-s", "--forceflush"))
	w.Add(srv.Kill)
	eventually(w.ctx, t, "iperf3 listens", func() bool { return strings.Contains(srv.LogTail(), "listening") })
	files := must[*harness.Process](t)(far.ns.Start(filepath.Join(w.Dir, "echo.log"), nil, "python3", "-c", echoServer))
	w.Add(files.Kill)
	guestFiles := func() { check(t, vm.WriteFile(w.ctx, "/tmp/echo.py", []byte(echoClient))) }
	guestFiles()
	iperf := []string{"-n 2M", "-n 2M -R", "-u -b 4M -l 1200 -t 1", "-u -b 4M -l 1200 -t 1 -R"}
	traffic := func(t *testing.T) {
		t.Helper()
		run(w.ctx, t, vm, "ping -c 3 -i 0.2 -W 5 "+endIP(12))
		run(w.ctx, t, vm, "timeout 120 python3 /tmp/echo.py "+endIP(12))
		for _, opt := range iperf {
			// A server still busy with the previous test answers that it is busy.
			out := run(w.ctx, t, vm, "for i in 1 2 3 4 5; do timeout 60 iperf3 -c "+endIP(12)+" "+opt+
				" && exit; sleep 1; done; exit 1")
			for line := range strings.Lines(out) {
				if strings.Contains(line, "receiver") {
					t.Logf("iperf3 %s: %s", opt, strings.TrimSpace(line))
				}
			}
		}
	}
	t.Run("as booted", traffic)
	iperf = iperf[:2]
	for _, f := range []string{"tso off", "gso off", "tx off", "gro off", "rx-gro-hw off", "rx off",
		"tx on tso on gso on gro on"} {
		t.Run("ethtool "+f, func(t *testing.T) {
			// ethtool reports what the driver cannot change.
			t.Log(strings.TrimSpace(run(w.ctx, t, vm, "ethtool -K eth0 "+f+" 2>&1 || true")))
			traffic(t)
		})
	}
	for _, n := range []int{1, 2} {
		t.Run(fmt.Sprint("queues ", n), func(t *testing.T) {
			run(w.ctx, t, vm, fmt.Sprint("ethtool -L eth0 combined ", n))
			eventually(w.ctx, t, fmt.Sprintf("%d running queue pairs", n), func() bool {
				return strings.Count(w.cli(w.hosts[0], "vm show -j"), "rx+tx") == n
			})
			traffic(t)
		})
	}
	for _, mtu := range []int{1280, 576, 1450} {
		t.Run(fmt.Sprint("mtu ", mtu), func(t *testing.T) {
			run(w.ctx, t, vm, fmt.Sprint("ip link set eth0 mtu ", mtu))
			traffic(t)
		})
	}
	t.Run("underlay shrinks", func(t *testing.T) {
		w.t = t
		underlay := func(mtu int) {
			for h, x := range w.hosts {
				w.ip(x.NS, "link set ul mtu %d", mtu)
				w.ip(w.wire, "link set w%d mtu %d", h, mtu)
			}
			// A container's MTU is set by its operator.
			w.ip(far.ns, "link set eth0 mtu %d", mtu-50)
			for _, x := range w.hosts {
				eventually(w.ctx, t, "the network's MTU follows", func() bool {
					return strings.Contains(w.cli(x, "network show blue"), fmt.Sprint("mtu ", mtu-50))
				})
			}
		}
		// The guest is not told; oversized packets are answered.
		underlay(1400)
		if r := must[qemu.Result](t)(vm.Shell(w.ctx, "ping -c 1 -W 5 -M do -s 1400 "+endIP(12))); r.ExitCode == 0 ||
			!strings.Contains(r.Stdout, "1350") {
			t.Errorf("ping does not report the MTU:\n%s%s", r.Stdout, r.Stderr)
		}
		traffic(t)
		// The guest may restart meanwhile, although QEMU still offers it the previous MTU.
		check(t, vm.Reboot(w.ctx))
		guestFiles()
		traffic(t)
		underlay(1500)
	})
	rebind := func(t *testing.T) {
		t.Helper()
		run(w.ctx, t, vm, `set -e; d=$(basename $(readlink /sys/class/net/eth0/device)); cd /sys/bus/virtio/drivers/virtio_net
			for i in 1 2 3 4 5; do echo $d > unbind; echo $d > bind; done
			until n=$(ls /sys/bus/virtio/devices/$d/net); do sleep 0.1; done
			[ $n = eth0 ] || ip link set $n name eth0; ip addr add 10.0.0.1/24 dev eth0; ip link set eth0 up`)
	}
	t.Run("rebind", func(t *testing.T) {
		rebind(t)
		traffic(t)
	})
	quietKernels(w.ctx, t, vm)

	// The same with packed rings, which QEMU offers on request. A restarted vnicd forgets run-time changes: the VM is
	// the configured one.
	t.Run("packed", func(t *testing.T) {
		w.t = t
		check(t, vm.Shutdown(w.ctx))
		w.cli(w.hosts[0], "vm del "+me.Name)
		w.cli(w.hosts[0], fmt.Sprintf("vm add %s network blue mac %s", me.Name, me.MAC))
		me.Queues, me.NoHCA = 0, true // without a driver for its HCA, QEMU exits with vnicd
		c := must[qemu.Config](t)(w.hosts[0].Config(w.ctx, me))
		c.ExtraArgs = append(c.ExtraArgs, "-global", "virtio-net-pci.packed=on")
		w.ms, err = w.Boot(w.ctx, c)
		check(t, err)
		vm = w.ms[0]
		packed := func() {
			t.Helper()
			if f := run(w.ctx, t, vm, "cut -c 35 /sys/class/net/eth0/device/features"); strings.TrimSpace(f) != "1" {
				t.Fatalf("feature 34, RING_PACKED: %q", f)
			}
			traffic(t)
		}
		guestFiles()
		packed()
		check(t, vm.Reboot(w.ctx))
		guestFiles()
		packed()
		rebind(t)
		packed()
		restartUnderStream(t, w, vm, far)
		packed()
		quietKernels(w.ctx, t, vm)
	})
}

// restartUnderStream kills and stops the vnicd of a VM during a TCP stream in both directions; the stream continues.
func restartUnderStream(t *testing.T, w *tenantLab, vm *qemu.Machine, far *container) {
	srv := must[*harness.Process](t)(far.ns.Start(filepath.Join(w.Dir, "stream.log"), nil, "iperf3", "-s", "-p", "5302",
		"--forceflush"))
	defer srv.Kill()
	eventually(w.ctx, t, "iperf3 listens", func() bool { return strings.Contains(srv.LogTail(), "listening") })
	stream := must[*qemu.Process](t)(vm.StartShell(w.ctx, "exec iperf3 -c "+endIP(12)+" -p 5302 --bidir -b 4M -t 3600"))
	moved := func() (n [2]int) {
		_, err := fmt.Sscan(run(w.ctx, t, vm, "cat /sys/class/net/eth0/statistics/[rt]x_bytes"), &n[0], &n[1])
		check(t, err)
		return n
	}
	for i := range *restarts {
		before := moved()
		eventually(w.ctx, t, "data in both directions of the stream", func() bool {
			now := moved()
			return now[0] > before[0]+300_000 && now[1] > before[1]+300_000
		})
		if i%3 == 2 {
			check(t, w.hosts[0].Stop(w.ctx))
		} else {
			check(t, w.hosts[0].Proc.Signal(syscall.SIGKILL))
			<-w.hosts[0].Proc.Done()
		}
		check(t, w.hosts[0].Start(w.ctx))
	}
	check(t, stream.Signal(w.ctx, "INT"))
	if r := must[qemu.Result](t)(stream.Wait(w.ctx)); strings.Contains(r.Stderr, "error") &&
		!strings.Contains(r.Stderr, "interrupt") {
		t.Errorf("the TCP stream broke: %s", r.Stderr)
	}
}

// echoServer returns what it receives. echoClient sends four megabytes and compares, then UDP datagrams of various
// sizes.
const echoServer = `import socket, threading
def tcp(c):
    while True:
        b = c.recv(65536)
        if not b:
            break
        c.sendall(b)
    c.close()
def udp():
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.bind(("", 7001))
    while True:
        b, a = s.recvfrom(65536)
        s.sendto(b, a)
threading.Thread(target=udp, daemon=True).start()
s = socket.create_server(("", 7001))
while True:
    c, _ = s.accept()
    threading.Thread(target=tcp, args=(c,), daemon=True).start()
`

const echoClient = `import os, socket, sys, threading, time
data = os.urandom(1 << 20) * 4
c = socket.create_connection((sys.argv[1], 7001), 60)
def send():
    c.sendall(data)
    c.shutdown(socket.SHUT_WR)
t = threading.Thread(target=send)
t.start()
got = bytearray()
while True:
    b = c.recv(1 << 16)
    if not b:
        break
    got += b
t.join()
if bytes(got) != data:
    sys.exit("TCP: sent %d bytes, received %d, or the data differs" % (len(data), len(got)))
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(2)
s.connect((sys.argv[1], 7001))
for n in (0, 1, 17, 548, 1000, 1252, 1422, 1423, 3000, 9000, 20000):
    want, end = data[n:2 * n], time.time() + 60
    while True:
        s.send(want)
        try:
            if s.recv(1 << 16) == want:
                break
        except OSError:
            pass
        if time.time() > end:
            sys.exit("UDP: no reply of %d bytes" % n)
`

// TestVLANUnderlay runs the tests of device/ethernet/vxlan that need VLAN interfaces in a VM, because the machine's own
// kernel may have none: vnicd's VTEP and TAP and a Linux vxlan device on a tagged underlay, and tenants that tag their
// frames. It also tests the short path's programs.
func TestVLANUnderlay(t *testing.T) {
	l, ctx := newLabWithoutModule(t)
	h := must[*lab.Host](t)(l.Host("h1"))
	check(t, h.Run(ctx, "networks:\n  - {name: blue, vni: 100}\nvms:\n  - {name: vm1, network: blue, mac: \""+vmA.MAC+
		"\"}\n"))
	l.Share = t.TempDir()
	for _, p := range []string{"vxlan", "fastpath"} {
		c := exec.CommandContext(ctx, "go", "test", "-c", "-o", filepath.Join(l.Share, p+".test"), "./device/ethernet/"+p)
		c.Dir, c.Env = l.Root, append(c.Environ(), "CGO_ENABLED=0")
		if out, err := c.CombinedOutput(); err != nil {
			t.Fatalf("building the test: %v\n%s", err, out)
		}
	}
	v := vmA
	v.NoHCA, v.CPUs = true, 2
	var ms []*qemu.Machine
	dumpOnFailure(t, []*lab.Host{h}, &ms)
	var err error
	ms, err = l.Boot(ctx, must[qemu.Config](t)(h.Config(ctx, v)))
	check(t, err)
	run(ctx, t, ms[0], "modprobe -a tun veth vxlan 8021q bridge")
	start := time.Now()
	out := run(ctx, t, ms[0], "cd /tmp && /host/vxlan.test -test.v -test.run '^(TestVLANUnderlay|TestVLANGuests)$' 2>&1")
	if strings.Contains(out, "no VLAN interfaces") || strings.Count("\n"+out, "\n--- PASS") != 2 {
		t.Errorf("in the VM:\n%s", out)
	}
	// Test the short path's programs on a kernel other than the machine's.
	out = run(ctx, t, ms[0],
		"cd /tmp && /host/fastpath.test -test.v -test.run '^(TestVLANShortPath|TestFrames|TestSuspend|TestEntry)$' 2>&1")
	if strings.Contains(out, "no VLAN interfaces") || strings.Count("\n"+out, "\n--- PASS") != 4 {
		t.Errorf("in the VM:\n%s", out)
	}
	t.Logf("%v in the VM", time.Since(start).Round(time.Second))
	quietKernels(ctx, t, ms...)
}
