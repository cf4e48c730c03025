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

// user accepts a user by name or number.
func (p *parser) user(what string, set func(uid int)) field {
	return p.id(what, "a user", func(name string) string {
		if u, err := user.Lookup(name); err == nil {
			return u.Uid
		}
		return name
	}, set)
}

// group accepts a group by name or number.
func (p *parser) group(what string, set func(gid int)) field {
	return p.id(what, "a group", func(name string) string {
		if g, err := user.LookupGroup(name); err == nil {
			return g.Gid
		}
		return name
	}, set)
}

// id accepts a number, or what lookup makes one of.
func (p *parser) id(what, kind string, lookup func(name string) string, set func(int)) field {
	return field{func(n *yaml.Node) {
		s, ok := p.scalar(n, what)
		if !ok {
			return
		}
		v, err := strconv.ParseUint(lookup(s), 10, 31)
		if err != nil {
			p.fail(n, "%s must be %s of this host or its number, found %q", what, kind, s)
			return
		}
		set(int(v))
	}, userOrID}
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
