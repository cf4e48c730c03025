package fastpath

// RenewTicks is how long entries live; set it before a short path is opened.
var RenewTicks = &renewTicks
