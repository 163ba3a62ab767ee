#!/bin/bash
# DoReMi as jobs that wait for each other: reference, proxy, final model (docs/doremi.md).
#
#   slurm/doremi.sh doremi.yaml [options of sbatch]
#
# Each job is `megatron-d3 doremi doremi.yaml --step NAME` on its nodes. If one fails, those behind
# it are cancelled; the same command goes on where they stopped. The file's final: may be left out.
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.out
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@600
#
# Exit codes: 0 the step is trained; 1 refused or failed, see above in the output; 2 wrong usage.
set -euo pipefail

STEPS=${STEPS:-reference proxy final}
DEVICE=${DEVICE:-cuda}                   # cpu: a dry run; then also --gpus-per-node=0
NPROC=${NPROC:-${SLURM_GPUS_ON_NODE:-1}} # ranks on each node
VENV=${VENV-.venv}                       # a virtual environment, or empty: what is on the PATH

file=${1:-}
[ -f "$file" ] || { echo "usage: slurm/doremi.sh doremi.yaml [options of sbatch]" >&2; exit 2; }
[ -z "$VENV" ] || PATH=$(realpath "$VENV")/bin:$PATH
if [ -z "${SLURM_JOB_ID:-}" ]; then
    after=()
    for step in $STEPS; do
        job=$(sbatch --parsable --job-name="d3-$step" "${after[@]}" "${@:2}" "$0" "$file" "$step")
        echo "$step: job ${job%%;*}"
        # Without kill-on-invalid-dep a job whose predecessor failed would wait for ever.
        after=(--dependency="afterok:${job%%;*}" --kill-on-invalid-dep=yes)
    done
    exit 0
fi

step=$2
export MEGATRON_D3_DEVICE=$DEVICE CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
master=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + (SLURM_JOB_ID + ${SLURM_RESTART_COUNT:-0}) % 10000))
echo "[$(date '+%F %T') life ${SLURM_RESTART_COUNT:-0}] $step of $file on $SLURM_JOB_NODELIST"
# -m MODULE FLAGS are put behind these words; the node's shell adds what makes a rank save on USR1.
launcher="srun --kill-on-bad-exit=1 --wait=60 --ntasks-per-node=1
    --cpus-per-task=${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}
    bash -c 'trap \"\" USR1; exec torchrun \"\$@\" --exit-signal-handler --exit-signal SIGUSR1' _
    --nnodes=$SLURM_JOB_NUM_NODES --nproc-per-node=$NPROC --max-restarts=0 --rdzv-backend=c10d
    --rdzv-endpoint=$master:$port --rdzv-id=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"
python -m megatron_d3 doremi "$file" --step "$step" --launcher "$launcher" &
command=$!
# All processes of the steps, not this script: that is what scancel without --batch does.
trap 'echo "USR1: asking every rank for a checkpoint"; scancel --signal=USR1 "$SLURM_JOB_ID"' USR1
code=0
while kill -0 "$command" 2> /dev/null; do wait "$command" || true; done
wait "$command" || code=$?
echo "[$(date '+%F %T')] exit code $code"
if [ "$code" = 75 ]; then # stopped with a checkpoint before the end
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$code"
