package main

import (
	"bytes"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// sabotages cause events, which the oracle or the watch must notice. They run early in the attack.
var sabotages = map[string]func(*stage){
	// A byte of an innocent's memory changes.
	"corrupt": func(s *stage) {
		for range 1000 { // whenever the owner has just filled it
			s.pairs[0].b.buf.Bytes()[slot/2] ^= 1
			time.Sleep(time.Millisecond)
		}
	},
	"kill": func(s *stage) { _ = s.proc(s.h1).Signal(syscall.SIGKILL) },
	// The next daemon of a restart does not know an innocent VM any more.
	"lose": func(s *stage) {
		file := filepath.Join(s.h1.Dir, "vnicd.yaml")
		text, err := os.ReadFile(file)
		if err == nil {
			err = os.WriteFile(file, bytes.ReplaceAll(text, []byte("name: alice"), []byte("name: alicia")), 0o644)
		}
		s.report("sabotage", err)
	},
	// A daemon that stands still for longer than operations may take.
	"stop": func(s *stage) {
		_ = s.proc(s.h2).Signal(syscall.SIGSTOP)
		time.AfterFunc(patience+10*time.Second, func() { _ = s.proc(s.h2).Signal(syscall.SIGCONT) })
	},
}
