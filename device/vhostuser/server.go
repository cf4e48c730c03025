package vhostuser

import (
	"os"

	"github.com/hashicorp/go-hclog"

	"github.com/vnicd/vnicd/translate"
)

// Config of a Server.
type Config struct {
	Path string      // where the socket is made
	Mode os.FileMode // of the socket; 0 means 0660
	UID  int         // owner; -1 leaves it
	GID  int
	Log  hclog.Logger // nil: silent
}

// Server listens on one Unix socket for front ends of one device.
type Server struct{}

// Listen creates the socket.
func Listen(cfg Config, dev Device, gvmi translate.GVMI) (*Server, error) { return nil, nil }

// Close stops serving.
func (s *Server) Close() error { return nil }
