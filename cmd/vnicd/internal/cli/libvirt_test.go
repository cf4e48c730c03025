package cli

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const oneVM = "networks: [{name: blue, vni: 100, mtu: 1400}]\nvms: [{name: vm1, network: blue, mac: \"02:00:00:00:00:01\", queues: 2}]\n"

// alone runs a command line with a configuration and without a daemon.
func alone(t *testing.T, yaml string, argv ...string) (status int, out, err string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "vnicd.yaml")
	if err := os.WriteFile(path, []byte("run-dir: "+filepath.Dir(path)+"\n"+yaml), 0o600); err != nil {
		t.Fatal(err)
	}
	var o, e bytes.Buffer
	status = Main("test", append([]string{"-c", path}, argv...), &o, &e)
	return status, o.String(), e.String()
}

// The domain has the same devices as the command line of `vnicd qemu-args`.
func TestLibvirtXML(t *testing.T) {
	status, out, errText := alone(t, oneVM, "libvirt-xml", "vm1")
	if status != 0 {
		t.Fatal(errText)
	}
	var d struct {
		Memory struct {
			Access struct {
				Mode string `xml:"mode,attr"`
			} `xml:"access"`
		} `xml:"memoryBacking"`
		Interface struct {
			MAC struct {
				Address string `xml:"address,attr"`
			} `xml:"mac"`
			Source struct {
				Path string `xml:"path,attr"`
				Mode string `xml:"mode,attr"`
			} `xml:"source"`
			Driver struct {
				Queues int `xml:"queues,attr"`
			} `xml:"driver"`
			Alias struct {
				Name string `xml:"name,attr"`
			} `xml:"alias"`
		} `xml:"devices>interface"`
		Args []struct {
			Value string `xml:"value,attr"`
		} `xml:"http://libvirt.org/schemas/domain/qemu/1.0 commandline>arg"`
		Override struct {
			Alias    string `xml:"alias,attr"`
			Property struct {
				Name  string `xml:"name,attr"`
				Value int    `xml:"value,attr"`
			} `xml:"frontend>property"`
		} `xml:"http://libvirt.org/schemas/domain/qemu/1.0 override>device"`
	}
	if err := xml.Unmarshal([]byte(out), &d); err != nil {
		t.Fatalf("%v in\n%s", err, out)
	}
	i := d.Interface
	if d.Memory.Access.Mode != "shared" || i.MAC.Address != "02:00:00:00:00:01" ||
		filepath.Base(i.Source.Path) != "vm1.net" || i.Source.Mode != "client" || i.Driver.Queues != 2 {
		t.Errorf("%+v from\n%s", d, out)
	}
	if o := d.Override; o.Alias != "ua-vm1-net" || o.Alias != i.Alias.Name || o.Property.Name != "host_mtu" ||
		o.Property.Value != 1400 {
		t.Errorf("%+v from\n%s", o, out)
	}
	var hca []string
	for _, a := range d.Args {
		hca = append(hca, a.Value)
	}
	var device struct{ Driver, ID, Chardev string }
	if len(hca) != 4 || !strings.Contains(hca[1], "vm1.hca") {
		t.Errorf("arguments %q", hca)
	} else if err := json.Unmarshal([]byte(hca[3]), &device); err != nil ||
		device.Driver != "vhost-user-test-device-pci" || device.ID != "vm1-hca" || device.Chardev != "chr-vm1-hca" {
		t.Errorf("arguments %q", hca)
	}
	if status, _, errText := alone(t, oneVM, "libvirt-xml", "vm2"); status != 2 ||
		!strings.Contains(errText, "it has: vm1") {
		t.Errorf("an unknown VM: %d %s", status, errText)
	}
}

func TestAttachUsage(t *testing.T) {
	for _, c := range []struct {
		line, want string
		status     int
	}{
		{"detach vm1", "--qmp SOCKET is missing", 2},
		{"detach", "accepts 1 arg(s), received 0", 2},
		{"detach --qmp /nowhere vm1", "connecting to /nowhere", 1},
		{"attach --qmp /nowhere vm1", "no vnicd at", 1},
	} {
		if status, _, errText := alone(t, oneVM, strings.Fields(c.line)...); status != c.status ||
			!strings.Contains(errText, c.want) {
			t.Errorf("vnicd %s: %d %s, want %d with %q", c.line, status, errText, c.status, c.want)
		}
	}
}
