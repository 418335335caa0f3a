#!/usr/bin/env bash
# A real SLURM cluster on this one machine, to learn and to test with.
#
#   slurm/local_cluster.sh start [--nodes N] [--gpus N] [--cpus N] [--port N] [--folder DIR] [--first N]
#   eval "$(slurm/local_cluster.sh env)"      # from here on sinfo, srun and sbatch mean this cluster
#   slurm/local_cluster.sh status
#   slurm/local_cluster.sh stop
#
# One controller, one daemon for each pretend node, and the munge daemon with which they recognise
# each other. All of them belong to you, root or not, listen on 127.0.0.1 only and keep everything
# in one folder, which must be yours alone: whoever can write there controls the daemons.
# Started by root it takes the jobs of all users of the machine, each as its owner.
# The GPUs are pretended: SLURM hands them out like real ones, and there is nothing behind them.
# Cores are declared, not separated. Needs Linux and Debian's or Ubuntu's packages.
set -euo pipefail

PACKAGES="slurmctld slurmd slurm-client munge"
INSTALL="apt-get install --no-install-recommends $PACKAGES"
PATH=$PATH:/usr/sbin:/sbin

main() {
    read_arguments "$@"
    case $command in
        start | stop | status) "$command" ;;
        env) print_environment ;;
    esac
}

read_arguments() {
    local usage="usage: slurm/local_cluster.sh start|stop|status|env [--nodes N] [--gpus N] [--cpus N] [--port N] [--first N] [--folder DIR]"
    command=${1:-}
    [[ $command =~ ^(start|stop|status|env)$ ]] || reject "$usage"
    shift
    nodes=2 gpus=4 cpus=4 port="" first=0
    folder=$(usual_folder)
    while [ $# -gt 0 ]; do
        [ $# -ge 2 ] || reject "$1 needs a value; $usage"
        case $1 in
            --nodes) nodes=$(whole_number "$1" "$2" 1 16) ;;
            --gpus) gpus=$(whole_number "$1" "$2" 0 16) ;;
            --cpus) cpus=$(whole_number "$1" "$2" 1 256) ;;
            --port) port=$(whole_number "$1" "$2" 1024 65000) ;;
            --first) first=$(whole_number "$1" "$2" 0 9999) ;;  # number in the first node's name
            --folder) folder=$2 ;;
            *) reject "$1 is not a flag of this program; $usage" ;;
        esac
        shift 2
    done
    [ -n "$folder" ] || reject "there is no home of yours for the cluster's folder; name one, yours or somebody else's, with --folder"
    [ ! -L "${folder%/}" ] || reject "$folder is a link; name the folder itself with --folder"
    check_links "$(dirname -- "$folder")"
    folder=$(realpath -m -- "$folder")
    export SLURM_CONF=$folder/slurm.conf
    [ ! -e "$folder" ] || check_owner
}

# One for each user, machine and copy of the course, where nobody else can make it first: not in
# /tmp. Short, because the name of a socket has at most 107 characters.
usual_folder() {
    local name place
    name=$({ uname -n && dirname "$(realpath "$0")"; } | cksum)
    name=course-cluster-${name%% *}
    if [ -n "${COURSE_CLUSTER_FOLDER:-}" ]; then
        echo "$COURSE_CLUSTER_FOLDER"
    elif [ "$(id -u)" = 0 ] && [ -w /run ]; then
        echo "/run/$name"  # other users can reach it there, unlike in root's home
    else
        for place in "${HOME:-}" "${XDG_RUNTIME_DIR:-}"; do
            if [ -O "$place" ] && [ -w "$place" ]; then
                echo "${place%/}/.$name"
                return
            fi
        done
    fi
}

