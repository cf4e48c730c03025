package main

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

// stage is two hosts with a daemon each. Alice and Bob (h1) and Carol (h2) are innocent VMs of the network blue, whose
// HCAs programs drive without a guest. Mallory (h1) is a VM of the same network on the same engine, Trudy (h1) one of
// another network, rogue (h1) a host application. Eve is a listed peer on the underlay.
type stage struct {
	*lab.Lab
	h1, h2, eve *lab.Host
	parties     []*party
	pairs       []*pair
	events      chan event

	restarting sync.Mutex                  // one restart at a time
	daemon     sync.RWMutex                // held for writing while a daemon is down: guards Host.Proc
	windows    map[*lab.Host]*atomic.Int64 // restarts begun and ended: odd while one is in progress
	outages    []time.Duration             // guarded by restarting
	managers   int                         // made so far
}

const (
	aliceMAC   = "02:00:00:00:00:01"
	bobMAC     = "02:00:00:00:00:02"
	carolMAC   = "02:00:00:00:00:03"
	malloryMAC = "02:00:00:00:00:04"
	monitoring = "127.0.0.1:9469"
)

// Underlay: 192.0.2.1 h1, .2 h2; 192.0.2.9 and .10 are the ends of a second wire, to Eve.
var (
	addr1, addr2     = netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	addr1Eve, addEve = netip.MustParseAddr("198.51.100.1"), netip.MustParseAddr("198.51.100.9")
)

const config1 = `vtep: {local: 192.0.2.1}
evpn: {as: 65001, neighbours: [{address: 198.51.100.9, passive: true}]}
networks:
  - {name: blue, vni: 100, peers: [192.0.2.2, 198.51.100.9]}
  - {name: red, vni: 200, peers: [192.0.2.2]}
monitoring: {listen: "127.0.0.1:9469", page: true}
vms:
  - {name: alice, network: blue, mac: "02:00:00:00:00:01", ips: [10.0.0.1]}
  - {name: bob, network: blue, mac: "02:00:00:00:00:02", ips: [10.0.0.2]}
  - {name: mallory, network: blue, mac: "02:00:00:00:00:04", ips: [10.0.0.4], memory-budget: 64MiB}
  - {name: trudy, network: red, mac: "02:00:00:00:00:01"}
applications:
  - {name: rogue, network: blue, mac: "02:00:00:00:00:06", memory: 64MiB}
`

const config2 = `vtep: {local: 192.0.2.2}
networks:
  - {name: blue, vni: 100, peers: [192.0.2.1]}
  - {name: red, vni: 200, peers: [192.0.2.1]}
monitoring: {listen: "127.0.0.1:9469", page: true}
vms:
  - {name: carol, network: blue, mac: "02:00:00:00:00:03", ips: [10.0.0.3]}
`

func newStage(ctx context.Context, o options) (*stage, error) {
	vnicd, err := filepath.Abs(o.vnicd)
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(vnicd); err != nil {
		return nil, fmt.Errorf("no daemon; run `make build` first: %w", err)
	}
	dir, err := os.MkdirTemp("", "vnicd-soak-")
	if err != nil {
		return nil, err
	}
	s := &stage{Lab: &lab.Lab{Env: &harness.Env{Dir: dir}, VNICD: vnicd}, events: make(chan event, 64)}
	s.Add(func() { _ = os.RemoveAll(dir) })
	if err := s.build(ctx); err != nil {
		s.Lab.Run()
		return nil, err
	}
	return s, nil
}

func (s *stage) build(ctx context.Context) (err error) {
	s.windows = map[*lab.Host]*atomic.Int64{}
	for _, h := range []struct {
		name string
		host **lab.Host
	}{{"s1", &s.h1}, {"s2", &s.h2}, {"eve", &s.eve}} {
		if *h.host, err = s.Host(h.name); err != nil {
			return err
		}
		s.windows[*h.host] = new(atomic.Int64)
	}
	if err := s.Underlay(s.h1, netip.PrefixFrom(addr1, 24), s.h2, netip.PrefixFrom(addr2, 24), 1500); err != nil {
		return err
	}
	if err := harness.AddVeth(s.h1.NS, "eve", s.eve.NS, "ul", 1500); err != nil {
		return err
	}
	if err := s.h1.NS.AddAddress("eve", netip.PrefixFrom(addr1Eve, 24)); err != nil {
		return err
	}
	if err := s.eve.NS.AddAddress("ul", netip.PrefixFrom(addEve, 24)); err != nil {
		return err
	}
	if _, err := s.eve.NS.Shell(ctx, "ip route add 192.0.2.0/24 via 198.51.100.1"); err != nil {
		return err
	}
	if err := s.h1.Run(ctx, config1); err != nil {
		return err
	}
	if err := s.h2.Run(ctx, config2); err != nil {
		return err
	}
	return s.innocents(ctx)
}

// innocents opens the devices of the innocent VMs and connects them.
func (s *stage) innocents(ctx context.Context) error {
	for _, v := range []struct {
		host *lab.Host
		name string
		ip   string
	}{{s.h1, "alice", "10.0.0.1"}, {s.h1, "bob", "10.0.0.2"}, {s.h2, "carol", "10.0.0.3"}} {
		p := &party{name: v.name, host: v.host, ip: netip.MustParseAddr(v.ip)}
		if err := p.open(ctx); err != nil {
			return err
		}
		s.Add(func() { _ = p.dev.Close() })
		s.parties = append(s.parties, p)
	}
	for _, c := range [][2]int{{0, 1}, {0, 2}, {2, 1}} {
		p, err := newPair(ctx, s.parties[c[0]], s.parties[c[1]])
		if err != nil {
			return err
		}
		s.pairs = append(s.pairs, p)
	}
	return nil
}

func (s *stage) socket(h *lab.Host, name string) string { return filepath.Join(h.Dir, name) }

func mac(text string) (m header.MAC) {
	_, _ = fmt.Sscanf(text, "%02x:%02x:%02x:%02x:%02x:%02x", &m[0], &m[1], &m[2], &m[3], &m[4], &m[5])
	return m
}
