#!/bin/bash
# What a guest does once it sees the host's files: network, RDMA device, then one command after another.
# The folder /lab is shared with the host and is all that goes between them: environment, do/N (a script, with
# do/N.go when it is whole), did/N.log, did/N.status (written last), up (when the guest is ready).
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 HOME=/root
mount -t tmpfs -o mode=0755 tmpfs /run
mkdir -p /run/lock /dev/shm /dev/pts /lab /lib/modules
mount -t tmpfs tmpfs /dev/shm
mount -t devpts devpts /dev/pts
ln -s /proc/self/fd /dev/fd 2>/dev/null # the kernel's own /dev lacks it
mount -t debugfs debugfs /sys/kernel/debug 2>/dev/null
# Where the kernel checks the DMA API: tells of each fault, and not of the first one alone.
[ -w /sys/kernel/debug/dma-api/all_errors ] && echo 1 >/sys/kernel/debug/dma-api/all_errors
if ! mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=none lab /lab; then
    echo "lab: the shared folder cannot be mounted"
    echo o >/proc/sysrq-trigger
    sleep 10
fi
# shellcheck disable=SC1091  # written by the host: NODE, MODULES
. /lab/environment
mount --bind "$MODULES" /lib/modules
ulimit -l unlimited
ulimit -n 65536
echo "node$NODE" >/proc/sys/kernel/hostname
{
    ip link set lo up
    for path in /sys/class/net/*; do
        name=${path##*/}
        [ "$name" = lo ] || break
    done
    # 4200: an RDMA path MTU of 4096 and its headers.
    ip link set "$name" mtu 4200
    ip addr add "10.77.0.$NODE/24" dev "$name"
    ip link set "$name" up
    modprobe -a rdma_rxe ib_uverbs rdma_ucm
    rdma link add rxe0 type rxe netdev "$name"
} >/lab/set-up.log 2>&1
echo $? >/lab/up.new
mv /lab/up.new /lab/up

mkfifo /run/never
exec 9<>/run/never # nobody writes there: reading it with a limit sleeps without a process
number=1
while :; do
    until [ -e "/lab/do/$number.go" ]; do read -r -t 0.2 -u 9; done
    read -r limit <"/lab/do/$number.go"
    # "limit" is empty for the last one, which asks to go.
    if [ -z "$limit" ]; then
        sync
        echo o >/proc/sysrq-trigger
        read -r -t 30 -u 9
        continue
    fi
    setsid --wait timeout --kill-after=10 "$limit" /bin/bash "/lab/do/$number" \
        </dev/null >"/lab/did/$number.log" 2>&1 9<&-
    echo $? >"/lab/did/$number.new"
    kill -9 -1 2>/dev/null # what it left running; the first process, which this is, is spared
    wait
    mv "/lab/did/$number.new" "/lab/did/$number.status"
    number=$((number + 1))
done
