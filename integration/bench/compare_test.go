package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestCompareRounds(t *testing.T) {
	ones := slices.Repeat([]float64{1}, 10)
	for _, tc := range []struct {
		base, head []float64
		higher     bool
		want       change
	}{
		{ones, slices.Repeat([]float64{1.1}, 10), true, better},
		{ones, slices.Repeat([]float64{1.1}, 10), false, worse},
		{ones, slices.Repeat([]float64{0.9}, 10), true, worse},
		{ones, slices.Repeat([]float64{0.9}, 10), false, better},
		{ones, ones, true, same},
		{ones, []float64{1.02, 0.98, 1.01, 1, 1, 1, 0.99, 1.01, 1, 1}, true, same},
		// The interval of ten pairs leaves out one outlier on either side.
		{ones, []float64{9, 0.1, 1.01, 1, 1, 1, 0.99, 1.01, 1, 1}, true, same},
		{ones, []float64{1.5, 0.7, 1.5, 0.7, 1.5, 0.7, 1.5, 0.7, 1.5, 0.7}, true, unclear},
		{ones, []float64{0.1, 1.1, 1.1, 1.1, 1.1, 1.1, 1.1, 1.1, 1.1, 1.1}, true, better},
		{ones, []float64{0.1, 0.1, 1.1, 1.1, 1.1, 1.1, 1.1, 1.1, 1.1, 1.1}, true, unclear},
		// Pairs count, not sides: the machine halves its speed in between.
		{[]float64{10, 10, 10, 5, 5, 5}, []float64{12, 12, 12, 6, 6, 6}, true, better},
		{ones[:4], []float64{2, 2, 2, 2}, true, unclear}, // too few
		{nil, nil, true, unclear},
		{make([]float64, 5), make([]float64, 5), true, unclear}, // 0/0
	} {
		if got := compareRounds(tc.base, tc.head, tc.higher); got.Change != tc.want {
			t.Errorf("%v to %v (higher is better: %v): %+v, want %s", tc.base, tc.head, tc.higher, got, tc.want)
		}
	}
}

// Two samples of one distribution differ in at most one comparison of 20, and a real difference of 10 % is found in
// most comparisons when the rounds vary by 5 %. The interval contains the true ratio as often as it says.
func TestCompareKnownDistributions(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 4))
	const runs, pairs, noise = 5000, 10, 0.05
	for _, ratio := range []float64{1, 1.1, 0.8} {
		wrong, found, inside := 0, 0, 0
		var confidence float64
		for range runs {
			var base, head []float64
			for range pairs {
				machine := math.Exp(0.3 * rnd.NormFloat64()) // both turns of a pair meet the same machine
				base = append(base, 100*machine*math.Exp(noise*rnd.NormFloat64()))
				head = append(head, ratio*100*machine*math.Exp(noise*rnd.NormFloat64()))
			}
			c := compareRounds(base, head, true)
			confidence = c.Confidence
			if c.Low <= ratio && ratio <= c.High {
				inside++
			}
			switch c.Change {
			case better:
				found++
				wrong += b2i(ratio <= 1)
			case worse:
				found++
				wrong += b2i(ratio >= 1)
			}
		}
		if part := float64(inside) / runs; math.Abs(part-confidence) > 0.01 {
			t.Errorf("ratio %v: %v of the intervals contain it, want %v", ratio, part, confidence)
		}
		if part := float64(wrong) / runs; part > 0.05 {
			t.Errorf("ratio %v: %v of the comparisons are wrong", ratio, part)
		}
		if part := float64(found) / runs; ratio != 1 && part < 0.7 {
			t.Errorf("ratio %v: only %v of the comparisons find it", ratio, part)
		}
	}
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

// The direction of every row's unit agrees with its goals.
func TestHigherIsBetter(t *testing.T) {
	for _, r := range registry() {
		for _, g := range r.Goals {
			if g.AtLeast != higherIsBetter(r.Unit) {
				t.Errorf("%s: %s with the goal %s", r.Name, r.Unit, g.describe())
			}
		}
	}
}

