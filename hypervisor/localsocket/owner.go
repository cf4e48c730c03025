package localsocket

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/user"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// None stands for no user or no group in an Owner.
const None = -1

// Owner are the processes that may use a socket, besides root's: those of a user, or with a group. Either may be None.
// A nil Owner admits every process that could open the socket.
type Owner struct{ UID, GID int }

// Admits reports whether a process may use the socket. The permissions of the file say the same; this is for a
// connection that came into being while they were others, or over a descriptor.
func (o *Owner) Admits(p Peer) bool {
	return o == nil || p.UID == 0 || o.UID != None && p.UID == o.UID ||
		o.GID != None && (p.GID == o.GID || slices.Contains(p.Groups, o.GID))
}

// String names the users and groups that are admitted, such as "root, user 1000 (alice) or group 105 (kvm)".
func (o *Owner) String() string {
	if o == nil {
		return "anybody"
	}
	who := []string{"root"}
	if o.UID > 0 {
		who = append(who, "user "+UserName(o.UID))
	}
	if o.GID != None {
		who = append(who, "group "+GroupName(o.GID))
	}
	if last := len(who) - 1; last > 0 {
		return strings.Join(who[:last], ", ") + " or " + who[last]
	}
	return who[0]
}

// UserName returns a user's number, and its name if it has one.
func UserName(uid int) string {
	n := strconv.Itoa(uid)
	if u, err := user.LookupId(n); err == nil {
		return n + " (" + u.Username + ")"
	}
	return n
}

// GroupName returns a group's number, and its name if it has one.
func GroupName(gid int) string {
	n := strconv.Itoa(gid)
	if g, err := user.LookupGroupId(n); err == nil {
		return n + " (" + g.Name + ")"
	}
	return n
}

// give sets the mode and the owner of a file of this process. A process without CAP_CHOWN gives a file to others than
// itself and its groups by an access control list (acl(5)).
func (o *Owner) give(path string, mode os.FileMode) error {
	if o == nil {
		return os.Chmod(path, mode)
	}
	mode &^= 0o007
	if o.GID == None {
		mode &^= 0o070
	}
	err := os.Chown(path, o.UID, o.GID)
	if err == nil {
		return os.Chmod(path, mode)
	}
	if !errors.Is(err, fs.ErrPermission) {
		return err
	}
	if aerr := unix.Setxattr(path, xattrACL, o.list(mode), 0); aerr != nil {
		return fmt.Errorf("cannot be given to %v: %w, and an access control list: %w; run vnicd as root, or as a member of "+
			"the group, or with its directory on a file system that has such lists", o, err, aerr)
	}
	return nil
}

// Tags and permissions of an access control list (Linux, include/uapi/linux/posix_acl.h).
const (
	aclUserObj, aclUser, aclGroupObj, aclGroup, aclMask, aclOther = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20

	xattrACL     = "system.posix_acl_access"
	aclVersion   = 2 // include/uapi/linux/posix_acl_xattr.h
	aclUndefined = ^uint32(0)
)

// list makes the access control list that grants o what mode grants to the file's user and group.
func (o *Owner) list(mode os.FileMode) []byte {
	own, group := uint16(mode>>6&7), uint16(mode>>3&7)
	le := binary.LittleEndian
	b := le.AppendUint32(nil, aclVersion)
	entry := func(tag, perm uint16, id uint32) {
		b = le.AppendUint32(le.AppendUint16(le.AppendUint16(b, tag), perm), id)
	}
	// In this order, or the kernel refuses the list.
	entry(aclUserObj, own, aclUndefined)
	if o.UID != None {
		entry(aclUser, own, uint32(o.UID))
	}
	entry(aclGroupObj, 0, aclUndefined)
	if o.GID != None {
		entry(aclGroup, group, uint32(o.GID))
	}
	entry(aclMask, own|group, aclUndefined)
	entry(aclOther, 0, aclUndefined)
	return b
}

// MayOpen names those who may open the socket at path besides root, such as "a member of the group 4 (adm) or the user
// 2 (bin)". Whoever may enter its directory can ask.
func MayOpen(path string) string {
	users, groups, err := access(path)
	if err != nil {
		return "the user of vnicd"
	}
	var who []string
	for _, id := range groups {
		who = append(who, "a member of the group "+GroupName(id))
	}
	for _, id := range users {
		who = append(who, "the user "+UserName(id))
	}
	return strings.Join(who, " or ")
}

// Groups returns the groups whose members may open the socket at path; none if there is no socket.
func Groups(path string) []int {
	_, groups, _ := access(path)
	return groups
}

// access reads who may open a socket, from its list if it has one.
func access(path string) (users, groups []int, err error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return nil, nil, err
	}
	// connect(2) needs write permission. With a list, the mode's bits of the group are the list's mask.
	const write = 2
	own, mask := uint16(st.Mode>>6&7), uint16(st.Mode>>3&7)
	if own&write != 0 {
		users = append(users, int(st.Uid))
	}
	b := make([]byte, 1024)
	n, err := unix.Getxattr(path, xattrACL, b)
	if err != nil || n < 4 {
		if mask&write != 0 {
			groups = append(groups, int(st.Gid))
		}
		return users, groups, nil
	}
	for le, e := binary.LittleEndian, b[4:n]; len(e) >= 8; e = e[8:] {
		if le.Uint16(e[2:])&mask&write == 0 {
			continue
		}
		switch id := int(le.Uint32(e[4:])); le.Uint16(e) {
		case aclUser:
			users = append(users, id)
		case aclGroupObj:
			groups = append(groups, int(st.Gid))
		case aclGroup:
			groups = append(groups, id)
		}
	}
	return users, groups, nil
}
