# Functions of the jobs of scripts/kernels. File descriptor 3 is the log.
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

# What the kernel reports about itself is a failure.
kernel_faults() {
  local faults
  faults=$(dmesg | grep -E 'BUG|WARNING:|Oops|hung_task|blocked for more|general protection|segfault|refcount_t' | tail -4 | tr '\n' '|')
  [ -z "$faults" ] || say "FAIL kernel: $faults"
}

# The disk of the host file system, at /d.
host_disk() {
  mkdir -p /d /m
  mke2fs -q -t ext4 -O quota,project /dev/ubda && mount -o prjquota /dev/ubda /d
}
