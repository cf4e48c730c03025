package ways

import (
	"testing"
	"time"
)

func TestParse(t *testing.T) {
	s, err := parse("engines=2  spin=1ms local-copy=false")
	if err != nil || *s.engines != 2 || *s.spin != time.Millisecond || *s.local || s.segmentation != nil {
		t.Errorf("%+v, %v", s, err)
	}
	for _, bad := range []string{"engines=0", "engines", "spin=5", "local-copy=perhaps", "loops=1"} {
		if _, err := parse(bad); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
}

func TestConfig(t *testing.T) {
	defer func(old settings) { forced = old }(forced)
	forced, _ = parse("engines=2 spin=0s local-copy=false segmentation=false ecn=false short-path=false selective-repeat=false")
	if got, want := Config("networks: []\nengines: 1\n"),
		"spin: 0s\necn: false\nshort-path: false\ndebug: {local-copy: false, segmentation: false, selective-repeat: false}\n"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if forced = (settings{}); Config("") != "" || Engines(3) != 3 || !Segmentation() || !ShortPath() || !ECN() ||
		!SelectiveRepeat() {
		t.Error("settings that are not forced were changed")
	}
}
