#!/bin/bash
# A corpus in another order (docs/offline.md), its scores read and its index written by many ranks:
# `megatron-d3 order` under MPI.
#
#   sbatch --nodes=2 --ntasks-per-node=16 slurm/reorder_index.sh --prefix corpus/web \
#       --method saw --output-prefix corpus/web_saw
#
# mpi4py and srun must speak the same language: with the wheels `pip install mpi4py mpich` that is
# pmi2, without root or compiler. With another MPI try MPI_TYPE=pmix (`srun --mpi=list`). Where they
# do not, every rank takes itself for rank 0 of 1 and all write the same file: that is looked for.
#SBATCH --job-name=d3-order
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --time=4:00:00
#SBATCH --output=%x-%j.out
#
# Exit codes: 0 written; 1 refused; 2 MPI does not see its ranks, or a setting is wrong.
set -euo pipefail

VENV=${VENV-.venv}
MPI_TYPE=${MPI_TYPE:-pmi2}

[ -n "${SLURM_JOB_ID:-}" ] || { echo "slurm/reorder_index.sh: start it with sbatch" >&2; exit 2; }
[ -z "$VENV" ] || PATH=$(realpath "$VENV")/bin:$PATH
seen=$(srun --mpi="$MPI_TYPE" python -c 'from mpi4py.MPI import COMM_WORLD as c; print(c.size)' |
    sort | uniq -c | xargs)
if [ "$seen" != "$SLURM_NTASKS $SLURM_NTASKS" ]; then
    echo "slurm/reorder_index.sh: $SLURM_NTASKS tasks, but (ranks, size they see) is: $seen; srun" \
        "--mpi=$MPI_TYPE and the MPI of mpi4py do not belong together, see the head of this file" >&2
    exit 2
fi
echo "$SLURM_NTASKS ranks on $SLURM_JOB_NODELIST"
srun --kill-on-bad-exit=1 --mpi="$MPI_TYPE" python tools/reorder_index.py "$@"
