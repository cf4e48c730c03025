package config

import (
	"fmt"
	"math"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
)

// Each function returns a field for one kind of value: reading stores it in dst, or reports that the value of `what` is
// wrong and what was expected.

// The schemas of several keys' texts.
var (
	anyText  = text("")
	anyPath  = text("^/")
	filePath = &Schema{Type: types{"string"}, Pattern: "^/", MaxLength: maxUnixSocketPath} // of a socket
	aName    = &Schema{Type: types{"string"}, Pattern: nameRule.String(), MaxLength: maxNameLength}
	aDevice  = &Schema{Type: types{"string"}, Pattern: nameRule.String(), MaxLength: maxInterfaceName}
	hostName = &Schema{Type: types{"string"}, Pattern: nameRule.String(), MaxLength: 253}
	userOrID = textOr("", 0, math.MaxInt32)
	anIP     = &Schema{Type: types{"string"}, AnyOf: []*Schema{{Format: "ipv4"}, {Format: "ipv6"}}}
)

// str accepts any text; is says what the checks of the whole accept.
func (p *parser) str(what string, is *Schema, dst *string) field {
	return field{func(n *yaml.Node) {
		if s, ok := p.scalar(n, what); ok {
			*dst = s
		}
	}, is}
}

func (p *parser) boolean(what string, dst *bool) field {
	return field{func(n *yaml.Node) {
		s, ok := p.scalar(n, what)
		if !ok {
			return
		}
		switch s {
		case "true", "yes", "on":
			*dst = true
		case "false", "no", "off":
			*dst = false
		default:
			p.fail(n, "%s must be true or false, found %q", what, s)
		}
	}, oneOf[any](true, false, "yes", "no", "on", "off")}
}

// choice accepts one of the values, and calls set with it.
func (p *parser) choice(what string, values []string, set func(string)) field {
	last := len(values) - 1
	return field{func(n *yaml.Node) {
		s, ok := p.scalar(n, what)
		switch {
		case !ok:
		case slices.Contains(values, s):
			set(s)
		default:
			p.fail(n, "%s must be %s or %s, found %q", what, strings.Join(values[:last], ", "), values[last], s)
		}
	}, oneOf(values...)}
}

// number accepts lo..hi in decimal, or with a 0x or 0o prefix.
func number[T int | uint8 | uint16 | uint32 | uint64](p *parser, what string, lo, hi uint64, dst *T) field {
	return field{func(n *yaml.Node) {
		s, ok := p.scalar(n, what)
		if !ok {
			return
		}
		v, err := strconv.ParseUint(s, 0, 64)
		if err != nil || v < lo || v > hi {
			p.fail(n, "%s must be a number from %d to %d, found %q", what, lo, hi, s)
			return
		}
		*dst = T(v)
	}, integer(int64(lo), int64(hi))}
}

func (p *parser) nice(what string, dst *int) field {
	return field{func(n *yaml.Node) {
		s, ok := p.scalar(n, what)
		if !ok {
			return
		}
		v, err := strconv.Atoi(s)
		if err != nil || v < -20 || v > 19 {
			p.fail(n, "%s must be a number from -20 to 19, found %q", what, s)
			return
		}
		*dst = v
	}, integer(-20, 19)}
}

// cpus accepts processors as taskset(1) and cpuset(7) write them: 2-3,8.
func (p *parser) cpus(what string, dst *[]int) field {
	const span = "[0-9]+(-[0-9]+)?"
	return field{func(n *yaml.Node) {
		if s, ok := p.scalar(n, what); ok {
			*dst = p.parseCPUs(what, s, n)
		}
	}, textOr("^"+span+"(,"+span+")*$", 0, maxCPU)}
}

const maxCPU = 1023

func (p *parser) parseCPUs(what, s string, n *yaml.Node) (cpus []int) {
	for part := range strings.SplitSeq(s, ",") {
		from, to, span := strings.Cut(part, "-")
		lo, err := strconv.ParseUint(from, 10, 10)
		hi, herr := lo, error(nil)
		if span {
			hi, herr = strconv.ParseUint(to, 10, 10)
		}
		if err != nil || herr != nil || hi < lo {
			p.fail(n, "%s must be a list of processors, 0 to %d, such as 2-3,8, found %q", what, maxCPU, s)
			return nil
		}
		for c := int(lo); c <= int(hi); c++ {
			if slices.Contains(cpus, c) {
				p.fail(n, "%s names processor %d twice", what, c)
				return nil
			}
			cpus = append(cpus, c)
		}
	}
	return cpus
}

// address accepts a unicast IP address.
func (p *parser) address(what string, dst *netip.Addr) field {
	return field{func(n *yaml.Node) { *dst, _ = p.addr(what, n) }, anIP}
}

func (p *parser) addresses(what string, dst *[]netip.Addr) field {
	return p.list(what, anIP, func(e *yaml.Node) {
		if a, ok := p.addr(what, e); ok {
			*dst = append(*dst, a)
		}
	})
}

func (p *parser) addr(what string, n *yaml.Node) (netip.Addr, bool) {
	s, ok := p.scalar(n, what)
	if !ok {
		return netip.Addr{}, false
	}
	a, err := netip.ParseAddr(s)
	if err != nil || a.IsUnspecified() || a.IsMulticast() {
		p.fail(n, "%s must be a unicast IP address, found %q", what, s)
		return netip.Addr{}, false
	}
	return a.Unmap(), true
}

