package roce

import (
	"reflect"
	"testing"
)

// TestStatsAdd: Add leaves out no counter.
func TestStatsAdd(t *testing.T) {
	var s, o Stats
	each := func(x *Stats, f func(i int, n reflect.Value)) {
		i, v := 0, reflect.ValueOf(x).Elem()
		for k := range v.NumField() {
			if a := v.Field(k); a.Kind() == reflect.Array {
				for j := range a.Len() {
					f(i, a.Index(j))
					i++
				}
				continue
			}
			f(i, v.Field(k))
			i++
		}
	}
	each(&o, func(i int, n reflect.Value) { n.SetUint(uint64(i + 1)) })
	s.Add(&o)
	s.Add(&o)
	each(&s, func(i int, n reflect.Value) {
		if n.Uint() != uint64(2*(i+1)) {
			t.Errorf("counter %d is %d, want %d", i, n.Uint(), 2*(i+1))
		}
	})
}
