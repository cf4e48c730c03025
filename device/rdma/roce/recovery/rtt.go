package recovery

// rttAge is how long the minimum and the maximum response time are valid, ns.
const rttAge = 10e9

// RTT estimates the response time: from sending a request packet to receiving what acknowledges it.
type RTT struct {
	Smoothed int64 // ns, gain 1/8; 0: not known
	Min      int64 // the minimum of the last 10 s; 0: not known
	Max      int64 // the maximum of the last 10 s, silence included; 0: not known
	minAt    int64
	maxAt    int64
}

// Sample takes one measured response time.
func (r *RTT) Sample(now, rtt int64) {
	if rtt <= r.Min || r.Min == 0 || now-r.minAt > rttAge {
		r.Min, r.minAt = rtt, now
	}
	r.Silence(now, rtt)
	if r.Smoothed == 0 {
		r.Smoothed = rtt
		return
	}
	r.Smoothed = max(r.Smoothed+(rtt-r.Smoothed)/8, 1)
}

// Silence notes that a response came after d ns, during which the request was sent more than once: it is not known
// which transmission it answers, so it is no sample (Karn's rule), but the peer can take that long.
func (r *RTT) Silence(now, d int64) {
	if d >= r.Max || now-r.maxAt > rttAge {
		r.Max, r.maxAt = d, now
	}
}
