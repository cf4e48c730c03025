package cli

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/testutil/testlog"
)

// startMonitored starts `vnicd run` with metrics and page; file is its configuration, socket where they are.
func startMonitored(t *testing.T) (c *exec.Cmd, log *testlog.Log, file, socket string) {
	t.Helper()
	dir := t.TempDir()
	file, socket = filepath.Join(dir, "vnicd.yaml"), filepath.Join(dir, "mon")
	yaml := fmt.Sprintf("run-dir: %s/run\nmonitoring: {listen: %s, page: true}\nnetworks: [{name: blue, vni: 100}]\n%s",
		dir, socket, vmOne)
	if err := os.WriteFile(file, []byte(yaml), 0o644); err != nil {
		t.Fatal(err)
	}
	c, log = exec.Command(os.Args[0], "-c", file, "run"), &testlog.Log{}
	c.Env = append(os.Environ(), asVNICD+"=1")
	c.Stdout, c.Stderr = log, log
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Process.Kill() }) // it may have ended
	testutil.Eventually(t, "the daemon is ready", func() bool { return strings.Contains(log.String(), "ready") })
	return c, log, file, socket
}

// TestSpawnerEnds: the process that starts BGP's and monitoring's ends, they with it, and nobody can start them again.
// `vnicd status` says so.
func TestSpawnerEnds(t *testing.T) {
	c, log, file, _ := startMonitored(t)
	status := func() string {
		t.Helper()
		q := exec.Command(os.Args[0], "-c", file, "status")
		q.Env = c.Env
		out, err := q.CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return string(out)
	}
	const ended = "monitoring have ended"
	if text := status(); strings.Contains(text, ended) {
		t.Errorf("status: %s", text)
	}
	if err := syscall.Kill(spawnerProcess(t, c.Process.Pid), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	testutil.Eventually(t, "status says so", func() bool { return strings.Contains(status(), ended) })
	_ = c.Process.Signal(syscall.SIGTERM)
	if err := c.Wait(); err != nil {
		t.Errorf("%v: %s", err, log)
	}
}

// TestMonitoringProcess: the page and the metrics of `vnicd run` come from a process without rights, which may die
// without the daemon, is started again although the daemon can start no programs, and ends with the daemon.
func TestMonitoringProcess(t *testing.T) {
	c, log, _, socket := startMonitored(t)
	client := http.Client{Timeout: time.Minute, Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(context.Context, string, string) (net.Conn, error) { return net.Dial("unix", socket) }}}
	get := func(path string) string {
		t.Helper()
		resp, err := client.Get("http://localhost" + path)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err != nil || resp.StatusCode != http.StatusOK {
			t.Errorf("%s: %d %.200q, %v", path, resp.StatusCode, text, err)
		}
		return string(text)
	}
	serving := func() int {
		return process(t, "monitoring", func(pid int) bool { return parent(parent(pid)) == c.Process.Pid })
	}
	before := 0
	for range 2 {
		if text := get("/metrics"); !strings.Contains(text, `vnicd_vm_info{mac="02:00:00:00:00:01"`) ||
			!strings.Contains(text, "\nprocess_resident_memory_bytes ") {
			t.Errorf("metrics: %.300q", text)
		}
		if text := get("/"); !strings.Contains(text, "app.js") {
			t.Errorf("page: %.300q", text)
		}
		pid := serving()
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range []string{"CapEff:\t0000000000000000", "CapPrm:\t0000000000000000", "NoNewPrivs:\t1",
			"Seccomp:\t2"} {
			if !strings.Contains(string(status), l+"\n") {
				t.Errorf("the process has no %q:\n%s", l, status)
			}
		}
		if pid == before {
			t.Error("the process was not killed")
		}
		if before = pid; syscall.Kill(pid, syscall.SIGKILL) != nil {
			t.Error("cannot kill it")
		}
	}
	if text := get("/healthz"); text != "ok\n" {
		t.Errorf("the daemon: %q", text)
	}
	last := serving()
	if !strings.Contains(log.String(), "vnicd.monitoring: worker process ended; it is started again") {
		t.Errorf("no word about it in the log: %s", log)
	}
	_ = c.Process.Signal(syscall.SIGTERM)
	if err := c.Wait(); err != nil {
		t.Errorf("%v: %s", err, log)
	}
	if syscall.Kill(last, 0) == nil {
		t.Error("the process outlives the daemon")
	}
	if _, err := os.Lstat(socket); !os.IsNotExist(err) {
		t.Errorf("the socket outlives the daemon: %v", err)
	}
}
