package config

import (
	"slices"

	"go.yaml.in/yaml/v3"
)

// Several files are one configuration: sections (mappings) are merged key by key, lists are joined, and a single value
// overrides that of an earlier file. Entries of lists are never merged.

// Override is a single value that a later file has replaced.
type Override struct{ Was, Is Place }

// merge adds the mapping from, of a later file, to into, which is changed. Single values of from follow those of into:
// the parser reads both, so that it finds the mistakes of both, and the later one stays.
func (p *parser) merge(what string, into, from *yaml.Node) {
	values := map[string]int{}
	for i := 0; i+1 < len(into.Content); i += 2 {
		values[into.Content[i].Value] = i + 1
	}
	mine := map[string]bool{}
	for i := 0; i+1 < len(from.Content); i += 2 {
		k, v := from.Content[i], from.Content[i+1]
		p.under(join(p.key, k.Value), func() {
			if mine[k.Value] {
				p.fail(k, "key %q is there twice in %s", k.Value, what)
				return
			}
			mine[k.Value] = true
			if at, both := values[k.Value]; both {
				if one := p.combine(k.Value, what == topLevel, into.Content[at], v); one != nil {
					into.Content[at] = one
					return
				}
			}
			into.Content = append(into.Content, k, p.own(v))
		})
	}
}

// combine merges two sections or joins two lists, of which one may be absent, into the first; nil: they are neither.
// Only the top level has sections.
func (p *parser) combine(key string, sections bool, into, from *yaml.Node) *yaml.Node {
	from = resolve(from)
	list, more := into.Kind == yaml.SequenceNode, from.Kind == yaml.SequenceNode
	switch {
	case list && more:
		into.Content = append(into.Content, from.Content...)
	case (list || isNull(into)) && isNull(from):
	case isNull(into) && more:
		return p.own(from)
	case sections && into.Kind == yaml.MappingNode && from.Kind == yaml.MappingNode:
		p.merge(key, into, from)
	default:
		return nil
	}
	return into
}

// own returns a copy of a list or mapping that may be changed: other places of its file may refer to it.
func (p *parser) own(n *yaml.Node) *yaml.Node {
	if r := resolve(n); r.Kind == yaml.SequenceNode || r.Kind == yaml.MappingNode {
		c := *r
		c.Content = slices.Clone(r.Content)
		p.files[&c] = p.files[r]
		return &c
	}
	return n
}

// resolve returns the node that an alias means.
func resolve(n *yaml.Node) *yaml.Node {
	if n.Kind == yaml.AliasNode {
		return n.Alias
	}
	return n
}
