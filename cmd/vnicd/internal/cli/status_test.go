package cli

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/daemon"
	"github.com/vnicd/vnicd/device/ethernet/wireguard"
	"github.com/vnicd/vnicd/device/rdma/hca"
	"github.com/vnicd/vnicd/hypervisor/worktime"
	"github.com/vnicd/vnicd/translate"
)

func TestShowProtection(t *testing.T) {
	now := time.Unix(1000, 0)
	p := &wireguard.Status{Interface: "vnicd-wg0", PublicKey: "KEY=", ListenPort: 51820, MTU: 1440, InErrors: 1,
		OutErrors: 2, Peers: []wireguard.PeerStatus{
			{VTEP: netip.MustParseAddr("10.9.0.2"), Endpoint: netip.MustParseAddrPort("192.0.2.2:51820"),
				Handshake: now.Add(-90 * time.Second), InBytes: 3, OutBytes: 4},
			{VTEP: netip.MustParseAddr("10.9.0.3"), Endpoint: netip.MustParseAddrPort("[2001:db8::3]:1")},
		}}
	var b strings.Builder
	showProtection(&b, p, now)
	want := `  protected by wireguard vnicd-wg0 port 51820 mtu 1440 key KEY=, 1 not accepted, 2 not sent
    vtep 10.9.0.2 at 192.0.2.2:51820 handshake 1m30s ago rx 3 B tx 4 B
    vtep 10.9.0.3 at [2001:db8::3]:1 no handshake yet rx 0 B tx 0 B
`
	if b.String() != want {
		t.Errorf("got\n%swant\n%s", b.String(), want)
	}
	b.Reset()
	p.Problem = "it has gone"
	if showProtection(&b, p, now); !strings.Contains(b.String(), "    nothing is sent or received: it has gone\n") {
		t.Errorf("got\n%s", b.String())
	}
}

func TestShowFaults(t *testing.T) {
	dma := daemon.DMAStatus{Attribute: translate.UplinkReadOnly, Refused: translate.Denied{Reads: 1, Writes: 23}}
	control := worktime.Status{Percent: 50, Delayed: 6, Commands: 1234567 * time.Nanosecond,
		Messages: 2 * time.Second, Paging: 3 * time.Minute}
	v := &daemon.VMStatus{Name: "vm1", NetSocket: "n", Outlives: daemon.OutlivesKill, NetOutlives: daemon.OutlivesNothing,
		DMA: dma, Control: control, HCA: hca.Status{
			EngineTime: 1500 * time.Microsecond,
			QPs: []hca.QPStatus{{QPN: 17, Type: "RC", State: "RTS", Waits: []string{"responder: page absent"}},
				{QPN: 18, Type: "RC", State: "RTS", SQPSN: 0x345, RQPSN: 0x12, Requests: 3, Unacked: 4, Responses: 5, Unposted: 6,
					NotReady: true, Refused: true}},
			Stats: map[string]uint64{"tx_rnr": 7, "fault_drops": 9},
			HostMemory: translate.AccountStatus{Limit: 300 << 20, Used: 5 << 20, Most: 6 << 20, Refused: 8,
				By: map[string]uint64{"device": 1 << 20, "qps": 4 << 20}},
			Faults: hca.FaultStatus{
				Parked: 2,
				Guest: hca.FaultQueue{Raised: 5, Resumed: 3, Failed: 1, Waiting: 1, Mean: 12345 * time.Nanosecond,
					Max: 2 * time.Millisecond, Buckets: []uint64{0, 0, 3, 1}},
				Host:          hca.FaultQueue{Raised: 4, Resumed: 4, Buckets: []uint64{0, 0, 0, 0, 4}},
				Invalidations: 11, EpochsFlipped: 12, Drains: 13, LongestDrain: 1234567 * time.Nanosecond,
			},
		}}
	var b strings.Builder
	showVM(&b, v)
	for _, want := range []string{
		"net down socket n outlives nothing\nhca down socket  path mtu 0 outlives restart, kill\n",
		"\ndma ro, refused 1 reads, 23 writes\n",
		"    qp 0x000011  RC  RTS  engine 0\n        responder: page absent\n",
		"engine 0\n        psn 0x000345, expected 0x000012: 3 requests in progress, 4 packets unacknowledged, " +
			"5 READs or atomics to answer, 6 completions to post, the peer is not ready to receive, requests of the peer were refused\n",
		"    host memory 5.0 MiB of 300.0 MiB, most 6.0 MiB, refused 8 times: qps 4.0 MiB, device 1.0 MiB\n",
		"    processor time net 0s, hca 1.5ms on engines; commands 1.23ms, messages 2s, paging 3m0s, commands may use 50%, 6 delayed\n",
		"faults 2 parked now, 7 RNR sent, 9 packets dropped\n",
		"    guest  5 raised  3 resumed  1 failed  1 waiting  mean 12.3µs  median 0s  99% 0s  max 2ms\n",
		"    host   4 raised  4 resumed  0 failed  0 waiting",
		"    below 4µs   3 guest  0 host\n    below 8µs   1 guest  0 host\n    below 16µs  0 guest  4 host\n",
		"releases 11 invalidations, 12 epochs flipped, 13 drained, longest 1.23ms\n",
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in\n%s", want, b.String())
		}
	}
	v.HCA.Busy = true
	b.Reset()
	showVM(&b, v)
	if s := b.String(); !strings.Contains(s, "    busy: a command waits") || strings.Contains(s, "PDs") {
		t.Errorf("the waiting command is not shown:\n%s", s)
	}
	if strings.Contains(b.String(), "below 2µs") {
		t.Errorf("empty rows before the first fault:\n%s", b.String())
	}
}
