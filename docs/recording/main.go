// Command recording runs a command and makes a picture of what it prints: an animated SVG of a terminal.
//
//	recording [-o docs/demo.svg] [-idle 1s] [-as "make demo"] -- make demo
//
// The command's output, of both kinds, is also printed. The picture shows the lines in their order, at the pace at
// which they came, except that nothing lasts longer than -idle. A command that fails makes no picture.
package main

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"
)

func main() {
	out := flag.String("o", "build/recording.svg", "the picture's `file`")
	idle := flag.Duration("idle", time.Second, "what the picture shows of a longer pause")
	as := flag.String("as", "", "the `command` that the picture shows; by default the one that runs")
	flag.Parse()
	if *as == "" {
		*as = strings.Join(flag.Args(), " ")
	}
	if err := run(*out, *as, *idle, flag.Args(), os.Stdout); err != nil {
		fmt.Fprintf(os.Stderr, "recording: %v\n", err)
		os.Exit(1)
	}
}

func run(path, as string, idle time.Duration, argv []string, to io.Writer) error {
	if len(argv) == 0 {
		return errors.New("which command? See -help")
	}
	lines, err := record(argv, to)
	if err != nil {
		return err
	}
	lines = append([]line{{text: "$ " + as}}, lines...)
	return os.WriteFile(path, picture(as, shorten(lines, idle)), 0o644)
}

// line is a line of output, and when it came.
type line struct {
	at   time.Duration
	text string
}

// record runs a command, and returns what it has printed. Standard output and standard error are one stream.
func record(argv []string, to io.Writer) (lines []line, err error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer r.Close()
	c := exec.Command(argv[0], argv[1:]...)
	c.Stdin, c.Stdout, c.Stderr = nil, w, w
	start := time.Now()
	err = c.Start()
	_ = w.Close()
	if err != nil {
		return nil, err
	}
	in := bufio.NewScanner(r)
	in.Buffer(nil, 1<<20)
	for in.Scan() {
		lines = append(lines, line{time.Since(start), in.Text()})
		fmt.Fprintln(to, in.Text())
	}
	// Reading on, whatever the scanner thought: the command must not wait for a reader.
	_, copyErr := io.Copy(io.Discard, r)
	if err := c.Wait(); err != nil {
		return nil, fmt.Errorf("%s: %w", argv[0], err)
	}
	return lines, errors.Join(in.Err(), copyErr)
}

// shorten makes pauses between lines at most idle long.
func shorten(lines []line, idle time.Duration) []line {
	out := make([]line, 0, len(lines))
	var at, before time.Duration
	for _, l := range lines {
		at += min(max(l.at-before, 0), idle)
		before = l.at
		out = append(out, line{at, l.text})
	}
	return out
}
