# Run by open-mpi.sh: collective operations on arrays that every process knows the result of.
from array import array

from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
n = 100000  # of 8 bytes

mine = array('q', range(rank, rank + n))
total = array('q', bytes(8 * n))
comm.Allreduce([mine, MPI.INT64_T], [total, MPI.INT64_T])
if total != array('q', (size * i + size * (size - 1) // 2 for i in range(n))):
    raise SystemExit(f'process {rank}: a wrong sum')

everything = array('q', bytes(8 * n * size))
comm.Allgather([mine, MPI.INT64_T], [everything, MPI.INT64_T])
for r in range(size):
    if everything[r * n:(r + 1) * n] != array('q', range(r, r + n)):
        raise SystemExit(f'process {rank}: wrong data of process {r}')
print(f'process {rank} of {size} on {MPI.Get_processor_name()}: right', flush=True)
