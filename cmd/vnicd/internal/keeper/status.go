package keeper

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
)

// Status is what a keeper tells: to each daemon as it was at that daemon's start, and in its file as it is now.
type Status struct {
	PID      int    `json:"pid"`
	File     string `json:"file"`              // readable for the keeper's user and root
	Upgrades int    `json:"upgrades"`          // that have been tried, successfully or not
	Failed   int    `json:"failed"`            // of these: the previous program runs on, or again
	Failure  string `json:"failure,omitempty"` // of the newest upgrade, if it failed: why
}

const variable = "VNICD_KEEPER"

func (s *Status) environment() string {
	b, _ := json.Marshal(s) // cannot fail
	return variable + "=" + string(b)
}

// write replaces the file.
func (s *Status) write() error {
	b, err := json.Marshal(s)
	if err != nil {
		return err
	}
	if err := os.WriteFile(s.File+".new", b, 0o600); err != nil {
		return fmt.Errorf("the keeper's state: %w", err)
	}
	return os.Rename(s.File+".new", s.File)
}

// Now returns the present status of the keeper. It has been told by the daemon, which may be taken over: what it names
// as its keeper's file must belong to the owner of the process.
func (s *Status) Now() (*Status, error) {
	var owners [2]uint32
	for i, name := range []string{s.File, "/proc/" + strconv.Itoa(s.PID)} {
		fi, err := os.Stat(name)
		if err != nil {
			return nil, err
		}
		owners[i] = fi.Sys().(*syscall.Stat_t).Uid
	}
	if owners[0] != owners[1] {
		return nil, fmt.Errorf("%s belongs to user %d, process %d to user %d", s.File, owners[0], s.PID, owners[1])
	}
	b, err := os.ReadFile(s.File)
	if err != nil {
		return nil, err
	}
	now := &Status{}
	if err := json.Unmarshal(b, now); err != nil {
		return nil, fmt.Errorf("%s: %w", s.File, err)
	}
	if now.PID != s.PID {
		return nil, errors.New("another keeper runs now")
	}
	return now, nil
}

// Mine returns the status of the keeper that has started this process, or nil.
func Mine() *Status {
	var s Status
	if json.Unmarshal([]byte(os.Getenv(variable)), &s) != nil || s.PID != os.Getppid() {
		return nil
	}
	return &s
}

func statusFile(dir string) string { return filepath.Join(dir, "status") }
