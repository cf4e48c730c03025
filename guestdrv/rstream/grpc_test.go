package rstream_test

import (
	"context"
	"net"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/vnicd/vnicd/guestdrv/internal/rig"
	"github.com/vnicd/vnicd/guestdrv/rstream"
)

// gRPC runs over connections and listeners of this package: calls at the same time, and a stream.
func TestGRPC(t *testing.T) {
	p := newPair(t, rstream.Config{})
	status := health.NewServer()
	server := grpc.NewServer()
	grpc_health_v1.RegisterHealthServer(server, status)
	served := make(chan error, 1)
	go func() { served <- server.Serve(p.listener) }()
	client, err := grpc.NewClient("passthrough:///"+p.listener.Addr().String(),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			return rstream.Dial(ctx, p.a, address, rstream.Config{})
		}))
	if err != nil {
		t.Fatal(err)
	}
	api := grpc_health_v1.NewHealthClient(client)
	ctx, cancel := context.WithCancel(rig.Context(t))
	changes, err := api.Watch(ctx, &grpc_health_v1.HealthCheckRequest{Service: "queue"})
	if err != nil {
		t.Fatal(err)
	}
	next := func(want grpc_health_v1.HealthCheckResponse_ServingStatus) {
		t.Helper()
		if got, err := changes.Recv(); err != nil || got.Status != want {
			t.Fatalf("%v, %v, want %v", got, err, want)
		}
	}
	next(grpc_health_v1.HealthCheckResponse_SERVICE_UNKNOWN)
	status.SetServingStatus("queue", grpc_health_v1.HealthCheckResponse_NOT_SERVING)
	next(grpc_health_v1.HealthCheckResponse_NOT_SERVING)
	var calls sync.WaitGroup
	for range 8 {
		calls.Go(func() {
			for range 50 {
				got, err := api.Check(ctx, &grpc_health_v1.HealthCheckRequest{Service: "queue"})
				if err != nil || got.Status != grpc_health_v1.HealthCheckResponse_NOT_SERVING {
					t.Errorf("%v, %v", got, err)
				}
			}
		})
	}
	calls.Wait()
	cancel()
	if err := client.Close(); err != nil {
		t.Error(err)
	}
	server.Stop()
	if err := <-served; err != nil {
		t.Error(err)
	}
}
