package guestdrv_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/vnicd/vnicd/guestdrv"
	testrig "github.com/vnicd/vnicd/guestdrv/internal/rig"
)

// Sentinel errors tell why an operation failed.
func Example_errors() {
	ctx := context.Background()
	// A program has a fixed path: "/run/vnicd/app.hca" for the application named app in vnicd.yaml.
	sockets, stop := testrig.Applications(1)
	defer stop()

	dev, err := guestdrv.Open(ctx, sockets[0], guestdrv.Config{})
	if err != nil {
		log.Fatal(err)
	}
	defer dev.Close()
	pd, err := dev.AllocPD(ctx)
	if err != nil {
		log.Fatal(err)
	}
	buf, err := dev.Alloc(4096)
	if err != nil {
		log.Fatal(err)
	}
	if _, err := pd.Register(ctx, buf, guestdrv.AccessLocalWrite); err != nil {
		log.Fatal(err)
	}
	cq, err := dev.CreateCQ(ctx, 16, guestdrv.CQOptions{})
	if err != nil {
		log.Fatal(err)
	}

	// The driver rejects an argument.
	if _, err := dev.Alloc(0); errors.Is(err, guestdrv.ErrInvalid) {
		fmt.Println("a buffer needs a size")
	}
	// The device refuses a command: the error is a Status.
	if err := pd.Close(); errors.Is(err, guestdrv.StatusBusy) {
		fmt.Println("the PD has a region:", err)
	}
	// The context ends before there is a completion.
	short, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
	defer cancel()
	if _, err := cq.PollWait(short, make([]guestdrv.Completion, 1)); errors.Is(err, context.DeadlineExceeded) {
		fmt.Println("no completion in time")
	}
	// The device is closed.
	if err := dev.Close(); err != nil {
		log.Fatal(err)
	}
	if _, err := dev.AllocPD(ctx); errors.Is(err, guestdrv.ErrClosed) {
		fmt.Println(err)
	}
	// Output:
	// a buffer needs a size
	// the PD has a region: DESTROY_PD: object in use
	// no completion in time
	// CREATE_PD: device is closed
}

// The completion of a failed request has the reason: here the R_Key is wrong or lacks a right.
func ExampleCompletion_Err() {
	wc := guestdrv.Completion{ID: 7, QPN: 17, Status: guestdrv.WCRemAccessErr} // as from CQ.Poll
	err := wc.Err()
	fmt.Println(err)
	if errors.Is(err, guestdrv.WCRemAccessErr) {
		fmt.Println("the peer did not grant access")
	}
	var failed *guestdrv.CompletionError
	if errors.As(err, &failed) {
		fmt.Println("request", failed.ID, "of QP", failed.QPN)
	}
	// Output:
	// QP 17, work request 7: remote access error
	// the peer did not grant access
	// request 7 of QP 17
}
