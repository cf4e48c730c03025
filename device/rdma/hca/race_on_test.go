//go:build race

package hca

// raceEnabled: the race detector takes several times the memory, and the time.
const raceEnabled = true

// raceDivisor divides the size of a sample whose members all run on the test's goroutine: the race detector has little
// to find there, and other runs do without it.
const raceDivisor = 4
