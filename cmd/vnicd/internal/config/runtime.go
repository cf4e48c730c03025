package config

import (
	"bytes"
	"errors"
	"io"
	"slices"

	"go.yaml.in/yaml/v3"
)

// ParseNetwork reads one network, in YAML or JSON with the keys of the configuration file.
func ParseNetwork(data []byte) (*Network, error) { return parseOne(data, (*parser).network) }

// ParseTAP is ParseNetwork for a host port.
func ParseTAP(data []byte) (*TAP, error) { return parseOne(data, (*parser).tap) }

// ParseVM is ParseNetwork for a VM.
func ParseVM(data []byte) (*VM, error) { return parseOne(data, (*parser).vm) }

func parseOne[T any](data []byte, read func(*parser, *yaml.Node) *T) (*T, error) {
	p := parser{file: requestName, keys: map[string]Place{}}
	var doc yaml.Node
	var v *T
	switch err := yaml.NewDecoder(bytes.NewReader(data)).Decode(&doc); {
	case errors.Is(err, io.EOF):
		p.errs.add(Place{File: requestName}, "the body is empty")
	case err != nil:
		p.syntax(err)
	default:
		v = read(&p, doc.Content[0])
	}
	if err := p.errs.orNil(); err != nil {
		return nil, err
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
	var errs Errors
	c.check(&errs)
	return errs.orNil()
}
