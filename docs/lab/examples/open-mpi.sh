#!/bin/sh
# Open MPI over UCX: a process on each VM adds and exchanges arrays (allreduce.py), and the device has carried them.
#
#     vnicd lab run --packages "openmpi-bin python3-mpi4py" -- sh open-mpi.sh
#
# prints: open-mpi: right, and sent by RDMA
set -e

sent() { cat /sys/class/infiniband/vnic0/ports/1/hw_counters/tx_bytes; }
before=$(sent)
mpirun --allow-run-as-root --host vm1,vm2 --mca pml ucx -x UCX_NET_DEVICES=vnic0:1 -x UCX_TLS=rc,self \
	python3 allreduce.py
bytes=$(($(sent) - before))
[ $bytes -gt 1000000 ] || { echo "only $bytes bytes were sent by RDMA" >&2; exit 1; }
echo open-mpi: right, and sent by RDMA
