package cli

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/testutil/testlog"
	"github.com/vnicd/vnicd/guestdrv"
)

func TestBackendNames(t *testing.T) {
	for line, want := range map[string]string{
		"/usr/bin/vnicd status one":                                      "status one",
		"/usr/libexec/vnicd/vnicd-hca --vm one --fd=3":                   "backend hca --vm one --fd=3",
		"vnicd-net --colour red --print-capabilities --socket-path=/x y": "backend net --print-capabilities",
		"vnicd-something --print-capabilities":                           "--print-capabilities",
	} {
		if got := strings.Join(Args(strings.Fields(line)), " "); got != want {
			t.Errorf("%s: %s, want %s", line, got, want)
		}
	}
	for device, kind := range map[string]string{"net": "net", "hca": "rdma"} {
		status, out, errText := alone(t, oneVM, "backend", device, "--print-capabilities")
		var c map[string]any
		if err := json.Unmarshal([]byte(out), &c); status != 0 || err != nil || len(c) != 1 || c["type"] != kind {
			t.Errorf("%s: %d, %v, %s%s", device, status, err, out, errText)
		}
	}
	for line, want := range map[string]string{
		"backend gpu --vm vm1 --fd 3":                  "net or hca",
		"backend net --vm vm1":                         "one of --socket-path and --fd",
		"backend net --vm vm1 --fd 3 --socket-path /x": "one of --socket-path and --fd",
		"backend net --socket-path /x":                 "--vm",
		"backend net --vm vm7 --socket-path /x":        "it has: vm1",
	} {
		if status, _, errText := alone(t, oneVM, strings.Fields(line)...); status != 2 || !strings.Contains(errText, want) {
			t.Errorf("%s: %d %s", line, status, errText)
		}
	}
	if status, _, errText := alone(t, oneVM, "backend", "net", "--vm", "vm1", "--socket-path", "/x"); status != 1 ||
		!strings.Contains(errText, "no vnicd serves VM vm1") {
		t.Errorf("without a daemon: %d %s", status, errText)
	}
}

// A driver uses the device through the stand-in process, whichever way the process got its socket; the device ends with
// the process.
func TestBackend(t *testing.T) {
	l := newLab(t)
	connected := func() bool { return strings.Contains(l.ok("status"), "hca up") }
	for _, x := range []string{"--socket-path", "--fd listening", "--fd connected"} {
		t.Run(x, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "s")
			argv := []string{"-c", l.config, "backend", "hca", "--vm", "one"}
			var files []*os.File
			open := func() (*guestdrv.Device, error) {
				return guestdrv.Open(context.Background(), path, guestdrv.Config{Memory: 8 << 20})
			}
			switch x {
			case "--socket-path":
				argv = append(argv, "--socket-path="+path)
			default:
				argv = append(argv, "--fd=3")
				ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
				if err != nil {
					t.Fatal(err)
				}
				defer ln.Close()
				f, err := ln.File()
				if err != nil {
					t.Fatal(err)
				}
				if x == "--fd connected" {
					_ = f.Close()
					type result struct {
						d   *guestdrv.Device
						err error
					}
					opened := make(chan result, 1)
					dial := open
					go func() { d, err := dial(); opened <- result{d, err} }()
					c, err := ln.AcceptUnix()
					if err != nil {
						t.Fatal(err)
					}
					if f, err = c.File(); err != nil {
						t.Fatal(err)
					}
					_ = c.Close()
					open = func() (*guestdrv.Device, error) { r := <-opened; return r.d, r.err }
				}
				files = []*os.File{f}
			}
			c := exec.Command(os.Args[0], argv...)
			c.Env = append(os.Environ(), asVNICD+"=1")
			var log testlog.Log
			c.Stdout, c.Stderr, c.ExtraFiles = &log, &log, files
			if err := c.Start(); err != nil {
				t.Fatal(err)
			}
			ended := make(chan error, 1)
			go func() { ended <- c.Wait() }()
			defer func() { _ = c.Process.Kill() }()
			for _, f := range files {
				_ = f.Close()
			}
			rounds := 2
			if x == "--fd connected" {
				rounds = 1
			}
			for range rounds {
				var d *guestdrv.Device
				var err error
				testutil.Eventually(t, "the socket", func() bool {
					d, err = open()
					return !errors.Is(err, os.ErrNotExist) && !errors.Is(err, syscall.ECONNREFUSED)
				})
				if err != nil {
					t.Fatal(err, log.String())
				}
				if _, err := d.AllocPD(context.Background()); err != nil {
					t.Error(err)
				}
				if !connected() {
					t.Errorf("the daemon sees no driver: %s", l.ok("status"))
				}
				if rounds == 2 {
					_ = d.Close()
					testutil.Eventually(t, "the daemon sees the front end go", func() bool { return !connected() })
					continue
				}
				defer d.Close()
			}
			if err := c.Process.Signal(syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
			if err := <-ended; err != nil || log.String() != "" {
				t.Errorf("it ended with %v: %s", err, log.String())
			}
			testutil.Eventually(t, "the device ends with its program", func() bool { return !connected() })
			if _, err := os.Stat(path); x == "--socket-path" && err == nil {
				t.Error("the socket still exists")
			}
		})
	}
}
