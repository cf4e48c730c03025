package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/vnicd/vnicd/hypervisor/localsocket"
)

// Parse checks data, a whole configuration; path only names it in messages. Errors are *Errors.
func Parse(path string, data []byte) (*Config, error) {
	return parse(path, []source{{path, data}}, Errors{Files: []string{path}})
}

// parse reads and checks the files of a configuration whose main file is at path. errs are mistakes of files that are
// not among them.
func parse(path string, files []source, errs Errors) (*Config, error) {
	p := newParser()
	p.errs, p.incomplete = errs, len(errs.list) > 0
	c := &Config{
		Path: path, RunDir: DefaultRunDir, SocketMode: DefaultSocketMode, Engines: DefaultEngines, ECN: true, Journal: true,
		Debug:      Debug{LocalCopy: true, Segmentation: true, SelectiveRepeat: true, GuestFeatures: true},
		EngineNice: DefaultEngineNice,
		Spin:       DefaultSpin, Buffers: DefaultBuffers, LogLevel: "info",
		MemoryPressure: MemoryPressure{Watch: true, Limit: DefaultPressureLimit},
		ControlGroup:   groupOr(DefaultControlGroup, localsocket.None),
		StatusGroup:    groupOr(DefaultStatusGroup, localsocket.None),
	}
	all := &yaml.Node{Kind: yaml.MappingNode}
	for _, f := range files {
		if n := p.decode(f); n != nil && p.isMapping(n, topLevel) {
			p.merge(topLevel, all, n)
		}
	}
	if len(all.Content) == 0 && len(p.errs.list) == 0 {
		p.errs.add(Place{File: path}, "the file is empty; it needs at least `networks` and `vms`")
	}
	p.mapping(all, p.top(c))
	for _, vm := range c.VMs {
		if a := vm.Application; a != nil && a.Mode == 0 {
			a.Mode = c.SocketMode
		}
	}
	c.Files, c.Keys, c.Overrides = p.errs.Files, p.keys, p.overrides
	if c.Control == "" {
		c.Control = c.RunDir + "/vnicd.sock"
	}
	if c.Status == "" {
		c.Status = c.RunDir + "/vnicd-status.sock"
	}
	c.Monitoring.Group = c.StatusGroup
	if c.Host == "" {
		c.Host, _ = os.Hostname()
	}
	if !p.incomplete { // otherwise much would seem to be undefined
		c.check(&p.errs)
	}
	if err := p.errs.orNil(); err != nil {
		return nil, err
	}
	return c, nil
}

// parser walks the tree of a configuration.
type parser struct {
	errs       Errors
	incomplete bool                  // a file could not be read
	files      map[*yaml.Node]string // of each node
	key        string                // path of the node that is read
	keys       map[string]Place      // as Config.Keys
	overrides  []Override
}

func newParser() *parser { return &parser{files: map[*yaml.Node]string{}, keys: map[string]Place{}} }

// decode returns the root of a file's tree; nil: the file has mistakes or nothing but comments.
func (p *parser) decode(f source) *yaml.Node {
	dec := yaml.NewDecoder(bytes.NewReader(f.data))
	var doc, more yaml.Node
	switch err := dec.Decode(&doc); {
	case errors.Is(err, io.EOF):
		return nil
	case err != nil:
		p.syntax(f.path, err)
		return nil
	}
	if err := dec.Decode(&more); !errors.Is(err, io.EOF) {
		p.errs.add(Place{File: f.path}, "the file must hold one YAML document")
	}
	p.register(&doc, f.path)
	return doc.Content[0]
}

// register notes the file of a tree.
func (p *parser) register(n *yaml.Node, file string) {
	p.files[n] = file
	for _, c := range n.Content {
		p.register(c, file)
	}
}

// place returns where a node stands.
func (p *parser) place(n *yaml.Node) Place { return Place{File: p.files[n], Line: n.Line, Key: p.key} }

// fail reports a mistake in a node.
func (p *parser) fail(n *yaml.Node, format string, args ...any) {
	p.errs.add(p.place(n), format, args...)
}

