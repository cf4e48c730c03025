package monitoring

import (
	"net"
	"net/netip"
	"path/filepath"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/monitoring/access"
)

// rulePause is the time between two looks at the web configuration file. A change takes effect after one to two of
// them.
const rulePause = 5 * time.Second

// ruleFile keeps the rules of access as the web configuration file, and the files that it names, have them. The process
// that serves cannot open files, so they are read here.
//
// What is read takes effect, or is reported as a mistake, when the next look finds the same: certificate and key are
// two files, and each may be half written. Rules that lack a protection which there is now take no effect at all until
// a restart, because a file that is half written for longer must not open the server.
type ruleFile struct {
	path, listen string
	set          func(*access.Rules) error
	log          hclog.Logger

	inForce *access.Rules
	expires atomic.Pointer[time.Time] // a certificate of inForce, the first one; nil: there is none
	last    look                      // the previous one
	told    string                    // the mistake that the log has; "": none

	stop    chan struct{}
	running sync.WaitGroup
}

// look is what was found in the files.
type look struct {
	rules   *access.Rules // nil: there is a mistake
	mistake string
}

// newRuleFile returns one for a server that listens at an address, or a path. set applies rules.
func newRuleFile(path, listen string, set func(*access.Rules) error, log hclog.Logger) *ruleFile {
	return &ruleFile{path: path, listen: listen, set: set, log: log, stop: make(chan struct{})}
}

// first reads the files and applies their rules.
func (f *ruleFile) first() error {
	r, err := config.LoadWeb(f.path)
	if err == nil {
		err = f.apply(r)
	}
	f.last = look{rules: r}
	return err
}

// watch looks at the files after each pause, until close.
func (f *ruleFile) watch(pause time.Duration) {
	f.running.Go(func() {
		t := time.NewTicker(pause)
		defer t.Stop()
		for {
			select {
			case <-t.C:
				f.look()
			case <-f.stop:
				return
			}
		}
	})
}

func (f *ruleFile) close() {
	close(f.stop)
	f.running.Wait()
}

// look reads the files once.
func (f *ruleFile) look() {
	var now look
	r, err := config.LoadWeb(f.path)
	if now.rules = r; err != nil {
		now = look{mistake: err.Error()}
	} else if lacks := r.Weaker(f.inForce); lacks != "" {
		now = look{mistake: f.path + " demands no " + lacks + " any more, which takes effect with a restart only"}
	}
	settled := reflect.DeepEqual(now, f.last)
	f.last = now
	switch {
	case !settled:
	case now.mistake != "":
		if now.mistake != f.told {
			f.told = now.mistake
			f.log.Error("web configuration is not applied; what was read before stays in force", "error", now.mistake)
		}
	case reflect.DeepEqual(now.rules, f.inForce):
		if f.told != "" {
			f.told = ""
			f.log.Info("web configuration is the one in force again", "file", f.path)
		}
	default:
		if err := f.apply(now.rules); err != nil {
			f.log.Error("web configuration cannot be applied", "error", err)
			return
		}
		f.told = ""
		f.log.Info("web configuration applied", "file", f.path)
	}
}

// apply applies rules, and warns of what is no mistake but rarely meant.
func (f *ruleFile) apply(r *access.Rules) error {
	if err := f.set(r); err != nil {
		return err
	}
	f.inForce = r
	if at, ok := r.Expires(); ok {
		f.expires.Store(&at)
		if time.Now().After(at) {
			f.log.Warn("the server's certificate, or one that it sends with it, has expired", "file", f.path, "end", at)
		}
	}
	if r.TLS == nil {
		if len(r.Users) > 0 && !localOnly(f.listen) {
			f.log.Warn("without `tls_server_config` passwords cross the network in clear text", "listen", f.listen)
		}
	}
	return nil
}

// certificateEnd returns when a certificate of the server expires, or nil. f may be nil.
func (f *ruleFile) certificateEnd() *time.Time {
	if f == nil {
		return nil
	}
	return f.expires.Load()
}

// localOnly reports whether only this host's clients reach an address.
func localOnly(listen string) bool {
	host, _, err := net.SplitHostPort(listen)
	if filepath.IsAbs(listen) || host == "localhost" || err != nil {
		return true
	}
	a, err := netip.ParseAddr(host)
	return err == nil && a.IsLoopback()
}
