# More programs than in `smoke`, over each transport and with and without passthrough, for root and an ordinary user; compared with a native folder of this guest.
host_disk
chmod 755 /d
native more root
native more guest
# Before Linux 6.6 tmpfs, where the guest's root lies, has no extended attributes of users.
mkdir /d/guest && mount --bind /d/guest /home/guest
mkdir -p /d/source /d/low /d/up /d/cage /m/{mirror,union,pool} /home/guest/{source,mirror,cage,up,low,union}
echo below > /d/low/below
chown -R guest: /home/guest
served() { # FOLDER TRANSPORT: the mount is served over it
  [ "$(nacre status -H -o transport "$1")" = "$2" ] || say "FAIL $1: is served over $(nacre status -H -o transport,transport-reason "$1"), not $2"
}
all() { # TRANSPORT
  try "mirror, $1" "rm -rf /d/source/* && nacre mirror /d/source /m/mirror" && served /m/mirror "$1" && say "INFO mirror: passthrough $(nacre status -H -o passthrough /m/mirror)" \
    && compare "mirror, $1" more /m/mirror && try "mirror, $1: unmounted" "nacre umount /m/mirror"
  try "mirror without passthrough, $1" "rm -rf /d/source/* && nacre mirror --passthrough=off /d/source /m/mirror" && compare "mirror without passthrough, $1" more /m/mirror && try "mirror without passthrough, $1: unmounted" "nacre umount /m/mirror"
  try "union, $1" "nacre union /d/up=rw:/d/low=ro /m/union" && served /m/union "$1" && compare "union, $1" more /m/union && try "union, $1: unmounted" "nacre umount /m/union && rm -rf /d/up && mkdir /d/up"
  for size in 60M 1500M; do
    try "cage of $size, $1" "mkdir -p /d/cage-$size && nacre cage --size $size /d/cage-$size" && served /d/cage-$size "$1" && compare "cage of $size, $1" more /d/cage-$size \
      && try "cage of $size, $1: unmounted" "nacre umount /d/cage-$size && rm -rf /d/cage-$size"
  done
  try "pool, $1" "nacre pool create -f -O acltype=posix -m /m/pool tank ${disks[1]}" && served /m/pool "$1" && compare "pool, $1" more /m/pool && try "pool, $1: checked" "nacre pool check tank && nacre pool destroy tank"
}
# The switch is the kernel's default for nobody: both ways are asked for.
[ ! -w $switch ] || echo 0 > $switch
all device
if [ -w $switch ]; then
  echo 1 > $switch
  all uring
  echo 0 > $switch
else
  say "INFO this kernel has no FUSE over io_uring"
fi
for kind in mirror cage union; do
  case $kind in
    mirror) command="mirror source mirror" ;;
    cage) command="cage --size 300M cage" ;;
    union) command="union up=rw:low=ro union" ;;
  esac
  try "user's $kind" "cd /home/guest && $as_guest nacre $command" && compare "user's $kind" more /home/guest/$kind guest && try "user's $kind: unmounted" "$as_guest nacre umount /home/guest/$kind"
done
try "user's pool" "cd /home/guest && $as_guest nacre pool create -O acltype=posix --size 300M mine /home/guest/image" && compare "user's pool" more /home/guest/mine guest \
  && try "user's pool: checked" "cd /home/guest && $as_guest nacre pool check mine && $as_guest nacre pool destroy mine"
