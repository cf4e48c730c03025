package main

import "testing"

func TestFaultedEach(t *testing.T) {
	if err := faultedEach(64, 64); err != nil {
		t.Error(err)
	}
	if err := faultedEach(65, 64); err != nil { // a retry of the peer may meet the page before it is present
		t.Error(err)
	}
	if err := faultedEach(63, 64); err == nil {
		t.Error("a WRITE found its page and that is no error")
	}
}
