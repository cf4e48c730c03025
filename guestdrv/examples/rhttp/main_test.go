package main

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vnicd/vnicd/guestdrv/internal/rig"
)

// One instance serves a directory, and another one gets a file of it.
func TestServeAndGet(t *testing.T) {
	hosts := rig.New(t, 2).Hosts
	dir := t.TempDir()
	data := bytes.Repeat([]byte("0123456789"), 50000)
	if err := os.WriteFile(filepath.Join(dir, "file"), data, 0o644); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(rig.Context(t))
	output, say := io.Pipe()
	served := make(chan error, 1)
	go func() {
		served <- run(ctx, options{socket: hosts[0].Path, address: hosts[0].Addr.String(), port: 8080, dir: dir}, say)
		_ = say.Close()
	}()
	line := make([]byte, 100)
	if n, err := output.Read(line); err != nil || !strings.Contains(string(line[:n]), "http://10.0.0.1:8080") {
		t.Fatalf("%q, %v", line[:n], err)
	}
	var got bytes.Buffer
	client := options{socket: hosts[1].Path, address: hosts[1].Addr.String(), port: 8080,
		urls: []string{"http://10.0.0.1:8080/file"}}
	if err := run(ctx, client, &got); err != nil || !bytes.Equal(got.Bytes(), data) {
		t.Errorf("%d bytes of %d, %v", got.Len(), len(data), err)
	}
	client.urls[0] += "/missing"
	if err := run(ctx, client, io.Discard); err == nil || !strings.Contains(err.Error(), "404") {
		t.Errorf("a missing file: %v", err)
	}
	cancel()
	select {
	case err := <-served:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(rig.Patience):
		t.Fatal("the server does not end")
	}
}
