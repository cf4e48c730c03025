// Package roce is the InfiniBand transport over Ethernet (RoCE v2, v1): the
// requester and responder state machines of RC, UC, UD and the GSI queue pair
// (IBTA chapters 9 and 10, annexes A16 and A17). It knows nothing of rings,
// commands or tables: those are behind Adapter. See README.md.
package roce
