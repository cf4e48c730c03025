package web

import (
	"encoding/json"
	"fmt"
	"net"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/confine"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/worker"
)

// MaxConfig bounds an encoded Config.
const MaxConfig = 1 << 20

// Kind is the process of the server. Its first message is a Config, as JSON; its file is the listening socket, its
// streams are the slots. It makes no sockets: it only accepts on that one.
var Kind = worker.Kind{Name: "monitoring", Calls: confine.Connections(), MaxFiles: 2*maxClients + 64,
	MaxMemory: 256 << 20, Open: open}

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
	return func() error {
		s, err := New(cfg, p.Conn.Streams, p.Log)
		if err != nil {
			return err
		}
		go func() {
			_, _ = p.Conn.Receive(0) // until the daemon closes it, or has ended
			s.Close()
		}()
		return s.Serve(l)
	}, nil
}
