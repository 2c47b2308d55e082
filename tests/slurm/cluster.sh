#!/usr/bin/env bash
# A SLURM of two nodes on this machine: `cluster.sh FOLDER`, which gets slurm.conf, logs, state and, once both nodes are
# idle, the file `ready`. Run by cluster.py as the first process of namespaces of its own (processes, mounts, network,
# hostname), so that killing it ends every daemon and job, and leaves no mount and no network behind.
#
# Itself it is the controller, 198.51.100.1; node1 and node2 are network namespaces behind a bridge. CPUs, memory and
# GPUs of the nodes are claims that SLURM believes, so a real cluster's job script is taken as it is. FREEZER is a
# subtree of cgroup version 1's freezer, where there is one.
set -euo pipefail
folder=$1
network=198.51.100 # TEST-NET-2, inside our namespaces alone
nodes=(node1 node2)
export SLURM_CONF=$folder/slurm.conf

mount -t tmpfs none /run # for `ip netns`, which keeps files there
mkdir -p "$folder"/{state,log}

# ---- network: a bridge, and a namespace for each node ----------------------------------------------------------------
hostname controller
ip link set lo up
ip link add bridge0 type bridge
ip addr add "$network.1/24" dev bridge0
ip link set bridge0 up
{
    echo "127.0.0.1 localhost"
    echo "$network.1 controller"
} >"$folder/hosts"
for i in "${!nodes[@]}"; do
    node=${nodes[$i]}
    address=$network.$((11 + i))
    ip netns add "$node"
    ip -n "$node" link add eth0 type veth peer name "port$i" netns "$$"
    ip link set "port$i" master bridge0 up
    ip -n "$node" link set lo up
    ip -n "$node" addr add "$address/24" dev eth0
    ip -n "$node" link set eth0 up
    echo "$address $node" >>"$folder/hosts"
done
mount --bind "$folder/hosts" /etc/hosts

# ---- how it follows a job's processes, and so who gets a signal: by cgroup, as real clusters do, where it can ---------
track=linuxproc
if [ -n "${FREEZER:-}" ]; then
    mount --bind "$FREEZER" /sys/fs/cgroup/freezer
    track=cgroup
fi
echo "CgroupPlugin=cgroup/v1" >"$folder/cgroup.conf"
# A plain file will do where no device may be made; slurmd then complains in its log.
for i in {0..7}; do mknod "/run/gpu$i" c 1 3 2>/dev/null || touch "/run/gpu$i"; done
echo "Name=gpu File=/run/gpu[0-7]" >"$folder/gres.conf"
cat >"$SLURM_CONF" <<CONF
ClusterName=test
SlurmctldHost=controller($network.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/log/slurmctld.log
SlurmdLogFile=$folder/log/slurmd-%n.log
ProctrackType=proctrack/$track
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SlurmdParameters=config_overrides
GresTypes=gpu
KillWait=10
MinJobAge=3600
PropagateResourceLimits=NONE
MailProg=/bin/true
NodeName=node1 NodeAddr=$network.11 CPUs=64 RealMemory=500000 Gres=gpu:8
NodeName=node2 NodeAddr=$network.12 CPUs=64 RealMemory=500000 Gres=gpu:8
PartitionName=main Nodes=node[1-2] Default=YES MaxTime=INFINITE State=UP
CONF

# ---- daemons, without munge: there is nobody else in these namespaces ------------------------------------------------
slurmctld -D >"$folder/log/slurmctld.out" 2>&1 &
for node in "${nodes[@]}"; do
    nsenter --net="/run/netns/$node" unshare --uts sh -c "hostname $node; exec slurmd -D" \
        >"$folder/log/slurmd-$node.out" 2>&1 &
done
(
    until [ "$(sinfo -h -N -t idle -o %N 2>/dev/null | wc -l)" = "${#nodes[@]}" ]; do sleep 0.1; done
    echo ready >"$folder/ready"
) &
waiter=$!
# Ends only when a daemon does.
wait -n -p ended
[ "$ended" != "$waiter" ] || wait -n
exit 1
