package qemu

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// TestMain lets the test binary act as QEMU: a real child process with the two sockets that Boot expects.
func TestMain(m *testing.M) {
	if mode := os.Getenv("VNICD_TEST_QEMU"); mode != "" {
		fakeQEMU(mode)
		return
	}
	goleak.VerifyTestMain(m)
}

func fakeQEMU(mode string) {
	if mode == "refuse" {
		fmt.Fprintln(os.Stderr, "qemu-system-x86_64: -device x: cannot connect to the back end")
		os.Exit(1)
	}
	var qmpSock, agentSock net.Listener
	for _, a := range os.Args {
		for _, o := range strings.Split(a, ",") {
			p, ok := strings.CutPrefix(o, "path=")
			if !ok {
				continue
			}
			var err error
			switch filepath.Base(p) {
			case "qmp.sock":
				qmpSock, err = net.Listen("unix", p)
			case "agent.sock":
				agentSock, err = net.Listen("unix", p)
			}
			if err != nil {
				panic(err)
			}
		}
	}
	events := make(chan string, 10)
	go func() {
		for {
			conn, err := agentSock.Accept()
			if err != nil {
				panic(err)
			}
			fakeAgent(conn, mode, events)
		}
	}()
	conn, err := qmpSock.Accept()
	if err != nil {
		panic(err)
	}
	fmt.Fprintln(conn, `{"QMP": {"version": {"qemu": {"major": 11}}, "capabilities": []}}`)
	go func() {
		for e := range events {
			fmt.Fprintf(conn, `{"timestamp": {}, "event": %q}`+"\n", e)
		}
	}()
	sc := bufio.NewScanner(conn)
	for sc.Scan() {
		if strings.Contains(sc.Text(), "info registers -a") {
			fmt.Fprintf(conn, `{"return": %q}`+"\n", fakeRegisters)
			continue
		}
		fmt.Fprintln(conn, `{"return": {}}`)
		if strings.Contains(sc.Text(), "system_reset") {
			events <- "RESET"
		}
	}
	select {} // the monitor has gone, the machine keeps running
}

// fakeRegisters are those of two processors, one in the kernel's idle loop and one that has not left the firmware.
const fakeRegisters = "\r\nCPU#0\r\nRAX=0000000000000000 RBX=ffffffff82a0f940\r\n" +
	"RIP=ffffffff81c3f2ab RFL=00000246 [---Z-P-] CPL=0 II=0 A20=1 SMM=0 HLT=1\r\n" +
	"\r\nCPU#1\r\nEAX=00000000 EBX=00000000\r\nEIP=0000fff0 EFL=00000002 [-------] CPL=0 II=0 A20=1 SMM=0 HLT=0\r\n"

// fakeAgent is the guest agent of one connection; what it makes happen goes to events.
func fakeAgent(conn net.Conn, mode string, events chan<- string) {
	sc := bufio.NewScanner(conn)
	for sc.Scan() {
		line := strings.TrimPrefix(sc.Text(), "\xff")
		var req struct {
			Execute   string `json:"execute"`
			ID        int64  `json:"id"`
			Arguments struct {
				Mode string `json:"mode"`
			} `json:"arguments"`
		}
		if err := json.Unmarshal([]byte(line), &req); err != nil {
			panic(err)
		}
		switch {
		case mode == "hung":
		case req.Execute == "guest-sync-delimited":
			fmt.Fprintf(conn, "\xff{\"return\": 1, \"id\": %d}\n", req.ID)
		case req.Execute == "guest-shutdown" && mode == "stubborn":
		case req.Execute == "guest-shutdown" && req.Arguments.Mode == "reboot":
			events <- "RESET"
		case req.Execute == "guest-shutdown":
			os.Exit(0)
		}
	}
}

func bootFake(t *testing.T, mode string) (*Machine, error) {
	t.Helper()
	t.Setenv("VNICD_TEST_QEMU", mode)
	img := testImages()
	img.QEMU = os.Args[0]
	m, err := Boot(testCtx(t), Config{Images: img, Name: "vm", Dir: t.TempDir()})
	if m != nil {
		t.Cleanup(m.Kill)
	}
	return m, err
}

func TestBootRefused(t *testing.T) {
	_, err := bootFake(t, "refuse")
	if !errors.Is(err, ErrEnded) || !strings.Contains(err.Error(), "cannot connect to the back end") {
		t.Errorf("got %v", err)
	}
}

