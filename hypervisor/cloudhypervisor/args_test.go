package cloudhypervisor

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestArgs(t *testing.T) {
	for _, x := range []struct{ got, want []string }{
		{MemoryArgs(512, false), []string{"--memory", "size=512M,shared=on"}},
		{MemoryArgs(512, true), []string{"--memory", "size=512M,shared=on,hugepages=on"}},
		{NetArgs("/run/a.net", "a-net", "02:00:00:00:00:01", 0, 0),
			[]string{"--net", "id=a-net,vhost_user=true,socket=/run/a.net,mac=02:00:00:00:00:01,num_queues=2,queue_size=1024"}},
		{NetArgs("/run/a,b", "a-net", "02:00:00:00:00:01", 1450, 4), []string{"--net",
			`id=a-net,vhost_user=true,socket="/run/a,b",mac=02:00:00:00:00:01,num_queues=8,queue_size=1024,mtu=1450`}},
		{HCAArgs("/run/a.hca", "a-hca", 3, 53),
			[]string{"--generic-vhost-user", "id=a-hca,socket=/run/a.hca,device_type=42,queue_sizes=[256,256,256]"}},
		{HCAArgs(`/run/a"b`, "a-hca", 1, 52),
			[]string{"--generic-vhost-user", `id=a-hca,socket="/run/a""b",virtio_id=42,queue_sizes=[256]`}},
	} {
		if !slices.Equal(x.got, x.want) {
			t.Errorf("%q, want %q", x.got, x.want)
		}
	}
}

func TestVersion(t *testing.T) {
	for _, x := range []struct {
		says    string
		version int
		old     bool
		wrong   string
	}{
		{says: "cloud-hypervisor v53.0.0", version: 53}, {says: "cloud-hypervisor v52.1-dirty", version: 52},
		{says: "cloud-hypervisor v51.1.0", version: 51, old: true, wrong: "version 52 has"},
		{says: "QEMU emulator version 11.1", wrong: "want"},
	} {
		path := filepath.Join(t.TempDir(), "vmm")
		if err := os.WriteFile(path, []byte("#!/bin/sh\necho '"+x.says+"'\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		n, err := Version(context.Background(), path)
		if n != x.version || errors.Is(err, ErrOld) != x.old || (err != nil) != (x.wrong != "") ||
			err != nil && !strings.Contains(err.Error(), x.wrong) {
			t.Errorf("%s: %d, %v", x.says, n, err)
		}
	}
	if _, err := Version(context.Background(), "/nonexistent"); err == nil {
		t.Error("a binary that does not exist has a version")
	}
}
