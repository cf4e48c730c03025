#!/bin/sh
# A kernel module of one's own, which uses RDMA devices (devices_seen.c): built, loaded and unloaded in a VM.
#
#     vnicd lab run --hosts 1 --packages "gcc make linux-headers-amd64" -- sh kernel-module.sh
#
# prints: kernel-module: devices_seen: vnic0 has 1 port
set -e

dir=$(mktemp -d) # a kernel build is slow in the mounted directory
cp devices_seen.c "$dir"
echo 'obj-m := devices_seen.o' >"$dir/Kbuild"
make -C "/lib/modules/$(uname -r)/build" M="$dir" modules
insmod "$dir/devices_seen.ko"
rmmod devices_seen
echo "kernel-module: $(dmesg | grep -o 'devices_seen: vnic0 .*')"
