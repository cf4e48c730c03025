package vhostuser

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/vnicd/vnicd/device/virtio"
)

// Request is the number of a front-end message.
type Request uint32

// Front-end requests (vhost-user.rst, "Front-end message types"), without those of features that are not offered.
const (
	ReqGetFeatures         Request = 1
	ReqSetFeatures         Request = 2
	ReqSetOwner            Request = 3
	ReqResetOwner          Request = 4
	ReqSetMemTable         Request = 5
	ReqSetLogBase          Request = 6
	ReqSetVringNum         Request = 8
	ReqSetVringAddr        Request = 9
	ReqSetVringBase        Request = 10
	ReqGetVringBase        Request = 11
	ReqSetVringKick        Request = 12
	ReqSetVringCall        Request = 13
	ReqSetVringErr         Request = 14
	ReqGetProtocolFeatures Request = 15
	ReqSetProtocolFeatures Request = 16
	ReqGetQueueNum         Request = 17
	ReqSetVringEnable      Request = 18
	ReqSendRARP            Request = 19
	ReqNetSetMTU           Request = 20
	ReqSetBackendReqFD     Request = 21
	ReqGetConfig           Request = 24
	ReqSetConfig           Request = 25
	ReqResetDevice         Request = 34
	ReqGetMaxMemSlots      Request = 36
	ReqAddMemReg           Request = 37
	ReqRemMemReg           Request = 38
	ReqSetStatus           Request = 39
	ReqGetStatus           Request = 40
	ReqSetDeviceStateFD    Request = 42
	ReqCheckDeviceState    Request = 43
)

// ReqGetMemory asks for a memory file: a private extension, for front ends that are not trusted (ProtoMemory). The
// request is the size in bytes; the reply repeats it and carries the descriptor, or is empty. The front end then shares
// regions of the file as it would of its own.
const ReqGetMemory Request = 1 << 20

// BackendConfigChange is VHOST_USER_BACKEND_CONFIG_CHANGE_MSG, the only message that the back end sends on its own
// channel.
const BackendConfigChange Request = 2

// Protocol feature bits ("Protocol features").
const (
	ProtoMQ                = 1 << 0
	ProtoRARP              = 1 << 2
	ProtoReplyAck          = 1 << 3
	ProtoMTU               = 1 << 4
	ProtoBackendReq        = 1 << 5
	ProtoConfig            = 1 << 9
	ProtoResetDevice       = 1 << 13
	ProtoConfigureMemSlots = 1 << 15
	ProtoStatus            = 1 << 16
	ProtoDeviceState       = 1 << 19 // offered to front ends within this process: QEMU's generic device does not migrate
	ProtoMemory            = 1 << 62 // private: ReqGetMemory
)

// Bits of a header's flags word.
const (
	FlagVersionMask = 3
	FlagVersion     = 1
	FlagReply       = 1 << 2
	FlagNeedReply   = 1 << 3
)

// Sizes and limits.
const (
	HeaderSize      = 12
	MaxConfigSize   = 256 // VHOST_USER_MAX_CONFIG_SIZE
	MaxTableRegions = 8   // regions in one SET_MEM_TABLE
	MaxMemSlots     = 128 // regions altogether, with ADD_MEM_REG
	MaxQueues       = 256 // the index has eight bits in SET_VRING_KICK

	maxTable   = tableHeader + MaxTableRegions*regionSize
	maxPayload = max(maxTable, configHeader+MaxConfigSize)
)

// ErrProtocol marks a message that no correct front end sends. It ends the connection.
var ErrProtocol = errors.New("vhost-user protocol violation")

func protoErr(format string, a ...any) error {
	return fmt.Errorf("%w: %s", ErrProtocol, fmt.Sprintf(format, a...))
}

// Header precedes every message.
type Header struct {
	Request Request
	Flags   uint32
	Size    uint32 // of the payload, in bytes
}

