//go:build !race

package guestdrv_test

// allocsAllowed per message.
const allocsAllowed = 0
