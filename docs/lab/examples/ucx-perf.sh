#!/bin/sh
# UCX's own benchmark between vm1 and vm2, by RDMA alone: tagged messages and reading from memory of the other side.
#
#     vnicd lab run -- sh ucx-perf.sh
#
# prints: ucx-perf: 3 tests ran
set -e

perftest='env UCX_TLS=rc UCX_NET_DEVICES=vnic0:1 ucx_perftest -P 0' # without MPI
ran=0
for test in tag_lat tag_bw ucp_get; do
	ssh vm2 "$perftest" &
	ssh vm2 "timeout 60 sh -c 'until ss -ltnH | grep -q :13337; do sleep 0.2; done'"
	$perftest vm2 -t $test -s 4096 -n 500 -w 10
	wait $!
	ran=$((ran + 1))
done
echo "ucx-perf: $ran tests ran"
