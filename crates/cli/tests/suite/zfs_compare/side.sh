#!/bin/bash
# One side of the comparison: $1 zfs-fuse or nacre, $2 the file with the steps, $3 a directory of its own. Prints what zfs_compare.rs reads.
# %d1 to %d8 in a step are files of 128 MiB in that directory.
# zfs-fuse runs in a mount name space of its own (unshare -m), so it meets no other.
set -u
side=$1 steps=$2 work=$3
image=$work/image root=$work/x
mkdir -p "$root" && truncate -s 1G "$image" && truncate -s 128M "$work"/d{1..8} || exit 9
case $side in
  zfs-fuse)
    mount --make-rprivate / || exit 9
    # Mounts of tests that run meanwhile are not held.
    while read -r _ _ _ _ place _; do case $place in */nacre-test.*) umount -l "$place" ;; esac; done </proc/self/mountinfo 2>/dev/null
    mkdir -p /etc/zfs /var/run/zfs /var/lock/zfs /var/lib/zfs
    for place in /var/run/zfs /var/lock/zfs /var/lib/zfs; do mount -t tmpfs none $place || exit 9; done
    zfs-fuse -n --no-kstat-mount -m 100 >"$work/log" 2>&1 & daemon=$!
    for _ in $(seq 100); do timeout 5 zpool list >/dev/null 2>&1 && break; sleep 0.1; done
    timeout 30 zpool create -O atime=off -m "$root" zc "$image" >/dev/null || exit 9 ;;
  nacre) timeout 30 nacre pool create -O atime=off -O compression=off -m "$root" zc "$image" || exit 9 ;;
esac
write() { timeout -k 5 120 dd if=/dev/urandom of="$root/$1" bs=1M count="$2" seek="${3:-0}" conv=notrunc,fsync status=none; }
names=used,available,referenced,usedbydataset,usedbysnapshots,usedbychildren,usedbyrefreservation
show() { timeout -k 5 30 zfs set compare:tick=$RANDOM zc; timeout -k 5 60 zfs get -rHp -o name,property,value $names zc; }
figures() { # Both count what is committed: until two looks agree.
  local before='' now=''
  for _ in $(seq 20); do now=$(show); [ "$now" = "$before" ] && break; before=$now; [ $side = nacre ] || sleep 0.3; done
  echo "$now"
}
run() { # zfs-fuse calls a file system busy for a moment after it was used; a snapshot that is held stays busy.
  local tries code
  for tries in $(seq 25); do
    timeout -k 5 60 "$@" >"$work/said" 2>&1 </dev/null && return 0
    code=$?
    case $side:$*:$(cat "$work/said") in zfs-fuse:*@*) return $code ;; zfs-fuse:*busy*) sleep 0.2 ;; *) return $code ;; esac
  done
  return $code
}
while IFS= read -r line; do
  case $line in '#'* | '') continue ;; esac
  echo "## $line"
  read -ra words <<<"${line//%/$work/}"
  case ${words[0]} in
    zfs | zpool) run "${words[@]}"; echo "rc=$?"; sed "s/^/said=/; s,$work/,%,g" "$work/said" ;;
    write) write "${words[@]:1}" >"$work/said" 2>&1; echo "rc=$?"; sed 's/^/said=/' "$work/said" ;;
    as) chmod 777 "$root/${words[3]%/*}"; (setpriv --reuid "${words[1]}" --regid "${words[1]}" --clear-groups timeout 60 dd if=/dev/urandom "of=$root/${words[3]}" bs=1M "count=${words[4]}" conv=fsync status=none) >"$work/said" 2>&1; echo "rc=$?" ;;
    rm) rm "$root/${words[1]}"; echo "rc=$?" ;;
    figures) figures ;;
  esac
done <"$steps"
case $side in
  zfs-fuse) timeout 30 zpool destroy zg; timeout 30 zpool destroy zc; kill $daemon; wait $daemon ;;
  nacre) timeout 30 nacre pool export -f zg; timeout 30 nacre pool export -f zc ;;
esac 2>/dev/null
exit 0
