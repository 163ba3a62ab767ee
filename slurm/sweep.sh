#!/bin/bash
# Every mixer with every seed: an array of jobs, each of them slurm/pretrain_d3.sh with its settings.
#
#   MIXERS="static natural odm" SEEDS="1 2 3" RUN=/shared/sweep slurm/sweep.sh [options of sbatch]
#
# Runs are RUN/MIXER-SEED; compare them with `megatron-d3 plot table RUN/*`. A mixer with keys of its
# own is a file of mix: settings, e.g. MIXERS="static odm-fast" and odm-fast.mix next to run.yaml:
#   {type: odm, smoothing: 0.5}
#SBATCH --job-name=d3-sweep
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --output=%x-%A-%a.out
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@600
set -euo pipefail

MIXERS=${MIXERS:-static odm}
SEEDS=${SEEDS:-1 2 3}
AT_ONCE=${AT_ONCE:-8}       # jobs that may run at the same time
export CONFIG=${CONFIG:-run.yaml} RUN=${RUN:-runs/sweep} MIXERS SEEDS

read -ra mixers <<< "$MIXERS"
read -ra seeds <<< "$SEEDS"
number=$((${#mixers[@]} * ${#seeds[@]}))
[ "$number" -gt 0 ] || { echo "slurm/sweep.sh: MIXERS or SEEDS is empty" >&2; exit 2; }
if [ -z "${SLURM_JOB_ID:-}" ]; then
    exec sbatch --array="0-$((number - 1))%$AT_ONCE" "$@" "$0"
fi

task=$SLURM_ARRAY_TASK_ID
mixer=${mixers[task / ${#seeds[@]}]}
seed=${seeds[task % ${#seeds[@]}]}
mix="{type: $mixer}"
file=$(dirname "$CONFIG")/$mixer.mix
[ ! -f "$file" ] || mix=$(< "$file")
export RUN=$RUN/$mixer-$seed
exec bash slurm/pretrain_d3.sh --seed "$seed" --d3-set "mix=$mix"
