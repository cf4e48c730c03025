package hostdriver

// claim is what one VM needs of memory that is divided.
type claim struct {
	weight uint64
	least  uint64 // it gets at least this
	want   uint64 // what it has now, and some room to grow
}

// divide divides total bytes by weight, max-min fair: a VM that wants less than its share gets what it wants, and the
// others divide the rest. What all of them leave is added by weight as well. It returns each VM's bound; their sum is
// at most total, unless the least amounts are more.
func divide(total uint64, claims []claim) []uint64 {
	out := make([]uint64, len(claims))
	var weights uint64
	for _, c := range claims {
		weights += c.weight
	}
	if weights == 0 {
		return out
	}
	// The level is the bytes per unit of weight at which a VM is cut off.
	at := func(level float64) (sum uint64) {
		for i, c := range claims {
			out[i] = c.least
			if w := c.want; w > c.least {
				out[i] = max(c.least, uint64(min(level*float64(c.weight), float64(w))))
			}
			sum += out[i]
		}
		return sum
	}
	lo, hi := 0.0, float64(total)
	if sum := at(hi); sum <= total {
		for i, c := range claims {
			out[i] += uint64(float64(total-sum) * float64(c.weight) / float64(weights))
		}
		return out
	}
	for range 64 {
		if mid := (lo + hi) / 2; at(mid) <= total {
			lo = mid
		} else {
			hi = mid
		}
	}
	at(lo)
	return out
}
