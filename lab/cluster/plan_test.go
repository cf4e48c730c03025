package cluster

import (
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

// TestPlan: the names and addresses of the largest clusters are unique and in their networks.
func TestPlan(t *testing.T) {
	for hosts := 1; hosts <= maxHosts; hosts++ {
		ps := plan(hosts, maxVMs/hosts)
		seen := map[string]bool{}
		once := func(what string) {
			if seen[what] {
				t.Errorf("%d hosts: %s twice", hosts, what)
			}
			seen[what] = true
		}
		rank := 0
		for _, p := range ps {
			once(p.name)
			once(p.underlay.String())
			once(p.port.String())
			if p.underlay.Masked() != underlayPrefix || p.port.Masked() != tenantPrefix {
				t.Errorf("%s: %v, %v", p.name, p.underlay, p.port)
			}
			for _, v := range p.vms {
				once(v.name)
				once(v.mac)
				once(v.addr.String())
				hw, err := net.ParseMAC(v.mac)
				if err != nil || hw[0] != 2 || v.addr.Masked() != tenantPrefix || v.rank != rank {
					t.Errorf("%+v: %v", v, err)
				}
				rank++
			}
		}
		if len(ps) != hosts || rank != hosts*(maxVMs/hosts) || rank != len(vmsOf(ps)) {
			t.Errorf("%d hosts with %d VMs", len(ps), rank)
		}
	}
}

func TestConfiguration(t *testing.T) {
	got := configuration(plan(3, 2), 1)
	want := `vtep: {local: 192.0.2.2}
networks:
  - {name: lab, vni: 100, peers: [192.0.2.1, 192.0.2.3], tap: {name: lab0, addresses: [10.77.255.2/16]}}
vms:
  - {name: vm3, network: lab, mac: "02:00:00:00:00:03"}
  - {name: vm4, network: lab, mac: "02:00:00:00:00:04"}
`
	if got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

func TestEnvironment(t *testing.T) {
	vms := vmsOf(plan(2, 1))
	want := []string{"VNICD_LAB_HOSTS=vm1,vm2", "VNICD_LAB_ADDRESSES=10.77.0.1,10.77.0.2", "VNICD_LAB_RANK=1",
		"VNICD_LAB_SIZE=2", "VNICD_LAB_DIR=/home/it's a"}
	got := environment("/home/it's a", vms, vms[1])
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	if s := server(got); !strings.Contains(s, `SetEnv "VNICD_LAB_HOSTS=vm1,vm2" "VNICD_LAB_ADDRESSES=`) ||
		!strings.Contains(s, ` "VNICD_LAB_DIR=/home/it's a"`) {
		t.Errorf("the variables are not in the configuration of sshd:\n%s", s)
	}
}

func TestHostAddress(t *testing.T) {
	for _, x := range []struct {
		prefix string
		want   string
	}{{"10.77.0.0/16", "10.77.255.7/16"}, {"192.0.2.0/24", "192.0.2.7/24"}} {
		if got := host(netip.MustParsePrefix(x.prefix), 255, 7); got.String() != x.want {
			t.Errorf("%s: got %v, want %s", x.prefix, got, x.want)
		}
	}
}