func TestBootAndShutdown(t *testing.T) {
	m, err := bootFake(t, "normal")
	if err != nil {
		t.Fatal(err)
	}
	ctx := testCtx(t)
	if err := m.WaitReady(ctx); err != nil {
		t.Fatal(err)
	}
	if err := m.Reset(ctx); err != nil {
		t.Error(err)
	}
	if err := m.Reboot(ctx); err != nil {
		t.Error(err)
	}
	if err := m.Shutdown(ctx); err != nil {
		t.Error(err)
	}
	if err := m.Wait(ctx); err != nil {
		t.Error(err)
	}
	m.Kill() // a second call is harmless
	if _, err := m.Run(ctx, "true"); !errors.Is(err, ErrAgentClosed) {
		t.Errorf("a command after QEMU's end: %v", err)
	}
}

// A machine that has become another is that one's process, with the agent at its new place; its own has ended.
func TestBecome(t *testing.T) {
	m, err := bootFake(t, "normal")
	if err != nil {
		t.Fatal(err)
	}
	o, err := bootFake(t, "normal")
	if err != nil {
		t.Fatal(err)
	}
	ctx := testCtx(t)
	was, next := m.PID(), o.PID()
	if err := m.Become(ctx, o); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(was, 0); !errors.Is(err, syscall.ESRCH) || m.PID() != next {
		t.Errorf("process %d, then %d, want %d; the first: %v", was, m.PID(), next, err)
	}
	if err := m.Reset(ctx); err != nil {
		t.Error(err)
	}
	if err := m.Shutdown(ctx); err != nil {
		t.Error(err)
	}
	o.Kill() // which has happened
}

func TestShutdownOfStubbornGuest(t *testing.T) {
	m, err := bootFake(t, "stubborn")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	if err := m.Shutdown(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	if err := syscall.Kill(m.PID(), 0); !errors.Is(err, syscall.ESRCH) {
		t.Errorf("process %d still exists: %v", m.PID(), err)
	}
}

// The error of a guest that does not come up says where it hangs.
func TestHungGuest(t *testing.T) {
	m, err := bootFake(t, "hung")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(m.Console(), []byte("Booting"), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	const at = "CPU#0 RIP=ffffffff81c3f2ab CPL=0 HLT=1 CPU#1 EIP=0000fff0 CPL=0"
	err = m.WaitReady(ctx)
	if want := "processors: " + at + ", then " + at + "; console: Booting"; err == nil ||
		!errors.Is(err, context.DeadlineExceeded) || !strings.HasSuffix(err.Error(), want) {
		t.Errorf("got %v, expected %q", err, want)
	}
}

func TestKilledFromOutside(t *testing.T) {
	m, err := bootFake(t, "normal")
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(m.PID(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	ctx := testCtx(t)
	if err := m.Wait(ctx); !errors.Is(err, ErrEnded) {
		t.Errorf("wait: %v", err)
	}
	if err := m.WaitReady(ctx); !errors.Is(err, ErrEnded) && !errors.Is(err, ErrAgentClosed) {
		t.Errorf("ready: %v", err)
	}
}

func TestBootHostChecks(t *testing.T) {
	dir := t.TempDir()
	plain := filepath.Join(dir, "file")
	if err := os.WriteFile(plain, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		change func(*Config)
		want   string
	}{
		{func(c *Config) { c.HCA = &HCA{filepath.Join(dir, "none"), 4} }, "is vnicd running?"},
		{func(c *Config) { c.NICs = []NIC{{Socket: plain, MAC: "52:54:00:00:00:01"}} }, "is not a socket"},
		{func(c *Config) { c.Netns = "vnicd-no-such" }, `network namespace "vnicd-no-such"`},
		{func(c *Config) { c.Dir = filepath.Join(dir, "none") }, "no such file"},
		{func(c *Config) { c.Dir = plain }, "is not a directory"},
		{func(c *Config) { c.Images.QEMU = "/nonexistent/qemu" }, "/nonexistent/qemu"},
	} {
		c := Config{Images: testImages(), Name: "vm", Dir: dir}
		tc.change(&c)
		if _, err := Boot(testCtx(t), c); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("expected %q, got %v", tc.want, err)
		}
	}
}
