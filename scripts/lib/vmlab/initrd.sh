#!/bin/busybox sh
# The first process of a guest: makes this machine's files the root, read-only below a layer in memory.
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
while read -r module; do
    insmod "/modules/$module" || echo "lab: insmod $module failed"
done </modules/order
mount -t tmpfs -o size=80% tmpfs /upper
mkdir -p /upper/files /upper/work
tries=0
until mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=loose,ro root /lower; do
    tries=$((tries + 1))
    if [ "$tries" -gt 20 ]; then
        echo "lab: the files of the host cannot be mounted"
        echo o >/proc/sysrq-trigger
        sleep 10
    fi
    sleep 0.2
done
mount -t overlay -o lowerdir=/lower,upperdir=/upper/files,workdir=/upper/work overlay /new
for folder in proc sys dev; do
    mkdir -p "/new/$folder"
    mount -o move "/$folder" "/new/$folder"
done
cp /guest.sh /new/.hawk-lab-guest
exec switch_root /new /bin/bash /.hawk-lab-guest
