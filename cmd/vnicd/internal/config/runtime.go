package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"

	"go.yaml.in/yaml/v3"
)

// Runtime is the line of things that came from a request to the running daemon, not from the file.
const Runtime = -1

// requestName replaces the file's name in messages about a request.
const requestName = "request"

// at names the place of a definition.
func at(line int) string {
	if line == Runtime {
		return "an earlier request"
	}
	return fmt.Sprintf("line %d", line)
}

// ParseNetwork reads one network, in YAML or JSON with the keys of the configuration file.
func ParseNetwork(data []byte) (*Network, error) { return parseOne(data, (*parser).network) }

// ParseTAP is ParseNetwork for a host port.
func ParseTAP(data []byte) (*TAP, error) { return parseOne(data, (*parser).tap) }

// ParseVM is ParseNetwork for a VM.
func ParseVM(data []byte) (*VM, error) { return parseOne(data, (*parser).vm) }

func parseOne[T any](data []byte, read func(*parser, *yaml.Node) *T) (*T, error) {
	p := parser{errs: Errors{Path: requestName}}
	var doc yaml.Node
	var v *T
	switch err := yaml.NewDecoder(bytes.NewReader(data)).Decode(&doc); {
	case errors.Is(err, io.EOF):
		p.errs.add(0, "the body is empty")
	case err != nil:
		p.syntax(err)
	default:
		v = read(&p, doc.Content[0])
	}
	if len(p.errs.List) > 0 {
		return nil, &p.errs
	}
	return v, nil
}

// Clone returns a copy whose lists may be changed. Their elements are shared and must not be changed.
func (c *Config) Clone() *Config {
	n := *c
	n.Networks, n.VMs = slices.Clone(c.Networks), slices.Clone(c.VMs)
	return &n
}

// Check checks the whole configuration after a change; the error is *Errors.
func (c *Config) Check() error {
	errs := Errors{Path: requestName}
	c.check(&errs)
	if len(errs.List) > 0 {
		return &errs
	}
	return nil
}
