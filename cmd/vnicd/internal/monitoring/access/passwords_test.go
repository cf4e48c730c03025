package access

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/crypto/bcrypt"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func hashOf(t *testing.T, password string, cost int) string {
	t.Helper()
	h, err := bcrypt.GenerateFromPassword([]byte(password), cost)
	if err != nil {
		t.Fatal(err)
	}
	return string(h)
}

// counting is a Passwords that counts computations, and whose pauses end when the test says so.
type counting struct {
	*Passwords
	mu     sync.Mutex
	costs  []int // of the computations
	pauses []time.Duration
	end    []func()
}

func newCounting() *counting {
	c := &counting{Passwords: NewPasswords()}
	at := time.Unix(0, 0)
	c.now = func() time.Time {
		c.mu.Lock()
		defer c.mu.Unlock()
		at = at.Add(time.Second) // so each computation takes one
		return at
	}
	compare := c.compare
	c.compare = func(hash, password []byte) error {
		cost, _ := bcrypt.Cost(hash)
		c.mu.Lock()
		c.costs = append(c.costs, cost)
		c.mu.Unlock()
		return compare(hash, password)
	}
	c.after = func(d time.Duration, f func()) {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.pauses, c.end = append(c.pauses, d), append(c.end, f)
	}
	return c
}

// resume ends all pauses.
func (c *counting) resume() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, f := range c.end {
		f()
	}
	c.end = nil
}

// Only the right password of a user passes. It is computed once, wrong ones each time, and a user that does not exist
// takes as long as one that does.
func TestPasswords(t *testing.T) {
	c := newCounting()
	users := map[string]string{"alice": hashOf(t, "one", 4), "bob": hashOf(t, "two", 5)}
	for i, x := range []struct {
		user, password string
		right          bool
		cost           int // 0: nothing is computed
	}{
		{"alice", "one", true, 4}, {"alice", "one", true, 0}, {"alice", "two", false, 4}, {"alice", "two", false, 4},
		{"alice", "", false, 4}, {"alice", "one", true, 0}, {"bob", "one", false, 5}, {"bob", "two", true, 5},
		{"Alice", "one", false, 5}, {"", "", false, 5}, {"carol", "xx", false, 5}, {"bob", "two", true, 0},
	} {
		c.costs = nil
		right, err := c.Check(context.Background(), users, "192.0.2.1:1", x.user, x.password)
		if err != nil || right != x.right || len(c.costs) != min(x.cost, 1) || x.cost > 0 && c.costs[0] != x.cost {
			t.Errorf("%d: %q %q: %v, %v, computed %v, want %v, %d", i, x.user, x.password, right, err, c.costs, x.right, x.cost)
		}
		c.resume()
	}
	// A new hash: the old password is wrong.
	users["alice"] = hashOf(t, "three", 4)
	for password, want := range map[string]bool{"one": false, "three": true} {
		if right, err := c.Check(context.Background(), users, "", "alice", password); right != want || err != nil {
			t.Errorf("after a change %q: %v, %v", password, right, err)
		}
		c.resume()
	}
	delete(users, "alice")
	c.Retain(users)
	if right, _ := c.Check(context.Background(), users, "", "alice", "three"); right || len(c.known) != 1 {
		t.Errorf("a user that was removed: %v, %d known", right, len(c.known))
	}
}

