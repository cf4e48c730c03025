// Package recovery holds the parts of RC loss recovery and congestion control that need no queue pair: the congestion
// window, the estimator of the response time, the scoreboard of packets in flight, and the reorder queue. Each is a
// plain value: the caller passes PSNs and the time, and acts on the result. Nothing here locks, reads a clock or
// allocates, except New functions.
//
// PSNs are 64-bit numbers that do not wrap. Times and durations are in nanoseconds.
package recovery