# Another user's link on the way to a folder, or on a link's way, would lead where that user wants.
check_links() {
    [[ $1 = [/.] ]] || check_links "$(dirname -- "$1")"
    [ -L "$1" ] || return 0
    [[ $(stat -c %u -- "$1") =~ ^($(id -u)|0)$ ]] || reject "$1 is another user's link; name another --folder"
    local target; target=$(readlink -- "$1")
    [[ $target = /* ]] || target=$(dirname -- "$1")/$target
    [ ! -e "$1" ] || check_links "$target"  # else it leads nowhere, or in a circle
}

# A cluster's configuration names programs that SLURM's commands load, so another user's is not
# read, let alone written to. Only root's is used by others, and they change nothing in it.
check_owner() {
    local above=$folder
    owned_by "$(id -u)" "$folder" ||
        { [[ $command =~ ^(env|status)$ ]] && owned_by 0 "$folder"; } ||
        reject "$folder is not a folder that only you can write to; name a new one with --folder"
    until [ "$above" = / ]; do
        above=$(dirname "$above")
        owned_by "$(id -u)" "$above" || owned_by 0 "$above" || is_sticky "$above" ||
            reject "$above, which $folder lies in, can be changed by others; name another --folder"
    done
}

# Whether a folder, and no link to one, belongs to this user and only its owner may write to it.
owned_by() {
    [[ $(stat -c %u:%A "$2") =~ ^$1:d....[^w]..[^w]. ]]
}

# Root's, and nobody there can rename or remove what is somebody else's, as in /tmp.
is_sticky() {
    [[ $(stat -c %u:%A "$1") =~ ^0:d........[tT] ]]
}

whole_number() {
    [[ $2 =~ ^[0-9]{1,5}$ ]] && [ "$2" -ge "$3" ] && [ "$2" -le "$4" ] ||
        reject "$1 must be a whole number from $3 to $4, not '$2'"
    echo "$((10#$2))"  # 08 is eight, and not a wrong octal number
}

reject() {
    echo "$1" >&2
    exit 2
}

start() {
    check_machine
    make_folder
    if any_running && [ -e "$SLURM_CONF" ]; then
        echo "a cluster is running already; what it lacks is started again"
    else
        write_configuration
    fi
    start_munge
    is_running slurmctld || within 5 slurmctld -f "$SLURM_CONF" -i ||
        fail "slurmctld, the controller, did not start" "$folder/log/slurmctld.log"
    local name
    for name in $(node_names); do
        is_running "slurmd.$name" || start_node "$name" ||
            fail "slurmd, the daemon of node $name, did not start" "$folder/log/slurmd.$name.log"
    done
    wait_until_idle
    echo "$(node_names | wc -w) nodes are up: $(node_names | xargs). This shell uses them after:"
    echo "  eval \"\$(slurm/local_cluster.sh env$(folder_flag))\""
    [ "$(id -u)" != 0 ] || cat <<TEXT
Other users of this machine reach it from a copy of their own with:
  eval "\$(slurm/local_cluster.sh env --folder $folder)"
TEXT
}

# New, or one of a cluster of one's own. Others enter only root's, and find no log or state there.
make_folder() {
    umask 022
    [ -e "$folder" ] || mkdir -m 700 "$folder" 2>/dev/null || [ -e "$folder" ] ||
        reject "--folder $folder cannot be made; name one in a folder of yours that exists"
    check_owner
    # Elsewhere a file could have the name of one of the cluster's, such as /etc/hosts.
    [ -d "$folder/state" ] && [ -d "$folder/gpu" ] && [ -d "$folder/munge" ] ||
        [ -z "$(ls -A "$folder")" ] ||
        reject "$folder has files of something else in it; name a new folder with --folder"
    mkdir -p -m 700 "$folder"/{log,state}
    mkdir -p "$folder"/{run,gpu,munge}
    [ "$(id -u)" != 0 ] || chmod 755 "$folder"
}

check_machine() {
    [ "$(uname)" = Linux ] ||
        reject "SLURM runs on Linux; on macOS and Windows use torchrun, or a Linux virtual machine"
    local program missing=""
    for program in slurmctld slurmd srun sbatch munged; do
        type -P "$program" >/dev/null || missing+=" $program"
    done
    [ -z "$missing" ] ||
        reject "not installed:$missing; on Debian and Ubuntu, as root: $INSTALL"
    # A socket's name has 107 characters at most: here up to /spool.pp10014/pp10014_59996001.4294967291.
    [ ${#folder} -le 65 ] ||
        reject "--folder $folder is too long a name for the sockets in it; use one of 65 characters or less"
    [[ $folder =~ ^[A-Za-z0-9/._-]+$ ]] ||
        reject "--folder $folder: SLURM's configuration takes letters, digits and / . _ - only; use such a name"
}

# With SLURM's own file, so that a cluster that is running keeps the names it was started with.
node_names() {
    sed -n 's/^NodeName=\([^ ]*\) .*/\1/p' "$SLURM_CONF"
}

write_configuration() {
    local user memory i
    [ -n "$port" ] || port=$(free_ports)
    user=$(id -un)
    memory=$(awk '/^MemTotal/ { print int($2 * 0.9 / 1024) }' /proc/meminfo)
    for ((i = 0; i < gpus; i++)); do
        ln -sf /dev/null "$folder/gpu/nvidia$i"  # SLURM wants a device behind every GPU
    done
    {
        echo "AutoDetect=off"
        [ "$gpus" = 0 ] || echo "Name=gpu File=$folder/gpu/nvidia[0-$((gpus - 1))]"
    } >"$folder/gres.conf"
    local gres=""
    [ "$gpus" = 0 ] || gres="Gres=gpu:$gpus"
    cat >"$SLURM_CONF" <<CONFIGURATION
ClusterName=course
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=$port
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
# The second value lets a job start again 10 s after it ended instead of 120.
AuthInfo=socket=$folder/munge/socket,cred_expire=10
# Both are needed, or the controller listens to the whole network.
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation=$folder/state
SlurmctldPidFile=$folder/run/slurmctld.pid
SlurmctldLogFile=$folder/log/slurmctld.log
SlurmdSpoolDir=$folder/spool.%n
SlurmdPidFile=$folder/run/slurmd.%n.pid
SlurmdLogFile=$folder/log/slurmd.%n.log
# No cgroups, which take root and often a systemd.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$folder/log/jobcomp.log
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
GresTypes=gpu
PropagateResourceLimits=NONE
# Other numbers for every fresh start, so that no job writes into the folder of an older one; and,
# modulo 20000, for every cluster of this machine: a job's ranks meet at a port that follows from it.
FirstJobId=$(($(date +%s) / 10 % 3000 * 20000 + port % 800 * 20 + 1))
ReturnToService=2
KillWait=5
MinJobAge=3600
# A request that can never be granted is refused, not queued for ever.
EnforcePartLimits=ALL
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2
$(for ((i = 0; i < nodes; i++)); do
    echo "NodeName=pp$((first + i)) NodeHostname=localhost NodeAddr=127.0.0.1 Port=$((port + 1 + i))" \
        "CPUs=$cpus Sockets=1 CoresPerSocket=$cpus ThreadsPerCore=1 RealMemory=$memory $gres"
done)
PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=30:00 State=UP
CONFIGURATION
    # torch asks for the name of every address that it connects to, and of this one in both forms:
    # a network's name server that is busy or gone would hold up the start of a job for seconds.
    {
        echo "127.0.0.1 localhost $(node_names | xargs)"
        echo "::ffff:127.0.0.1 localhost-as-ipv6"
        cat /etc/hosts
    } >"$folder/hosts"
}

# The first of the needed number of consecutive free ports. Each user's search begins elsewhere,
# because in a course all start at the same moment.
free_ports() {
    local first=$((26817 + $(id -u) % 40 * 20)) i
    for ((i = 0; i <= nodes; i++)); do
        if (exec 3<>"/dev/tcp/127.0.0.1/$((first + i))") 2>/dev/null; then
            first=$((first + 20)) i=-1
        fi
    done
    echo "$first"
}

start_munge() {
    is_running munged && return
    [ -s "$folder/munge/key" ] ||
        (umask 077 && head -c 1024 /dev/urandom >"$folder/munge/key")
    # --force: it would reject a folder that others cannot enter, and only you are to use it. What
    # munged would check besides, check_owner has.
    within 5 munged --force --key-file "$folder/munge/key" --socket "$folder/munge/socket" \
        --log-file "$folder/munge/log" --pid-file "$folder/run/munged.pid" \
        --seed-file "$folder/munge/seed" || fail "munged did not start" "$folder/munge/log"
}

# A daemon that thinks its machine is called pp0, so that a job sees the names of its nodes. Where
# the system forbids that, the node keeps this machine's name, and `env` says where ranks meet.
start_node() {
    local inside="hostname $1 && mount --bind $folder/hosts /etc/hosts"
    local unshare=(unshare --uts --mount) drop=(setpriv --ambient-caps -all --inh-caps -all)
    [ "$(id -u)" = 0 ] || unshare+=(--user --map-current-user --keep-caps)
    if [ ! -e "$folder/plain" ] && "${unshare[@]}" bash -c "$inside" 2>"$folder/log/unshare.$1"; then
        within 10 "${unshare[@]}" bash -c "$inside && exec ${drop[*]} slurmd -f $SLURM_CONF -N $1"
    else
        touch "$folder/plain"
        within 10 slurmd -f "$SLURM_CONF" -N "$1"
    fi
}

within() {
    timeout --signal=KILL "$@" </dev/null >>"$folder/log/start" 2>&1
}

wait_until_idle() {
    local i
    for ((i = 0; i < 100; i++)); do
        [ "$(sinfo --noheader --Node --format=%t 2>/dev/null | grep -cE '^(idle|mix|alloc|comp)$')" \
            = "$(node_names | wc -w)" ] && return
        sleep 0.05
    done
    fail "the nodes are not ready after 5 s: $(sinfo --noheader --Node --format='%N %t' | xargs)" \
        "$folder/log/slurmctld.log"
}

fail() {
    echo "$1; the end of $2:" >&2
    tail -n 5 "$2" "$folder/log/start" >&2 || true
    stop >/dev/null
    exit 1
}

# By recorded process id, and only if the number has not gone to another program since, nor to that of
# another folder. What has ended and was not collected by its parent (state Z) is not running.
is_running() {
    local id
    id=$(id_of "$1")
    [ -n "$id" ] || return 1
    { [ "$(sed -n 's/^Name:\t//p' "/proc/$id/status")" = "${1%%.*}" ] &&
        grep -qF "$folder/" "/proc/$id/cmdline" && ! grep -q '^State:.*Z' "/proc/$id/status"; } 2>/dev/null
}

# Not $(<file): a daemon removes its file as it ends, and bash would end with it.
id_of() {
    cat "$folder/run/$1.pid" 2>/dev/null || true
}

daemons() {
    [ -e "$SLURM_CONF" ] || return 0
    node_names | sed 's/^/slurmd./'
    printf '%s\n' slurmctld munged
}

any_running() {
    local name
    for name in $(daemons); do
        is_running "$name" && return
    done
    return 1
}

stop() {
    any_running || { echo "no cluster is running in $folder"; return; }
    local name i jobs
    if is_running slurmctld && is_running munged; then
        # Of all users: whom root has let in must not be left with ranks that nobody can cancel.
        read -ra jobs <<<"$(timeout 5 squeue --noheader --format=%A 2>/dev/null | xargs)" || true
        timeout 5 scancel "${jobs[@]}" 2>/dev/null || true
        timeout 5 scancel --signal=KILL --full "${jobs[@]}" 2>/dev/null || true
        for ((i = 0; i < 200; i++)); do
            [ -n "$(timeout 5 squeue --noheader 2>/dev/null)" ] || break
            sleep 0.05
        done
    fi
    for name in $(daemons); do
        end_daemon "$name"
    done
    echo "stopped; $folder keeps its logs and job numbers, and may be deleted"
}

end_daemon() {
    local i id
    id=$(id_of "$1")
    is_running "$1" || return 0
    kill "$id" 2>/dev/null || true
    for ((i = 0; i < 100; i++)); do
        is_running "$1" || { rm -f "$folder/run/$1.pid"; return 0; }
        sleep 0.05
    done
    kill -KILL "$id" 2>/dev/null || true
    rm -f "$folder/run/$1.pid"
}

status() {
    any_running || { echo "no cluster is running in $folder"; exit 3; }
    local name
    for name in $(daemons); do
        if is_running "$name"; then
            printf '%-14s process %s\n' "$name" "$(id_of "$name")"
        else
            printf '%-14s not running; start starts it again\n' "$name"
        fi
    done
    timeout 5 sinfo || true
    timeout 5 squeue || true
}

print_environment() {
    any_running || reject "no cluster is running in $folder; first: slurm/local_cluster.sh start$(folder_flag), or name the folder of somebody else's with --folder"
    printf 'export SLURM_CONF=%q\n' "$SLURM_CONF"
    [ ! -e "$folder/plain" ] || echo "export MASTER_ADDR=127.0.0.1  # the nodes' names do not resolve here"
}

folder_flag() {
    local usual
    usual=$(usual_folder)
    [ "$folder" = "$(realpath -m "${usual:-/}")" ] || echo " --folder $folder"
}

main "$@"
