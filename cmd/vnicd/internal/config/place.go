package config

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Place is where something stands in the configuration.
type Place struct {
	File string
	// Line counts from 1. 0: the file as a whole.
	Line int
	// Key is the path to it, such as vtep.port or vms[2].mac; elements of lists count from 0 within the file. "": the
	// file as a whole.
	Key string
}

// Runtime is the place of things that came from a request to the running daemon, not from a file.
var Runtime = Place{Line: -1}

// requestName replaces the file's name in messages about a request.
const requestName = "request"

// String returns FILE:LINE, or FILE for the file as a whole.
func (p Place) String() string {
	switch {
	case p == Runtime:
		return "an earlier request"
	case p.Line == 0:
		return p.File
	}
	return fmt.Sprintf("%s:%d", p.File, p.Line)
}

// seenFrom names a place in a message about another one.
func (p Place) seenFrom(other Place) string {
	if p != Runtime && p.File == other.File {
		return fmt.Sprintf("line %d", p.Line)
	}
	return p.String()
}

// sub returns the place of a key below p; its line is that of p.
func (p Place) sub(key string) Place {
	p.Key = join(p.Key, key)
	return p
}

// join appends a key to a path of keys.
func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

// Error is one mistake: what is wrong, and what was expected.
type Error struct {
	Place
	Msg string
}

// Error returns FILE:LINE: MESSAGE.
func (e Error) Error() string { return e.String() + ": " + e.Msg }

// Errors is every mistake found in a configuration.
type Errors struct {
	// Files are those that were read, in that order.
	Files []string
	list  []Error
}

// List returns the mistakes by file, in the order of Files, and line.
func (e *Errors) List() []Error {
	slices.SortStableFunc(e.list, func(a, b Error) int {
		return cmp.Or(slices.Index(e.Files, a.File)-slices.Index(e.Files, b.File), a.Line-b.Line)
	})
	return e.list
}

// Error lists the mistakes, one per line.
func (e *Errors) Error() string {
	var lines []string
	for _, x := range e.List() {
		lines = append(lines, x.Error())
	}
	return strings.Join(lines, "\n")
}

func (e *Errors) add(at Place, format string, args ...any) {
	e.list = append(e.list, Error{at, fmt.Sprintf(format, args...)})
}

// orNil returns e if there are mistakes.
func (e *Errors) orNil() error {
	if len(e.list) == 0 {
		return nil
	}
	return e
}
