#!/bin/sh
# NVMe over RDMA: vm2 exports a RAM disk, and fio on vm1 writes to it and verifies what it reads back.
#
#     vnicd lab run -- sh nvme-fio.sh
#
# prints: nvme-fio: verified
set -e

ssh vm2 sh -e <<'TARGET'
modprobe -a brd nvmet-rdma
mountpoint -q /sys/kernel/config || mount -t configfs none /sys/kernel/config
cd /sys/kernel/config/nvmet
mkdir subsystems/disk subsystems/disk/namespaces/1 ports/1
echo 1 >subsystems/disk/attr_allow_any_host
echo /dev/ram0 >subsystems/disk/namespaces/1/device_path
echo 1 >subsystems/disk/namespaces/1/enable
echo rdma >ports/1/addr_trtype
echo ipv4 >ports/1/addr_adrfam
echo "${VNICD_LAB_ADDRESSES#*,}" >ports/1/addr_traddr
echo 4420 >ports/1/addr_trsvcid
ln -s /sys/kernel/config/nvmet/subsystems/disk ports/1/subsystems/disk
TARGET

modprobe nvme-rdma
nvme connect -t rdma -a "${VNICD_LAB_ADDRESSES#*,}" -s 4420 -n disk -i 2 \
	--hostid=6b9a2f80-0000-4000-8000-000000000001 \
	--hostnqn=nqn.2014-08.org.nvmexpress:uuid:6b9a2f80-0000-4000-8000-000000000001
timeout 60 sh -c 'until [ -b /dev/nvme0n1 ]; do sleep 0.1; done'
fio --name=example --filename=/dev/nvme0n1 --size=4m --direct=1 --rw=randwrite --bs=4k --iodepth=8 --ioengine=libaio \
	--verify=crc32c
nvme disconnect -n disk
echo nvme-fio: verified
