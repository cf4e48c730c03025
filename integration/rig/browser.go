// Package rig holds what only tests and the demo use beside a lab: a headless browser and a container with systemd.
package rig

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/vnicd/vnicd/lab/harness"
)

// browsers are the names of Chromium's executable, in order of preference.
var browsers = []string{"chromium-headless-shell", "chromium", "google-chrome"}

// FindBrowser returns the path of a Chromium, or an error that says what to install.
func FindBrowser() (string, error) {
	for _, name := range browsers {
		if path, err := exec.LookPath(name); err == nil {
			return path, nil
		}
	}
	return "", errors.New("no Chromium: install Debian's chromium-headless-shell, or chromium")
}

// Browser is a headless Chromium with one page, driven by the DevTools protocol over a pair of pipes.
type Browser struct {
	cmd     *exec.Cmd
	in      *os.File // to the browser
	out     *os.File // from the browser
	dir     string
	session string
	read    chan struct{} // closed when the browser's output ends

	mu       sync.Mutex
	next     int
	calls    map[int]chan answer
	errors   []string // errors of the page's console and the browser
	requests []string // addresses that the page requested
}

type answer struct {
	Result json.RawMessage
	Error  *struct{ Message string }
}

// NewBrowser starts a browser in the namespace. It must be closed.
func NewBrowser(ctx context.Context, ns *harness.Namespace) (*Browser, error) {
	path, err := FindBrowser()
	if err != nil {
		return nil, err
	}
	b := &Browser{calls: map[int]chan answer{}, read: make(chan struct{})}
	if b.dir, err = os.MkdirTemp("", "vnicd-browser-"); err != nil {
		return nil, err
	}
	theirIn, in, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	out, theirOut, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	b.in, b.out = in, out
	argv := ns.Argv([]string{path, "--headless", "--remote-debugging-pipe", "--user-data-dir=" + b.dir, "--no-sandbox",
		"--disable-gpu", "--disable-dev-shm-usage",
		"--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
		"--hide-scrollbars", "--force-color-profile=srgb"})
	b.cmd = exec.Command(argv[0], argv[1:]...)
	b.cmd.ExtraFiles = []*os.File{theirIn, theirOut}
	b.cmd.Env = append(os.Environ(), "HOME="+b.dir)
	err = b.cmd.Start()
	_, _ = theirIn.Close(), theirOut.Close()
	if err != nil {
		_, _ = in.Close(), out.Close()
		return nil, errors.Join(err, os.RemoveAll(b.dir))
	}
	go b.listen()
	if err := b.open(ctx); err != nil {
		b.Close()
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return b, nil
}

// Close stops the browser.
func (b *Browser) Close() {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	b.session = ""
	_ = b.call(ctx, "Browser.close", nil, nil)
	done := make(chan struct{})
	go func() { defer close(done); _ = b.cmd.Wait() }()
	select {
	case <-done:
	case <-ctx.Done():
		_ = b.cmd.Process.Kill()
		<-done
	}
	_, _ = b.in.Close(), b.out.Close()
	<-b.read
	_ = os.RemoveAll(b.dir)
}

func (b *Browser) open(ctx context.Context) error {
	var target struct{ TargetID string }
	if err := b.call(ctx, "Target.createTarget", map[string]any{"url": "about:blank"}, &target); err != nil {
		return err
	}
	var session struct{ SessionID string }
	if err := b.call(ctx, "Target.attachToTarget", map[string]any{"targetId": target.TargetID, "flatten": true},
		&session); err != nil {
		return err
	}
	b.session = session.SessionID
	for _, domain := range []string{"Page", "Runtime", "Log", "Network"} {
		if err := b.call(ctx, domain+".enable", nil, nil); err != nil {
			return err
		}
	}
	return nil
}

// listen reads the browser's messages until its output ends.
func (b *Browser) listen() {
	defer close(b.read)
	r := bufio.NewReaderSize(b.out, 1<<20)
	for {
		text, err := r.ReadBytes(0)
		if err != nil {
			return
		}
		var m struct {
			ID     int
			Method string
			Params struct {
				Type             string
				Args             []struct{ Value, Description any }
				Entry            struct{ Level, Text, URL string }
				ExceptionDetails struct {
					Text      string
					Exception struct{ Description string }
				}
				Request struct{ URL string }
			}
			answer
		}
		if json.Unmarshal(bytes.TrimSuffix(text, []byte{0}), &m) != nil {
			continue
		}
		b.mu.Lock()
		p := &m.Params
		switch {
		case m.ID != 0:
			if c := b.calls[m.ID]; c != nil {
				delete(b.calls, m.ID)
				c <- m.answer
			}
		case m.Method == "Runtime.consoleAPICalled" && (p.Type == "error" || p.Type == "warning"):
			b.errors = append(b.errors, fmt.Sprintf("console: %v", p.Args))
		case m.Method == "Runtime.exceptionThrown":
			b.errors = append(b.errors, p.ExceptionDetails.Text+" "+p.ExceptionDetails.Exception.Description)
		case m.Method == "Log.entryAdded" && (p.Entry.Level == "error" || p.Entry.Level == "warning"):
			// The page, or Open, asks again.
			if strings.Contains(p.Entry.Text, networkChanged) {
				break
			}
			b.errors = append(b.errors, p.Entry.Text+" "+p.Entry.URL)
		case m.Method == "Network.requestWillBeSent":
			b.requests = append(b.requests, p.Request.URL)
		}
		b.mu.Unlock()
	}
}

// call runs a method of the protocol; result may be nil.
func (b *Browser) call(ctx context.Context, method string, params map[string]any, result any) error {
	b.mu.Lock()
	b.next++
	id, c := b.next, make(chan answer, 1)
	b.calls[id] = c
	msg := map[string]any{"id": id, "method": method, "params": params}
	if params == nil {
		msg["params"] = map[string]any{}
	}
	if b.session != "" {
		msg["sessionId"] = b.session
	}
	text, err := json.Marshal(msg)
	if err == nil {
		_, err = b.in.Write(append(text, 0))
	}
	b.mu.Unlock()
	if err != nil {
		return fmt.Errorf("%s: %w", method, err)
	}
	select {
	case a := <-c:
		if a.Error != nil {
			return fmt.Errorf("%s: %s", method, a.Error.Message)
		}
		if result == nil {
			return nil
		}
		return json.Unmarshal(a.Result, result)
	case <-b.read:
		return fmt.Errorf("%s: the browser has exited", method)
	case <-ctx.Done():
		return fmt.Errorf("%s: %w", method, ctx.Err())
	}
}

// Window sets the size and the colours of the page.
func (b *Browser) Window(ctx context.Context, width, height int, dark bool) error {
	scheme := "light"
	if dark {
		scheme = "dark"
	}
	return errors.Join(
		b.call(ctx, "Emulation.setDeviceMetricsOverride",
			map[string]any{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false}, nil),
		b.call(ctx, "Emulation.setEmulatedMedia",
			map[string]any{"features": []map[string]string{{"name": "prefers-color-scheme", "value": scheme}}}, nil))
}

// networkChanged is Chromium's error for requests that it ends because an interface of the namespace gets an address,
// as some do when a test begins.
const networkChanged = "ERR_NETWORK_CHANGED"

// maxLoads bounds how often Open loads a page.
const maxLoads = 20

// Open loads a page with all that it names, and does so again when Chromium has ended a request of it (networkChanged).
// A user would do that by hand.
func (b *Browser) Open(ctx context.Context, url string) error {
	for range maxLoads {
		var r struct{ ErrorText string }
		if err := b.call(ctx, "Page.navigate", map[string]any{"url": url}, &r); err != nil {
			return err
		}
		if strings.Contains(r.ErrorText, networkChanged) {
			continue
		}
		if r.ErrorText != "" {
			return fmt.Errorf("%s: %s", url, r.ErrorText)
		}
		if err := b.Wait(ctx, `location.href !== "about:blank" && document.readyState === "complete"`); err != nil {
			return err
		}
		// The status of a request without an answer is 0.
		var whole bool
		if err := b.Eval(ctx, `performance.getEntriesByType("resource").every((r) => r.responseStatus !== 0)`,
			&whole); err != nil {
			return err
		}
		if whole {
			return nil
		}
	}
	return fmt.Errorf("%s: loaded %d times, and never whole: %q", url, maxLoads, b.Complaints())
}

// Eval runs a JavaScript expression in the page, awaits it if it is a promise, and decodes its value.
func (b *Browser) Eval(ctx context.Context, expression string, result any) error {
	var r struct {
		Result           struct{ Value json.RawMessage }
		ExceptionDetails *struct {
			Text      string
			Exception struct{ Description string }
		}
	}
	if err := b.call(ctx, "Runtime.evaluate", map[string]any{"expression": expression, "returnByValue": true,
		"awaitPromise": true}, &r); err != nil {
		return err
	}
	if x := r.ExceptionDetails; x != nil {
		return fmt.Errorf("%s: %s %s", expression, x.Text, x.Exception.Description)
	}
	if result == nil {
		return nil
	}
	return json.Unmarshal(r.Result.Value, result)
}

// Wait waits until an expression is true.
func (b *Browser) Wait(ctx context.Context, expression string) error {
	for {
		var yes bool
		err := b.Eval(ctx, "!!("+expression+")", &yes)
		if err == nil && yes {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the page did not reach %s: %w", expression, errors.Join(ctx.Err(), err))
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// Screenshot writes an image of the whole page as PNG.
func (b *Browser) Screenshot(ctx context.Context, file string) error {
	var r struct{ Data string }
	if err := b.call(ctx, "Page.captureScreenshot", map[string]any{"format": "png", "captureBeyondViewport": true},
		&r); err != nil {
		return err
	}
	text, err := base64.StdEncoding.DecodeString(r.Data)
	if err != nil {
		return err
	}
	return os.WriteFile(file, text, 0o644)
}

// Complaints returns the errors and warnings of the page so far.
func (b *Browser) Complaints() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.errors)
}

// Requests returns the addresses that the page requested so far.
func (b *Browser) Requests() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.requests)
}
