package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

// ucx is ucx_perftest (Debian's ucx-utils) between two processes over shared memory.
type ucx struct {
	*Bench
	test             string
	size, iterations int
	calibrated       bool
}

// ucx returns a test. The first run has that many iterations; the others have as many as their time allows, so that the
// programs' start, a tenth of a second of processor time, is a small part of the machine's work.
func (b *Bench) ucx(test string, size, iterations int) *ucx {
	return &ucx{Bench: b, test: test, size: size, iterations: iterations}
}

// run returns the last line of the test's figures by column name. The work includes the start of the client.
func (u *ucx) run(ctx context.Context, d time.Duration) (r map[string]float64, w work, err error) {
	port, err := freePort()
	if err != nil {
		return nil, w, err
	}
	env := []string{"UCX_TLS=sm,self", "UCX_WARN_UNUSED_ENV_VARS=n"}
	var here *harness.Namespace
	server, err := here.Start(filepath.Join(u.Dir, "ucx.log"), env, "ucx_perftest", "-p", port)
	if err != nil {
		return nil, w, err
	}
	defer server.Kill()
	args := []string{"127.0.0.1", "-p", port, "-t", u.test, "-s", strconv.Itoa(u.size),
		"-n", strconv.Itoa(u.iterations), "-f", "-v"}
	messages := 1 // of an iteration
	if strings.HasSuffix(u.test, "_lat") {
		messages = 2 // there and back
	}
	for {
		p, err := begin()
		if err != nil {
			return nil, w, err
		}
		c := exec.CommandContext(ctx, "ucx_perftest", args...)
		c.Env = append(os.Environ(), env...)
		out, err := c.CombinedOutput()
		if err == nil {
			if w, err = p.end("message", float64(messages*u.iterations)); err != nil {
				return nil, w, err
			}
			r, err = parseCSV(string(out))
			if n := int(r["overall_mr"]*d.Seconds()) / messages; err == nil && !u.calibrated {
				u.calibrated, u.iterations = true, max(u.iterations, n)
			}
			return r, w, err
		}
		// The server may not listen yet; it prints nothing when it does.
		select {
		case <-server.Done():
			return nil, w, fmt.Errorf("ucx_perftest: %s", server.LogTail())
		case <-ctx.Done():
			return nil, w, fmt.Errorf("ucx_perftest: %w: %s", ctx.Err(), out)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// freePort returns a TCP port of the loopback that is not in use.
func freePort() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	_, port, err := net.SplitHostPort(l.Addr().String())
	return port, errors.Join(err, l.Close())
}

// parseCSV parses a header line and the last line of values below it.
func parseCSV(s string) (map[string]float64, error) {
	var head, last []string
	for l := range strings.Lines(s) {
		f := strings.Split(strings.TrimSpace(l), ",")
		switch {
		case f[0] == "iterations":
			head = f
		case head != nil && len(f) == len(head):
			last = f
		}
	}
	if last == nil {
		return nil, fmt.Errorf("no figures in the output %q", s)
	}
	m := map[string]float64{}
	for i, k := range head {
		v, err := strconv.ParseFloat(last[i], 64)
		if err != nil {
			return nil, fmt.Errorf("figure %s: %w", k, err)
		}
		m[k] = v
	}
	return m, nil
}

// iperfServer runs iperf3 on h until the row ends.
func (b *Bench) iperfServer(h *lab.Host) error {
	p, err := h.NS.Start(filepath.Join(h.Dir, "iperf3.log"), nil, "iperf3", "-s")
	if err != nil {
		return err
	}
	b.Add(p.Kill)
	return nil
}

// iperf sends from h to addr for d, at least a second. The result holds the received bits or packets (UDP only) and the
// time.
func iperf(ctx context.Context, h *lab.Host, addr string, d time.Duration, args ...string) (r iperfResult, err error) {
	secs := strconv.Itoa(max(1, int(d.Round(time.Second).Seconds())))
	argv := append([]string{"iperf3", "-c", addr, "-t", secs, "-J"}, args...)
	for {
		out, err := h.NS.Run(ctx, argv...)
		if err == nil {
			r = iperfResult{}
			if err = json.Unmarshal([]byte(out), &r); err != nil {
				return r, err
			}
			if r.Error == "" {
				return r, nil
			}
			err = errors.New(r.Error)
		}
		// The server may not listen yet, or still be busy with the previous test.
		select {
		case <-ctx.Done():
			return r, fmt.Errorf("%w: %s", err, out)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

type iperfResult struct {
	Error string `json:"error"`
	End   struct {
		Sent struct { // TCP
			Seconds float64 `json:"seconds"`
		} `json:"sum_sent"`
		Received struct { // TCP
			Bytes         float64 `json:"bytes"`
			BitsPerSecond float64 `json:"bits_per_second"`
		} `json:"sum_received"`
		Sum struct { // UDP
			Seconds float64 `json:"seconds"`
			Packets float64 `json:"packets"`
			Lost    float64 `json:"lost_packets"`
		} `json:"sum"`
		CPU struct {
			Client float64 `json:"host_total"`
			Server float64 `json:"remote_total"`
		} `json:"cpu_utilization_percent"`
	} `json:"end"`
}

// ran returns the processor time of both ends in a test of that many seconds.
func (r *iperfResult) ran(seconds float64) time.Duration {
	return time.Duration((r.End.CPU.Client + r.End.CPU.Server) / 100 * seconds * float64(time.Second))
}
