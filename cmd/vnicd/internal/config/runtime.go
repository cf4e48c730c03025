package config

import (
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
	p := newParser()
	var v *T
	if n := p.decode(source{requestName, data}); n != nil {
		v = read(p, n)
	} else if len(p.errs.list) == 0 {
		p.errs.add(Place{File: requestName}, "the body is empty")
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
