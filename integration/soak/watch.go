package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/vnicd/vnicd/lab"
)

// event is something that must not happen.
type event struct{ who, what string }

func (e event) String() string { return e.who + ": " + e.what }

// report passes an event on; after many nobody needs another.
func (s *stage) report(who string, err error) {
	if err == nil || errors.Is(err, context.Canceled) {
		return
	}
	select {
	case s.events <- event{who, err.Error()}:
	default:
	}
}

// guard watches a daemon until ctx ends: the process lives and answers.
func (s *stage) guard(ctx context.Context, h *lab.Host) {
	for {
		at := s.disturbance()
		select {
		case <-ctx.Done():
			return
		case <-s.proc(h).Done():
			if !s.disturbed(at) {
				return // searchLog reports it
			}
			time.Sleep(20 * time.Millisecond)
			continue
		case <-time.After(2 * time.Second):
		}
		c, cancel := context.WithTimeout(ctx, 2*patience)
		_, err := h.Status(c)
		cancel()
		if err != nil && ctx.Err() == nil && !s.disturbed(at) {
			s.report(h.Name, fmt.Errorf("`vnicd status` failed: %w", err))
		}
	}
}

// defect matches lines of the log that no attacker may provoke.
var defect = regexp.MustCompile(`panic|fatal error|goroutine \d+ \[|DATA RACE|\bbug\b|does not drain`)

// searchLog reports defects in a daemon's log, and its end.
func (s *stage) searchLog(h *lab.Host) {
	select {
	case <-h.Proc.Done():
		s.report(h.Name, errors.New("vnicd has ended: "+h.Proc.LogTail()))
	default:
	}
	found := 0
	for line := range strings.Lines(s.logs(h)) {
		if defect.MatchString(line) {
			if found++; found <= 5 {
				s.report(h.Name, errors.New("log: "+strings.TrimSpace(line)))
			}
		}
	}
}

// resources is what a daemon uses.
type resources struct {
	descriptors, mappings, threads, goroutines, rssKiB int
}

// measure counts a daemon's resources. It collects nothing itself: a daemon's RSS includes what Go has not returned.
func measure(h *lab.Host) (r resources, err error) {
	dir := fmt.Sprintf("/proc/%d", h.Proc.PID())
	fds, err := os.ReadDir(filepath.Join(dir, "fd"))
	if err != nil {
		return r, err
	}
	r.descriptors = len(fds)
	maps, err := os.ReadFile(filepath.Join(dir, "maps"))
	if err != nil {
		return r, err
	}
	r.mappings = strings.Count(string(maps), "\n")
	status, err := os.ReadFile(filepath.Join(dir, "status"))
	if err != nil {
		return r, err
	}
	for line := range strings.Lines(string(status)) {
		f := strings.Fields(line)
		if len(f) < 2 {
			continue
		}
		switch f[0] {
		case "VmRSS:":
			r.rssKiB, err = strconv.Atoi(f[1])
		case "Threads:":
			r.threads, err = strconv.Atoi(f[1])
		}
		if err != nil {
			return r, err
		}
	}
	r.goroutines, err = metric(h, "go_goroutines")
	return r, err
}

// metric reads a metric without labels from the daemon's monitoring address.
func metric(h *lab.Host, name string) (int, error) {
	conn, err := dialIn(h, "tcp", monitoring)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(patience))
	if _, err := fmt.Fprintf(conn, "GET /metrics HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n", monitoring); err != nil {
		return 0, err
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		if v, ok := strings.CutPrefix(lines.Text(), name+" "); ok {
			return strconv.Atoi(v)
		}
	}
	return 0, fmt.Errorf("%s: no metric %q (%s)", h.Name, name, resp.Status)
}

// dialIn connects from within a host's namespace.
func dialIn(h *lab.Host, network, addr string) (conn net.Conn, err error) {
	err = h.NS.Do(func() (err error) {
		conn, err = net.Dial(network, addr)
		return err
	})
	return conn, err
}

// grown compares the resources of a quiet daemon before and after the attack. Descriptors, mappings and goroutines
// return to what they were; a few may be on their way (an idle connection of the control socket). RSS keeps what the Go
// heap has once needed, so it is bounded by what the attackers are permitted (limits), not by what it was.
func grown(before, after resources) error {
	const few = 16
	var bad []string
	for _, c := range []struct {
		what    string
		was, is int
		more    int
	}{
		{"descriptors", before.descriptors, after.descriptors, few},
		{"mappings", before.mappings, after.mappings, before.mappings / 2},
		{"goroutines", before.goroutines, after.goroutines, few},
		{"threads", before.threads, after.threads, few},
		{"MiB of RSS", before.rssKiB >> 10, after.rssKiB >> 10, 1024},
	} {
		if c.is > c.was+c.more {
			bad = append(bad, fmt.Sprintf("%d %s, before the attack %d", c.is, c.what, c.was))
		}
	}
	if bad == nil {
		return nil
	}
	return errors.New("resources that were not released: " + strings.Join(bad, "; "))
}
