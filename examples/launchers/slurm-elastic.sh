#!/bin/sh
# An elastic run on two machines with two workers each: `sbatch examples/launchers/slurm-elastic.sh`. When a worker or a machine is
# lost, the others go on, down to one. A minute before the time is over all leave, and write a checkpoint; sbatch again goes on from it.
#SBATCH --job-name=hocket
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
#SBATCH --no-kill
#SBATCH --signal=TERM@60
set -e
KEYS="${KEYS:-job.keys}" PORT="${PORT:-7000}"
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
export HOCKET_JOB="$(printf %032d "$SLURM_JOB_ID")" HOCKET_RENDEZVOUS="tcp://$SLURMD_NODENAME:$PORT"
hocket rendezvous --elastic 1:4 --workers "$SLURM_NTASKS" --bind "tcp://*:$PORT" --keys "$KEYS" &
trap 'kill $! 2> /dev/null || true' EXIT
srun --no-kill --kill-on-bad-exit=0 --wait=0 hocket train --elastic 1:4 --strategy "local(16) + gossip" --epochs 5 \
  --keys "$KEYS" --out "${OUT:-run}" --device cpu
