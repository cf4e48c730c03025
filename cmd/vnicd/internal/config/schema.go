package config

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
)

// Schema is a JSON Schema (draft 7, which editors know best) of one value of the configuration. A file that it accepts
// may still have mistakes that only the whole shows. It is a little stricter than vnicd, which reads each value as
// text, so that "2" and 2 are the same to it.
type Schema struct {
	Schema      string             `json:"$schema,omitempty"`
	Title       string             `json:"title,omitempty"`
	Description string             `json:"description,omitempty"`
	Type        types              `json:"type,omitempty"`
	Enum        []any              `json:"enum,omitempty"`
	AnyOf       []*Schema          `json:"anyOf,omitempty"`
	Minimum     *int64             `json:"minimum,omitempty"` // of numbers only, as Pattern is of texts only
	Maximum     *int64             `json:"maximum,omitempty"`
	Pattern     string             `json:"pattern,omitempty"`
	MaxLength   int                `json:"maxLength,omitempty"`
	Format      string             `json:"format,omitempty"`
	Items       *Schema            `json:"items,omitempty"`
	Properties  map[string]*Schema `json:"properties,omitempty"`
	Required    []string           `json:"required,omitempty"`
	// Additional is false for mappings: they have no other keys.
	Additional *bool `json:"additionalProperties,omitempty"`
}

// types are the names of JSON's types: one is written as such, several as a list.
type types []string

// MarshalJSON implements json.Marshaler.
func (t types) MarshalJSON() ([]byte, error) {
	if len(t) == 1 {
		return json.Marshal(t[0])
	}
	return json.Marshal([]string(t))
}

// text is a text that matches a regular expression; "": any.
func text(pattern string) *Schema { return &Schema{Type: types{"string"}, Pattern: pattern} }

// integer is a number of lo to hi.
func integer(lo, hi int64) *Schema {
	return &Schema{Type: types{"integer"}, Minimum: &lo, Maximum: &hi}
}

// textOr is a text that matches, or a number of lo to hi.
func textOr(pattern string, lo, hi int64) *Schema {
	return &Schema{Type: types{"string", "integer"}, Pattern: pattern, Minimum: &lo, Maximum: &hi}
}

// oneOf is one of the values.
func oneOf[T any](values ...T) *Schema {
	s := &Schema{}
	for _, v := range values {
		s.Enum = append(s.Enum, v)
	}
	return s
}

// anyOf is a value that one of the schemas accepts.
func anyOf(list ...*Schema) *Schema { return &Schema{AnyOf: list} }

// listOf is a list, which may be left out although its key is there.
func listOf(item *Schema) *Schema { return &Schema{Type: types{"array", "null"}, Items: item} }

// schema returns the object's.
func (o object) schema() *Schema {
	no := false
	s := &Schema{Type: types{"object"}, Properties: map[string]*Schema{}, Required: slices.Sorted(slices.Values(o.need)),
		Additional: &no}
	for k, f := range o.keys {
		s.Properties[k] = f.is
	}
	return s
}

// JSONSchema returns the schema of a configuration file or fragment, as JSON text.
func JSONSchema() ([]byte, error) {
	s := newParser().top(&Config{}).schema()
	s = s.described("", descriptions())
	s.Type = append(s.Type, "null") // a fragment may have comments only
	s.Schema, s.Title = "http://json-schema.org/draft-07/schema#", "Configuration of vnicd"
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	err := enc.Encode(s)
	return b.Bytes(), err
}

// described returns a copy with descriptions of s, at path, and all that is below it.
func (s *Schema) described(path string, texts map[string]string) *Schema {
	c := *s
	c.Description = texts[path]
	if c.Description == "" {
		if rest, is := strings.CutPrefix(path, "applications[]"); is {
			c.Description = texts["vms[]"+rest]
		}
	}
	if s.Items != nil {
		c.Items = s.Items.described(path+"[]", texts)
	}
	if s.Properties != nil {
		c.Properties = map[string]*Schema{}
		for k, p := range s.Properties {
			c.Properties[k] = p.described(join(path, k), texts)
		}
	}
	return &c
}

// Values returns the words of which the key at path has one. There must be such a key; [] follows lists: vms[].hca.
func Values(path string) (words []string) {
	s := newParser().top(&Config{}).schema()
	for _, part := range strings.Split(path, ".") {
		name, list := strings.CutSuffix(part, "[]")
		if s = s.Properties[name]; list {
			s = s.Items
		}
	}
	for _, v := range s.Enum {
		if word, is := v.(string); is {
			words = append(words, word)
		}
	}
	return words
}
