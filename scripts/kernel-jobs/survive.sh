# Mounts with --survive whose processes are killed under programs: nothing fails, and what the programs leave is the same as in a native folder.
# Before Linux 6.9 no mount survives its process: it says so, and is gone with it.
host_disk
native work root
kills=3

# kill_one NAME PROCESS: kills the process that PROCESS prints, and waits until another one serves.
kill_one() {
  local before
  before=$(bash -c "$2")
  kill -KILL "$before" && await 60 "now=\$($2) && [ \"\$now\" -gt 0 ] && [ \"\$now\" != $before ]" && return
  say "FAIL $1: nobody goes on after process $before"
  return 1
}

# Before Linux 6.9: the mount works, and ends with its process; then it can be made again, with all that was written.
ends() { # NAME FOLDER PROCESS AGAIN
  compare "$1" work "$2"
  try "$1: its process is killed" "echo kept > $2/kept && sync $2/kept && kill -KILL \$($3) && await 60 '! ls $2/. || ! findmnt $2'" \
    && try "$1: made again" "$4 && [ \"\$(cat $2/kept)\" = kept ]"
}

survives() { # NAME FOLDER PROCESS AGAIN: AGAIN is a command that makes the mount again
  local number
  kernel_is_at_least 6.9 || { ends "$@"; return; }
  echo held > "$2/held"
  exec 5<>"$2/held" 6>"$2/nameless"
  rm "$2/nameless"
  kill_one "$1" "$3"
  try "$1: open files go on" "[ \"\$(cat <&5)\" = held ] && echo more >&6 && [ \$(stat -L -c %s /dev/fd/6) = 5 ] && [ \"\$(ls $2 | grep held)\" = held ]"
  exec 5>&- 6>&-
  rm "$2/held"
  # Three deaths within a minute end a mount.
  (for number in $(seq $kills); do sleep 31; kill_one "$1" "$3" || exit; done) &
  local killer=$!
  number=0
  while kill -0 $killer 2> /dev/null; do
    number=$((number + 1))
    mkdir "$2/$number"
    compare "$1, round $number" work "$2/$number" || { kill $killer; break; }
    rm -rf "${2:?}/$number"
  done
  wait $killer
}

mkdir -p /d/source /d/up /d/low /d/cage /m/{mirror,union,pool}
mount_of() { # NAME FOLDER COMMAND
  try "$1" "$3" && survives "$1" "$2" "nacre status -H -o pid $2" "$3" && try "$1: unmounted" "nacre umount $2"
}
mount_of mirror /m/mirror "nacre mirror --survive /d/source /m/mirror"
mount_of union /m/union "nacre union --survive /d/up=rw:/d/low=ro /m/union"
mount_of cage /d/cage "nacre cage --survive --size 1G /d/cage"
try pool "nacre pool create -f --survive -m /m/pool tank ${disks[1]}" && survives pool /m/pool "owner_of tank" "nacre pool import tank" && try "pool: checked" "nacre pool check tank && nacre pool destroy tank"
