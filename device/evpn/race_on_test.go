//go:build race

package evpn

// raceDetector says that the race detector is on.
const raceDetector = true
