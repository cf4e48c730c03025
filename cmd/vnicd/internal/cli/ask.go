package cli

import (
	"context"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
)

// askTime bounds the daemon's time to answer.
const askTime = 30 * time.Second

const whichSocket = `The control socket is that of --control or of the configuration, by default
` + config.DefaultRunDir + `/vnicd.sock; a user who may not open it asks at the status socket,
` + config.DefaultRunDir + `/vnicd-status.sock, which permits no changes and no captures.`

// askFlags adds the flags of commands that talk to the running daemon.
func (a *app) askFlags(c *cobra.Command) {
	c.PersistentFlags().StringVar(&a.control, "control", "", "control socket `path`")
	c.PersistentFlags().BoolVarP(&a.json, "json", "j", false, "JSON output")
}

// client finds the daemon's socket.
func (a *app) client(c *cobra.Command) (*daemon.Client, error) {
	if a.control != "" {
		return daemon.NewClient(a.control), nil
	}
	cfg, err := config.Load(a.config)
	if err == nil {
		return daemon.NewClient(cfg.Control, cfg.Status), nil
	}
	if c.Flags().Changed("config") {
		return nil, usageError{err}
	}
	return daemon.NewClient(config.DefaultRunDir+"/vnicd.sock", config.DefaultRunDir+"/vnicd-status.sock"), nil
}

// ask sends one request to the daemon.
func (a *app) ask(c *cobra.Command, method, url string, in, out any) error {
	client, err := a.client(c)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), askTime)
	defer cancel()
	return client.Do(ctx, method, url, in, out)
}

// get asks for a list and prints it as JSON or with show.
func get[T any](a *app, c *cobra.Command, url string, show func([]T)) error {
	var list []T
	if err := a.ask(c, http.MethodGet, url, nil, &list); err != nil {
		return err
	}
	if a.json {
		return a.printJSON(list)
	}
	show(list)
	return nil
}

// wordKind is how a key may be used: once, repeatedly, or without a value.
type wordKind uint8

const (
	once wordKind = iota
	many
	flag
)

// words reads "key value key value ..." and keys without a value, as ip(8) does. known has the kind of each key.
func words(argv []string, known map[string]wordKind) (map[string][]string, error) {
	out := map[string][]string{}
	for i := 0; i < len(argv); i++ {
		k := argv[i]
		kind, ok := known[k]
		switch {
		case !ok:
			keys := make([]string, 0, len(known))
			for x := range known {
				keys = append(keys, x)
			}
			slices.Sort(keys)
			return nil, usageError{fmt.Errorf("unknown word %q; known: %s", k, strings.Join(keys, ", "))}
		case kind != many && out[k] != nil:
			return nil, usageError{fmt.Errorf("%q is there twice", k)}
		case kind == flag:
			out[k] = []string{"true"}
		case i+1 == len(argv):
			return nil, usageError{fmt.Errorf("%q needs a value", k)}
		default:
			i++
			out[k] = append(out[k], argv[i])
		}
	}
	return out, nil
}

// one returns the value of a key, "" if it is absent.
func one(w map[string][]string, k string) string {
	if v := w[k]; len(v) > 0 {
		return v[0]
	}
	return ""
}

// need returns an error if a key is missing.
func need(w map[string][]string, keys ...string) error {
	for _, k := range keys {
		if w[k] == nil {
			return usageError{fmt.Errorf("%q is missing", k)}
		}
	}
	return nil
}

// body makes the request's body from the words: lists and single values by their kind. Numbers are sent as text,
// because the daemon parses the keys as those of its configuration.
func body(w map[string][]string, known map[string]wordKind, rename map[string]string) map[string]any {
	m := map[string]any{}
	for k, v := range w {
		name := k
		if n := rename[k]; n != "" {
			name = n
		}
		if known[k] == many {
			m[name] = v
		} else {
			m[name] = v[0]
		}
	}
	return m
}

// numeric are values that the configuration has as numbers.
var numeric = regexp.MustCompile(`^(0|[1-9][0-9]{0,15})$`)

// fileKeys returns the keys of a body as they stand in a file: numbers and truth values as such.
func fileKeys(body map[string]any, known map[string]wordKind) map[string]any {
	keys := map[string]any{}
	for k, v := range body {
		s, single := v.(string)
		n, err := strconv.ParseInt(s, 10, 64)
		switch {
		case single && known[k] == flag:
			keys[k] = true
		case single && err == nil && numeric.MatchString(s) && k != "network":
			keys[k] = n
		default:
			keys[k] = v
		}
	}
	return keys
}

// group returns a command with sub-commands that runs show if no sub-command is given.
func (a *app) group(use, short, long string, show *cobra.Command, more ...*cobra.Command) *cobra.Command {
	c := &cobra.Command{Use: use, Short: short, Long: long + "\n\n" + whichSocket, Args: args(cobra.NoArgs),
		RunE: show.RunE}
	a.askFlags(c)
	c.AddCommand(show)
	c.AddCommand(more...)
	return c
}
