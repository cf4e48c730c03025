package rig

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/vnicd/vnicd/lab"
)

// Traffic runs ib_write_bw between two ends until stop is called; stop returns the first error.
func Traffic(ctx context.Context, client, server lab.End) (stop func() error) {
	end, done := make(chan struct{}), make(chan error, 1)
	go func() {
		for {
			select {
			case <-end:
				done <- nil
				return
			default:
			}
			if _, err := lab.Perftest(ctx, client, server, "ib_write_bw", "-s 65536", "-D 5"); err != nil {
				done <- err
				return
			}
		}
	}()
	return func() error { close(end); return <-done }
}

// WatchPage opens a daemon's web page while vms transfer data. It checks that the page draws them and that their rates
// change, that the page reports no errors, and that it requests nothing from other origins. The last VM's details are
// left open.
func WatchPage(ctx context.Context, b *Browser, where string, vms ...string) error {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	if err := b.Open(ctx, where); err != nil {
		return err
	}
	waits := []string{`document.querySelector("#live")?.textContent === "live"`}
	for _, vm := range vms {
		const row = `#vms tr[data-vm="%[1]s"] td[data-label="RDMA in, out"]`
		rate := fmt.Sprintf(`document.querySelector('`+row+`').textContent`, vm)
		waits = append(waits, fmt.Sprintf(`document.querySelector('#topology [data-vm="%[1]s"]') && document.querySelector('`+
			row+`')`, vm), rate+`.match(/[1-9]/)`,
			fmt.Sprintf(`(window.was ??= {}, window.was[%[1]q] ??= %[2]s, window.was[%[1]q] !== %[2]s && %[2]s.match(/[1-9]/))`,
				vm, rate),
			fmt.Sprintf(`(document.querySelector('#vms tr[data-vm="%[1]s"]').click(), document.querySelector("#t-detail").textContent === "%[1]s")`, vm))
	}
	waits = append(waits,
		`document.querySelector("#topology .conn.busy") && document.querySelector("#detail").offsetHeight > 0 && document.querySelector("#memory svg")`)
	for _, w := range waits {
		if err := b.Wait(ctx, w); err != nil {
			var text string
			late, cancel := context.WithTimeout(context.Background(), 20*time.Second)
			defer cancel()
			return errors.Join(fmt.Errorf("waiting for %s: %w", w, err), b.Eval(late, "document.body.innerText", &text),
				errors.New(text))
		}
	}
	if bad := b.Complaints(); len(bad) > 0 {
		return fmt.Errorf("the page reports errors: %q", bad)
	}
	for _, r := range b.Requests() {
		if !strings.HasPrefix(r, where) {
			return fmt.Errorf("the page requests %s", r)
		}
	}
	return nil
}
