# Functions of the jobs of scripts/kernels. File descriptor 3 is the log.
disks=(/dev/ubd{a..f})
[ -b /dev/ubda ] || disks=(/dev/vd{a..f})
as_guest="setpriv --reuid guest --regid guest --clear-groups env HOME=/home/guest"
switch=/sys/module/fuse/parameters/enable_uring

say() { echo "$*" >&3; }

# try NAME COMMAND: passes where the command does, within LIMIT seconds.
try() {
  local name=$1 output status
  output=$(timeout -k 1 "${LIMIT:-120}" bash -c "$2" 2>&1 < /dev/null)
  status=$?
  if [ $status = 0 ]; then
    say "PASS $name"
  else
    say "FAIL $name: status $status: $(tail -c 400 <<< "$output" | tr '\n' '|')"
  fi
  return $status
}

# kernel_is_at_least VERSION
kernel_is_at_least() { [ "$(printf '%s\n' "$1" "$(uname -r | grep -o '^[0-9]*\.[0-9]*')" | sort -V | head -n 1)" = "$1" ]; }

# What the kernel reports about itself is a failure.
kernel_faults() {
  local faults
  faults=$(dmesg | grep -E 'BUG|WARNING:|Oops|hung_task|blocked for more|general protection|segfault|refcount_t' | tail -4 | tr '\n' '|')
  [ -z "$faults" ] || say "FAIL kernel: $faults"
}

# The disk of the host file system, at /d; made where it is not there yet.
host_disk() {
  mkdir -p /d /m
  blkid "${disks[0]}" > /dev/null || mke2fs -q -t ext4 -O quota,project "${disks[0]}"
  mountpoint -q /d || mount -o prjquota "${disks[0]}" /d
}

# native PROGRAM USER: what the program of this folder leaves in a native folder, for `compare`.
native() {
  mkdir -p "/d/native-$1-$2" && chown "$2:" "/d/native-$1-$2"
  setpriv --reuid "$2" --regid "$2" --clear-groups bash "$jobs/$1" "/d/native-$1-$2" > "/tmp/$1.$2" || say "FAIL native $1 of $2"
}

# compare NAME PROGRAM FOLDER [USER]: the program works in the folder, and leaves the same as in a native one.
compare() {
  local user=${4:-root}
  LIMIT=${LIMIT:-300} try "$1: $2" "setpriv --reuid $user --regid $user --clear-groups bash $jobs/$2 $3 > /tmp/compared" || return
  if cmp -s /tmp/compared "/tmp/$2.$user"; then
    say "PASS $1: as native"
  else
    say "FAIL $1: $2 differs from native: $(diff "/tmp/$2.$user" /tmp/compared | head -6 | tr '\n' '|')"
  fi
}

# The process that owns a pool.
owner_of() { nacre pool status --json "$1" | grep -o '"process": *[0-9]*' | grep -o '[0-9]*'; }

# await SECONDS CONDITION: fails where the condition does not come true.
await() {
  local deadline=$((SECONDS + $1))
  until bash -c "$2" > /dev/null 2>&1; do
    [ $SECONDS -lt $deadline ] || return
    sleep 0.1
  done
}
export -f await owner_of
