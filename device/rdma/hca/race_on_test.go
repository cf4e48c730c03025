//go:build race

package hca

// raceEnabled: the race detector takes several times the memory.
const raceEnabled = true
