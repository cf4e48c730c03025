// Package docs has the documents of the project. Its tests check that the names in the documents exist.
package docs

import (
	"strings"
	"unicode"
)

// Anchor returns the anchor that a heading gets on the usual hosting platforms.
func Anchor(heading string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == ' ':
			return '-'
		case r == '-' || r == '_' || unicode.IsLetter(r) || unicode.IsDigit(r):
			return unicode.ToLower(r)
		}
		return -1
	}, strings.TrimSpace(heading))
}
