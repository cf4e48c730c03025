package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The arguments for Cloud Hypervisor are those that its version understands; what it cannot have is refused.
func TestVMMArgs(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "vnicd.yaml")
	text := "run-dir: " + dir + "\nnetworks: [{name: blue, vni: 100, mtu: 1450}]\nvms:\n" +
		"  - {name: vm1, network: blue, mac: \"02:00:00:00:00:01\", queues: 2}\n" +
		"  - {name: doorbell, network: blue, mac: \"02:00:00:00:00:02\", hca: ivshmem}\n" +
		"applications: [{name: app, network: blue, mac: \"02:00:00:00:00:03\"}]\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	bins := t.TempDir()
	binary := func(version string) string {
		path := filepath.Join(bins, version, "cloud-hypervisor")
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte("#!/bin/sh\necho cloud-hypervisor v"+version+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		return path
	}
	t.Setenv("PATH", "/nonexistent")
	const devices = "--net id=vm1-net,vhost_user=true,socket=DIR/vm1.net,mac=02:00:00:00:00:01,num_queues=4," +
		"queue_size=1024,mtu=1450 --generic-vhost-user id=vm1-hca,socket=DIR/vm1.hca,TYPE=42,queue_sizes=["
	for _, x := range []struct{ line, path, want, wrong string }{
		{"cloud-hypervisor vm1", "", "--memory size=1024M,shared=on " +
			strings.Replace(devices, "TYPE", "device_type", 1), ""},
		{"cloud-hypervisor vm1 -m 64 --huge-pages", "52.0.0", "--memory size=64M,shared=on,hugepages=on " +
			strings.Replace(devices, "TYPE", "virtio_id", 1), ""},
		{"--no-memory cloud-hypervisor vm1", "51.0.0", strings.Replace(devices, "TYPE", "device_type", 1), ""},
		{"--lines --no-memory cloud-hypervisor vm1", "", strings.NewReplacer("TYPE", "device_type", " --g", "\n--g").Replace(
			devices), ""},
		{"cloud-hypervisor vm1 --binary " + binary("54.1.0"), "52.0.0", "device_type=42", ""},
		{"cloud-hypervisor vm1 --binary " + binary("51.0.0"), "", "", "version 52 has"},
		{"cloud-hypervisor vm1 -m 8", "", "", "16 to 1048576"},
		{"cloud-hypervisor doorbell", "", "", "set hca to auto or vhost-user"},
		{"cloud-hypervisor app", "", "", "host application"},
		{"cloud-hypervisor other", "", "", "other"},
		{"bochs vm1", "", "", "known is cloud-hypervisor"},
	} {
		t.Run(x.line, func(t *testing.T) {
			if x.path != "" {
				t.Setenv("PATH", filepath.Dir(binary(x.path)))
			}
			var out, errText strings.Builder
			status := Main("test", append([]string{"vmm-args", "-c", file}, strings.Fields(x.line)...), &out, &errText)
			switch {
			case x.wrong != "" && (status == 0 || !strings.Contains(errText.String(), x.wrong)):
				t.Errorf("status %d, no %q: %s", status, x.wrong, errText.String())
			case x.wrong == "" && (status != 0 || !strings.HasPrefix(out.String(), strings.ReplaceAll(x.want, "DIR", dir)) &&
				!strings.Contains(out.String(), ","+x.want+",")):
				t.Errorf("status %d, no %q: %s%s", status, x.want, out.String(), errText.String())
			}
		})
	}
}
