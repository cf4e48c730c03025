package recovery

// minRTTAge is how long the minimum response time is valid, ns.
const minRTTAge = 10e9

// RTT estimates the response time: from sending a request packet to receiving what acknowledges it.
type RTT struct {
	Smoothed int64 // ns, gain 1/8; 0: not known
	Min      int64 // the minimum of the last 10 s; 0: not known
	minAt    int64
}

// Sample takes one measured response time.
func (r *RTT) Sample(now, rtt int64) {
	if rtt <= r.Min || r.Min == 0 || now-r.minAt > minRTTAge {
		r.Min, r.minAt = rtt, now
	}
	if r.Smoothed == 0 {
		r.Smoothed = rtt
		return
	}
	r.Smoothed = max(r.Smoothed+(rtt-r.Smoothed)/8, 1)
}
