package qmp

import (
	"context"
	"errors"
)

// Status is the answer to query-status.
type Status struct {
	Running bool   `json:"running"`
	Status  string `json:"status"` // running, paused, shutdown, guest-panicked, ...
}

// Chardev is one row of query-chardev.
type Chardev struct {
	Label        string `json:"label"`
	Filename     string `json:"filename"`
	FrontendOpen bool   `json:"frontend-open"` // the front end has it open
}

// Status asks for the run state of the VM.
func (c *Client) Status(ctx context.Context) (Status, error) {
	var s Status
	err := c.Run(ctx, "query-status", nil, &s)
	return s, err
}

// Chardevs lists the character devices with the state of their front ends.
func (c *Client) Chardevs(ctx context.Context) ([]Chardev, error) {
	var l []Chardev
	err := c.Run(ctx, "query-chardev", nil, &l)
	return l, err
}

// Reset resets the VM without involving the guest.
func (c *Client) Reset(ctx context.Context) error { return c.Run(ctx, "system_reset", nil, nil) }

// Powerdown presses the VM's power button.
func (c *Client) Powerdown(ctx context.Context) error {
	return c.Run(ctx, "system_powerdown", nil, nil)
}

// Quit ends QEMU at once. It is success, too, if the connection breaks before the reply.
func (c *Client) Quit(ctx context.Context) error {
	if err := c.Run(ctx, "quit", nil, nil); err != nil && !errors.Is(err, ErrClosed) {
		return err
	}
	return nil
}
