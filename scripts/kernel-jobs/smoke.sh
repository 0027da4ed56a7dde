# Every kind of mount, as root and as an ordinary user: what ordinary programs leave in it is compared with a native folder. INFO lines say what the kernel offers.
host_disk
work() { # NAME FOLDER [USER]
  local user=${3:-root}
  if LIMIT=300 try "$1: programs" "setpriv --reuid $user --regid $user --clear-groups bash $jobs/work $2 > /tmp/work.$$"; then
    cmp -s /tmp/work.$$ /tmp/work.native && say "PASS $1: as native" || say "FAIL $1: differs from native: $(diff /tmp/work.native /tmp/work.$$ | head -5 | tr '\n' '|')"
  fi
  rm -f /tmp/work.$$
}
about() { # NAME FOLDER
  say "INFO $1: $(nacre status -H -o transport,passthrough,coherence "$2" | tr '\t' ' '), $(python3 "$jobs/features.py" "$2")"
}
pool() { # NAME LAYOUT...
  local name=$1
  shift
  try "$name" "nacre pool create -f -m /m/pool tank $*" || return
  [ "$name" != "pool on a device" ] || about "$name" /m/pool
  work "$name" /m/pool
  try "$name: exported and imported" "sha256sum /m/pool/tried/names/* > /tmp/sums && nacre pool export tank && nacre pool import -d /d -d /dev tank && sha256sum -c --quiet /tmp/sums && nacre pool check tank"
  try "$name: send and receive" "nacre fs snapshot tank@a && nacre fs send tank@a | nacre fs receive tank/copy && diff -r --no-dereference -x pipe /m/pool/tried /m/pool/copy/tried"
  try "$name: destroyed" "nacre pool destroy tank"
}

mkdir /d/native && bash "$jobs/work" /d/native > /tmp/work.native || say "FAIL native"
mkdir -p /d/source /m/mirror /m/union /d/up /d/low /d/cage /m/pool
try mirror "nacre mirror /d/source /m/mirror" && about mirror /m/mirror && work mirror /m/mirror && try "mirror: unmounted" "nacre umount /m/mirror"
try union "echo below > /d/low/below && nacre union /d/up=rw:/d/low=ro /m/union" && work union /m/union \
  && try "union: copy-up" "echo more >> /m/union/below && [ \$(cat /d/low/below | wc -l) = 1 -a \$(cat /d/up/below | wc -l) = 2 ]" && try "union: unmounted" "nacre umount /m/union"
engines=(fuse loop quota)
[ -z "$short" ] || engines=(fuse)
for engine in "${engines[@]}"; do
  mkdir -p /d/cage-$engine
  try "cage by $engine" "nacre cage --engine $engine --size 600M /d/cage-$engine" || continue
  [ $engine != fuse ] || about "cage" /d/cage-fuse
  work "cage by $engine" /d/cage-$engine
  # Quotas do not hold for processes with CAP_SYS_RESOURCE.
  try "cage by $engine: full" "! setpriv --bounding-set=-sys_resource --inh-caps=-sys_resource dd if=/dev/zero of=/d/cage-$engine/big bs=1M count=700 && rm /d/cage-$engine/big && nacre umount /d/cage-$engine"
done
pool "pool on a device" /dev/ubdb
if [ -z "$short" ]; then
  pool "pool in a file" --size 600M /d/image
  pool "pool on a mirror" mirror /dev/ubdb /dev/ubdc
  pool "pool on raidz1" raidz1 /dev/ubdb /dev/ubdc /dev/ubdd
fi
mkdir -p /home/guest/{source,mirror,cage} && chown -R guest: /home/guest
user="setpriv --reuid guest --regid guest --clear-groups env HOME=/home/guest"
try "user's mirror" "$user nacre mirror /home/guest/source /home/guest/mirror" && work "user's mirror" /home/guest/mirror guest && try "user's mirror: unmounted" "$user nacre umount /home/guest/mirror"
try "user's cage" "$user nacre cage --size 500M /home/guest/cage" && work "user's cage" /home/guest/cage guest && try "user's cage: unmounted" "$user nacre umount /home/guest/cage"
