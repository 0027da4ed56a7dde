# The guest is killed at random under load, round after round; after each, all that was acknowledged is there. `power` does the same with disks that lose their cache.
# On the third disk lie the acknowledgements; it loses nothing. The native folder shows that the check holds for a file system that keeps its promises.
rounds=${rounds:-5}
targets=(native mirror union cage pool raid)
declare -A at=([native]=/d/native [mirror]=/m/mirror [union]=/m/union [cage]=/d/cage [pool]=/m/pool [raid]=/m/raid)
[ "$(type -t volatile_disks)" != function ] || volatile_disks
host_disk
mkdir -p /d/{native,source,up,low,cage,state} /m/{mirror,union,pool,raid} /var/lib/nacre
mount --bind /d/state /var/lib/nacre
if [ "$round" = 0 ]; then
  try "pool: made" "nacre pool create -f -m /m/pool tank ${disks[1]}"
  try "raid: made" "nacre pool create -f -m /m/raid raid raidz1 ${disks[3]} ${disks[4]} ${disks[5]}"
else
  # The disks are named: below those of `power` lie others with the same labels.
  try "pool: imported, $round" "nacre pool import -d ${disks[1]} tank"
  try "raid: imported, $round" "nacre pool import -d ${disks[3]} -d ${disks[4]} -d ${disks[5]} raid"
fi
try "mounts, $round" "nacre mirror /d/source /m/mirror && nacre union /d/up=rw:/d/low=ro /m/union && nacre cage --size 1G /d/cage"
for number in "${!targets[@]}"; do
  name=${targets[$number]}
  try "$name: what was acknowledged is there, $round" "python3 $jobs/crash.py check $name ${at[$name]} $number ${disks[2]} 2>&1 > /tmp/acknowledged" && say "INFO $name: $(cat /tmp/acknowledged) acknowledged"
done
[ "$round" = 0 ] || try "pools: checked, $round" "nacre pool check tank && nacre pool check raid"
[ "$round" -lt "$rounds" ] || { try "end" "nacre umount /m/mirror /m/union /d/cage && nacre pool export -a"; return; }
for number in "${!targets[@]}"; do
  name=${targets[$number]}
  (python3 "$jobs/crash.py" load "$name" "${at[$name]}" "$number" "${disks[2]}" || say "FAIL $name: the load ended") &
done
# Beside it, what nobody syncs; snapshots; a scrub.
(while true; do for name in mirror cage pool raid; do rm -rf "${at[$name]}/unsynced"; cp -r "$jobs" "${at[$name]}/unsynced"; done; done) &
(number=0; while sleep 1; do number=$((number + 1)); nacre fs snapshot "tank@$round-$number" && nacre fs destroy "tank@$round-$((number - 2))"; nacre pool scrub -w raid; done) &
# The guest is killed when each kind of mount has acknowledged at least 25 more operations, and a random moment later.
acknowledged() { od -An -t u8 -j $(($1 * 4096)) -N 8 "${disks[2]}" | tr -d ' '; }
for number in "${!targets[@]}"; do before[number]=$(acknowledged $number); done
for number in "${!targets[@]}"; do
  until [ "$(acknowledged $number)" -ge $((before[number] + 25)) ]; do sleep 0.2; done
done
sync "$out/log"
touch "$out/again" "$out/kill"
sleep 600
say "FAIL nobody killed the guest"
