package daemon

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
)

// An engine that is stuck is named; asking again and again costs one goroutine; it is healthy again when it goes on.
func TestHealthy(t *testing.T) {
	cfg, err := config.Parse("test", []byte("engines: 2\nrun-dir: "+t.TempDir()+"\nnetworks: []\n"))
	if err != nil {
		t.Fatal(err)
	}
	d, err := Start(cfg, "test", hclog.NewNullLogger())
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	patient, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := d.Healthy(patient); err != nil {
		t.Fatal(err)
	}
	hold, held := make(chan struct{}), make(chan struct{})
	go d.loops[1].Do(func() { close(held); <-hold })
	<-held
	first := d.probes[1].ask(func() { d.loops[1].Do(func() {}) })
	for range 3 {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
		if err := d.Healthy(ctx); err == nil || !strings.Contains(err.Error(), "engine 1") || strings.Contains(err.Error(), "engine 0") {
			t.Errorf("engine 1 is held, health: %v", err)
		}
		cancel()
		if d.probes[1].ask(nil) != first {
			t.Error("asked again while a question is open")
		}
	}
	close(hold)
	if err := d.Healthy(patient); err != nil {
		t.Error(err)
	}
}
