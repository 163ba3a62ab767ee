#!/bin/bash
# Megatron-D3 on a Slurm cluster: one job that trains to the end of the run, over as many lives as
# that takes. Submit it from the checkout; slurm/README.md explains everything.
#
#   MODEL=llama-1b CONFIG=run.yaml RUN=/shared/runs/one sbatch slurm/pretrain_d3.sh [Megatron's flags]
#
# Edit these lines or give sbatch the same options, which win: --nodes=16, --account=, --partition= ...
#SBATCH --job-name=d3
#SBATCH --nodes=2
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
# Exit codes: 0 trained to the end (RUN/DONE says so), or stopped because RUN/STOP is there;
# 1 refused: one rank said why, a repetition would say the same; 2 a setting below is wrong;
# 3 failed, and no checkpoint came of this life; 4 failed or timed out in the last life allowed.
# Between two lives the job is PENDING: it has requeued itself, or Slurm has after a node was lost.
set -euo pipefail

# --- settings: the environment wins ---------------------------------------------------------------
MODEL=${MODEL:-llama-1b}            # presets of examples/models/ or flag files; a later one wins
CONFIG=${CONFIG:-run.yaml}          # domains and mixture: --d3-config
RUN=${RUN:-runs/${MODEL// /-}}      # on a file system that all nodes share; not named by the job id
TOKENIZER=${TOKENIZER:-}            # a SentencePiece model, or give Megatron's --tokenizer-* flags
SAMPLES=${SAMPLES:-1000000}         # samples of seq_length tokens to train on in all
SAVE_INTERVAL=${SAVE_INTERVAL:-500} # steps between two checkpoints
EVAL_INTERVAL=${EVAL_INTERVAL:-500} # steps between two evaluations
DEVICE=${DEVICE:-cuda}              # cpu: a dry run over gloo; then also sbatch --gpus-per-node=0
NPROC=${NPROC:-${SLURM_GPUS_ON_NODE:-1}} # ranks on each node
VENV=${VENV-.venv}                  # a virtual environment, or empty: what is on the PATH
CONTAINER=${CONTAINER:-}            # an image for Pyxis, in place of VENV
MOUNTS=${MOUNTS:-}                  # more directories for the container: /data:/data,...
LOGS=${LOGS:-}                      # default RUN/logs; elsewhere, a full disk can still be reported
LIVES=${LIVES:-100}                 # how often the job may start
JOIN_SECONDS=${JOIN_SECONDS:-300}   # how long nodes wait for each other at the start
COLLECTIVE_SECONDS=${COLLECTIVE_SECONDS:-600} # a collective that takes longer ends the life

# --- everything else follows ----------------------------------------------------------------------
say() { echo "[$(date '+%F %T') life $life] $*"; }
wrong() { echo "slurm/pretrain_d3.sh: $*" >&2; exit 2; }
checkpoint() { cat "$RUN/latest_checkpointed_iteration.txt" 2> /dev/null || echo 0; }

life=${SLURM_RESTART_COUNT:-0}
[ -n "${SLURM_JOB_ID:-}" ] || wrong "is a job: start it with sbatch"
[ -d megatron_d3 ] || wrong "$PWD is no checkout of Megatron-D3; submit the job from there"
mkdir -p "$RUN" || wrong "RUN=$RUN cannot be made"
RUN=$(realpath "$RUN")
LOGS=$(realpath -m "${LOGS:-$RUN/logs}")/$SLURM_JOB_ID-$life
export LOGS

flags=()
for name in $MODEL; do
    file=$name
    [ -f "$file" ] || file=examples/models/$name.args
    [ -f "$file" ] || wrong "MODEL=$name is neither a file nor one of $(cd examples/models && ls)"
    words=$(grep -v '^ *#' "$file")
    # shellcheck disable=SC2206  # one flag a line, split at spaces on purpose
    flags+=($words)
done
[ -f "$CONFIG" ] || wrong "CONFIG=$CONFIG is no file"
if [ -n "$TOKENIZER" ]; then
    [ -f "$TOKENIZER" ] || wrong "TOKENIZER=$TOKENIZER is no file"
    flags+=(--tokenizer-type SentencePieceTokenizer --tokenizer-model "$TOKENIZER")
fi
case " $* " in *" --exit-duration-in-mins"* | *" --exit-interval"*)
    wrong "--exit-duration-in-mins and --exit-interval: use sbatch --time, which this script follows" ;;
esac
flags+=(
    --d3-config "$CONFIG" --train-samples "$SAMPLES" --eval-interval "$EVAL_INTERVAL"
    --save "$RUN" --load "$RUN" --save-interval "$SAVE_INTERVAL"
    --exit-signal-handler --exit-signal SIGUSR1
    --distributed-timeout-minutes $(((COLLECTIVE_SECONDS + 59) / 60))
    --distributed-timeout-seconds-after-init "$COLLECTIVE_SECONDS"
    "$@"
)

container=()
if [ -n "$CONTAINER" ]; then
    container=(--container-image="$CONTAINER" --container-workdir="$PWD" --no-container-mount-home
        --container-mounts="$PWD:$PWD,$RUN:$RUN,${LOGS%/*}:${LOGS%/*}${MOUNTS:+,$MOUNTS}")
elif [ -n "$VENV" ]; then
    [ -x "$VENV/bin/torchrun" ] || wrong "VENV=$VENV has no torchrun: make setup, or set VENV= or CONTAINER="
    PATH=$(realpath "$VENV")/bin:$PATH
fi

# NCCL and gloo read NCCL_*, GLOO_SOCKET_IFNAME ... of your environment: nothing is set here.
export MEGATRON_D3_DEVICE=$DEVICE CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
cpus=${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cpus > NPROC ? cpus / NPROC : 1))}
# Here, not in the container, which has no scontrol.
master=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# --- one life -------------------------------------------------------------------------------------
if [ -e "$RUN/DONE" ]; then say "$RUN/DONE is there: nothing to do"; exit 0; fi
if [ -e "$RUN/STOP" ]; then say "$RUN/STOP is there: remove it to go on"; exit 0; fi
mkdir -p "$LOGS" || wrong "LOGS=${LOGS%/*} cannot be made"
cp "$0" "$LOGS/job.sh"
before=$(checkpoint)
say "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, rendezvous at $master; $NPROC ranks a node on $DEVICE"
say "Megatron-D3 $(git rev-parse --short HEAD 2> /dev/null || echo without git); from step $before"
say "flags: ${flags[*]}"
say "watch: tail -F $LOGS/*-rank*.log"

