#!/bin/bash
# Stands for srun with the Pyxis plugin: the "image" is this machine's file system, and what a task
# writes outside of --container-mounts vanishes with it, as in the real thing.
set -euo pipefail
if [ "$1" = --inside ]; then
    mounts=$2 work=$3 root=$(mktemp -d)
    shift 3
    mount -t tmpfs tmpfs "$root"
    mkdir "$root"/{upper,work,merged}
    mount -t overlay -o "lowerdir=/,upperdir=$root/upper,workdir=$root/work" overlay "$root/merged"
    for place in ${mounts//,/ } /proc:/proc /dev:/dev /etc/hosts:/etc/hosts \
        /etc/nsswitch.conf:/etc/nsswitch.conf; do
        target=$root/merged${place#*:}
        [ -e "$target" ] || mkdir -p "$target"
        mount --rbind "${place%%:*}" "$target"
    done
    exec chroot "$root/merged" /bin/bash -c 'cd "$0" && exec "$@"' "$work" "$@"
fi
options=() image='' mounts='' work=/
while [[ $1 == --* ]]; do
    case $1 in
    --container-image=*) image=${1#*=} ;;
    --container-mounts=*) mounts=${1#*=} ;;
    --container-workdir=*) work=${1#*=} ;;
    --no-container-mount-home) ;;
    *) options+=("$1") ;;
    esac
    shift
done
[ -n "$image" ] || exec /usr/bin/srun "${options[@]}" "$@"
exec /usr/bin/srun "${options[@]}" unshare --mount "$0" --inside "$mounts" "$work" "$@"
