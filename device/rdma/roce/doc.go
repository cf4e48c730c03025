// Package roce implements the InfiniBand transport over Ethernet (RoCE v2 and v1): the requester and responder state
// machines of RC, UC, UD and the GSI queue pair (IBTA chapters 9 and 10, annexes A16, A17 and A19). Rings, guest
// memory, the network and the loop are behind the four interfaces of Adapter. See README.md.
package roce
