package access

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"strings"
	"sync"
	"time"

	"golang.org/x/crypto/bcrypt"
)

// Bounds of the time that checks of passwords take. bcrypt is meant to be slow, so clients with wrong passwords could
// otherwise occupy processors.
const (
	// MaxCost bounds the cost of a hash, of which each further one doubles the time: 14 is about a second.
	MaxCost = 14

	maxChecks    = 16               // in progress: one that computes, and those that wait for it
	clientChecks = 4                // of these, from one client's address
	pauseFactor  = 4                // after a wrong password, no check begins for this many times the time that it took
	maxPause     = 10 * time.Second // of that
	checkTime    = 20 * time.Second // that a check may wait
)

// ErrBusy says that too many passwords are being checked.
var ErrBusy = errors.New("too many passwords are being checked: try again later")

// Passwords checks passwords. One is checked at a time, and wrong ones use a fifth of one processor at most. A user's
// password that was right is known from then on, and costs nothing.
type Passwords struct {
	secret  []byte // of known
	compare func(hash, password []byte) error
	now     func() time.Time
	after   func(time.Duration, func()) // calls the function later, in any goroutine

	turn chan struct{} // holds a token while a check computes, and during the pause after it

	mu      sync.Mutex
	checks  int
	clients map[netip.Prefix]int
	known   map[string][sha256.Size]byte // by user: digest of the hash and the password that fits it
}

// NewPasswords returns one that knows no password.
func NewPasswords() *Passwords {
	p := &Passwords{secret: make([]byte, 32), compare: bcrypt.CompareHashAndPassword, now: time.Now,
		after: func(d time.Duration, f func()) { time.AfterFunc(d, f) }, turn: make(chan struct{}, 1),
		clients: map[netip.Prefix]int{}, known: map[string][sha256.Size]byte{}}
	_, _ = rand.Read(p.secret) // never fails
	return p
}

// Check reports whether user has this password. client is the client's address, as http.Request.RemoteAddr. The error
// is ErrBusy or that of ctx; the password has not been checked then.
//
// A user that does not exist takes as long as one with the greatest cost.
func (p *Passwords) Check(ctx context.Context, users map[string]string, client, user, password string) (bool, error) {
	hash, exists := users[user]
	digest := p.digest(user, hash, password)
	if exists && p.knows(user, digest) {
		return true, nil
	}
	if !exists {
		hash = nobody(users)
	}
	from := origin(client)
	if !p.enter(from) {
		return false, ErrBusy
	}
	defer p.leave(from)
	ctx, cancel := context.WithTimeoutCause(ctx, checkTime, ErrBusy)
	defer cancel()
	select {
	case p.turn <- struct{}{}:
	case <-ctx.Done():
		return false, context.Cause(ctx)
	}
	if exists && p.knows(user, digest) { // by the check before
		<-p.turn
		return true, nil
	}
	began := p.now()
	right := p.compare([]byte(hash), []byte(password)) == nil && exists
	if !right {
		p.after(min(pauseFactor*p.now().Sub(began), maxPause), func() { <-p.turn })
		return false, nil
	}
	p.mu.Lock()
	p.known[user] = digest
	p.mu.Unlock()
	<-p.turn
	return true, nil
}

// Retain forgets users that do not exist any more.
func (p *Passwords) Retain(users map[string]string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for u := range p.known {
		if _, exists := users[u]; !exists {
			delete(p.known, u)
		}
	}
}

// digest returns what stands for a right password. Nobody without the secret can say from the time that a comparison
// takes what it compares with.
func (p *Passwords) digest(parts ...string) (d [sha256.Size]byte) {
	h := hmac.New(sha256.New, p.secret)
	for _, s := range parts {
		h.Write(binary.LittleEndian.AppendUint64(nil, uint64(len(s))))
		h.Write([]byte(s))
	}
	copy(d[:], h.Sum(nil))
	return d
}

func (p *Passwords) knows(user string, digest [sha256.Size]byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	known, ok := p.known[user]
	return ok && hmac.Equal(known[:], digest[:])
}

// enter counts a check if there may be one more.
func (p *Passwords) enter(from netip.Prefix) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.checks == maxChecks || p.clients[from] == clientChecks {
		return false
	}
	p.checks++
	p.clients[from]++
	return true
}

func (p *Passwords) leave(from netip.Prefix) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.checks--
	if p.clients[from]--; p.clients[from] == 0 {
		delete(p.clients, from)
	}
}

// origin returns what a client's address counts as: in IPv6 its network, of which a host has all addresses. Clients of
// a unix socket are one.
func origin(client string) netip.Prefix {
	a, err := netip.ParseAddrPort(client)
	if err != nil {
		return netip.Prefix{}
	}
	ip, bits := a.Addr().Unmap().WithZone(""), 32
	if ip.Is6() {
		bits = 64
	}
	from, _ := ip.Prefix(bits)
	return from
}

// nobody returns a hash of the greatest cost among users, of no password in particular.
func nobody(users map[string]string) string {
	cost := bcrypt.MinCost
	for _, h := range users {
		if c, err := bcrypt.Cost([]byte(h)); err == nil {
			cost = max(cost, c)
		}
	}
	return fmt.Sprintf("$2a$%02d$%s", cost, strings.Repeat("x", 53)) // 22 digits of a salt, 31 of a hash
}

// CheckHash returns an error if a text is no bcrypt hash that can be served with. The error does not have the hash.
func CheckHash(hash string) error {
	cost, err := bcrypt.Cost([]byte(hash))
	switch {
	case err == nil && cost > MaxCost:
		return fmt.Errorf("the hash has cost %d: each check would take seconds; want at most %d", cost, MaxCost)
	case err != nil || !bcryptHash.MatchString(hash):
		return errors.New("want a bcrypt hash, as `htpasswd -nBC 10 USER` prints it after the user's name: 60 characters " +
			"that begin with $2y$, $2a$ or $2b$")
	}
	return nil
}

// bcryptHash is a version, a cost, and 22 digits of a salt with 31 of a hash.
var bcryptHash = regexp.MustCompile(`^\$2[aby]\$[0-9]{2}\$[./A-Za-z0-9]{53}$`)
