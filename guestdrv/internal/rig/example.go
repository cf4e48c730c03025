package rig

import (
	"fmt"
	"os"
	"testing"
)

// Applications takes the place of vnicd in an Example: it starts a network with n applications and returns the
// paths of their sockets. The Example opens the devices, and closes them before it calls stop.
func Applications(n int) (sockets []string, stop func()) {
	tb := &exampleTB{}
	for _, h := range New(tb, n).Hosts {
		sockets = append(sockets, h.Path)
	}
	return sockets, tb.cleanup
}

// exampleTB is the testing.TB of a rig in an Example, which has none. Errors are printed: they are not part of the
// expected output, so the Example fails.
type exampleTB struct {
	testing.TB // nil: rigs call only the methods below
	cleanups   []func()
}

func (t *exampleTB) Helper()                   {}
func (t *exampleTB) Error(args ...any)         { fmt.Println(args...) }
func (t *exampleTB) Errorf(f string, a ...any) { fmt.Printf(f+"\n", a...) }
func (t *exampleTB) Fatal(args ...any)         { panic(fmt.Sprint(args...)) }
func (t *exampleTB) Cleanup(f func())          { t.cleanups = append(t.cleanups, f) }

func (t *exampleTB) TempDir() string {
	dir, err := os.MkdirTemp("", "rig")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func (t *exampleTB) cleanup() {
	for i := len(t.cleanups) - 1; i >= 0; i-- {
		t.cleanups[i]()
	}
}
