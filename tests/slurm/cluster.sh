#!/bin/bash
# A Slurm cluster inside one set of namespaces of this machine, for tests. cluster.py starts it:
#
#   unshare --mount --uts --net --pid --fork --mount-proc --kill-child cluster.sh up NODES DIR...
#
# This process is PID 1 there. It ends when its standard input does, and the kernel then ends every
# process, network and mount of the cluster with it: nothing is left, however the tests end.
# Each node is a namespace set of its own: host name, address, processes, /dev/shm, and /tmp apart
# from DIR..., the directories that all nodes share. CPUs, memory and GPUs are declared, not real.
#
#   cluster.sh node N      start node N again (power on); the rest is plain `ip link` and `kill`
set -euo pipefail
LAB=/run/cluster NET=10.99.0
export SLURM_CONF=$LAB/slurm.conf

configure() { # number of nodes, shared directories
    local n=$1 i
    mount -t tmpfs tmpfs /run
    mkdir -p $LAB/{state,log,etc,gpu,run}
    chmod 755 $LAB $LAB/run
    printf '%s\n' "${@:2}" > $LAB/shared
    {
        echo "127.0.0.1 localhost"
        echo "$NET.254 control"
        for ((i = 1; i <= n; i++)); do echo "$NET.$i node$i"; done
    } > $LAB/etc/hosts
    # No name server: asking one that does not answer costs torch seconds for each peer.
    { echo "hosts: files"; sed '/^hosts:/d' /etc/nsswitch.conf; } > $LAB/etc/nsswitch.conf
    for ((i = 0; i < 8; i++)); do mknod $LAB/gpu/gpu$i c 1 3; done
    echo "NodeName=node[1-$n] Name=gpu File=$LAB/gpu/gpu[0-7]" > $LAB/gres.conf
    # slurmd would look for a cgroup plugin, find none in a namespace and give up; v1 is not looked for.
    echo "CgroupPlugin=cgroup/v1" > $LAB/cgroup.conf
    : > $LAB/plugstack.conf
    cat > $SLURM_CONF <<END
ClusterName=tests
SlurmctldHost=control($NET.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits cred_expire + 1 seconds, by default two minutes; 5 is the least.
AuthInfo=socket=$LAB/run/munge,cred_expire=5
StateSaveLocation=$LAB/state
SlurmdSpoolDir=$LAB/spool.%n
SlurmctldPidFile=$LAB/run/slurmctld.pid
SlurmdPidFile=$LAB/run/slurmd.%n.pid
SlurmctldLogFile=$LAB/log/slurmctld
SlurmdLogFile=$LAB/log/slurmd.%n
PlugStackConfig=$LAB/plugstack.conf
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
GresTypes=gpu
JobRequeue=1
ReturnToService=2
# A silent node is down after about this and the next round of pings.
SlurmdTimeout=6
SlurmctldTimeout=30
MessageTimeout=5
TCPTimeout=2
KillWait=3
MinJobAge=3600
MailProg=/bin/true
NodeName=node[1-$n] NodeAddr=$NET.[1-$n] CPUs=64 RealMemory=1000000 Gres=gpu:8 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
END
}

control() { # the controller's side: a bridge, the key daemon, slurmctld
    hostname control
    mount --bind $LAB/etc/hosts /etc/hosts
    mount --bind $LAB/etc/nsswitch.conf /etc/nsswitch.conf
    ip link set lo up
    ip link add bridge type bridge
    ip addr add $NET.254/24 dev bridge
    ip link set bridge up
    (umask 077 && mkdir $LAB/munge && head -c 1024 /dev/urandom > $LAB/munge/key)
    # --force: it only warns about directories that others may write.
    munged --force --key-file=$LAB/munge/key --socket=$LAB/run/munge --num-threads=4 \
        --pid-file=$LAB/run/munged.pid --log-file=$LAB/munge/log --seed-file=$LAB/munge/seed
    slurmctld
}

node() { # power node N on
    local n=$1 pid
    mkdir -p $LAB/spool.node$n
    unshare --net --uts --ipc --mount --pid --fork --mount-proc --kill-child \
        "$0" inside "$n" < /dev/null >> $LAB/log/node$n 2>&1 &
    for _ in {1..100}; do
        pid=$(< "/proc/$!/task/$!/children")
        [ -z "$pid" ] || break
        sleep 0.02
    done
    echo "${pid% }" > $LAB/run/node$n.pid
    ip link del cable$n 2> /dev/null || true
    ip link add cable$n type veth peer name plug$n
    ip link set cable$n master bridge up
    ip link set plug$n netns "${pid% }" name eth0 # last: the node waits for it
}

inside() { # PID 1 of a node
    local n=$1 tmp=$LAB/tmp.node$1 directory
    hostname "node$n"
    mount -t tmpfs -o mode=1777 tmpfs /dev/shm
    rm -rf "$tmp" && mkdir -p "$tmp" && chmod 1777 "$tmp"
    while read -r directory; do
        case $directory/ in /tmp/*)
            mkdir -p "$directory" "$tmp/${directory#/tmp/}"
            mount --bind "$directory" "$tmp/${directory#/tmp/}" ;;
        esac
    done < $LAB/shared
    mount --rbind "$tmp" /tmp
    until ip link show eth0 > /dev/null 2>&1; do sleep 0.02; done
    ip link set lo up
    ip addr add $NET.$n/24 dev eth0
    ip link set eth0 up
    cd /
    slurmd -D -N "node$n" &
    # slurmd as PID 1 would not bury the orphans of killed jobs. Without it the node goes on.
    set +e
    while :; do wait -n; sleep 0.2; done
}

case $1 in
up)
    configure "${@:2}"
    control
    for ((i = 1; i <= $2; i++)); do node $i; done
    echo ready
    cat > /dev/null # until whoever started the cluster closes the pipe, or dies
    ;;
node | inside) "$1" "$2" ;;
esac
