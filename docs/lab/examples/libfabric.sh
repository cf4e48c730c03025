#!/bin/sh
# libfabric over verbs: fi_pingpong between vm1 and vm2 with messages (msg) and reliable datagrams (rdm).
#
#     vnicd lab run -- sh libfabric.sh
#
# prints: libfabric: both endpoint types work
set -e

for type in 'verbs -e msg' 'verbs;ofi_rxm -e rdm'; do
	provider=${type%% *} endpoint=${type##* }
	ssh vm2 "fi_pingpong -p '$provider' -e $endpoint -I 20 -S 4096" &
	ssh vm2 "timeout 60 sh -c 'until ss -ltnH | grep -q :47592; do sleep 0.2; done'"
	fi_pingpong -p "$provider" -e "$endpoint" -I 20 -S 4096 vm2
	wait $!
done
echo libfabric: both endpoint types work
