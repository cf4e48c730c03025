package main

import (
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
	"kill": func(s *stage) { _ = s.h1.Proc.Signal(syscall.SIGKILL) },
	// A daemon that stands still for longer than operations may take.
	"stop": func(s *stage) {
		_ = s.h2.Proc.Signal(syscall.SIGSTOP)
		time.AfterFunc(patience+10*time.Second, func() { _ = s.h2.Proc.Signal(syscall.SIGCONT) })
	},
}
