//go:build race

package guestdrv_test

// allocsAllowed per message: with the race detector, the bytes that x/sys writes to eventfds escape.
const allocsAllowed = 4