// TestFindRow reads lines of this version and of the first one that had the file, complete and not.
func TestFindRow(t *testing.T) {
	old := `{"kernel":"6.1","cpu":"c","cores":2,"load":"0","go":"go1.26"}
{"row":"x_y","what":"w","unit":"ns","ours":1,"spread":0,"rounds":[1]}
{"row":"x","what":"w","unit":"ns","ours":5,"anchor":7,"goal":"<= 9","met":true,"rounds":[5],"anchor_rounds":[7]}
{"row":"bad","error":"no daemon"}
{"row":"empty","what":"w","unit":"ns","ours":5,"spread":0,"rounds":[]}
{"row":"late","what":"w","unit":"ns","ours":5,"spread":0,"rounds":[5]}`
	path := filepath.Join(t.TempDir(), "x.jsonl")
	if l, err := findRow(path, "x"); l != nil || err != nil {
		t.Errorf("without a file: %v, %v", l, err)
	}
	if err := os.WriteFile(path, []byte(old), 0o644); err != nil {
		t.Fatal(err)
	}
	l, err := findRow(path, "x")
	if err != nil || l == nil || l.Unit != "ns" || l.Rounds[0] != 5 || l.AnchorRounds[0] != 7 {
		t.Errorf("%+v, %v", l, err)
	}
	for _, row := range []string{"late", "other"} {
		if l, err := findRow(path, row); l != nil || err != nil {
			t.Errorf("%s: %+v, %v", row, l, err)
		}
	}
	for row, want := range map[string]string{"bad": "no daemon", "empty": "no rounds"} {
		if l, err := findRow(path, row); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %+v, %v", row, l, err)
		}
	}
}

// A pair of turns counts for a state of the cores if both had figures in it.
func TestPairsInState(t *testing.T) {
	x := &turns{}
	for _, near := range [][2]float64{{1, 2}, {3, 0}, {0, 4}, {0, 0}, {5, 6}} {
		for i, to := range []*figures{&x.base, &x.head} {
			extra := map[string]float64{lineFigure: 100}
			if near[i] != 0 {
				extra[coresNear] = near[i]
			}
			to.addStates(extra)
		}
	}
	base, head := x.inState(coresNear)
	if !slices.Equal(base, []float64{1, 5}) || !slices.Equal(head, []float64{2, 6}) {
		t.Errorf("near: %v and %v", base, head)
	}
	if base, head := x.inState(coresFar); len(base)+len(head) != 0 {
		t.Errorf("far: %v and %v", base, head)
	}
}

// fakeBench is the benchmark program of a commit in TestCompare. It takes the flags, writes the row and those whose
// names it begins, and then waits for its interruption, as a program does that measures more rows. %[1]s are the rows'
// names, %[2]v is the figure.
const fakeBench = `package main

import ("flag"; "fmt"; "os"; "strings"; "time")

func main() {
	list := flag.Bool("list", false, "")
	only, json := flag.String("only", "", ""), flag.String("json", "", "")
	rounds := flag.Int("rounds", 0, "")
	flag.Duration("time", 0, "")
	flag.Parse()
	rows := strings.Fields("%[1]s")
	if *list {
		fmt.Println(strings.Join(rows, " is a row\n"))
		return
	}
	order, _ := os.OpenFile(os.Getenv("ORDER"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	fmt.Fprintf(order, "%[2]v ")
	f, _ := os.Create(*json)
	fmt.Fprintln(f, "{\"kernel\":\"k\"}")
	for i, r := range rows {
		if !strings.HasPrefix(r, *only) || *rounds != 1 && r != "tells" {
			continue
		}
		if r == "tells" {
			// The base has rounds of both states, the head only near ones.
			states := "\"cores near\":3"
			if %[2]v == 10 {
				states += ",\"cores far\":2"
			}
			fmt.Fprintf(f, "{\"row\":%%q,\"unit\":\"GB/s\",\"rounds\":[%%s9],\"extra\":{\"cache line, ns\":1,%%s}}\n", r,
				strings.Repeat("7,", *rounds-1), states)
		} else if r == "broken" {
			fmt.Fprintln(f, "{\"row\":\"broken\",\"error\":\"it broke\"}")
		} else {
			fmt.Fprintf(f, "{\"row\":%%q,\"unit\":\"GB/s\",\"rounds\":[%%v],\"anchor_rounds\":[4]}\n", r, %[2]v+i)
		}
	}
	if *only == "alpha" {
		time.Sleep(time.Hour)
	}
}
`

