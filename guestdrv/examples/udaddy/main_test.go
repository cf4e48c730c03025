package main

import (
	"bytes"
	"io"
	"strings"
	"testing"

	"github.com/vnicd/vnicd/guestdrv/internal/rig"
)

// One instance serves another, with messages of one byte, of some, and of the MTU.
func TestExchange(t *testing.T) {
	hosts := rig.New(t, 2).Hosts
	for _, size := range []int{1, 100, 1024} {
		ctx := rig.Context(t)
		output, say := io.Pipe()
		served := make(chan error, 1)
		server := options{socket: hosts[0].Path, address: hosts[0].Addr.String(), port: 7174, size: size, n: 20,
			compare: true}
		go func() {
			err := run(ctx, server, say)
			_ = say.CloseWithError(err)
			served <- err
		}()
		line := make([]byte, 100)
		if n, err := output.Read(line); err != nil || !strings.Contains(string(line[:n]), "10.0.0.1:7174") {
			t.Fatalf("%q, %v", line[:n], err)
		}
		go func() { _, _ = io.Copy(io.Discard, output) }()
		client := server
		client.socket, client.address, client.peer = hosts[1].Path, hosts[1].Addr.String(), hosts[0].Addr.String()
		var said bytes.Buffer
		if err := run(ctx, client, &said); err != nil || !strings.Contains(said.String(), "20 messages received") {
			t.Fatalf("%v\n%s", err, said.String())
		}
		if err := <-served; err != nil {
			t.Error(err)
		}
	}
}

// Arguments that are no use.
func TestRefused(t *testing.T) {
	host := rig.New(t, 1).Hosts[0]
	good := options{socket: host.Path, address: host.Addr.String(), port: 7174, size: 100, n: 1, peer: "10.0.0.2"}
	for want, change := range map[string]func(o *options){
		"-address": func(o *options) { o.address = "x" },
		"-n":       func(o *options) { o.n = 0 },
		"-size":    func(o *options) { o.size = 5000 },
		"address":  func(o *options) { o.peer = "224.0.0.1" },
	} {
		o := good
		change(&o)
		if err := run(rig.Context(t), o, io.Discard); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
}
