// Command bench is `make bench`: it measures what vnicd promises about speed. In the same run it measures an anchor for
// each figure, another workload of the same machine. The ratios matter: machines and their other load differ.
//
// A measurement is a Row: a name, a unit, goals, and two closures. Rows of the data path run the vnicd binary as a user
// would and drive it with package guestdrv, the native driver: no VM, so that no CPU emulator is measured.
//
// Every round runs the anchor and the measurement, in alternating order; the first round only warms up. The table shows
// medians; the spread is half the distance between the best and the worst round, in percent of the median. A goal that
// the rounds do not agree on is "not decided" (verdict.go).
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
)

func main() {
	var o options
	flag.StringVar(&o.only, "only", "",
		"rows to run, separated by commas or spaces; a name also selects the rows that begin with it, =name does not [all]")
	flag.IntVar(&o.rounds, "rounds", 5, "rounds, besides one that warms up")
	flag.DurationVar(&o.time, "time", time.Second, "how long one measurement lasts")
	flag.StringVar(&o.out, "json", "build/bench.jsonl",
		"file for the results, one JSON object per line; it is overwritten, as is the plot beside it, .svg")
	flag.StringVar(&o.vnicd, "vnicd", "build/vnicd", "the daemon's binary")
	flag.StringVar(&o.profiles, "profile", "",
		"directory for a processor profile of each process and row, taken in an additional measurement [none]")
	flag.StringVar(&o.plain, "plain", "",
		"directory with this program and the daemon built without the compiler's profile, to show what it gives [none]")
	anchors := flag.Bool("anchors", true, "measure the anchors, too")
	list := flag.Bool("list", false, "list the rows")
	base := flag.String("compare", "",
		"commit to compare with, in turns; -rounds is the number of pairs of turns [no comparison]")
	flag.BoolVar(&o.daemons, "daemons", false,
		"compare only the commits' daemons, driven by this program and started anew for each pair of figures")
	head := flag.String("head", "HEAD", "commit that is compared")
	flag.Parse()
	o.alone = !*anchors
	var rows []Row
	var err error
	if *base == "" {
		rows, err = pick(o.only) // the commits have their own rows
	}
	if err == nil && (o.rounds < 1 || o.time <= 0 || flag.NArg() > 0) {
		err = errors.New("expected at least one round, a positive time and no arguments")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(2)
	}
	if *list {
		for _, r := range rows {
			fmt.Printf("%-28s %s\n", r.Name, r.What)
		}
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if *base != "" {
		err = compare(ctx, o, *base, *head, os.Stdout)
	} else {
		err = run(ctx, o, rows)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

type options struct {
	only, out, vnicd, profiles, plain string
	rounds                            int
	time                              time.Duration
	alone                             bool // without anchors
	daemons                           bool // compare only daemons
}

// fields splits a list of names.
func fields(only string) []string {
	return strings.FieldsFunc(only, func(r rune) bool { return r == ',' || r == ' ' })
}

// selects reports whether that field of -only selects the row.
func selects(field, row string) bool {
	if name, alone := strings.CutPrefix(field, "="); alone {
		return row == name
	}
	return strings.HasPrefix(row, field)
}

// pick returns the rows that only selects, in registry order.
func pick(only string) ([]Row, error) {
	all := registry()
	names := fields(only)
	if len(names) == 0 {
		return all, nil
	}
	var out []Row
	used := map[string]bool{}
	for _, r := range all {
		wanted := false
		for _, n := range names {
			if selects(n, r.Name) {
				used[n], wanted = true, true
			}
		}
		if wanted {
			out = append(out, r)
		}
	}
	for _, n := range names {
		if !used[n] {
			return nil, fmt.Errorf("no row %q; -list shows all rows", n)
		}
	}
	return out, nil
}

// run measures the rows one after the other. It continues after a row that fails; missed goals are results, not errors.
func run(ctx context.Context, o options, rows []Row) error {
	rep, err := newReport(o.out, os.Stdout)
	if err != nil {
		return err
	}
	failed := 0
	if o.plain != "" {
		sides, err := plainSides(o)
		if err == nil {
			err = comparePlain(ctx, o, sides, rows, rep)
		}
		if ctx.Err() != nil {
			return errors.Join(ctx.Err(), rep.close())
		}
		if err != nil {
			failed++
			rep.failure(Row{Name: "without the profile"}, err)
		}
	}
	rep.columns()
	for _, r := range rows {
		var res *Result
		if r.Section != nil {
			err = r.Section(ctx, o, rep)
		} else {
			res, err = measure(ctx, o, r)
		}
		if ctx.Err() != nil {
			return errors.Join(ctx.Err(), rep.close())
		}
		if err != nil {
			failed++
			rep.failure(r, err)
		} else if res != nil {
			rep.add(r, res)
		}
	}
	if err := rep.close(); err != nil {
		return err
	}
	if failed > 0 {
		return fmt.Errorf("%d rows could not be measured", failed)
	}
	return nil
}