// under calls f to read a node whose path is key.
func (p *parser) under(key string, f func()) {
	before := p.key
	p.key = key
	f()
	p.key = before
}

var yamlLine = regexp.MustCompile(`^yaml: line (\d+): (.*)$`)

func (p *parser) syntax(file string, err error) {
	p.incomplete = true
	if m := yamlLine.FindStringSubmatch(err.Error()); m != nil {
		line, _ := strconv.Atoi(m[1])
		p.errs.add(Place{File: file, Line: line}, "not YAML: %s", m[2])
		return
	}
	p.errs.add(Place{File: file}, "not YAML: %s", strings.TrimPrefix(err.Error(), "yaml: "))
}

// mapping reads the value of every key. Unknown keys are mistakes, and so are keys that a file repeats, and a
// node that is not a mapping; where a later file repeats a key, its value stays. mapping returns the keys present.
func (p *parser) mapping(n *yaml.Node, o object) map[string]bool {
	seen := map[string]bool{}
	if !p.isMapping(n, o.what) {
		return seen
	}
	n = resolve(n)
	places := map[string]Place{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], n.Content[i+1]
		p.under(join(p.key, k.Value), func() {
			f, ok := o.keys[k.Value]
			_, debug := debugKeys[k.Value]
			switch {
			case !ok && o.what == topLevel && debug:
				p.fail(k, "key %q belongs under `debug:`", k.Value)
			case !ok:
				p.fail(k, "unknown key %q in %s; known: %s", k.Value, o.what, knownKeys(o.keys))
			case seen[k.Value] && places[k.Value].File == p.files[k]:
				p.fail(k, "key %q is there twice in %s", k.Value, o.what)
			default:
				if seen[k.Value] {
					p.overrides = append(p.overrides, Override{places[k.Value], p.place(k)})
				}
				seen[k.Value], places[k.Value] = true, p.place(k)
				if !strings.Contains(p.key, "[") {
					p.keys[p.key] = p.place(k)
				}
				f.read(v)
			}
		})
	}
	return seen
}

// read is mapping, and reports keys that are missing.
func (p *parser) read(n *yaml.Node, o object) {
	p.need(n, p.mapping(n, o), o.what, o.need...)
}

func (p *parser) need(n *yaml.Node, seen map[string]bool, what string, keys ...string) {
	for _, k := range keys {
		if !seen[k] {
			p.fail(n, "%s needs `%s`", what, k)
		}
	}
}

// isMapping reports whether n is a mapping; otherwise that is a mistake.
func (p *parser) isMapping(n *yaml.Node, what string) bool {
	if n = resolve(n); n.Kind != yaml.MappingNode {
		p.fail(n, "%s must be a mapping of keys, found %s", what, kindName(n))
		return false
	}
	return true
}

func (p *parser) sequence(n *yaml.Node, what string, each func(*yaml.Node)) {
	n = resolve(n)
	if isNull(n) {
		return
	}
	if n.Kind != yaml.SequenceNode {
		p.fail(n, "%s must be a list, found %s", what, kindName(n))
		return
	}
	i, file := 0, ""
	for _, e := range n.Content {
		if f := p.files[e]; f != file { // what follows is of a later file
			i, file = 0, f
		}
		p.under(fmt.Sprintf("%s[%d]", p.key, i), func() { each(e) })
		i++
	}
}

func knownKeys(keys map[string]field) string {
	return strings.Join(slices.Sorted(maps.Keys(keys)), ", ")
}

// isNull reports whether a node has no value.
func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.Tag == "!!null" }

func kindName(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	case yaml.ScalarNode:
		if isNull(n) {
			return "nothing"
		}
		return fmt.Sprintf("%q", n.Value)
	}
	return "something else"
}

// scalar returns the node's text; other kinds of node are mistakes.
func (p *parser) scalar(n *yaml.Node, what string) (string, bool) {
	if n = resolve(n); n.Kind != yaml.ScalarNode || isNull(n) {
		p.fail(n, "%s needs a value, found %s", what, kindName(n))
		return "", false
	}
	return n.Value, true
}
