package qemu

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

func testImages() *Images {
	return &Images{QEMU: "/c/qemu", Kernel: "/c/vmlinuz", Initrd: "/c/initrd", Rootfs: "/c/root,fs.ext4", Cache: "/c"}
}

func testConfig() Config {
	return Config{
		Images: testImages(), Name: "vm1", Dir: "/tmp/v", MemoryMiB: 512, CPUs: 2,
		HCA: &HCA{Socket: "/run/vm1.hca", Queues: 6},
		NICs: []NIC{
			{Socket: "/run/vm1.net", MAC: "52:54:00:00:00:0A", MTU: 1450, Queues: 4,
				Addresses: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24"), netip.MustParsePrefix("fd00::1/64")}},
			{Tap: "tap0", MAC: "52:54:00:00:00:0b", IfName: "mgmt", Gateway: netip.MustParseAddr("10.1.0.1")},
		},
		HostShare:  "/src",
		Shares:     []Share{{Tag: "work", Dir: "/home/a,b"}},
		KernelArgs: []string{"vnicd.shell"},
		ExtraArgs:  []string{"-S"},
	}
}

func TestArgs(t *testing.T) {
	c := testConfig()
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	want := []string{
		"-name", "vm1", "-nodefaults", "-no-user-config", "-display", "none", "-M", "q35,memory-backend=ram",
		"-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2",
		"-m", "512M", "-object", "memory-backend-memfd,id=ram,size=512M,share=on",
		"-kernel", "/c/vmlinuz", "-initrd", "/c/initrd",
		"-append", "console=ttyS0 quiet loglevel=5 panic=-1 net.ifnames=0 vnicd.hostname=vm1 " +
			"vnicd.net=52:54:00:00:00:0a,mtu=1450,10.0.0.1/24,fd00::1/64 vnicd.net=52:54:00:00:00:0b,name=mgmt,gw=10.1.0.1 vnicd.shell",
		"-drive", "file=/c/root,,fs.ext4,format=raw,if=none,id=disk,snapshot=on,cache=unsafe",
		"-device", "virtio-blk-pci,drive=disk,romfile=",
		"-chardev", "file,id=console,path=/tmp/v/console.log", "-serial", "chardev:console",
		"-chardev", "socket,id=qmp,path=/tmp/v/qmp.sock,server=on,wait=off", "-mon", "chardev=qmp,mode=control",
		"-device", "virtio-serial-pci,romfile=",
		"-chardev", "socket,id=agent,path=/tmp/v/agent.sock,server=on,wait=off",
		"-device", "virtserialport,chardev=agent,name=org.qemu.guest_agent.0",
		"-fsdev", "local,id=host,path=/src,security_model=none,readonly=on",
		"-device", "virtio-9p-pci,fsdev=host,mount_tag=host,romfile=",
		"-fsdev", "local,id=work,path=/home/a,,b,security_model=none,multidevs=remap",
		"-device", "virtio-9p-pci,fsdev=work,mount_tag=work,romfile=",
		"-chardev", "socket,id=chr-nic0,path=/run/vm1.net,reconnect-ms=100",
		"-netdev", "vhost-user,id=net-nic0,chardev=chr-nic0,queues=4",
		"-device",
		"virtio-net-pci,id=nic0,netdev=net-nic0,mac=52:54:00:00:00:0a,romfile=,host_mtu=1450,rx_queue_size=1024,tx_queue_size=1024,mq=on,vectors=10",
		"-netdev", "tap,id=net-nic1,ifname=tap0,script=no,downscript=no",
		"-device", "virtio-net-pci,id=nic1,netdev=net-nic1,mac=52:54:00:00:00:0b,romfile=",
		"-chardev", "socket,id=chr-hca0,path=/run/vm1.hca",
		"-device",
		"vhost-user-test-device-pci,id=hca0,chardev=chr-hca0,virtio-id=38,num_vqs=6,vq_size=256,config_size=128,romfile=",
		"-S",
	}
	got := c.Args()
	for i := range max(len(got), len(want)) {
		switch {
		case i >= len(got):
			t.Fatalf("argument %d is missing: %q", i, want[i])
		case i >= len(want):
			t.Fatalf("argument %d is unexpected: %q", i, got[i])
		case got[i] != want[i]:
			t.Fatalf("argument %d:\n got %q\nwant %q", i, got[i], want[i])
		}
	}
	if !slices.Equal(got, c.Args()) {
		t.Error("a second call differs")
	}
}

func TestArgsDefaults(t *testing.T) {
	c := Config{Images: testImages(), Name: "a", Dir: "/d", Accel: KVM}
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	s := strings.Join(c.Args(), " ")
	for _, want := range []string{"-accel kvm -cpu host", "-smp 1", "size=1024M,share=on"} {
		if !strings.Contains(s, want) {
			t.Errorf("no %q in %s", want, s)
		}
	}
	for _, not := range []string{HCADevice, "virtio-net", "9p"} {
		if strings.Contains(s, not) {
			t.Errorf("unexpected %q in %s", not, s)
		}
	}
}

func TestValidate(t *testing.T) {
	nic := func(n NIC) func(*Config) { return func(c *Config) { c.NICs = append(c.NICs, n) } }
	for _, tc := range []struct {
		change func(*Config)
		want   string
	}{
		{func(c *Config) { c.Images = nil }, "no images"},
		{func(c *Config) { c.Name = "a b" }, `name "a b"`},
		{func(c *Config) { c.Name = "" }, `name ""`},
		{func(c *Config) { c.Dir = "x" }, "absolute path"},
		{func(c *Config) { c.Dir = "/" + strings.Repeat("d", 100) }, "at most 107 fit"},
		{func(c *Config) { c.MemoryMiB = 5 }, "memory of 5 MiB"},
		{func(c *Config) { c.CPUs = -1 }, "-1 CPUs"},
		{func(c *Config) { c.Accel = "xen" }, `accelerator "xen"`},
		{func(c *Config) { c.HCA = &HCA{Queues: 5} }, "HCA: no socket"},
		{func(c *Config) { c.HCA = &HCA{Socket: "s"} }, "HCA: 0 queues"},
		{func(c *Config) { c.Netns = "../x" }, `network namespace "../x"`},
		{nic(NIC{MAC: "52:54:00:00:00:01"}), "NIC 2: expected either"},
		{nic(NIC{Tap: "t", Socket: "s", MAC: "52:54:00:00:00:01"}), "NIC 2: expected either"},
		{nic(NIC{Tap: "t", MAC: "52:54"}), `MAC "52:54"`},
		{nic(NIC{Tap: "t", MAC: "01:00:00:00:00:01"}), "group address"},
		{nic(NIC{Tap: "t", MAC: "52:54:00:00:00:0a"}), "used twice"},
		{nic(NIC{Tap: "t", MAC: "52:54:00:00:00:01", MTU: 60}), "MTU 60"},
		{nic(NIC{Tap: "t", MAC: "52:54:00:00:00:01", IfName: "a,b"}), `interface name "a,b"`},
		{nic(NIC{Tap: "t", MAC: "52:54:00:00:00:01", Addresses: make([]netip.Prefix, 1)}), "invalid address"},
		{func(c *Config) { c.KernelArgs = []string{"a b"} }, `kernel argument "a b"`},
		{func(c *Config) { c.KernelArgs = []string{strings.Repeat("a", 2000)} }, "kernel command line"},
	} {
		c := testConfig()
		tc.change(&c)
		if err := c.Validate(); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("expected %q, got %v", tc.want, err)
		}
	}
}

// A value with commas must stay one value: otherwise a path could inject device options.
func TestEscape(t *testing.T) {
	got := fmt.Sprint(HCAArgs("/a,server=on", "h", 3))
	if !strings.Contains(got, "path=/a,,server=on") {
		t.Error(got)
	}
}
