package nstest

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

const ethtoolSetTxChecksum = 0x17 // ETHTOOL_STXCSUM, linux/ethtool.h

// NoOffload makes an interface's kernel compute checksums and segment packets before sending, as a physical wire
// requires (like ethtool -K DEV tx off). By default a veth pair passes frames with unfinished checksums and of up to 64
// KiB, because the other end is a kernel too.
func (ns *NS) NoOffload(dev string) {
	ns.tb.Helper()
	ns.Do(func() {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			ns.tb.Fatal(err)
		}
		defer unix.Close(fd)
		value := struct{ cmd, data uint32 }{ethtoolSetTxChecksum, 0}
		req := struct {
			name [unix.IFNAMSIZ]byte
			data unsafe.Pointer
			_    [16]byte
		}{data: unsafe.Pointer(&value)}
		copy(req.name[:unix.IFNAMSIZ-1], dev)
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL,
			uintptr(unsafe.Pointer(&req))); errno != 0 {
			ns.tb.Fatalf("nstest: %s: checksum offload of %s: %v", ns.Name, dev, errno)
		}
	})
}
