package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// described are the parts of what `git describe` prints: tag, pre-release, commits since the tag, commit.
var described = regexp.MustCompile(
	`^v(\d+\.\d+\.\d+)(?:-((?:alpha|beta|rc)[.\d]*))?(?:-(\d+)-g([0-9a-f]+))?(-dirty)?$`)

// version is that of a release or of a commit after one.
type version struct {
	git     string // as `git describe` prints it, and vnicd itself
	numbers string // of the tag, such as 1.2.3-rc1: the heading in CHANGELOG.md
	tagged  bool   // the commit has the tag and no changes
}

func parseVersion(s string) (version, error) {
	m := described.FindStringSubmatch(s)
	if m == nil {
		return version{}, fmt.Errorf("version %q: expected vX.Y.Z, vX.Y.Z-rcN, or what `git describe` makes of them", s)
	}
	v := version{git: s, numbers: m[1], tagged: m[3] == "" && m[5] == ""}
	if m[2] != "" {
		v.numbers += "-" + m[2]
	}
	return v, nil
}

// pkg returns the version in a form that dpkg, rpm and DKMS accept and order alike: v1.2.3-rc1 is 1.2.3~rc1, before
// 1.2.3; v1.2.3-4-gabcdef-dirty is 1.2.3+4.gabcdef.dirty, after it. Neither has a hyphen, which separates the
// packager's revision (deb-version(7), rpm-version(7)).
func (v version) pkg() string {
	m := described.FindStringSubmatch(v.git)
	s := m[1]
	if m[2] != "" {
		s += "~" + m[2]
	}
	var after []string
	if m[3] != "" {
		after = append(after, m[3], "g"+m[4])
	}
	if m[5] != "" {
		after = append(after, "dirty")
	}
	if len(after) > 0 {
		s += "+" + strings.Join(after, ".")
	}
	return s
}

// commitTime returns the time that files and packages get: SOURCE_DATE_EPOCH
// (https://reproducible-builds.org/specs/source-date-epoch/), else that of the commit. Archives that git makes give the
// commit's time to all files.
func commitTime(root string) (time.Time, error) {
	s := os.Getenv("SOURCE_DATE_EPOCH")
	if s == "" {
		c := exec.Command("git", "log", "-1", "--format=%ct")
		c.Dir = root
		out, err := c.Output()
		if err != nil {
			info, err := os.Stat(filepath.Join(root, "CHANGELOG.md"))
			if err != nil {
				return time.Time{}, err
			}
			return info.ModTime().UTC().Truncate(time.Second), nil
		}
		s = strings.TrimSpace(string(out))
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		return time.Time{}, fmt.Errorf("SOURCE_DATE_EPOCH or commit time %q: expected seconds since 1970", s)
	}
	return time.Unix(n, 0).UTC(), nil
}

// ref returns the tag or commit, for addresses of the repository.
func (v version) ref() string {
	if hash := described.FindStringSubmatch(v.git)[4]; hash != "" {
		return hash
	}
	return "v" + v.numbers
}
