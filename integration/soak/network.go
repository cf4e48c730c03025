package main

import (
	"context"
	"encoding/binary"
	"math/rand/v2"
	"time"

	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
	"github.com/vnicd/vnicd/translate"
)

const (
	receiveQueue  = 0
	transmitQueue = 1
	netHeader     = 12 // bytes of struct virtio_net_hdr with VERSION_1
)

// networkEpisode is a guest that sends hostile frames and offers hostile receive buffers on its network card.
func networkEpisode(ctx context.Context, s *stage, rng *rand.Rand) error {
	mem, err := frontend.NewMemory(frontend.Range{PA: 0, Size: 8 << 20})
	if err != nil {
		return err
	}
	defer mem.Close()
	socket := []string{"mallory.net", "trudy.net"}[rng.IntN(2)]
	dev, err := frontend.Open(ctx, frontend.Config{Path: s.socket(s.h1, socket), Memory: mem, NumQueues: 2,
		Features: rng.Uint64() & 0xffffff, QueueSize: 256 << rng.IntN(3)})
	if err != nil {
		time.Sleep(10 * time.Millisecond) // another campaign has the socket, or has spoilt the negotiation
		return nil
	}
	defer dev.Close()
	pa, err := mem.Alloc(4<<20, 4096)
	if err != nil {
		return err
	}
	area, err := mem.Bytes(pa, 4<<20)
	if err != nil {
		return err
	}
	tx, rx := dev.Queue(transmitQueue), dev.Queue(receiveQueue)
	for range 50 + rng.IntN(200) {
		if ctx.Err() != nil {
			return nil
		}
		for q := range 2 {
			for { // take back what the device has returned
				if _, _, ok, err := dev.Queue(q).Get(); err != nil {
					return nil
				} else if !ok {
					break
				}
			}
		}
		offerReceive(rx, rng, pa)
		for range 1 + rng.IntN(32) {
			f := hostileFrame(s, rng)
			at := rng.IntN(len(area) - len(f) - netHeader)
			h := area[at : at+netHeader]
			clear(h)
			if rng.IntN(4) == 0 { // offloads that nothing backs
				h[0], h[1] = byte(rng.IntN(4)), byte(rng.IntN(8))
				for i := 2; i < 10; i++ {
					h[i] = byte(rng.Uint32())
				}
			}
			copy(area[at+netHeader:], f)
			bufs := split(rng, pa+translate.PA(at), netHeader+len(f), 1+rng.IntN(1+rng.IntN(200)))
			if tx.Add(1, bufs, nil) != nil {
				break
			}
		}
		tx.Kick()
		if rng.IntN(8) == 0 {
			_ = dev.StopQueue(rng.IntN(2))
			return nil
		}
		time.Sleep(time.Duration(rng.IntN(500)) * time.Microsecond)
	}
	return nil
}

// offerReceive offers receive buffers of one to many descriptors, down to one byte each.
func offerReceive(rx *frontend.Queue, rng *rand.Rand, pa translate.PA) {
	for range rng.IntN(16) {
		if rx.Add(2, nil, split(rng, pa+translate.PA(rng.IntN(1<<20)), 1+rng.IntN(4096), 1+rng.IntN(255))) != nil {
			break
		}
	}
	rx.Kick()
}

// split divides n bytes into at most k buffers.
func split(rng *rand.Rand, pa translate.PA, n, k int) (bufs []frontend.Buf) {
	for n > 0 && k > 1 {
		m := 1 + rng.IntN(max(1, 2*n/k))
		m = min(m, n)
		bufs = append(bufs, frontend.Buf{PA: pa, Len: uint32(m)})
		pa, n, k = pa+translate.PA(m), n-m, k-1
	}
	if n > 0 {
		bufs = append(bufs, frontend.Buf{PA: pa, Len: uint32(n)})
	}
	return bufs
}

