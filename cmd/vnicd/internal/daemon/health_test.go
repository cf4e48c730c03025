package daemon

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
)

// Healthy names a stuck loop; repeated checks cost one goroutine; the loop is healthy again when it continues.
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
	release := sync.OnceFunc(func() { close(hold) })
	defer release() // before Close, which joins the loops
	go d.loops[1].Do(func() { close(held); <-hold })
	<-held
	first := d.probes[1].ask(func() { d.loops[1].Do(func() {}) })
	for alone := 0; alone < 3; {
		ctx, cancel := context.WithTimeout(patient, 10*time.Millisecond)
		err := d.Healthy(ctx)
		cancel()
		if err == nil || !strings.Contains(err.Error(), "loop 1,") || patient.Err() != nil {
			t.Fatalf("loop 1 is held, health: %v", err)
		}
		if !strings.Contains(err.Error(), "loop 0,") { // which a busy machine may keep from answering in time
			alone++
		}
		if d.probes[1].ask(nil) != first {
			t.Error("a second check was sent while one is pending")
		}
	}
	release()
	if err := d.Healthy(patient); err != nil {
		t.Error(err)
	}
}
