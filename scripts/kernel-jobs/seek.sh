# lseek(2) for data and holes of files whose writes the kernel collects: five ordinary commands, then a random mix by 8 processes; and copies of a file while it is mapped. All of it waits for nothing.
host_disk
ops=10000
[ -z "$short" ] || ops=2000
five() { # NAME: in the working directory
  try "$1: cp of what was written" "yes text | head -c 1M > a && cp a b && cmp a b"
  try "$1: cp of a sparse file" "echo x > s && truncate -s 1M s && cp s t && cmp s t"
  try "$1: cp after sync" "yes text | head -c 1M > a2 && sync && cp a2 b2 && cmp a2 b2"
  try "$1: tar -S" "echo x > f && truncate -s 1M f && tar cSf /tmp/f.tar f && mkdir x && tar xf /tmp/f.tar -C x && cmp f x/f"
  try "$1: grep in zeros" "head -c 1M /dev/zero > z && { grep -c x z || [ \$? = 1 ]; }"
  LIMIT=400 try "$1: $ops random operations" "python3 $jobs/seek.py . $ops"
}
mapped() { # NAME: in the working directory
  truncate -s 4M m
  ls -ls m > /dev/null
  try "$1: cp and tar of a file that is mapped" "python3 $jobs/mapped.py m"
}
mkdir /d/cage /d/large /d/source /d/mirror
try "cage" "nacre cage --size 50M /d/cage" && cd /d/cage && LIMIT=30 five "cage" && LIMIT=60 mapped "cage" && cd /
try "large cage" "nacre cage --size 1G /d/large" && cd /d/large && LIMIT=30 five "large cage" && LIMIT=60 mapped "large cage" && cd /
try "pool" "nacre pool create -f -m /m/pool tank ${disks[1]}" && cd /m/pool && LIMIT=30 five "pool" && LIMIT=60 mapped "pool" && cd /
try "mirror" "nacre mirror --passthrough=off /d/source /d/mirror" && cd /d/mirror && LIMIT=60 mapped "mirror" && cd /
LIMIT=20 try "end" "nacre umount /d/cage && nacre umount /d/large && nacre umount /d/mirror && nacre pool export tank"