// hostileFrame makes an Ethernet frame: neighbour discovery with others' addresses, management datagrams, RoCE packets
// with the keys and queue pair numbers of the innocents, noise; now and then cut short or spoilt.
func hostileFrame(s *stage, rng *rand.Rand) []byte {
	b := make([]byte, 2048)
	target := s.pairs[rng.IntN(len(s.pairs))].known.Load()
	src := mac([]string{malloryMAC, malloryMAC, malloryMAC, aliceMAC, bobMAC, carolMAC}[rng.IntN(6)])
	dst := mac([]string{aliceMAC, bobMAC, carolMAC, "ff:ff:ff:ff:ff:ff", "33:33:00:00:00:01"}[rng.IntN(5)])
	eth := header.Ethernet{Dst: dst, Src: src, VLAN: header.NoVLAN}
	if rng.IntN(10) == 0 {
		eth.VLAN = uint16(rng.IntN(4096))
	}
	n := 0
	switch rng.IntN(8) {
	case 0:
		eth.Type = header.TypeARP
		n = eth.Encode(b)
		a := header.ARP{Op: uint16(1 + rng.IntN(2)), SenderMAC: src, TargetMAC: dst,
			SenderIP: [4]byte{10, 0, 0, byte(1 + rng.IntN(6))}, TargetIP: [4]byte{10, 0, 0, byte(1 + rng.IntN(6))}}
		n += a.Encode(b[n:])
	case 1:
		eth.Type = uint16(rng.Uint32())
		n = eth.Encode(b) + rng.IntN(1400)
		for i := eth.Len(); i < n; i++ {
			b[i] = byte(rng.Uint32())
		}
	default:
		n = rocePacket(b, &eth, target, rng)
	}
	n = max(n, 1)
	if rng.IntN(10) == 0 {
		n = 1 + rng.IntN(n)
	}
	if rng.IntN(4) == 0 {
		for range 1 + rng.IntN(4) {
			b[rng.IntN(n)] ^= byte(1 << rng.IntN(8))
		}
	}
	return b[:n]
}

// rocePacket writes a RoCEv2 packet to the innocent b of a pair and returns its length. Its ICRC is right.
func rocePacket(b []byte, eth *header.Ethernet, target *identity, rng *rand.Rand) int {
	const udpAt = header.IPv4Len
	eth.Type = header.TypeIPv4
	n := eth.Encode(b)
	ip := header.IPv4{DontFrag: true, TTL: 64, Protocol: header.ProtoUDP, Src: [4]byte{10, 0, 0, byte(1 + rng.IntN(4))},
		Dst: [4]byte{10, 0, 0, byte(1 + rng.IntN(3))}}
	at := n + udpAt + header.UDPLen
	opcodes := []wire.Opcode{wire.OpRCWriteOnly, wire.OpRCSendOnly, wire.OpRCReadRequest, wire.OpRCFetchAdd, wire.OpRCAck,
		wire.OpUCWriteOnly, wire.OpUDSendOnly, wire.Opcode(rng.Uint32())}
	bth := wire.BTH{Opcode: opcodes[rng.IntN(len(opcodes))], Migrated: true, PKey: 0xffff,
		DestQP: []uint32{target.b, target.a, 1, rng.Uint32() & 0xffffff}[rng.IntN(4)],
		AckReq: rng.IntN(2) == 0, PSN: rng.Uint32() & 0xffffff}
	end := at + bth.Encode(b[at:])
	reth := wire.RETH{VA: target.addr + uint64(rng.IntN(area)), RKey: target.rkey,
		Length: uint32(rng.IntN(1024))}
	end += reth.Encode(b[end:])
	payload := rng.IntN(1024) &^ 3
	for i := range payload {
		b[end+i] = 0xee
	}
	if bth.DestQP == 1 { // a MAD of the CM class
		end = at + wire.BTHLen + 8
		binary.BigEndian.PutUint32(b[end-8:], 0x80010000) // DETH: the well-known Q_Key, source QP 1
		binary.BigEndian.PutUint32(b[end-4:], 1)
		copy(b[end:], []byte{1, 7, 2, 3})
		for i := 4; i < 24; i++ {
			b[end+i] = byte(rng.Uint32())
		}
		binary.BigEndian.PutUint16(b[end+16:], uint16(0x10+rng.IntN(16))) // REQ, REP, ...
		payload = 256
	}
	end += payload + wire.ICRCLen
	udp := header.UDP{SrcPort: uint16(rng.Uint32()), DstPort: header.PortRoCE, Length: uint16(end - n - udpAt)}
	udp.Encode(b[n+udpAt:])
	ip.TotalLen = uint16(end - n)
	ip.Encode(b[n:])
	_ = wire.SealICRC(b[:end])
	return end
}
