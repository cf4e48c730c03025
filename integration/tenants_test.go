package integration

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

// Endpoint i of each tenant is 10.0.0.i with a MAC derived from i, and tells its name at askPort.
const (
	tenantHosts = 3
	askPort     = 7000
)

// The tenants by number. VM i of each has endpoint number i+1 and the same addresses as the other tenant's VM i.
var tenantNames = [2]string{"blue", "red"}

func endIP(i int) string  { return fmt.Sprintf("10.0.0.%d", i) }
func endMAC(i int) string { return fmt.Sprintf("02:00:00:00:00:%02x", i) }

// container is an endpoint of a tenant: a namespace with a veth pair into a Linux bridge that holds vnicd's TAP port.
type container struct {
	tenant, number int
	ns             *harness.Namespace
	host           *lab.Host // nil: unplugged
	port           string    // its veth end in the host's bridge
	listener       net.Listener
}

// tenantLab has three hosts on one wire, each with both tenants' networks and a container of each.
type tenantLab struct {
	*lab.Lab
	ctx   context.Context
	t     *testing.T
	wire  *harness.Namespace
	hosts [tenantHosts]*lab.Host
	ends  [2][tenantHosts]*container
	ms    []*qemu.Machine
}

func hostIP(h int) string { return fmt.Sprintf("192.0.2.%d", h+1) }

func newTenantLab(t *testing.T) *tenantLab {
	t.Helper()
	l, ctx := newLabWithoutModule(t)
	w := &tenantLab{Lab: l, ctx: ctx, t: t}
	w.wire = must[*harness.Namespace](t)(harness.NewNamespace("vnicd-wire"))
	l.Add(func() { _ = w.wire.Close() })
	w.ip(w.wire, "link add sw type bridge")
	w.ip(w.wire, "link set sw up")
	for h := range tenantHosts {
		x := must[*lab.Host](t)(l.Host(fmt.Sprint("h", h+1)))
		w.hosts[h] = x
		dev := fmt.Sprint("w", h)
		check(t, harness.AddVeth(x.NS, "ul", w.wire, dev, 1500))
		w.ip(w.wire, "link set %s master sw", dev)
		check(t, x.NS.AddAddress("ul", netip.MustParsePrefix(hostIP(h)+"/24")))
		check(t, x.RealWire())
		for _, name := range tenantNames {
			w.ip(x.NS, "link add b%s mtu 1450 type bridge", name)
			w.ip(x.NS, "link set b%s up", name)
		}
	}
	dumpOnFailure(t, w.hosts[:], &w.ms)
	for h := range tenantHosts {
		check(t, w.hosts[h].Run(ctx, w.config(h, h < 2)))
		for tenant := range tenantNames {
			w.ends[tenant][h] = w.container(tenant, 11+h)
			w.plug(w.ends[tenant][h], w.hosts[h])
		}
	}
	return w
}

