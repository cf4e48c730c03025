#!/bin/sh
# One lab for several commands, on the machine itself: a server that stays, and clients that come and go.
#
#     sh up-exec-down.sh
#
# prints: up-exec-down: 3 clients were served
set -e

vnicd lab up --name example
trap 'vnicd lab down example' EXIT
for client in 1 2 3; do
	vnicd lab exec --name example --vm vm2 -- ib_write_bw -n 100 &
	vnicd lab exec --name example --vm vm2 -- timeout 60 sh -c 'until ss -ltnH | grep -q :18515; do sleep 0.2; done'
	vnicd lab exec --name example --vm vm1 -- ib_write_bw -n 100 vm2
	wait $!
done
echo "up-exec-down: $client clients were served"
