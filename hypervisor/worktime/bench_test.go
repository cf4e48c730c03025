package worktime

import "testing"

// A round of commands begins and ends with a reading of the thread's clock.
func BenchmarkStartStop(b *testing.B) {
	a := New(Config{Percent: DefaultPercent})
	for b.Loop() {
		w := a.Start(Commands)
		w.Stop()
	}
}

func BenchmarkThreadTime(b *testing.B) {
	for b.Loop() {
		threadTime()
	}
}

func BenchmarkDelay(b *testing.B) {
	a := New(Config{Percent: DefaultPercent})
	for b.Loop() {
		a.Delay()
	}
}
