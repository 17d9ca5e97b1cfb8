#!/bin/bash
# dask-mpi, wherever mpirun works: the first rank is the scheduler, the others are workers, so one more rank than workers.
# The arguments are the number of workers and those of siirl-dask; MPIRUN is how mpirun is called, here Open MPI's:
#   MPIRUN="mpirun --hostfile hosts -x PATH -x OMP_NUM_THREADS" bash mpi.sh 3 run mine.yaml
set -euo pipefail

interface=eth0 # the network between the hosts, on all of them: ib0, for instance
name=$PWD/mpi-$$
workers=$1
shift
export OMP_NUM_THREADS=1

${MPIRUN:-mpirun} -n $((workers + 1)) dask-mpi --scheduler-file "$name.json" --interface $interface \
  --nthreads 1 --memory-limit 0 --dashboard-address :0 &> "$name.log" &
trap 'kill $!; wait; rm -f "$name.json"' EXIT

siirl-dask "$@" cluster.scheduler_file="$name.json" cluster.workers="$workers"
