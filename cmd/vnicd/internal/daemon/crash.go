package daemon

import (
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"strings"

	"golang.org/x/sys/unix"
)

// crashFile is the name under which the keeper has the file into which the Go runtime writes why it ends the process
// (a bug). If it is empty, the process was killed or has ended in good order.
const crashFile = "crash/output/1"

// maxCrashLine bounds what the log has of it.
const maxCrashLine = 200

// watchCrash reads what the previous process left, and keeps a file for this one. blameless: the previous process did
// not end by a fault of its own, so no VM is suspected of having caused it.
func (d *Daemon) watchCrash() (blameless bool) {
	if d.keeper() == nil {
		return false
	}
	if fd, ok := d.kept[crashFile]; ok {
		delete(d.kept, crashFile)
		f := os.NewFile(uintptr(fd), crashFile)
		b := make([]byte, maxCrashLine)
		n, err := f.ReadAt(b, 0)
		_, _ = f.WriteAt([]byte{0}, 0) // it says nothing of this process, should the next one get it again
		_ = f.Close()
		_ = d.store.Forget(crashFile)
		if blameless = n == 0 && errors.Is(err, io.EOF); n > 1 {
			line, _, _ := strings.Cut(string(b[:n]), "\n")
			d.log.Error("the previous vnicd ended by a bug; please report it with what it wrote to its standard error",
				"began", line)
		}
	}
	if err := d.keepCrash(); err != nil {
		d.log.Warn("the next vnicd will not know whether this one crashed or was killed", "error", err)
	}
	return blameless
}

func (d *Daemon) keepCrash() error {
	fd, err := unix.MemfdCreate("vnicd-crash", unix.MFD_CLOEXEC)
	if err != nil {
		return fmt.Errorf("memory file: %w", err)
	}
	f := os.NewFile(uintptr(fd), crashFile)
	defer f.Close()              // the runtime has a descriptor of its own
	debug.SetTraceback("single") // with none, the runtime writes nothing
	if err := debug.SetCrashOutput(f, debug.CrashOptions{}); err != nil {
		return err
	}
	return d.store.Keep(crashFile, fd)
}