// TestCompare compares two commits of a small repository: they are built in work trees, their programs take turns, and
// the table and the JSON say what changed.
func TestCompare(t *testing.T) {
	repo := t.TempDir()
	t.Chdir(repo)
	t.Setenv("ORDER", filepath.Join(repo, "order"))
	git := func(args ...string) {
		t.Helper()
		c := exec.Command("git", append([]string{"-c", "user.name=a", "-c", "user.email=a@example.com"}, args...)...)
		if out, err := c.CombinedOutput(); err != nil {
			t.Fatalf("git %v: %v: %s", args, err, out)
		}
	}
	write := func(path, text string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	git("init", "-q")
	write("go.mod", "module example.com/x\n\ngo 1.26\n")
	write("Makefile", "build:\n\tmkdir -p build\n")
	write(".gitignore", "/build/\n/order\n")
	main := filepath.Join("integration", "bench", "main.go")
	write(main, fmt.Sprintf(fakeBench, "alpha alpha_more old broken tells micro", 10))
	git("add", "-A")
	git("commit", "-q", "-m", "one")
	write(main, fmt.Sprintf(fakeBench, "alpha alpha_more new broken tells micro", 20))
	git("commit", "-q", "-a", "-m", "two")
	write(filepath.Join("build", "compare", "base", "left-over"), "of an interrupted run that git does not know")

	var out bytes.Buffer
	o := options{rounds: 6, time: time.Millisecond, out: filepath.Join("build", "compare.jsonl")}
	err := compare(context.Background(), o, "HEAD^", "HEAD", &out)
	if err == nil || !strings.Contains(err.Error(), "1 of 4 rows") {
		t.Fatalf("%v\n%s", err, out.String())
	}
	order, err := os.ReadFile("order")
	if err != nil || !strings.HasPrefix(string(order), "10 20 20 10 10 20 20 10 10 20 20 10 ") {
		t.Errorf("order of turns: %s, %v", order, err)
	}
	for _, want := range []string{"better", "2.00x", "only in base", "only in head", "FAILED: base: it broke",
		"  cores near           6 pairs "} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
	if strings.Contains(out.String(), "not committed") {
		t.Errorf("a clean tree: %s", out.String())
	}
	text, err := os.ReadFile(o.out)
	if err != nil {
		t.Fatal(err)
	}
	var rows []string
	for l := range bytes.Lines(text) {
		var x struct {
			compareLine
			Only, Error string
		}
		if err := json.Unmarshal(l, &x); err != nil {
			t.Fatal(err)
		}
		rows = append(rows, x.Row)
		if x.Row == "alpha" && (x.Change != better || *x.Ratio != 2 || *x.Low != 2 || *x.High != 2 ||
			*x.AnchorRatio != 1 || len(x.BaseRounds) != 6 || x.HeadRounds[5] != 20 || x.Confidence < 0.95) {
			t.Errorf("%s", l)
		}
		// Not 9, of the turn with one round, which only showed that the row tells; its other turns have ten.
		if x.Row == "tells" && (!slices.Equal(x.BaseRounds, slices.Repeat([]float64{7}, 6)) || len(x.States) != 1 ||
			x.States[0].State != coresNear || x.States[0].Change != same || len(x.States[0].HeadRounds) != 6) {
			t.Errorf("%s", l)
		}
		if x.Row == "old" && x.Only != "base" || x.Row == "new" && x.Only != "head" {
			t.Errorf("%s", l)
		}
	}
	if got := strings.Join(rows, " "); got != " alpha alpha_more broken tells old new" {
		t.Errorf("rows in the JSON: %s", got)
	}
	trees, err := exec.Command("git", "worktree", "list").Output()
	if err != nil || bytes.Count(trees, []byte("\n")) != 1 {
		t.Errorf("work trees remain: %s, %v", trees, err)
	}

	// The commits have no daemons. As many sittings as begin with either of them are planned.
	out.Reset()
	d := o
	d.daemons, d.only, d.rounds = true, "local_write_lat", 5
	if err := compare(context.Background(), d, "HEAD^", "HEAD", &out); err == nil ||
		!strings.Contains(out.String(), "; 6 sittings; ") || !strings.Contains(out.String(), "FAILED") {
		t.Errorf("two daemons: %v\n%s", err, out.String())
	}

	for _, tc := range []struct{ base, only, want string }{
		{"nonsense", "", "nonsense"}, {"HEAD^", "alpha,beta", `no row "beta"`},
	} {
		o.only = tc.only
		err := compare(context.Background(), o, tc.base, "HEAD", &out)
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("base %s, only %s: %v", tc.base, tc.only, err)
		}
	}
}
