package qemu

import (
	"bufio"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestBuilderOwnGroup: when the context ends, so do the programs that the script has started.
func TestBuilderOwnGroup(t *testing.T) {
	script := filepath.Join(t.TempDir(), "build")
	if err := os.WriteFile(script, []byte("#!/bin/sh\nsleep 100000 &\necho $! >&2\nwait\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	in, out := io.Pipe()
	ctx, cancel := context.WithCancel(testCtx(t))
	ended := make(chan error, 1)
	go func() {
		b := &Builder{Script: script, Log: out, OwnGroup: true}
		ended <- b.Module(ctx, "/src", "/out")
		_ = out.Close()
	}()
	text, err := bufio.NewReader(in).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(text))
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	if err := <-ended; err == nil {
		t.Error("no error although the context has ended")
	}
	// It ends with the signal; whoever adopted it may reap it later.
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
		if errors.Is(err, os.ErrNotExist) || strings.Contains(string(stat), ") Z ") {
			break
		}
		if time.Now().After(deadline) {
			_ = syscall.Kill(pid, syscall.SIGKILL)
			t.Fatalf("process %d is left: %s", pid, stat)
		}
	}
}
