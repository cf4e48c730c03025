package integration

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

// Tests with kernel consumers. They need fast registration, invalidation by either side, and the reserved key for real
// addresses (RA-1 to RA-3), which no other program in a guest uses.

// nvmeUse creates a file system on the target's disk, has fio write and verify, and reads everything again after
// remounting.
const nvmeUse = `set -e
%s
mkfs.ext4 -q -E lazy_itable_init=0 /dev/nvme0n1
mkdir -p /mnt/nvme
mount /dev/nvme0n1 /mnt/nvme
fio --name=verify --directory=/mnt/nvme --size=4M --numjobs=2 --rw=randwrite --bsrange=512-256k --direct=1 \
	--ioengine=libaio --iodepth=16 --verify=crc32c --verify_fatal=1 --randseed=7 --allow_mounted_write=1 --minimal >/tmp/fio.out
fio --name=mixed --directory=/mnt/nvme --size=1M --rw=randrw --bs=4k --direct=1 --ioengine=libaio --iodepth=32 --verify=crc32c --verify_fatal=1 --minimal >>/tmp/fio.out
dd if=/dev/urandom of=/tmp/random bs=1M count=8 status=none
cp /tmp/random /mnt/nvme/random
umount /mnt/nvme
fsck.ext4 -fn /dev/nvme0n1 >/dev/null
mount /dev/nvme0n1 /mnt/nvme
cmp /tmp/random /mnt/nvme/random
umount /mnt/nvme
%s`

// nvme runs this script with one guest as host and the other as target.
func nvme(ctx context.Context, t *testing.T, host, target *qemu.Machine, addr string) {
	t.Helper()
	a, _, _ := strings.Cut(addr, "/")
	way := lab.NVMe{Transport: "rdma", Addr: a}
	end := must[func() error](t)(lab.ExportNVMe(ctx, target, way))
	run(ctx, t, host, fmt.Sprintf(nvmeUse, way.Connect(0), way.Disconnect()))
	if err := end(); err != nil {
		t.Fatal(err)
	}
}

// moderated runs f while ib_core moderates the completion queues that are made on a VM (rdma_dim), until it has asked
// the driver to. The module is loaded again, because ib_core keeps completion queues for its users.
func moderated(ctx context.Context, t *testing.T, m *qemu.Machine, f func()) {
	t.Helper()
	const trace = "/sys/kernel/tracing/"
	run(ctx, t, m, "rmmod vnicd")
	check(t, lab.LoadModule(ctx, m))
	run(ctx, t, m, "mountpoint -q "+trace+" || mount -t tracefs none "+trace+"\n"+
		"echo 'p:moderated vnicd_modify_cq count=$arg2:u16 period=$arg3:u16' > "+trace+"kprobe_events\n"+
		"echo 1 > "+trace+"events/kprobes/moderated/enable\n"+
		"rdma dev set "+lab.Device+" adaptive-moderation on")
	eventually(ctx, t, "the driver moderates a completion queue", func() bool {
		f()
		calls := run(ctx, t, m, "grep -o 'count=.*' "+trace+"trace || true")
		t.Logf("%d changes of moderation: %s", strings.Count(calls, "count="), strings.ReplaceAll(calls, "\n", ", "))
		return calls != ""
	})
	run(ctx, t, m, "rdma dev set "+lab.Device+" adaptive-moderation off\n"+
		"echo 0 > "+trace+"events/kprobes/moderated/enable\necho > "+trace+"kprobe_events")
}

// nfsServer exports a directory over RDMA. The grace time is short: no client has locks to reclaim, and newer kernels
// do not end it on demand.
const nfsServer = `set -e
mkdir -p /srv/nfs /run/rpc_pipefs
mountpoint -q /srv/nfs || mount -t tmpfs none /srv/nfs
modprobe -a nfsd rpcrdma
mountpoint -q /proc/fs/nfsd || mount -t nfsd none /proc/fs/nfsd
echo '/srv/nfs *(rw,fsid=0,no_root_squash,insecure,no_subtree_check)' > /etc/exports
echo 10 > /proc/fs/nfsd/nfsv4leasetime
echo 10 > /proc/fs/nfsd/nfsv4gracetime
rpc.mountd -N 2 -N 3
exportfs -a
rpc.nfsd -N 3 -H 0.0.0.0 --rdma=20049 4
echo Y > /proc/fs/nfsd/v4_end_grace || true
grep -q rdma /proc/fs/nfsd/portlist`

