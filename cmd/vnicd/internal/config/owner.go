package config

import (
	"os/user"
	"strconv"

	"go.yaml.in/yaml/v3"

	"github.com/vnicd/vnicd/hypervisor/localsocket"
)

// owner returns the VM's owner, made on demand.
func (v *VM) owner() *localsocket.Owner {
	if v.Owner == nil {
		v.Owner = &localsocket.Owner{UID: localsocket.None, GID: localsocket.None}
	}
	return v.Owner
}

// user reads a user by name or number; None after a mistake.
func (p *parser) user(what string, n *yaml.Node) int {
	s, ok := p.scalar(n, what)
	if !ok {
		return localsocket.None
	}
	if u, err := user.Lookup(s); err == nil {
		s = u.Uid
	}
	return p.id(what, "a user", s, n)
}

// group is user for a group.
func (p *parser) group(what string, n *yaml.Node) int {
	s, ok := p.scalar(n, what)
	if !ok {
		return localsocket.None
	}
	if g, err := user.LookupGroup(s); err == nil {
		s = g.Gid
	}
	return p.id(what, "a group", s, n)
}

func (p *parser) id(what, kind, s string, n *yaml.Node) int {
	v, err := strconv.ParseUint(s, 10, 31)
	if err != nil {
		p.fail(n, "%s must be %s of this host or its number, found %q", what, kind, s)
		return localsocket.None
	}
	return int(v)
}

// groupOr returns the number of a group, or what there is instead if the host has no such group.
func groupOr(name string, otherwise int) int {
	g, err := user.LookupGroup(name)
	if err != nil {
		return otherwise
	}
	id, err := strconv.Atoi(g.Gid)
	if err != nil {
		return otherwise
	}
	return id
}
