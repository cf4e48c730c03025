package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Two sides measure one row in turns, each with its own benchmark program: two commits, or two ways to build one. A
// turn is one round in a process of its own, or several short ones if the row's figure depends on how far apart the
// cores are, which changes from one to the next. The order is base, head, head, base, and so on, so that neither side
// always comes first and a drift of the machine meets both alike.

// side is one of two programs that are compared.
type side struct {
	commit string
	dir    string // working directory
	bench  string // the benchmark program, relative to dir
	vnicd  string // the daemon, relative to dir; "": the program's default
	alone  bool   // without anchors
}

// checkout builds a commit in a work tree of its own at dir.
func checkout(ctx context.Context, rev, dir string, log io.Writer) (*side, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	s := &side{dir: dir, bench: filepath.Join(dir, "build", "bench")}
	sha, err := exec.CommandContext(ctx, "git", "rev-parse", "--verify", "--end-of-options", rev+"^{commit}").Output()
	if err != nil {
		return nil, fmt.Errorf("no commit %q: %w", rev, err)
	}
	s.commit = strings.TrimSpace(string(sha))
	run := func(dir, name string, args ...string) error {
		c := exec.CommandContext(ctx, name, args...)
		c.Dir, c.Stdout, c.Stderr = dir, log, log
		if err := c.Run(); err != nil {
			return fmt.Errorf("%s of %s: %w", strings.Join(c.Args, " "), rev, err)
		}
		return nil
	}
	// An interrupted run may have left the work tree.
	if err := errors.Join(os.RemoveAll(dir), run("", "git", "worktree", "prune")); err != nil {
		return nil, err
	}
	if err := run("", "git", "worktree", "add", "--quiet", "--force", "--detach", dir, s.commit); err != nil {
		return nil, err
	}
	build := []string{"build", "-trimpath", "-o", s.bench, "./integration/bench"}
	if profile := filepath.Join("cmd", "vnicd", "default.pgo"); exists(filepath.Join(dir, profile)) {
		build = slices.Insert(build, 1, "-pgo", profile)
	}
	if err := errors.Join(run(dir, "make", "--no-print-directory", "build"), run(dir, "go", build...)); err != nil {
		return nil, errors.Join(err, s.remove())
	}
	return s, nil
}

// remove removes the work tree that checkout made.
func (s *side) remove() error {
	out, err := exec.Command("git", "worktree", "remove", "--force", s.dir).CombinedOutput()
	if err != nil {
		return fmt.Errorf("git worktree remove %s: %w: %s", s.dir, err, out)
	}
	return nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// rows lists the side's rows.
func (s *side) rows(ctx context.Context) (names []string, err error) {
	c := exec.CommandContext(ctx, s.bench, "-list")
	c.Dir = s.dir
	out, err := c.Output()
	if err != nil {
		return nil, fmt.Errorf("%s -list: %w", s.bench, err)
	}
	for l := range strings.Lines(string(out)) {
		if f := strings.Fields(l); len(f) > 0 {
			names = append(names, f[0])
		}
	}
	return names, nil
}

// commonRows returns the selected rows that both sides have, in head's order, and those that only one has. The Go
// benchmarks are left out: they are no row with one figure.
func commonRows(ctx context.Context, sides [2]*side, selected string) (both []string, only [2][]string, err error) {
	var all [2][]string
	for i, s := range sides {
		if all[i], err = s.rows(ctx); err != nil {
			return nil, only, err
		}
		all[i] = slices.DeleteFunc(all[i], func(n string) bool { return n == "micro" })
	}
	wanted := func(string) bool { return true }
	if names := fields(selected); len(names) > 0 {
		rows := slices.Concat(all[:]...)
		for _, n := range names {
			if !slices.ContainsFunc(rows, func(row string) bool { return selects(n, row) }) {
				return nil, only, fmt.Errorf("no row %q in either commit", n)
			}
		}
		wanted = func(row string) bool {
			return slices.ContainsFunc(names, func(n string) bool { return selects(n, row) })
		}
	}
	for i := range all {
		for _, row := range all[i] {
			switch shared := slices.Contains(all[1-i], row); {
			case !wanted(row):
			case !shared:
				only[i] = append(only[i], row)
			case i == 1:
				both = append(both, row)
			}
		}
	}
	return both, only, nil
}

// figures are those of one side's turns.
type figures struct {
	ours, anchor []float64
	// By coresNear and coresFar: the turns' figures in that state, NaN for a turn without.
	states map[string][]float64
}

// A turn of a row that tells how far apart the cores are has this many rounds, each a part of the time of one and not
// less than the shortest.
const (
	shortRounds   = 10
	shortestRound = 50 * time.Millisecond
)

// turns are all turns of one row.
type turns struct {
	row, unit  string
	base, head figures
}

// takeTurns measures a row o.rounds times on each side.
func takeTurns(ctx context.Context, sides [2]*side, row string, o options) (*turns, error) {
	t := &turns{row: row}
	rounds, each := 1, o.time
	for i := 0; i < 2*o.rounds; i++ {
		which := (i + 1) / 2 % 2 // 0 1 1 0 0 1 1 0
		l, err := sides[which].turn(ctx, row, rounds, each)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", []string{"base", "head"}[which], err)
		}
		if _, tells := l.Extra[lineFigure]; tells && rounds == 1 {
			rounds, each = shortRounds, max(o.time/shortRounds, shortestRound)
			t, i = &turns{row: row}, -1
			continue
		}
		if t.unit != "" && t.unit != l.Unit {
			return nil, fmt.Errorf("one side measures %s, the other %s", t.unit, l.Unit)
		}
		t.unit = l.Unit
		to := [2]*figures{&t.base, &t.head}[which]
		to.ours = append(to.ours, median(l.Rounds))
		if len(l.AnchorRounds) > 0 {
			to.anchor = append(to.anchor, median(l.AnchorRounds))
		}
		if rounds > 1 {
			to.addStates(l.Extra)
		}
	}
	return t, nil
}

