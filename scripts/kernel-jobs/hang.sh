# A wilful hang: the disk below a large cage, which collects writes, is frozen, so that a flush of its own mount is not answered. Status reports it within 15 seconds, and no more once it has ended.
# Before Linux 6.6 no writes are collected: the write itself is a request that is not answered.
host_disk
sign="^waiting"
kernel_is_at_least 6.6 || sign="^requests .* 1 in flight"
mkdir -p /d/cage
try "cage" "nacre cage --size 1G /d/cage"
# The file is open in this process alone: a process that closes it waits for the flush.
(echo written && until [ -e /tmp/frozen ]; do sleep 0.1; done && echo more && until [ -e /tmp/thawed ]; do sleep 0.1; done) > /d/cage/file &
await 60 "[ -s /d/cage/file ]"
fsfreeze -f /d
frozen=$SECONDS
touch /tmp/frozen
try "reported by status" "await 25 'nacre status /d/cage | grep \"$sign\"'"
took=$((SECONDS - frozen))
[ $took -le 15 ] && say "PASS within 15 seconds: $took" || say "FAIL only after $took seconds"
say "INFO $(nacre status /d/cage | grep "$sign")"
fsfreeze -u /d
touch /tmp/thawed
wait
try "ended" "await 30 '! nacre status /d/cage | grep \"$sign\"' && [ \$(wc -l < /d/cage/file) = 2 ] && nacre umount /d/cage"
