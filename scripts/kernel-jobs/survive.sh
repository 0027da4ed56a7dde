# Mounts with --survive whose processes are killed under programs: nothing fails, and what the programs leave is the same as in a native folder.
# Before Linux 6.9 requests under way are lost with the process: there it is killed between two operations only.
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

survives() { # NAME FOLDER PROCESS
  local number
  echo held > "$2/held"
  exec 5<>"$2/held" 6>"$2/nameless"
  rm "$2/nameless"
  kill_one "$1" "$3"
  try "$1: open files go on" "[ \"\$(cat <&5)\" = held ] && echo more >&6 && [ \$(stat -L -c %s /dev/fd/6) = 5 ] && [ \"\$(ls $2 | grep held)\" = held ]"
  exec 5>&- 6>&-
  rm "$2/held"
  kernel_is_at_least 6.9 || return
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
try mirror "nacre mirror --survive /d/source /m/mirror" && survives mirror /m/mirror "nacre status -H -o pid /m/mirror" && try "mirror: unmounted" "nacre umount /m/mirror"
try union "nacre union --survive /d/up=rw:/d/low=ro /m/union" && survives union /m/union "nacre status -H -o pid /m/union" && try "union: unmounted" "nacre umount /m/union"
try cage "nacre cage --survive --size 1G /d/cage" && survives cage /d/cage "nacre status -H -o pid /d/cage" && try "cage: unmounted" "nacre umount /d/cage"
try pool "nacre pool create -f --survive -m /m/pool tank ${disks[1]}" && survives pool /m/pool "owner_of tank" && try "pool: checked" "nacre pool check tank && nacre pool destroy tank"