// nfsBegin mounts what nfsServer exports, whose address is its argument, and copies a file to it.
const nfsBegin = `set -e
modprobe rpcrdma
mkdir -p /mnt/nfs
mount -t nfs4 -o proto=rdma,port=20049,vers=4.2,rsize=262144,wsize=262144 %s:/ /mnt/nfs
dd if=/dev/urandom of=/tmp/random bs=1M count=4 status=none
cp /tmp/random /mnt/nfs/random
`

// nfsCompare mounts it again, so that the client reads the file from the server, and ends.
const nfsCompare = `set -e
umount /mnt/nfs
mount -t nfs4 -o proto=rdma,port=20049,vers=4.2 %s:/ /mnt/nfs
cmp /tmp/random /mnt/nfs/random
grep -q 'proto=rdma' /proc/mounts
umount /mnt/nfs`

const nfsUse = nfsBegin + `fio --name=verify --directory=/mnt/nfs --size=3M --rw=randwrite --bsrange=4k-256k --direct=1 --ioengine=libaio --iodepth=8 \
	--verify=crc32c --verify_fatal=1 --minimal >/tmp/fio.out
` + nfsCompare

const nfsServerEnd = `set -e
rpc.nfsd 0
exportfs -ua
pkill rpc.mountd
umount /proc/fs/nfsd /srv/nfs`

// echo is a program for the kernel's RDMA sockets, SMC-R and RDS: one end returns what it receives, the other compares.
// Sockets of these families take IP addresses; Python does not support SMC's.
const echo = `import ctypes, os, socket, struct, sys
kind, mode, me, peer = sys.argv[1:]
if kind == "smc":
    fd = ctypes.CDLL(None, use_errno=True).socket(43, socket.SOCK_STREAM, 0)
    s = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=fd)
    s.settimeout(60)
    if mode == "serve":
        s.bind((me, 5000))
        s.listen(1)
        c, _ = s.accept()
        c.settimeout(60)
        while b := c.recv(65536):
            c.sendall(b)
    else:
        s.connect((peer, 5000))
        for i in range(64):
            b, got = os.urandom(16384), b""
            s.sendall(b)
            while len(got) < len(b):
                more = s.recv(65536)
                assert more, "closed"
                got += more
            assert got == b, i
else:
    s = socket.socket(socket.AF_RDS, socket.SOCK_SEQPACKET, 0)
    for size in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        s.setsockopt(socket.SOL_SOCKET, size, 1 << 20)
    s.setsockopt(276, 8, struct.pack("i", 0)) # SO_RDS_TRANSPORT: RDS_TRANS_IB, not TCP
    s.settimeout(60)
    s.bind((me, 4000))
    for i in range(100):
        if mode == "serve":
            b, who = s.recvfrom(65536)
            s.sendto(b, who)
        else:
            b = os.urandom([1, 1000, 8192, 40000][i % 4])
            s.sendto(b, (peer, 4000))
            got, _ = s.recvfrom(65536)
            assert got == b, i
    if mode == "serve":
        import time; time.sleep(2) # the last answer is on its way
`

