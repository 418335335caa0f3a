# Sourced by every job script, in the repository's root: reads slurm/site.env, says which of its
# values is wrong, and sets what the scripts use:
#   PYTHON, TORCHRUN   the words that start them, container included
#   RANKS_PER_NODE     for torchrun
#   HEAD, PORT         where the ranks of this job meet
#   LOGS               a folder of this job for what each rank prints
# and seconds_left, until the job's time limit; own_folder, for one below build.
# shellcheck shell=bash disable=SC2034  # what is set here the job scripts use
set -euo pipefail

site=${COURSE_SITE:-slurm/site.env}
if [ ! -f "$site" ]; then
    echo "$site is not there; submit jobs from the course's own folder, or let COURSE_SITE name a file" >&2
    exit 2
fi
if LC_ALL=C grep -aq $'\r$\|^\xef\xbb\xbf' "$site"; then
    echo "$site was saved as on Windows; mend it: sed -i 's/\r\$//; s/^\xef\xbb\xbf//' $site" >&2
    exit 2
fi
# An apostrophe in a comment may close a quote: the first command finds it, the second UTF-16, too.
reason=$(LC_ALL=C grep -m 1 -E "^COURSE_[A-Z_]*=[^'\"#]*(\"[^\"]*|'[^']*)$" "$site" || LC_ALL=C bash -n "$site" 2>&1 || true)
if [ -n "$reason" ]; then
    echo "$site cannot be read (${reason%%$'\n'*}); close each quote, and save it as UTF-8" >&2
    exit 2
fi
# shellcheck source=slurm/site.env
. "$site"
for name in GPUS_PER_NODE GPU_TYPE EXCLUSIVE RANKS_PER_NODE MODULES CONTAINER PYTHON INTERFACE; do
    name=COURSE_$name
    [ -n "${!name+set}" ] || { echo "$site has no $name; copy its line from slurm/site.env" >&2; exit 2; }
done

wrong_value() {
    echo "$site: $1=${!1} is wrong: $2" >&2
    exit 2
}

# Until this job's time limit; a year without one. SLURM says it as [DAYS-][HOURS:]MINUTES:SECONDS.
seconds_left() {
    local left part
    left=$(squeue --noheader --job "$SLURM_JOB_ID" --format=%L 2>/dev/null || true)
    [[ $left =~ ^(([0-9]+)-)?(([0-9]+):)?([0-9]+):([0-9]+)$ ]] || { echo 31536000; return; }
    part=("${BASH_REMATCH[@]}")
    echo $((((10#0${part[2]} * 24 + 10#0${part[4]}) * 60 + 10#${part[5]}) * 60 + 10#${part[6]}))
}

for name in COURSE_GPUS_PER_NODE COURSE_RANKS_PER_NODE; do
    [[ ${!name} =~ ^(0|[1-9][0-9]{0,2})?$ ]] ||
        wrong_value $name "it must be a whole number below 1000"
done
[[ $COURSE_GPU_TYPE != *[[:space:]:=]* ]] ||
    wrong_value COURSE_GPU_TYPE "it is one word, the a100 of gpu:a100:4, without the number"
[[ $COURSE_EXCLUSIVE =~ ^(yes)?$ ]] || wrong_value COURSE_EXCLUSIVE "it is yes or empty"
[ "$COURSE_RANKS_PER_NODE" != 0 ] || wrong_value COURSE_RANKS_PER_NODE "a node needs a rank"

if [ -n "$COURSE_MODULES" ]; then
    type module >/dev/null 2>&1 ||
        wrong_value COURSE_MODULES "$(hostname) has no module command; leave it empty"
    # shellcheck disable=SC2086  # several modules
    module load $COURSE_MODULES || wrong_value COURSE_MODULES "module load fails; see module avail"
fi

read -ra PYTHON <<<"$COURSE_CONTAINER"
if [ -n "$COURSE_CONTAINER" ] && ! type -P "${PYTHON[0]:-}" >/dev/null; then  # of blanks only, it has no word
    wrong_value COURSE_CONTAINER "there is no program ${PYTHON[0]:-''} on $(hostname)"
fi
if [ -n "$COURSE_PYTHON" ]; then
    PYTHON+=("$COURSE_PYTHON")
elif [ -x .venv/bin/python ]; then
    PYTHON+=("$PWD/.venv/bin/python")
else
    PYTHON+=(python3)
fi
has_torch="import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
"${PYTHON[@]}" -c "$has_torch" 2>/dev/null ||
    wrong_value COURSE_PYTHON "'${PYTHON[*]}' does not start on $(hostname), or has no torch; name the Python that has the course's packages"
TORCHRUN=("${PYTHON[@]}" -m torch.distributed.run)

if [ -n "$COURSE_INTERFACE" ]; then
    [[ $COURSE_INTERFACE != */* && -e /sys/class/net/$COURSE_INTERFACE/address ]] ||
        wrong_value COURSE_INTERFACE "$(hostname) has $(ls -m /sys/class/net)"
    export GLOO_SOCKET_IFNAME=$COURSE_INTERFACE NCCL_SOCKET_IFNAME=$COURSE_INTERFACE
fi

[[ ${SLURM_JOB_ID:-} =~ ^[1-9][0-9]*$ ]] || {  # a folder of this name is removed below
    echo "SLURM_JOB_ID is not the number of a job: start a job script with sbatch, as in: sbatch slurm/train.sbatch gpipe.py" >&2
    exit 2
}
# SLURM names no GPUs, or 0, for a job without any.
[[ ${SLURM_GPUS_ON_NODE:-} =~ ^[1-9][0-9]*$ ]] || unset SLURM_GPUS_ON_NODE
RANKS_PER_NODE=${COURSE_RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-2}}
# The first node of the list. The ranks of a pipeline are numbered along it.
HEAD=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}
[ -n "$HEAD" ] || { echo "scontrol does not say where the ranks meet; export MASTER_ADDR=NODE" >&2; exit 2; }
# Jobs may share a node; each has a port of its own, below those that the system hands out.
PORT=$((10000 + SLURM_JOB_ID % 20000))
unset SLURM_CONSTRAINT  # of the shell that submitted; a step that wants it waits for ever
# srun does not take this over from sbatch by itself.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
# Makes folders, the last of them to write to. Where all may write to build, another user can be
# first with a folder, or with a link that leads elsewhere what is written and removed. set -e has
# no effect here, because job scripts source this file before ||.
own_folder() {
    local folder
    for folder in "$@"; do
        mkdir -p "$folder" 2>/dev/null ||
            { echo "$PWD/${!#} cannot be made; submit from a copy of the course that you may write to" >&2; exit 2; }
        [ ! -L "$folder" ] && [ -O "$folder" ] ||
            { echo "$PWD/$folder is a link or another user's; submit from your own copy of the course" >&2; exit 2; }
    done
}

LOGS=build/jobs/$SLURM_JOB_ID
own_folder build/jobs "$LOGS"
# An older cluster may have left logs of a job with this number.
[ "${SLURM_RESTART_COUNT:-0}" != 0 ] || { rm -rf "$LOGS"; own_folder "$LOGS"; }
# On a full disk torchrun would lose there what the ranks say.
{ echo "$SLURM_JOB_NODELIST" >"$LOGS/nodes" && rm "$LOGS/nodes"; } 2>/dev/null ||
    { echo "$PWD/$LOGS cannot be written to (a full disk, or a quota?); make room there" >&2; exit 2; }
echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, attempt $((${SLURM_RESTART_COUNT:-0} + 1))"