// Append encodes the header.
func (h Header) Append(b []byte) []byte {
	b = binary.NativeEndian.AppendUint32(b, uint32(h.Request))
	b = binary.NativeEndian.AppendUint32(b, h.Flags)
	return binary.NativeEndian.AppendUint32(b, h.Size)
}

// message appends the whole message with that body to b.
func (h Header) message(b, body []byte) []byte {
	h.Size = uint32(len(body))
	return append(h.Append(b), body...)
}

// NeedReply reports whether the sender asked for an acknowledgement.
func (h Header) NeedReply() bool { return h.Flags&FlagNeedReply != 0 }

// ParseHeader decodes a header and checks the version.
func ParseHeader(b []byte) (Header, error) {
	if len(b) != HeaderSize {
		return Header{}, protoErr("header of %d bytes, want %d", len(b), HeaderSize)
	}
	h := Header{
		Request: Request(binary.NativeEndian.Uint32(b[0:4])),
		Flags:   binary.NativeEndian.Uint32(b[4:8]),
		Size:    binary.NativeEndian.Uint32(b[8:12]),
	}
	if h.Flags&FlagVersionMask != FlagVersion {
		return h, protoErr("%v: version %d, want %d", h.Request, h.Flags&FlagVersionMask, FlagVersion)
	}
	return h, nil
}

// rule is an entry of the allow-list: the properties of a request that hold in every state.
type rule struct {
	name             string
	minSize, maxSize uint32
	fds              int    // descriptors, unless the body says how many
	vringFD          bool   // the body says whether there is one
	proto            uint64 // required protocol feature, 0 if none
	replies          bool   // has a reply of its own
	gives            bool   // with a descriptor
}

var rules = map[Request]rule{
	ReqGetFeatures: {name: "GET_FEATURES", replies: true},
	ReqSetFeatures: {name: "SET_FEATURES", minSize: 8, maxSize: 8},
	ReqSetOwner:    {name: "SET_OWNER"},
	ReqResetOwner:  {name: "RESET_OWNER"},
	ReqSetMemTable: {name: "SET_MEM_TABLE", minSize: tableHeader, maxSize: maxTable},
	ReqSetLogBase: {name: "SET_LOG_BASE", minSize: logBaseSize, maxSize: logBaseSize, fds: 1, proto: ProtoLogSHMFD,
		replies: true},
	ReqSetVringNum:         {name: "SET_VRING_NUM", minSize: stateSize, maxSize: stateSize},
	ReqSetVringAddr:        {name: "SET_VRING_ADDR", minSize: addrSize, maxSize: addrSize},
	ReqSetVringBase:        {name: "SET_VRING_BASE", minSize: stateSize, maxSize: stateSize},
	ReqGetVringBase:        {name: "GET_VRING_BASE", minSize: stateSize, maxSize: stateSize, replies: true},
	ReqSetVringKick:        {name: "SET_VRING_KICK", minSize: 8, maxSize: 8, vringFD: true},
	ReqSetVringCall:        {name: "SET_VRING_CALL", minSize: 8, maxSize: 8, vringFD: true},
	ReqSetVringErr:         {name: "SET_VRING_ERR", minSize: 8, maxSize: 8, vringFD: true},
	ReqGetProtocolFeatures: {name: "GET_PROTOCOL_FEATURES", replies: true},
	ReqSetProtocolFeatures: {name: "SET_PROTOCOL_FEATURES", minSize: 8, maxSize: 8},
	ReqGetQueueNum:         {name: "GET_QUEUE_NUM", proto: ProtoMQ, replies: true},
	ReqSetVringEnable:      {name: "SET_VRING_ENABLE", minSize: stateSize, maxSize: stateSize},
	ReqSendRARP:            {name: "SEND_RARP", minSize: 8, maxSize: 8, proto: ProtoRARP},
	ReqNetSetMTU:           {name: "NET_SET_MTU", minSize: 8, maxSize: 8, proto: ProtoMTU},
	ReqSetBackendReqFD:     {name: "SET_BACKEND_REQ_FD", fds: 1, proto: ProtoBackendReq},
	ReqGetConfig: {name: "GET_CONFIG", minSize: configHeader, maxSize: configHeader + MaxConfigSize,
		proto: ProtoConfig, replies: true}, ReqSetConfig: {name: "SET_CONFIG", minSize: configHeader,
		maxSize: configHeader + MaxConfigSize, proto: ProtoConfig},
	ReqResetDevice:    {name: "RESET_DEVICE", proto: ProtoResetDevice},
	ReqGetMaxMemSlots: {name: "GET_MAX_MEM_SLOTS", proto: ProtoConfigureMemSlots, replies: true},
	ReqAddMemReg: {name: "ADD_MEM_REG", minSize: singleSize, maxSize: singleSize, fds: 1,
		proto: ProtoConfigureMemSlots},
	ReqRemMemReg: {name: "REM_MEM_REG", minSize: singleSize, maxSize: singleSize,
		proto: ProtoConfigureMemSlots}, ReqSetStatus: {name: "SET_STATUS", minSize: 8, maxSize: 8, proto: ProtoStatus},
	ReqGetStatus: {name: "GET_STATUS", proto: ProtoStatus, replies: true},
	ReqSetDeviceStateFD: {name: "SET_DEVICE_STATE_FD", minSize: stateTransferSize, maxSize: stateTransferSize, fds: 1,
		proto: ProtoDeviceState, replies: true},
	ReqCheckDeviceState: {name: "CHECK_DEVICE_STATE", proto: ProtoDeviceState, replies: true},
	ReqGetMemory:        {name: "GET_MEMORY", minSize: 8, maxSize: 8, proto: ProtoMemory, replies: true, gives: true},
}