// sockets lets two guests communicate by SMC-R or RDS, and reports whether RDMA carried it: SMC-R silently falls back
// to TCP.
func sockets(ctx context.Context, t *testing.T, kind, modules string, a, b *qemu.Machine) bool {
	t.Helper()
	addrA, _, _ := strings.Cut(vmA.Addr, "/")
	addrB, _, _ := strings.Cut(vmB.Addr, "/")
	for _, m := range []*qemu.Machine{a, b} {
		run(ctx, t, m, "modprobe -a "+modules+" && cat > /tmp/echo.py <<'END'\n"+echo+"END")
	}
	sent := func() int { return counter(ctx, t, lab.End{VM: a, Device: lab.Device}, "tx_bytes") }
	before := sent()
	srv := must[*qemu.Process](t)(b.StartShell(ctx,
		lab.Limited(3*time.Minute, fmt.Sprintf("python3 /tmp/echo.py %s serve %s %s", kind, addrB, addrA))))
	// SMC listens on its own TCP socket; an RDS socket is bound once it is in the list.
	check(t, harness.WaitGuest(ctx, b, fmt.Sprintf("ss -ltnH | grep -q :5000 || [ %s = rds ] && sleep 1 || ! kill -0 %d",
		kind, srv.PID())))
	run(ctx, t, a, lab.Limited(2*time.Minute, fmt.Sprintf("python3 /tmp/echo.py %s ask %s %s", kind, addrA, addrB)))
	if r, err := srv.Wait(ctx); err != nil || r.ExitCode != 0 {
		t.Errorf("server: %v, exit %d\n%s%s", err, r.ExitCode, r.Stdout, r.Stderr)
	}
	return sent()-before >= 1<<20
}

// TestKernelConsumers: NVMe over RDMA and NFS over RDMA between two hosts, with our HCA at both ends, and NVMe with rxe
// at one end, in both roles.
func TestKernelConsumers(t *testing.T) {
	l, ctx := newLab(t)
	w := newTwoHosts(ctx, t, l)
	a, b := w.vms[0], w.vms[1]
	w.load(ctx, t)
	t.Run("nvme", func(t *testing.T) { nvme(ctx, t, a, b, vmB.Addr) })
	t.Run("nvme, adaptive moderation", func(t *testing.T) {
		moderated(ctx, t, a, func() { nvme(ctx, t, a, b, vmB.Addr) })
	})
	quietKernels(ctx, t, w.vms...)
	t.Run("nfs", func(t *testing.T) {
		addr, _, _ := strings.Cut(vmB.Addr, "/")
		run(ctx, t, b, nfsServer)
		run(ctx, t, a, fmt.Sprintf(nfsUse, addr, addr))
		run(ctx, t, b, nfsServerEnd)
	})
	quietKernels(ctx, t, w.vms...)
	for _, d := range []struct {
		name         string
		host, target int
		rxe          *qemu.Machine
	}{{"rxe target", 0, 1, b}, {"rxe host", 1, 0, b}} {
		t.Run("nvme, "+d.name, func(t *testing.T) {
			if exists := run(ctx, t, d.rxe, "ls /sys/class/infiniband"); !strings.Contains(exists, "rxe0") {
				run(ctx, t, d.rxe, "rmmod vnicd")
				check(t, harness.AddRXE(ctx, d.rxe, "rxe0", "eth0"))
				check(t, lab.WaitRDMA(ctx, d.rxe, "rxe0"))
			}
			nvme(ctx, t, w.vms[d.host], w.vms[d.target], []string{vmA.Addr, vmB.Addr}[d.target])
		})
	}
	quietKernels(ctx, t, w.vms...)
}

// TestKernelSockets: SMC-R and RDS between two hosts.
func TestKernelSockets(t *testing.T) {
	l, ctx := newLab(t)
	w := newTwoHosts(ctx, t, l)
	a, b := w.vms[0], w.vms[1]
	w.load(ctx, t)
	// SMC may need a moment, and one connection over TCP, to notice a new link.
	smc := func(t *testing.T) {
		if l.Images.Release == backports {
			if r, err := a.Shell(ctx, "modinfo smc"); err == nil && r.ExitCode != 0 {
				t.Skip("Debian's 7.3 does not carry SMC")
			}
		}
		eventually(ctx, t, "SMC uses RDMA", func() bool { return sockets(ctx, t, "smc", "smc", a, b) })
	}
	rds := func(t *testing.T) {
		if !sockets(ctx, t, "rds", "rds rds_rdma", a, b) {
			t.Error("the connection did not use RDMA")
		}
	}
	t.Run("smc", smc)
	t.Run("rds", rds)
	quietKernels(ctx, t, w.vms...)
}

