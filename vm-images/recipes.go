// Package vmimages holds the recipes of this folder, for programs that are installed without the source tree.
package vmimages

import "embed"

// Recipes has the scripts of this folder and the files that they use. A file system of this kind has no permissions:
// where the files are unpacked, those named in Executables must be executable and no others, because the names of the
// images depend on it (lib/common.sh: recipe_hash).
//
//go:embed build rootless guest kernel lib
var Recipes embed.FS

// Executables are the paths in Recipes of the programs.
var Executables = []string{"build", "rootless"}
