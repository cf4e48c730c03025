package fastpath

// RenewTicks is the maximum lifetime of entries; set it before a short path is opened.
var RenewTicks = &renewTicks
