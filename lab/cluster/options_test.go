package cluster

import (
	"strings"
	"testing"
	"time"
)

func valid() Options {
	return Options{Hosts: 2, VMsPerHost: 1, CPUs: 1, MemoryMiB: 768, Kernel: "6.12", Dir: "/home/a/src"}
}

func TestValidate(t *testing.T) {
	if o := valid(); o.Validate() != nil {
		t.Error(o.Validate())
	}
	for _, x := range []struct {
		change func(o *Options)
		want   string
	}{
		{func(o *Options) { o.Hosts = 0 }, "--hosts 0: want 1 to 16"},
		{func(o *Options) { o.Hosts = 17 }, "--hosts 17"},
		{func(o *Options) { o.VMsPerHost = 0 }, "--vms-per-host 0"},
		{func(o *Options) { o.VMsPerHost = 33 }, "at most 64 VMs"},
		{func(o *Options) { o.Hosts, o.VMsPerHost = 0, -1 }, "--hosts 0"},
		{func(o *Options) { o.CPUs = 65 }, "--cpus 65: want 1 to 64"},
		{func(o *Options) { o.MemoryMiB = 511 }, "--memory 511: want 512"},
		{func(o *Options) { o.Kernel = "5.10" }, `--kernel "5.10": want 6.1, 6.12, 7.x`},
		{func(o *Options) { o.Packages = []string{"gdb", "--x"} }, `--packages "--x"`},
		{func(o *Options) { o.Loss = 101 }, "--loss 101%"},
		{func(o *Options) { o.Delay = time.Minute }, "--delay 1m0s: want 0s to 1s"},
		{func(o *Options) { o.Delay = -1 }, "--delay -1ns"},
		{func(o *Options) { o.Env = []string{"A=1", "B C=1"} }, `--env "B C=1": want NAME=VALUE`},
		{func(o *Options) { o.Each, o.VM = true, "vm1" }, "--each and --vm"},
		{func(o *Options) { o.Logs = "/run/logs" }, "--logs /run/logs: want a directory outside of /run"},
		{func(o *Options) { o.Dir = "/" }, "current directory /"},
		{func(o *Options) { o.Dir = "/usr" }, "current directory /usr"},
		{func(o *Options) { o.Dir = "/run/user/1000" }, "current directory /run/user/1000"},
		{func(o *Options) { o.Dir = "src" }, "want a clean absolute path"},
		{func(o *Options) { o.Dir = "/a\nb" }, "line feeds"},
	} {
		o := valid()
		x.change(&o)
		if err := o.Validate(); err == nil || !strings.Contains(err.Error(), x.want) {
			t.Errorf("want %q, got %v", x.want, err)
		}
	}
	o := valid()
	for _, dir := range []string{"/usr/src/a", "/root", "/runner/work", "/tmp/x y'z,"} {
		if o.Dir = dir; o.Validate() != nil {
			t.Error(o.Validate())
		}
	}
}

func TestParseLoss(t *testing.T) {
	for text, want := range map[string]float64{"0%": 0, "1%": 1, "0.1%": 0.1, "100%": 100} {
		if got, err := ParseLoss(text); err != nil || got != want {
			t.Errorf("%s: %v, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "%", "1", "-1%", "101%", "NaN%", "0.05%", "1 %", "one%"} {
		if _, err := ParseLoss(text); err == nil || !strings.Contains(err.Error(), "want a percentage from 0% to 100%") {
			t.Errorf("%q: %v", text, err)
		}
	}
}
