package qemu

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/vnicd/vnicd/hypervisor/qmp"
)

// Errors of migrations.
var (
	ErrMigration = errors.New("the migration has failed, and the VM runs on where it was")
	ErrCancelled = errors.New("the migration was cancelled, and the VM runs on where it was")
)

// Migration is QEMU's report on a migration, or on one to a file.
type Migration struct {
	Status   string `json:"status"`     // MigrationStatus of QMP, such as "active" or "completed"
	Total    int    `json:"total-time"` // ms
	Downtime int    `json:"downtime"`   // for how long QEMU stopped the VM, in ms, once it is completed
	Error    string `json:"error-desc"` // of a failed one
	RAM      struct {
		Transferred uint64 `json:"transferred"` // bytes
		Remaining   uint64 `json:"remaining"`   // bytes
	} `json:"ram"`
}

// Ended reports whether the migration is over.
func (m *Migration) Ended() bool {
	return m.Status == "completed" || m.Status == "failed" || m.Status == "cancelled"
}

// QueryMigration returns the state of the VM's migration, which has begun.
func QueryMigration(ctx context.Context, c *qmp.Client) (m Migration, err error) {
	return m, c.Run(ctx, "query-migrate", nil, &m)
}

// answerTime bounds QEMU's time to answer a command while it migrates a VM.
const answerTime = time.Minute

// Migrate moves the running VM behind c to the QEMU that waits at uri (-incoming), or into a file, and returns once it
// is there. report, if not nil, is called with each new state. If ctx ends first, the migration is cancelled; after an
// ErrCancelled, an ErrMigration or QEMU's refusal (*qmp.CommandError) the VM runs on.
func Migrate(ctx context.Context, c *qmp.Client, uri string, report func(Migration)) (m Migration, err error) {
	run := func(f func(context.Context) error) error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), answerTime)
		defer cancel()
		return f(ctx)
	}
	if err := run(func(ctx context.Context) error {
		return c.Run(ctx, "migrate", map[string]any{"uri": uri}, nil)
	}); err != nil {
		return m, err
	}
	t := time.NewTicker(poll)
	defer t.Stop()
	for cancelled := ctx.Done(); ; {
		if err := run(func(ctx context.Context) (err error) { m, err = QueryMigration(ctx, c); return err }); err != nil {
			return m, err
		}
		if report != nil {
			report(m)
		}
		switch m.Status {
		case "completed":
			return m, nil
		case "failed":
			return m, fmt.Errorf("%w: %s", ErrMigration, m.Error)
		case "cancelled":
			return m, ErrCancelled
		}
		select {
		case <-t.C:
		case <-cancelled:
			cancelled = nil
			if err := run(func(ctx context.Context) error { return c.Run(ctx, "migrate_cancel", nil, nil) }); err != nil {
				return m, err
			}
		}
	}
}
