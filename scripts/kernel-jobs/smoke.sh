# Every kind of mount, as root and as an ordinary user: what ordinary programs leave in it is compared with a native folder. INFO lines say what the kernel offers;
# that is what the first table of docs/kernels.md says.
host_disk
since() { if kernel_is_at_least "$1"; then echo "${2:-yes}"; else echo "${3:-no}"; fi; } # VERSION [THEN] [BEFORE]
about() { # NAME FOLDER
  local features expected
  features=$(python3 "$jobs/features.py" "$2")
  say "INFO $1: $(nacre status -H -o transport,passthrough,coherence "$2" | tr '\t' ' '), $features"
  expected="O_TMPFILE $(since 6.1) FALLOC_FL_ZERO_RANGE $(since 5.14) birth time $(since 6.6)"
  [ "$features" = "$expected" ] && say "PASS $1: features" || say "FAIL $1: $features, but docs/kernels.md says: $expected"
}
pool() { # NAME LAYOUT...
  local name=$1
  shift
  try "$name" "nacre pool create -f -m /m/pool tank $*" || return
  [ "$name" != "pool on a device" ] || about "$name" /m/pool
  compare "$name" work /m/pool
  try "$name: exported and imported" "sha256sum /m/pool/tried/names/* > /tmp/sums && nacre pool export tank && nacre pool import -d /d -d /dev tank && sha256sum -c --quiet /tmp/sums && nacre pool check tank"
  try "$name: send and receive" "nacre fs snapshot tank@a && nacre fs send tank@a | nacre fs receive tank/copy && diff -r --no-dereference -x pipe /m/pool/tried /m/pool/copy/tried"
  try "$name: destroyed" "nacre pool destroy tank"
}

native work root
native work guest
cage_size=600 too_much=700
[ -z "$short" ] || cage_size=100 too_much=120
mkdir -p /d/source /m/mirror /m/union /d/up /d/low /d/cage /m/pool
try mirror "nacre mirror /d/source /m/mirror" && about mirror /m/mirror \
  && try "mirror: passthrough" "[ \$(nacre status -H -o passthrough /m/mirror) = $(since 6.9 on off) ]" && compare mirror work /m/mirror && try "mirror: unmounted" "nacre umount /m/mirror"
try union "echo below > /d/low/below && nacre union /d/up=rw:/d/low=ro /m/union" && compare union work /m/union \
  && try "union: copy-up" "echo more >> /m/union/below && [ \$(cat /d/low/below | wc -l) = 1 -a \$(cat /d/up/below | wc -l) = 2 ]" && try "union: unmounted" "nacre umount /m/union"
engines=(fuse loop quota)
[ -z "$short" ] || engines=(fuse)
for engine in "${engines[@]}"; do
  mkdir -p /d/cage-$engine
  try "cage by $engine" "nacre cage --engine $engine --size ${cage_size}M /d/cage-$engine" || continue
  [ $engine != fuse ] || about "cage" /d/cage-fuse
  compare "cage by $engine" work /d/cage-$engine
  # Quotas do not hold for processes with CAP_SYS_RESOURCE.
  try "cage by $engine: full" "! setpriv --bounding-set=-sys_resource --inh-caps=-sys_resource dd if=/dev/zero of=/d/cage-$engine/big bs=1M count=$too_much && rm /d/cage-$engine/big && nacre umount /d/cage-$engine"
done
pool "pool on a device" ${disks[1]}
if [ -z "$short" ]; then
  pool "pool in a file" --size 600M /d/image
  pool "pool on a mirror" mirror ${disks[1]} ${disks[2]}
  pool "pool on raidz1" raidz1 ${disks[1]} ${disks[2]} ${disks[3]}
fi
mkdir -p /home/guest/{source,mirror,cage} && chown -R guest: /home/guest
try "user's mirror" "$as_guest nacre mirror /home/guest/source /home/guest/mirror" && compare "user's mirror" work /home/guest/mirror guest && try "user's mirror: unmounted" "$as_guest nacre umount /home/guest/mirror"
[ -z "$short" ] || return 0
try "user's cage" "$as_guest nacre cage --size 500M /home/guest/cage" && compare "user's cage" work /home/guest/cage guest && try "user's cage: unmounted" "$as_guest nacre umount /home/guest/cage"
