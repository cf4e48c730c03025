//go:build race

package guestdrv_test

// allocsAllowed per message: under the race detector x/sys lets the bytes written
// to eventfds escape.
const allocsAllowed = 4
