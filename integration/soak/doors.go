package main

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"time"
)

// doorsEpisode speaks HTTP, well and badly, to the control socket and to the web page: unknown paths and methods, large
// headers and bodies, requests that never end, bodies that are not what they say. It asks for nothing that an operator
// may do and innocents would notice.
func doorsEpisode(ctx context.Context, s *stage, rng *rand.Rand) error {
	var conns []net.Conn
	defer func() {
		for _, c := range conns {
			_ = c.Close()
		}
	}()
	for range 1 + rng.IntN(32) {
		if ctx.Err() != nil {
			return nil
		}
		network, addr := "unix", s.socket(s.h1, "vnicd.sock")
		if rng.IntN(2) == 0 {
			network, addr = "tcp", monitoring
		}
		c, err := dialIn(s.h1, network, addr)
		if err != nil {
			return fmt.Errorf("%s: %w", addr, err)
		}
		conns = append(conns, c)
		_ = c.SetDeadline(time.Now().Add(200 * time.Millisecond))
		_, _ = io.WriteString(c, request(rng))
		if rng.IntN(3) > 0 {
			_, _ = io.CopyN(io.Discard, c, int64(rng.IntN(64<<10)))
		}
	}
	return nil
}

func request(rng *rand.Rand) string {
	methods := []string{"GET", "POST", "PUT", "DELETE", "OPTIONS", "\x00", strings.Repeat("A", 1+rng.IntN(2000))}
	paths := []string{"/", "/metrics", "/healthz", "/v1/overview", "/v1/status", "/v1/", "/debug/pprof/",
		"/../../etc/passwd", "/v1/vms/" + strings.Repeat("%00", rng.IntN(50)), "//" + strings.Repeat("/", rng.IntN(5000))}
	host := []string{monitoring, "localhost", "evil.example", "", strings.Repeat("h", rng.IntN(3000))}[rng.IntN(5)]
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s HTTP/1.%d\r\nHost: %s\r\n", methods[rng.IntN(len(methods))], paths[rng.IntN(len(paths))],
		rng.IntN(3), host)
	for range rng.IntN(30) {
		fmt.Fprintf(&b, "X-%d: %s\r\n", rng.IntN(1000), strings.Repeat("v", rng.IntN(5000)))
	}
	switch rng.IntN(5) {
	case 0: // never ends
	case 1:
		fmt.Fprintf(&b, "Content-Length: %d\r\n\r\n%s", rng.Uint64(), strings.Repeat("{", rng.IntN(5000)))
	case 2:
		fmt.Fprintf(&b, "Transfer-Encoding: chunked\r\n\r\n%x\r\n%s", rng.Uint32(), strings.Repeat("[", rng.IntN(5000)))
	default:
		b.WriteString("\r\n")
	}
	return b.String()
}