# In single quotes: node and rank are known there, not here. USR1 reaches every process of the step:
# torchrun would die of it, and so would a rank that is still importing.
each_node='trap "" USR1; exec torchrun "$@"'
each_rank='exec python -u -m megatron_d3.pretrain "$@" > "$LOGS/$(hostname -s)-rank$RANK.log" 2>&1'
is_stopping=
trap 'is_stopping=yes; say "USR1: asking every rank for a checkpoint"' USR1
srun --kill-on-bad-exit=1 --wait=60 --ntasks-per-node=1 --cpus-per-task="$cpus" "${container[@]}" \
    bash -c "$each_node" _ --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$NPROC" \
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID.$life" --rdzv-conf="join_timeout=$JOIN_SECONDS" \
    --rdzv-endpoint="$master:$((20000 + (SLURM_JOB_ID + life) % 10000))" --max-restarts=0 \
    --no-python bash -c "$each_rank" _ "${flags[@]}" &
step=$!
# In the background and in a loop, since bash runs a trap only between commands. USR1 is sent again
# and again: a rank that was not ready for it yet has ignored it.
while kill -0 "$step" 2> /dev/null; do
    [ -z "$is_stopping" ] || kill -USR1 "$step" 2> /dev/null || true
    sleep 10 &
    wait -n "$step" $! || true
done
code=0
wait "$step" || code=$?

# --- and then -------------------------------------------------------------------------------------
after=$(checkpoint)
say "srun rc $code, checkpoint at step $after"
if [ "$code" = 0 ] && [ -z "$is_stopping" ]; then
    echo "job $SLURM_JOB_ID, life $life, step $after" > "$RUN/DONE"
    say "done"
    exit 0
fi
said='^megatron_d3\.pretrain: rank [0-9]+: (Config|Corpus|Plan|Resume|Probe|D3)Error: '
if file=$(grep -lE "$said" "$LOGS"/*.log | sort -V | head -n 1) && [ -n "$file" ]; then
    sed -nE "/$said/,\$p" "$file" | head -n 8 # as one rank says it
    say "refused, see above. Correct that and submit the job again"
    exit 1
fi
grep -hE '^megatron_d3\.pretrain: rank [0-9]+ on ' "$LOGS"/*.log || true
if [ -e "$RUN/STOP" ]; then say "$RUN/STOP is there: not requeued"; exit 0; fi
# A node that was cut off and is back: Slurm has started the job again meanwhile. Leave that alone.
if ! scontrol show job -o "$SLURM_JOB_ID" | grep -q " Restarts=$life "; then
    say "this job lives on elsewhere"
    exit 1
fi
if [ "$after" -le "$before" ]; then
    say "no checkpoint came of this life: not requeued; the last words of rank 0:"
    tail -n 20 "$LOGS"/*-rank0.log || true
    exit 3
fi
if [ $((life + 1)) -ge "$LIVES" ]; then say "life $life was the last of LIVES=$LIVES"; exit 4; fi
say "requeued: goes on from step $after"
scontrol requeue "$SLURM_JOB_ID"
