# As `crash`, with disks that lose what no flush has made durable (volatile.py): a power cut.
volatile_disks() {
  modprobe nbd nbds_max=8
  local number
  # The acknowledgements lie on a disk that loses nothing.
  for number in 0 1 3 4 5; do
    python3 "$jobs/volatile.py" "${disks[$number]}" "/dev/nbd$number" &
    await 60 "[ \$(cat /sys/block/nbd$number/size) -gt 0 ] && dd if=/dev/nbd$number of=/dev/null bs=4096 count=1 iflag=direct" || say "FAIL disk $number does not answer"
    [ "$(cat /sys/block/nbd$number/queue/write_cache)" = "write back" ] || say "FAIL disk $number has no cache"
    disks[number]=/dev/nbd$number
  done
}
rounds=5
. "$jobs/crash.sh"
