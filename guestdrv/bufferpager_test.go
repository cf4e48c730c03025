package guestdrv_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/guestdrv"
)

// lazyMemory is memory of a program's own whose pages it makes when somebody needs them, by a userfaultfd: page i holds
// the bytes of content(i).
type lazyMemory struct {
	data  []byte
	own   *guestdrv.Buffer
	fault *testutil.UserFaults
	made  atomic.Int32
}

func content(i int) []byte { return bytes.Repeat([]byte{byte(i + 1)}, page) }

func newLazyMemory(t *testing.T, h *guestdrv.Device, pages int, userOnly bool) *lazyMemory {
	t.Helper()
	f, data := ownMemory(t, pages*page)
	own, err := h.Share(f, 0, data)
	if err != nil {
		t.Fatal(err)
	}
	return &lazyMemory{data: data, own: own, fault: testutil.NewUserFaults(t, data, userOnly)}
}

// answer makes pages until the userfaultfd is closed.
func (m *lazyMemory) answer() {
	for {
		addr, ok := m.fault.Next()
		if !ok {
			return
		}
		m.made.Add(1)
		m.fault.Fill(addr&^(page-1), content(int(addr-m.own.Addr())/page))
	}
}

// A program makes pages of its memory when they are needed (userfaultfd): the device gets what the program would, and
// causes no more of them to be made than it uses.
func TestPagerOfUserFaults(t *testing.T) {
	for _, userOnly := range []bool{false, true} {
		t.Run(fmt.Sprintf("userOnly=%v", userOnly), func(t *testing.T) {
			r := newRig(t, rigConfig{untrusted: true})
			ha, hb := r.hosts[0], r.hosts[1]
			const pages = 64
			m := newLazyMemory(t, hb.Device, pages, userOnly)
			go m.answer()
			mr, err := hb.pd.RegisterOnDemand(bg, m.own.Addr(), pages*page, allAccess, m.own.Pager())
			if err != nil {
				t.Fatal(err)
			}
			a, _ := connect(t, ha, hb, qpDefaults(), faulty)
			buf, local := ha.region(t, 4*page, guestdrv.AccessLocalWrite)

			// Four pages are read, one is written in part, two by the program itself.
			postOwn(t, a, guestdrv.NewRead(1, mr.Remote(20*page), local.SGE(0, 4*page)).With(guestdrv.SendSignaled))
			expect(t, a.scq, 1, guestdrv.WCSuccess, guestdrv.WCOpRDMARead)
			for i := range 4 {
				if !bytes.Equal(buf.Bytes()[i*page:][:page], content(20+i)) {
					t.Errorf("READ: page %d begins with %d", 20+i, buf.Bytes()[i*page])
				}
			}
			postOwn(t, a, guestdrv.NewWrite(2, mr.Remote(40*page+100), local.SGE(0, 8)).With(guestdrv.SendSignaled))
			expect(t, a.scq, 2, guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
			if want := append(bytes.Repeat([]byte{41}, 100), bytes.Repeat([]byte{21}, 8)...); !bytes.Equal(
				m.data[40*page:][:108], want) || m.data[40*page+108] != 41 {
				t.Errorf("WRITE into page 40: it begins with % x", m.data[40*page:][:110])
			}
			if m.data[60*page] != 61 || m.data[20*page] != 21 {
				t.Errorf("the program reads %d and %d", m.data[60*page], m.data[20*page])
			}
			if n := m.made.Load(); n != 6 {
				t.Errorf("%d pages were made, want 6", n)
			}
			// Beyond the buffer there is nothing.
			beyond, err := hb.pd.RegisterOnDemand(bg, m.own.Addr(), (pages+1)*page, allAccess, m.own.Pager())
			if err != nil {
				t.Fatal(err)
			}
			postOwn(t, a, guestdrv.NewRead(3, beyond.Remote(pages*page), local.SGE(0, 8)).With(guestdrv.SendSignaled))
			if wc := await(t, a.scq, 1)[0]; wc.Status != guestdrv.WCRemAccessErr {
				t.Errorf("READ beyond the buffer: %v", wc.Status)
			}
		})
	}
}

// While nobody makes the pages only the operation waits that needs them. The region can be closed, and the operation
// fails then.
func TestPagerOfDeadUserFaults(t *testing.T) {
	r := newRig(t, rigConfig{untrusted: true})
	ha, hb := r.hosts[0], r.hosts[1]
	m := newLazyMemory(t, hb.Device, 4, false)
	mr, err := hb.pd.RegisterOnDemand(bg, m.own.Addr(), 4*page, allAccess, m.own.Pager())
	if err != nil {
		t.Fatal(err)
	}
	a, _ := connect(t, ha, hb, qpDefaults(), faulty)
	_, local := ha.region(t, page, guestdrv.AccessLocalWrite)
	postOwn(t, a, guestdrv.NewRead(1, mr.Remote(0), local.SGE(0, 8)).With(guestdrv.SendSignaled))
	if addr, ok := m.fault.Next(); !ok || addr&^(page-1) != m.own.Addr() {
		t.Fatalf("a fault at %#x (%v), want %#x", addr, ok, m.own.Addr())
	}
	other, _ := connect(t, ha, hb, qpDefaults(), faulty)
	_, far := hb.region(t, page, allAccess)
	postOwn(t, other, guestdrv.NewWrite(2, far.Remote(0), local.SGE(0, 8)).With(guestdrv.SendSignaled))
	expect(t, other.scq, 2, guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
	if err := mr.Close(); err != nil {
		t.Fatal(err)
	}
	if wc := await(t, a.scq, 1)[0]; wc.Status != guestdrv.WCRemAccessErr {
		t.Errorf("READ of a region that was closed: %v", wc.Status)
	}
	ctx, cancel := context.WithCancel(bg)
	cancel()
	if err := m.own.Pager().PageIn(ctx, guestdrv.PageFault{VA: m.own.Addr()}, make([]uint64, 1)); err == nil {
		t.Error("a page that nobody makes")
	}
}

// What the program cannot read itself, the device does not get.
func TestPagerOfUnreadable(t *testing.T) {
	r := newRig(t, rigConfig{untrusted: true})
	h := r.hosts[0]
	f, data := ownMemory(t, 4*page)
	own, err := h.Share(f, 0, data)
	if err != nil {
		t.Fatal(err)
	}
	pas := make([]uint64, 4)
	fault := guestdrv.PageFault{VA: own.Addr()}
	if err := own.Pager().PageIn(bg, fault, pas); err != nil || pas[3] != own.PA()+3*page {
		t.Errorf("%v: %#x", err, pas)
	}
	if err := unix.Mprotect(data[page:2*page], unix.PROT_NONE); err != nil {
		t.Fatal(err)
	}
	if err := own.Pager().PageIn(bg, fault, pas); !errors.Is(err, unix.EFAULT) {
		t.Errorf("a page that the program cannot read: %v", err)
	}
	if err := own.Pager().PageIn(bg, fault, pas[:1]); err != nil {
		t.Error(err)
	}
	// A buffer that ends within a page, of which a byte is readable, and nothing else.
	odd, err := h.Alloc(page + 1)
	if err != nil {
		t.Fatal(err)
	}
	pas = make([]uint64, 3)
	err = odd.Pager().PageIn(bg, guestdrv.PageFault{VA: odd.Addr()}, pas)
	if err != nil || pas[1] != odd.PA()+page || pas[2] != 0 {
		t.Errorf("%v: %#x", err, pas)
	}
}