// TestBesideRXE: our module and rdma_rxe in one guest, on the same interface. Unloading rdma_rxe also removes our
// device, which has its driver id, under a sleeping and a busy program; a reload brings it back. Unloading our module
// leaves rxe working. The guest's kernel reports no defect.
func TestBesideRXE(t *testing.T) {
	l, ctx := newLab(t)
	h := must[*lab.Host](t)(l.Host("h1"))
	check(t, h.Run(ctx,
		"networks: [{name: blue, vni: 100}]\nvms: [{name: vm1, network: blue, mac: \"02:00:00:00:00:01\"}]\n"))
	var ms []*qemu.Machine
	dumpOnFailure(t, []*lab.Host{h}, &ms)
	var err error
	ms, err = l.Boot(ctx, must[qemu.Config](t)(h.Config(ctx, vmA)))
	check(t, err)
	m := ms[0]
	works := func(device string) {
		t.Helper()
		check(t, lab.WaitRDMA(ctx, m, device))
		e := must[lab.End](t)(lab.NewEnd(ctx, m, device, vmA.Addr))
		must[string](t)(lab.Pingpong(ctx, e, e, "ibv_rc_pingpong", "-c", "-n", "50"))
	}
	check(t, lab.LoadModule(ctx, m))
	works(lab.Device)
	for range 2 {
		check(t, harness.AddRXE(ctx, m, "rxe0", "eth0"))
		works("rxe0")
		works(lab.Device)
		e := must[lab.End](t)(lab.NewEnd(ctx, m, lab.Device, vmA.Addr))
		asleep := must[*qemu.Process](t)(lab.Listen(ctx, m, "rping -s -a "+e.Addr, 0))
		busy := must[*qemu.Process](t)(lab.Listen(ctx, m, fmt.Sprintf("ibv_rc_pingpong -e -d %s -g %d -n 10000000", e.Device,
			e.GID), 18515))
		client := must[*qemu.Process](t)(m.StartShell(ctx,
			fmt.Sprintf("exec timeout -k 5 240 ibv_rc_pingpong -e -d %s -g %d -n 10000000 %s", e.Device, e.GID, e.Addr)))
		check(t, harness.WaitGuest(ctx, m, "[ $(rdma resource show qp link "+lab.Device+"/1 | grep -c RTS) -ge 2 ]"))
		run(ctx, t, m, lab.Limited(2*time.Minute, "rmmod rdma_rxe"))
		if left := run(ctx, t, m, "ls /sys/class/infiniband"); strings.TrimSpace(left) != "" {
			t.Fatalf("after rmmod rdma_rxe there is still %s: has the kernel changed?", left)
		}
		if log := run(ctx, t, m, "dmesg | tail -50"); !strings.Contains(log, "vnicd") {
			t.Errorf("the module logged nothing:\n%s", log)
		}
		_ = asleep.Signal(ctx, "TERM")
		for what, p := range map[string]*qemu.Process{"asleep": asleep, "busy": busy, "client": client} {
			if r, err := p.Wait(ctx); err != nil || r.ExitCode == 0 || r.ExitCode == 124 {
				t.Errorf("%s: %v, exit %d\n%s%s", what, err, r.ExitCode, r.Stdout, r.Stderr)
			}
		}
		run(ctx, t, m, "rmmod vnicd")
		check(t, lab.LoadModule(ctx, m))
		works(lab.Device)
	}
	check(t, harness.AddRXE(ctx, m, "rxe0", "eth0"))
	run(ctx, t, m, "rmmod vnicd")
	works("rxe0")
	check(t, lab.LoadModule(ctx, m))
	works(lab.Device)
	quietKernels(ctx, t, ms...)
}