// config returns a host's configuration, with the VM of the tenant of the host's number.
func (w *tenantLab) config(h int, vm bool) string {
	var peers []string
	for i := range tenantHosts {
		if i != h {
			peers = append(peers, hostIP(i))
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, "vtep: {local: %s}\nnetworks:\n", hostIP(h))
	for i, name := range tenantNames {
		fmt.Fprintf(&b, "  - {name: %s, vni: %d, storm: 2000, peers: [%s], tap: {name: %s0, bridge: b%s}}\n", name, 100+i,
			strings.Join(peers, ", "), name, name)
	}
	if vm {
		fmt.Fprintf(&b, "vms:\n  - {name: %s, network: %s, mac: %q}\n", w.vm(h).Name, tenantNames[h], endMAC(1))
	}
	return b.String()
}

func (w *tenantLab) ip(ns *harness.Namespace, format string, args ...any) {
	w.t.Helper()
	must[string](w.t)(ns.Run(w.ctx, append([]string{"ip"}, strings.Fields(fmt.Sprintf(format, args...))...)...))
}

// container creates an unplugged container.
func (w *tenantLab) container(tenant, number int) *container {
	w.t.Helper()
	c := &container{tenant: tenant, number: number, port: fmt.Sprintf("c%s%d", tenantNames[tenant], number)}
	c.ns = must[*harness.Namespace](w.t)(harness.NewNamespace("vnicd-" + c.port))
	w.Add(func() { _ = c.ns.Close() })
	check(w.t, c.ns.Do(func() (err error) {
		c.listener, err = net.Listen("tcp", fmt.Sprint(":", askPort))
		return err
	}))
	w.Add(func() { _ = c.listener.Close() })
	go func() {
		for {
			s, err := c.listener.Accept()
			if err != nil {
				return
			}
			fmt.Fprintln(s, c.name())
			s.Close()
		}
	}()
	return c
}

func (c *container) name() string { return fmt.Sprintf("%s %d", tenantNames[c.tenant], c.number) }

// plug attaches a container to a host, detaching it from its previous host.
func (w *tenantLab) plug(c *container, h *lab.Host) {
	w.t.Helper()
	w.unplug(c)
	check(w.t, harness.AddVeth(h.NS, c.port, c.ns, "eth0", 1450))
	w.ip(c.ns, "link set eth0 address %s", endMAC(c.number))
	check(w.t, c.ns.AddAddress("eth0", netip.MustParsePrefix(endIP(c.number)+"/24")))
	w.ip(h.NS, "link set %s master b%s", c.port, tenantNames[c.tenant])
	c.host = h
}

func (w *tenantLab) unplug(c *container) {
	w.t.Helper()
	if c.host != nil {
		w.ip(c.host.NS, "link del %s", c.port)
		c.host = nil
	}
}

// ask returns the name of the endpoint that answers a container at an address.
func (c *container) ask(number int, timeout time.Duration) (string, error) {
	var s net.Conn
	err := c.ns.Do(func() (err error) {
		s, err = net.DialTimeout("tcp", fmt.Sprint(endIP(number), ":", askPort), timeout)
		return err
	})
	if err != nil {
		return "", err
	}
	defer s.Close()
	if err := s.SetDeadline(time.Now().Add(timeout)); err != nil {
		return "", err
	}
	b, err := io.ReadAll(s)
	return strings.TrimSpace(string(b)), err
}

// reaches waits until c gets an answer from number in the name of c's tenant.
func (w *tenantLab) reaches(c *container, number int) {
	w.t.Helper()
	want := fmt.Sprintf("%s %d", tenantNames[c.tenant], number)
	var got string
	var err error
	eventually(w.ctx, w.t, fmt.Sprintf("%s reaches %d", c.name(), number), func() bool {
		got, err = c.ask(number, 2*time.Second)
		return err == nil
	})
	if got != want {
		w.t.Fatalf("%s asked %d, and %q answered", c.name(), number, got)
	}
}

// misses checks that c gets no answer from number.
func (w *tenantLab) misses(c *container, number int) {
	w.t.Helper()
	if got, err := c.ask(number, 2*time.Second); err == nil {
		w.t.Fatalf("%s asked %d, which is not plugged in, and %q answered", c.name(), number, got)
	}
}

// all checks that all plugged-in endpoints of a tenant reach each other, the VM included.
func (w *tenantLab) all(tenant int, vm *qemu.Machine) {
	w.t.Helper()
	var numbers []int
	for _, c := range w.ends[tenant] {
		if c.host == nil {
			continue
		}
		numbers = append(numbers, c.number)
		if vm != nil {
			w.reaches(c, 1)
		}
		for _, d := range w.ends[tenant] {
			if d != c && d.host != nil {
				w.reaches(c, d.number)
			}
		}
	}
	if vm != nil {
		w.vmReaches(vm, tenant, numbers...)
	}
}

// guestScript is the VMs' server and client.
const guestScript = `import socket, sys, threading, time
def serve(name):
    s = socket.create_server(("", 7000))
    while True:
        c, _ = s.accept()
        c.sendall(name.encode() + b"\n")
        c.close()
def ask(ip):
    end = time.time() + 120
    while True:
        try:
            with socket.create_connection((ip, 7000), 5) as c:
                return c.recv(100).decode().strip()
        except OSError as e:
            if time.time() > end:
                return str(e)
            time.sleep(0.2)
if sys.argv[1] == "serve":
    serve(sys.argv[2])
for ip in sys.argv[2:]:
    print(ip, ask(ip))
`

// bootVM starts a tenant's VM on a host whose configuration has it.
func (w *tenantLab) bootVM(tenant int, h *lab.Host) *qemu.Machine {
	w.t.Helper()
	ms, err := w.Boot(w.ctx, must[qemu.Config](w.t)(h.Config(w.ctx, w.vm(tenant))))
	check(w.t, err)
	w.startVM(tenant, ms[0])
	return ms[0]
}

func (w *tenantLab) vm(tenant int) lab.VM {
	return lab.VM{Name: tenantNames[tenant] + "-vm", MAC: endMAC(1), Addr: endIP(1) + "/24", MemoryMiB: 512}
}

// startVM starts the server in a VM.
func (w *tenantLab) startVM(tenant int, m *qemu.Machine) {
	w.t.Helper()
	check(w.t, m.WriteFile(w.ctx, "/tmp/ask.py", []byte(guestScript)))
	run(w.ctx, w.t, m, fmt.Sprintf("python3 /tmp/ask.py serve '%s 1' >/dev/null 2>&1 </dev/null &", tenantNames[tenant]))
}

func (w *tenantLab) vmReaches(m *qemu.Machine, tenant int, numbers ...int) {
	w.t.Helper()
	line, want := "python3 /tmp/ask.py ask", ""
	for _, n := range numbers {
		line += " " + endIP(n)
		want += fmt.Sprintf("%s %s %d\n", endIP(n), tenantNames[tenant], n)
	}
	if got := run(w.ctx, w.t, m, line); got != want {
		w.t.Fatalf("the VM of %s asked:\n%swant:\n%s", tenantNames[tenant], got, want)
	}
}

func (w *tenantLab) cli(h *lab.Host, line string) string {
	w.t.Helper()
	return must[string](w.t)(h.CLI(w.ctx, strings.Fields(line)...))
}

// TestTenants: three hosts with vnicds, two tenants with equal subnets and MACs, on each host containers behind TAP
// ports, and a VM of each tenant. Endpoints reach their own tenant and no other, before and after containers and a VM
// move and hosts stop and return (MT-1, MT-2, MT-9, MT-10). Then it tests attacks by a tenant and from the underlay.
func TestTenants(t *testing.T) {
	w := newTenantLab(t)
	h, blue, red := w.hosts, 0, 1
	var err error
	w.ms, err = w.Boot(w.ctx, must[qemu.Config](t)(h[0].Config(w.ctx, w.vm(blue))),
		must[qemu.Config](t)(h[1].Config(w.ctx, w.vm(red))))
	check(t, err)
	w.startVM(blue, w.ms[blue])
	w.startVM(red, w.ms[red])
	allReach := func() {
		t.Helper()
		for tenant := range tenantNames {
			w.all(tenant, w.ms[tenant])
		}
	}
	allReach()

	t.Run("container moves", func(t *testing.T) {
		w.t = t
		// 13 leaves red; blue's 13 must not answer in its place.
		w.unplug(w.ends[red][2])
		w.misses(w.ends[red][0], 13)
		w.reaches(w.ends[blue][0], 13)
		// It returns on another host, and blue's 12 moves there too.
		w.plug(w.ends[red][2], h[0])
		w.plug(w.ends[blue][1], h[0])
		allReach()
		w.plug(w.ends[red][2], h[2])
		w.plug(w.ends[blue][1], h[1])
		allReach()
	})
	t.Run("host goes", func(t *testing.T) {
		w.t = t
		h[2].Proc.Kill()
		w.misses(w.ends[blue][0], 13)
		w.reaches(w.ends[blue][0], 12)
		w.vmReaches(w.ms[red], red, 11, 12)
		check(t, h[2].Start(w.ctx))
		allReach()
	})
	t.Run("VM moves", func(t *testing.T) {
		w.t = t
		// An operator tells host 2 where the VM is, and updates it later.
		w.cli(h[1], "fdb add "+endMAC(1)+" network blue vtep "+hostIP(0))
		w.reaches(w.ends[blue][1], 1)
		check(t, w.ms[blue].Shutdown(w.ctx))
		w.cli(h[0], "vm del blue-vm")
		w.misses(w.ends[blue][1], 1) // red's VM is still there
		w.cli(h[2], "vm add blue-vm network blue mac "+endMAC(1))
		w.cli(h[1], "fdb add "+endMAC(1)+" network blue vtep "+hostIP(2))
		w.ms[blue] = w.bootVM(blue, h[2])
		allReach()
		w.cli(h[1], "fdb del "+endMAC(1)+" network blue")
		allReach()
	})
	t.Run("host stops", func(t *testing.T) {
		w.t = t
		check(t, h[0].Stop(w.ctx))
		w.misses(w.ends[red][1], 11)
		w.reaches(w.ends[blue][1], 1)
		check(t, h[0].Run(w.ctx, w.config(0, false)))
		allReach()
	})
	for i, x := range h {
		s := must[map[string]any](t)(x.Status(w.ctx))
		t.Logf("h%d refused: %v", i+1, s["refused"])
	}
	quietKernels(w.ctx, t, w.ms...)
}
