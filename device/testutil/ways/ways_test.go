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
	for _, bad := range []string{"engines=0", "engines", "spin=5", "local-copy=perhaps", "loops=1", "passes=0"} {
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

func TestPasses(t *testing.T) {
	defer func(old settings) { forced = old }(forced)
	var local, journal bool
	for text, want := range map[string]int{"": 2, "passes=1": 0, "passes=2": 1, "passes=3": 2, "passes=9": 2,
		"local-copy=true": 0, "journal=true": 1} {
		forced, _ = parse(text)
		if got := (Tests{Local: &local, Journal: &journal}).more(); len(got) != want {
			t.Errorf("%q: %d more passes, want %d", text, len(got), want)
		}
	}
	forced = settings{}
	if got := (Tests{Local: &local}).more(); len(got) != 1 || got[0].setting != &local {
		t.Errorf("without journals: %+v, want the local path alone", got)
	}
}