// mac accepts a unicast Ethernet address.
func (p *parser) mac(what string, dst *net.HardwareAddr) field {
	const first, hex = "[0-9A-Fa-f][02468ACEace]", "[0-9A-Fa-f]"
	return field{func(n *yaml.Node) {
		s, ok := p.scalar(n, what)
		if !ok {
			return
		}
		m, err := net.ParseMAC(s)
		if err != nil || len(m) != 6 || m[0]&1 != 0 || isZero(m) {
			p.fail(n, "%s must be a unicast Ethernet address such as 02:00:00:00:00:01, found %q", what, s)
			return
		}
		*dst = m
	}, text("^" + first + "(([:-]" + hex + "{2}){5}|" + hex + "{2}([.]" + hex + "{4}){2})$")}
}

func isZero(b []byte) bool {
	for _, x := range b {
		if x != 0 {
			return false
		}
	}
	return true
}

// dscpNames are the names of RFC 2474, 2597 and 3246.
var dscpNames = func() map[string]uint8 {
	m := map[string]uint8{"default": 0, "be": 0, "ef": 46}
	for c := uint8(0); c < 8; c++ {
		m[fmt.Sprintf("cs%d", c)] = c << 3
	}
	for c := uint8(1); c <= 4; c++ {
		for d := uint8(1); d <= 3; d++ {
			m[fmt.Sprintf("af%d%d", c, d)] = c<<3 | d<<1
		}
	}
	return m
}()

func (p *parser) dscp(what string, dst *uint8) field {
	names := []string{}
	for name := range dscpNames {
		names = append(names, name)
	}
	slices.Sort(names)
	return field{func(n *yaml.Node) {
		s, ok := p.scalar(n, what)
		if !ok {
			return
		}
		if v, ok := dscpNames[strings.ToLower(s)]; ok {
			*dst = v
			return
		}
		v, err := strconv.ParseUint(s, 0, 8)
		if err != nil || v > 63 {
			p.fail(n, "%s must be 0 to 63 or a name such as af31, cs3 or ef, found %q", what, s)
			return
		}
		*dst = uint8(v)
	}, anyOf(integer(0, 63), oneOf(names...))}
}

// duration accepts lo..hi with a unit.
func (p *parser) duration(what string, lo, hi time.Duration, example string, dst *time.Duration) field {
	is := text(`^([0-9]+([.][0-9]*)?(ns|us|µs|ms|s|m|h))+$`)
	if lo == 0 {
		is = textOr(is.Pattern, 0, 0)
	}
	return field{func(n *yaml.Node) {
		s, ok := p.scalar(n, what)
		if !ok {
			return
		}
		d, err := time.ParseDuration(s)
		if err != nil || d < lo || d > hi {
			p.fail(n, "%s must be a duration from %v to %v such as %s, found %q", what, lo, hi, example, s)
			return
		}
		*dst = d
	}, is}
}

// storm accepts a limit of frames per second. 0 means no limit, which is stored as -1.
func (p *parser) storm(dst *int) field {
	f := number(p, "storm", 0, vswitch.MaxStorm, dst)
	return field{func(n *yaml.Node) {
		f.read(n)
		if *dst == 0 {
			*dst = vswitch.Unlimited
		}
	}, f.is}
}

// rate accepts bits per second, with k, M or G for a power of 1000.
func (p *parser) rate(dst *int64) field {
	return field{func(n *yaml.Node) {
		s, ok := p.scalar(n, "rate")
		if !ok {
			return
		}
		digits, unit := s, int64(1)
		for i, suffix := range []string{"k", "M", "G"} {
			if d, found := strings.CutSuffix(s, suffix); found {
				digits, unit = d, []int64{1e3, 1e6, 1e9}[i]
			}
		}
		v, err := strconv.ParseInt(digits, 10, 64)
		if err != nil || v < 1 || v > vswitch.MaxRate/unit || v*unit < vswitch.MinRate {
			p.fail(n, "rate must be bits per second from 64k to 1000G such as 10G, found %q", s)
			return
		}
		*dst = v * unit
	}, textOr("^[0-9]+[kMG]$", vswitch.MinRate, vswitch.MaxRate)}
}

// percent accepts 1% to 100%.
func (p *parser) percent(what string, dst *int) field {
	return field{func(n *yaml.Node) {
		s, ok := p.scalar(n, what)
		if !ok {
			return
		}
		digits, ok := strings.CutSuffix(s, "%")
		v, err := strconv.ParseUint(digits, 10, 32)
		if !ok || err != nil || v < 1 || v > 100 {
			p.fail(n, "%s must be a whole percentage, 1%% to 100%%, such as 10%%, found %q", what, s)
			return
		}
		*dst = int(v)
	}, text("^([1-9][0-9]?|100)%$")}
}

// size accepts a number of bytes, at least lo, with a unit that is a power of 1024.
func (p *parser) size(what string, lo uint64, dst *uint64) field {
	return field{func(n *yaml.Node) {
		s, ok := p.scalar(n, what)
		if !ok {
			return
		}
		for i, unit := range []string{"KiB", "MiB", "GiB", "TiB"} {
			digits, found := strings.CutSuffix(s, unit)
			if !found {
				continue
			}
			shift := 10 * (i + 1)
			if v, err := strconv.ParseUint(strings.TrimSpace(digits), 10, 63-shift); err == nil && v<<shift >= lo {
				*dst = v << shift
				return
			}
		}
		p.fail(n, "%s must be a whole number of KiB, MiB, GiB or TiB, at least %d MiB, such as 256MiB, found %q",
			what, lo>>20, s)
	}, text("^[0-9]+ ?[KMGT]iB$")}
}
