// Package worker runs parts of vnicd that handle foreign input in processes of their own, which have almost no rights
// and may die alone.
//
//	daemon ──── start, kill ────▶ spawner ── starts, reaps ──▶ worker KIND
//	  │                                                           ▲
//	  └─────── messages (Conn), log lines, listening sockets ─────┘
//
// The daemon forbids itself to start programs (confine.AfterStart), so it starts the spawner before: Start. The spawner
// is this program again; it handles no foreign input. Its only work is to start workers of the kinds that the program
// has, to reap them and to report their end. It ends, and with it all workers, when the daemon has ended, however.
//
// In the daemon, Spawner.Supervise keeps one worker of a kind: it starts a process and has Config.Serve talk with it.
// When the process ends, or Serve returns because it misbehaved, the process is killed and, after a pause, another one
// is started. What a worker sends is hostile input: Conn bounds each message and each wait, and log lines are bounded
// in length and rate and carry the worker's name.
//
// In the worker, Main runs Kind.Open, gives up all that is left, and calls the function that Open returned. A worker
// has no capabilities, no environment and no descriptors but a pipe for its log (1, 2), its connection (3), those that
// Config.Files lists (4 and following) and its streams; if the daemon is root, it is the user nobody. From the end of
// Open on it has no system calls but those of confine.Runtime and Kind.Calls: it cannot open files, start programs, or
// reach another process.
//
// To add a kind: a Kind in the list that the program gives to Main before anything else runs, and Supervise in the
// daemon. The program's tests call Main in TestMain in the same way.
package worker
