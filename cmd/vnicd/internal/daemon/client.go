package daemon

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/user"
	"strconv"

	"github.com/vnicd/vnicd/hypervisor/localsocket"
)

// Client talks to the daemon behind a control socket.
type Client struct {
	path   string
	others []string
	http   http.Client
}

// NewClient makes a client for the socket at path, or at the first of others that it can open. Each request opens a
// connection.
func NewClient(path string, others ...string) *Client {
	return &Client{path: path, others: others, http: http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			c, err := d.DialContext(ctx, "unix", path)
			for _, other := range others {
				if err == nil {
					break
				}
				if o, oerr := d.DialContext(ctx, "unix", other); oerr == nil {
					c, err = o, nil
				}
			}
			return c, err
		},
		DisableKeepAlives: true,
	}}}
}

// Do sends a request with in as its JSON body (nil: none) and reads the answer into out (nil: discarded). It returns
// the daemon's errors with their text.
func (c *Client) Do(ctx context.Context, method, url string, in, out any) error {
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(b)
	}
	resp, err := c.send(ctx, method, url, body)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if out == nil {
		return nil
	}
	if err := json.NewDecoder(resp.Body).Decode(out); err != nil {
		return fmt.Errorf("reading vnicd's answer: %w", err)
	}
	return nil
}

// send returns the response to a successful request; the caller closes its body.
func (c *Client) send(ctx context.Context, method, url string, body io.Reader) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://vnicd"+url, body)
	if err != nil {
		return nil, err
	}
	resp, err := c.http.Do(req)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil, fmt.Errorf("no vnicd at %s: start it with `vnicd run`, or name its socket with --control", c.path)
	case errors.Is(err, os.ErrPermission):
		text := fmt.Sprintf("no permission for %s: run %s", c.path, asWhom(c.path))
		for _, other := range c.others {
			text += fmt.Sprintf("; to ask questions only, use %s %s", other, asWhom(other))
		}
		return nil, errors.New(text)
	case err != nil:
		return nil, fmt.Errorf("asking vnicd at %s: %w", c.path, err)
	case resp.StatusCode != http.StatusOK:
		defer resp.Body.Close()
		var e errorBody
		if json.NewDecoder(io.LimitReader(resp.Body, maxBody)).Decode(&e) == nil && e.Error != "" {
			return nil, answeredError{resp.StatusCode, e.Error}
		}
		return nil, fmt.Errorf("vnicd at %s answered %s", c.path, resp.Status)
	}
	return resp, nil
}

// answeredError is the daemon's refusal of a request.
type answeredError struct {
	status int
	text   string
}

func (e answeredError) Error() string { return e.text }

// IsNotFound reports whether the daemon has answered that what a request names does not exist.
func IsNotFound(err error) bool {
	var e answeredError
	return errors.As(err, &e) && e.status == http.StatusNotFound
}

// asWhom says as whom a socket can be opened, and how to become that.
func asWhom(path string) string {
	text := "as root or as " + localsocket.MayOpen(path)
	for _, gid := range localsocket.Groups(path) {
		name := strconv.Itoa(gid)
		if g, err := user.LookupGroupId(name); err == nil {
			name = g.Name
		}
		text += fmt.Sprintf(" (`sudo usermod -aG %s $USER`, then log in again)", name)
	}
	return text
}

// Status asks for the daemon's status.
func (c *Client) Status(ctx context.Context) (*Status, error) {
	var s Status
	return &s, c.Do(ctx, http.MethodGet, "/v1/status", nil, &s)
}
