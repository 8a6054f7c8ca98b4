#!/bin/sh
# Two machines with two workers each: `sbatch examples/launchers/slurm.sh`. The first machine of the allocation keeps the store.
#SBATCH --job-name=hocket
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
set -e
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
srun hocket train --strategy "async + server(shards=2)" --epochs 5 --keys "${KEYS:-job.keys}" --out "${OUT:-run}" --device cpu
