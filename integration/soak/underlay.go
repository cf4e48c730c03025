package main

import (
	"context"
	"math/rand/v2"
	"net"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/lab"
)

const vxlanPort = 4789

// underlayEpisode sends datagrams to both daemons: as a local user of the peer host, which has the VTEP's address but
// not its rights; from Eve, a listed peer; and from a port below 1024, as a peer that was taken over does.
func underlayEpisode(ctx context.Context, s *stage, rng *rand.Rand) error {
	from, to := s.h2, addr1
	local := addr2
	switch rng.IntN(3) {
	case 0:
		from, to, local = s.h1, addr2, addr1
	case 1:
		from, to, local = s.eve, addr1, addEve
	}
	port := 0
	if from == s.eve && rng.IntN(2) == 0 {
		port = 600 + rng.IntN(400)
	}
	fd, err := udpSocket(from, &unix.SockaddrInet4{Addr: local.As4(), Port: port})
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	target := &unix.SockaddrInet4{Addr: to.As4(), Port: vxlanPort}
	for range 20 + rng.IntN(100) {
		if ctx.Err() != nil {
			return nil
		}
		for range 1 + rng.IntN(64) {
			_ = unix.Sendto(fd, hostileDatagram(s, rng), 0, target)
		}
		time.Sleep(time.Duration(rng.IntN(2000)) * time.Microsecond)
	}
	return nil
}

func udpSocket(h *lab.Host, local *unix.SockaddrInet4) (fd int, err error) {
	err = h.NS.Do(func() (err error) {
		if fd, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0); err != nil {
			return err
		}
		if err = unix.Bind(fd, local); err == unix.EADDRINUSE { // the VTEP's own port
			local.Port = 0
			err = unix.Bind(fd, local)
		}
		if err != nil {
			unix.Close(fd)
		}
		return err
	})
	return fd, err
}

// hostileDatagram is a VXLAN header, right or spoilt, and a frame. Its source is nobody who works here: an underlay
// peer may claim any MAC of its networks (SECURITY.md), which would take the innocents' traffic by right.
func hostileDatagram(s *stage, rng *rand.Rand) []byte {
	d := make([]byte, header.VXLANLen, header.VXLANLen+2048)
	h := header.VXLAN{VNI: []uint32{100, 200, 300, rng.Uint32() & 0xffffff}[rng.IntN(4)]}
	h.Encode(d)
	f := hostileFrame(s, rng)
	if len(f) >= header.EthernetLen {
		copy(f[6:12], net.HardwareAddr{0x02, 0xee, 0, 0, 0, byte(rng.IntN(256))})
	}
	if rng.IntN(20) == 0 {
		d[rng.IntN(len(d))] ^= byte(1 << rng.IntN(8))
	}
	d = append(d, f...)
	if rng.IntN(20) == 0 {
		d = d[:rng.IntN(len(d))]
	}
	return d
}