// TestPasswordFlood: one check computes at a time, and a pause follows each wrong password. Checks beyond the bounds of
// all clients and of one are refused at once, a known password is not, and a client that goes frees its place.
func TestPasswordFlood(t *testing.T) {
	c := newCounting()
	users := map[string]string{"alice": hashOf(t, "one", 4)}
	if right, err := c.Check(context.Background(), users, "", "alice", "one"); !right || err != nil {
		t.Fatal(right, err)
	}
	at, top, computing, proceed := 0, 0, make(chan struct{}), make(chan struct{})
	c.compare = func(_, _ []byte) error {
		c.mu.Lock()
		at++
		top = max(top, at)
		c.mu.Unlock()
		computing <- struct{}{}
		<-proceed
		c.mu.Lock()
		at--
		c.mu.Unlock()
		return errors.New("wrong")
	}
	ctx, leave := context.WithCancel(context.Background())
	results := make(chan error, maxChecks)
	begun := func() int {
		c.Passwords.mu.Lock()
		defer c.Passwords.mu.Unlock()
		return c.checks
	}
	for host := range maxChecks / clientChecks {
		for port := range clientChecks {
			go func() {
				_, err := c.Check(ctx, users, fmt.Sprintf("[2001:db8:0:%d::%d]:%d", host, port, port), "alice", "x")
				results <- err
			}()
		}
		for begun() != (host+1)*clientChecks {
			time.Sleep(time.Millisecond)
		}
		if host == 0 {
			if _, err := c.Check(ctx, users, "[2001:db8::7:8:9]:1", "alice", "x"); !errors.Is(err, ErrBusy) {
				t.Errorf("one more of the same network: %v", err)
			}
		}
	}
	if _, err := c.Check(ctx, users, "192.0.2.1:1", "alice", "x"); !errors.Is(err, ErrBusy) {
		t.Errorf("one more of another client: %v", err)
	}
	if right, err := c.Check(ctx, users, "192.0.2.1:1", "alice", "one"); !right || err != nil {
		t.Errorf("a known password: %v, %v", right, err)
	}
	for range 2 {
		<-computing
		proceed <- struct{}{}
		if err := <-results; err != nil {
			t.Error(err)
		}
		select {
		case <-computing:
			t.Error("a check computes during the pause")
		case <-time.After(50 * time.Millisecond): // for what must not happen
		}
		c.resume()
	}
	<-computing
	leave()
	for range maxChecks - 3 {
		if err := <-results; !errors.Is(err, context.Canceled) {
			t.Errorf("a client that has gone: %v", err)
		}
	}
	proceed <- struct{}{}
	<-results
	if top != 1 || begun() != 0 || len(c.clients) != 0 {
		t.Errorf("%d computed at once, %d checks and %d clients remain", top, begun(), len(c.clients))
	}
	for _, d := range c.pauses {
		if d != pauseFactor*time.Second {
			t.Errorf("pause of %v after a computation of a second", d)
		}
	}
}

func TestCheckHash(t *testing.T) {
	good := hashOf(t, "x", 4)
	for _, h := range []string{good, "$2y$" + good[4:], "$2b$14$" + good[7:], nobody(map[string]string{"a": good})} {
		if err := CheckHash(h); err != nil {
			t.Errorf("%s: %v", h, err)
		}
	}
	for _, h := range []string{"", "secret", good[:59], good + "x", "$2y$15$" + good[7:], "$2y$03$" + good[7:],
		"$2y$31$" + good[7:], "$1$" + good[3:], "$6$" + strings.Repeat("x", 57), good[:30] + " " + good[31:],
		"$2$10$" + good[7:] + "x"} {
		if err := CheckHash(h); err == nil || h != "" && strings.Contains(err.Error(), h) {
			t.Errorf("%s: %v", h, err)
		}
	}
}

func TestWeaker(t *testing.T) {
	users := map[string]string{"a": "x"}
	strict := &Rules{TLS: &TLS{ClientAuth: tls.RequireAndVerifyClientCert, ClientSANs: []string{"a"}}, Users: users}
	for want, r := range map[string]*Rules{
		"TLS":                          {Users: users},
		"passwords":                    {TLS: strict.TLS, Users: map[string]string{}},
		"client certificates":          {TLS: &TLS{ClientAuth: tls.VerifyClientCertIfGiven}, Users: users},
		"names in client certificates": {TLS: &TLS{ClientAuth: tls.RequireAndVerifyClientCert}, Users: users},
	} {
		if got := r.Weaker(strict); got != want || strict.Weaker(r) != "" || r.Weaker(&Rules{}) != "" {
			t.Errorf("%q, want %q; the other way round %q", got, want, strict.Weaker(r))
		}
	}
}
