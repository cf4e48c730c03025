package vxlan

// RenewTicks is how long entries of the short path live; for before VTEPs are made.
var RenewTicks = &renewTicks