func (f *figures) addStates(extra map[string]float64) {
	if f.states == nil {
		f.states = map[string][]float64{}
	}
	for _, state := range []string{coresNear, coresFar} {
		v, ok := extra[state]
		if !ok {
			v = math.NaN()
		}
		f.states[state] = append(f.states[state], v)
	}
}

// inState returns the figures of the pairs of turns that both had one in a state of the cores.
func (t *turns) inState(state string) (base, head []float64) {
	b, h := t.base.states[state], t.head.states[state]
	for i := range min(len(b), len(h)) {
		if !math.IsNaN(b[i]) && !math.IsNaN(h[i]) {
			base, head = append(base, b[i]), append(head, h[i])
		}
	}
	return base, head
}

// turn runs rounds of a row in a process, each of duration d, and returns its line. -only also selects the rows whose
// names begin with this one's: the process is interrupted when our line is there.
func (s *side) turn(ctx context.Context, row string, rounds int, d time.Duration) (*line, error) {
	dir, err := os.MkdirTemp("", "vnicd-turn-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "turn.jsonl")
	args := []string{"-only", row, "-rounds", strconv.Itoa(rounds), "-time", d.String(), "-json", path}
	if s.vnicd != "" {
		args = append(args, "-vnicd", s.vnicd)
	}
	if s.alone {
		args = append(args, "-anchors=false")
	}
	var log bytes.Buffer
	c := exec.CommandContext(ctx, s.bench, args...)
	c.Dir, c.Stdout, c.Stderr = s.dir, &log, &log
	// The program stops its daemons when it is interrupted.
	c.Cancel = func() error { return c.Process.Signal(syscall.SIGINT) }
	c.WaitDelay = time.Minute
	if err := c.Start(); err != nil {
		return nil, err
	}
	ended := make(chan error, 1)
	go func() { ended <- c.Wait() }()
	for over := false; ; {
		l, err := findRow(path, row)
		if l != nil || err != nil {
			if !over {
				_ = c.Cancel() // it may have ended just now
				<-ended
			}
			return l, err
		}
		if over {
			return nil, fmt.Errorf("%s gave no figure of %s: %s", s.bench, row, tail(log.String()))
		}
		select {
		case <-ended:
			over = true
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// findRow returns a row's line of a JSON file that is being written, or nil. A row that failed is an error.
func findRow(path, row string) (*line, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, nil // not yet
	}
	for l := range bytes.Lines(text) {
		var x struct {
			line
			Error string `json:"error"`
		}
		if !bytes.HasSuffix(l, []byte("\n")) {
			break
		}
		if err := json.Unmarshal(l, &x); err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		switch {
		case x.Row != row:
		case x.Error != "":
			return nil, errors.New(x.Error)
		case len(x.Rounds) == 0:
			return nil, fmt.Errorf("%s has no rounds: %s", row, l)
		default:
			return &x.line, nil
		}
	}
	return nil, nil
}

// tail returns the end of a program's output.
func tail(s string) string { return strings.TrimSpace(s[max(0, len(s)-1000):]) }
