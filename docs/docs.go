// Package docs has the documents of the project and no code. Its tests check that the names in the documents exist.
package docs
