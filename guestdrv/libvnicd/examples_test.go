package libvnicd_test

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/vnicd/vnicd/guestdrv/internal/rig"
)

// served is an example that waits for its peer on a TCP port.
type served struct {
	tb   testing.TB
	cmd  *exec.Cmd
	out  *bufio.Reader
	log  bytes.Buffer
	port int
}

// serve starts an example that serves, and waits until it listens.
func serve(tb testing.TB, command ...string) *served {
	tb.Helper()
	s := &served{tb: tb, cmd: exec.CommandContext(limit(tb), command[0], command[1:]...)}
	s.cmd.Stderr = &s.log
	out, err := s.cmd.StdoutPipe()
	if err == nil {
		err = s.cmd.Start()
	}
	if err != nil {
		tb.Fatal(err)
	}
	s.out = bufio.NewReader(out)
	if _, err := fmt.Fscanf(s.out, "port %d\n", &s.port); err != nil {
		_ = s.cmd.Wait()
		tb.Fatalf("%v: %v\n%s", command, err, &s.log)
	}
	return s
}

// end returns what the program printed after its port, once it has ended.
func (s *served) end() (out string, err error) {
	text, err := io.ReadAll(s.out)
	if err != nil {
		s.tb.Fatal(err)
	}
	return string(text), s.cmd.Wait()
}

// TestExamples runs each example between two applications, alone and under valgrind: as many bytes are verified, or
// transferred, as it says.
func TestExamples(t *testing.T) {
	dir := filepath.Dir(build(t, "peer", ""))
	const bandwidth = `100 messages of 10000 bytes, \d+\.\d\d MiB/s; %s bytes here have changed\n`
	for _, x := range []struct {
		name           string
		server, client []string // arguments
		served, got    string   // what both print
	}{
		{"rdma_copy", nil, nil, `written by the peer: 1048576 bytes verified\n`, `read back: 1048576 bytes verified\n`},
		{"rdma_bw", []string{"10000"}, []string{"10000", "write", "100"},
			fmt.Sprintf(bandwidth, "10000"), fmt.Sprintf(bandwidth, "0")},
		{"rdma_bw", []string{"70000"}, []string{"10000", "read", "100"},
			fmt.Sprintf(bandwidth, "0"), fmt.Sprintf(bandwidth, "10000")},
	} {
		for name, prefix := range map[string][]string{"alone": nil, "valgrind": valgrind} {
			t.Run(strings.Join(append([]string{x.name, name}, x.client...), " "), func(t *testing.T) {
				n := rig.New(t, 2)
				command := func(host int, port string, args []string, more ...string) []string {
					h := n.Hosts[host]
					c := append(append([]string{}, prefix...), filepath.Join(dir, x.name), h.Path, h.Addr.String(), port)
					return append(append(c, args...), more...)
				}
				s := serve(t, command(0, "0", x.server)...)
				c := command(1, fmt.Sprint(s.port), x.client, "127.0.0.1")
				if got := run(t, c[0], c[1:]...); !regexp.MustCompile("^" + x.got + "$").MatchString(got) {
					t.Errorf("the client printed %q", got)
				}
				got, err := s.end()
				if err != nil || !regexp.MustCompile("^"+x.served+"$").MatchString(got) {
					t.Errorf("the server printed %q and ended with %v\n%s", got, err, &s.log)
				}
			})
		}
	}
}

// TestBandwidthRefuses: rdma_bw says what is wrong with a peer that is not a perftest which it understands.
func TestBandwidthRefuses(t *testing.T) {
	program := filepath.Join(filepath.Dir(build(t, "peer", "")), "rdma_bw")
	pad := func(s string, n int) string { return s + strings.Repeat("\x00", n-len(s)) }
	const sizes = "\x00\x00\x10\x00\x00\x00\x00\x40"
	hello := pad("6.22", 16) + sizes + "3\x00"
	for name, x := range map[string]struct{ sent, want string }{
		"old":         {pad("5.60", 16), `version "5.60"`},
		"other":       {"GET / HTTP/1.1\r\n\r\n", "version"},
		"cycle":       {pad("6.22", 16) + "\x00\x01\x00\x00", "more than 4096"},
		"MTU":         {pad("6.22", 16) + sizes + "9\x00", "number 9"},
		"keys":        {hello + strings.Repeat("x", 108), "expected LID:"},
		"unfinished":  {hello + pad("0000:0010:000012:000000:00000034:0000000000000000:00:00:", 108), "expected LID:"},
		"ends at GID": {hello + "0000:0010:000012:000000", "receive: "},
	} {
		t.Run(name, func(t *testing.T) {
			n := rig.New(t, 1)
			s := serve(t, program, n.Hosts[0].Path, n.Hosts[0].Addr.String(), "0", "4096")
			c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", s.port))
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			// The program may refuse the beginning and end before it has all.
			_, _ = io.WriteString(c, x.sent)
			_ = c.(*net.TCPConn).CloseWrite()
			if _, err := s.end(); err == nil || !strings.Contains(s.log.String(), x.want) {
				t.Errorf("ended with %v, printed %q, expected %q", err, s.log.String(), x.want)
			}
		})
	}
}
