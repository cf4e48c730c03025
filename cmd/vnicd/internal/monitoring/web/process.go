package web

import (
	"encoding/json"
	"fmt"
	"net"
	"runtime"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/confine"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/monitoring/access"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/worker"
)

// MaxConfig bounds encoded configurations and rules: MaxRules, and names.
const (
	MaxConfig = MaxRules + 1<<20
	MaxRules  = 4 << 20
)

// Kind is the process of the server. Its first message is a Config, as JSON, and each further one access.Rules, which
// replace the former ones; its file is the listening socket, its streams are the slots. It makes no sockets: it only
// accepts on that one.
var Kind = worker.Kind{Name: "monitoring", Calls: confine.Connections(), MaxFiles: 2*maxClients + 64,
	MaxMemory: 256 << 20, Open: open}

// maxProcessors bounds what clients can make the process compute, such as handshakes of TLS and compression.
const maxProcessors = 2

func open(p *worker.Process) (run func() error, err error) {
	text, err := p.Conn.Receive(MaxConfig)
	if err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	var cfg Config
	if err := json.Unmarshal(text, &cfg); err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	if len(p.Files) != 1 {
		return nil, fmt.Errorf("%d descriptors, want the listening socket", len(p.Files))
	}
	l, err := net.FileListener(p.Files[0])
	if err != nil {
		return nil, fmt.Errorf("listening socket: %w", err)
	}
	_ = p.Files[0].Close()
	runtime.GOMAXPROCS(min(runtime.GOMAXPROCS(0), maxProcessors))
	return func() error {
		s, err := New(cfg, p.Conn.Streams, p.Log)
		if err != nil {
			return err
		}
		go func() {
			defer s.Close()
			for {
				text, err := p.Conn.Receive(MaxRules)
				if err != nil {
					return // the daemon has closed it, or has ended
				}
				if err := replace(s, text); err != nil {
					p.Log.Error("rules of access", "error", err)
					return
				}
			}
		}()
		return s.Serve(l)
	}, nil
}

// replace applies rules that the daemon has checked.
func replace(s *Server, text []byte) error {
	var r access.Rules
	if err := json.Unmarshal(text, &r); err != nil {
		return err
	}
	return s.Apply(r)
}