// String is the request's name in the specification.
func (r Request) String() string {
	if ru, ok := rules[r]; ok {
		return ru.name
	}
	return fmt.Sprintf("request %d", uint32(r))
}

// Check verifies a request's header against the allow-list, before its body is read.
func (h Header) Check() error {
	r, ok := rules[h.Request]
	switch {
	case !ok:
		return protoErr("%v is unknown or belongs to a feature that is not offered", h.Request)
	case h.Flags&FlagReply != 0:
		return protoErr("%v: reply bit set in a request", h.Request)
	case h.Size < r.minSize || h.Size > r.maxSize:
		if r.minSize == r.maxSize {
			return protoErr("%v: payload of %d bytes, want %d", h.Request, h.Size, r.minSize)
		}
		return protoErr("%v: payload of %d bytes, want %d to %d", h.Request, h.Size, r.minSize, r.maxSize)
	}
	return nil
}

// NumFDs returns how many descriptors a message with that body comes with. None belong to replies but
// GET_MEMORY's, nor to messages of the back end.
func (h Header) NumFDs(body []byte) int {
	r := rules[h.Request]
	switch {
	case h.Flags&FlagReply != 0 && r.gives && len(body) > 0:
		return 1
	case h.Flags&FlagReply != 0:
		return 0
	case h.Request == ReqSetMemTable && len(body) >= tableHeader:
		return int(min(binary.NativeEndian.Uint32(body), MaxTableRegions))
	case r.vringFD && len(body) == 8 && binary.NativeEndian.Uint64(body)&vringNoFD == 0:
		return 1
	}
	return r.fds
}

// FeatureProtocolFeatures is VHOST_USER_F_PROTOCOL_FEATURES, vhost-user's own feature bit.
const FeatureProtocolFeatures = 1 << 30

// transportFeatures are the feature bits that the server offers for every device.
const transportFeatures = virtio.FeatureIndirectDesc | virtio.FeatureEventIdx | virtio.FeatureVersion1 |
	FeatureProtocolFeatures
