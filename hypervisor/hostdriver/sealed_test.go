package hostdriver

import (
	"bytes"
	"testing"

	"golang.org/x/sys/unix"
)

func TestSealedFile(t *testing.T) {
	for _, want := range [][]byte{nil, []byte("x"), bytes.Repeat([]byte("state "), 1<<20)} {
		fd, err := SealedFile("test", want)
		if err != nil {
			t.Fatal(err)
		}
		got := make([]byte, len(want)+1)
		if n, err := unix.Pread(fd, got, 0); err != nil || !bytes.Equal(got[:n], want) {
			t.Errorf("%d of %d bytes, or other ones: %v", n, len(want), err)
		}
		if _, err := unix.Pwrite(fd, []byte("y"), 0); err == nil {
			t.Error("it can be written")
		}
		for _, size := range []int64{0, 1 << 30} {
			if err := unix.Ftruncate(fd, size); err == nil && size != int64(len(want)) {
				t.Errorf("it can have %d bytes", size)
			}
		}
		if err := unix.Close(fd); err != nil {
			t.Error(err)
		}
	}
}
