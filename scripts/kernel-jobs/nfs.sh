# The kernel's NFS server and its client, versions 4.2 and 3, on a pool: trees are whole, locks work, and clients go on over a death of the pool's process and over an export.
host_disk
# The root of what version 4 sees: the guest's own root, an overlay, cannot be exported.
mount -t tmpfs tmpfs /m
mkdir -p /m/pool /client /tree /proc/fs/nfsd /var/lib/nfs/{rpc_pipefs,v4recovery,sm} /run/rpcbind
cp -r "$jobs/../../docs" "$jobs" /tree/
ln -s docs /tree/link
for module in nfsd nfs nfsv3 nfsv4; do modprobe $module; done
grep -qw nfsd /proc/filesystems || { say "FAIL this kernel has no NFS server"; return; }
mount -t nfsd nfsd /proc/fs/nfsd && mount -t rpc_pipefs rpc_pipefs /var/lib/nfs/rpc_pipefs
: > /etc/exports
touch /var/lib/nfs/{etab,rmtab}
rpcbind -w
echo 10 > /proc/fs/nfsd/nfsv4leasetime
echo 10 > /proc/fs/nfsd/nfsv4gracetime
exportfs -o ro,fsid=0,crossmnt '*:/m'
try "server" "rpc.nfsd -G 10 4 && rpc.mountd && rpc.statd --no-notify"
try "pool" "nacre pool create -f --survive -m /m/pool tank ${disks[1]} && nacre fs set sharenfs=rw,no_root_squash tank && exportfs -v | grep -q /m/pool"
for version in 4.2 3; do
  case $version in 3) exported=/m/pool ;; *) exported=/pool ;; esac
  LIMIT=60 try "$version: mounted" "mount -t nfs -o vers=$version,timeo=50,retrans=3 localhost:$exported /client" || continue
  try "$version: a tree" "cp -r /tree /client/tree && diff -r --no-dereference /tree /client/tree && diff -r --no-dereference /tree /m/pool/tree"
  try "$version: many names" "mkdir /client/names && for n in \$(seq 500); do echo \$n > /client/names/\$n; done && [ \$(ls /client/names | wc -l) = 500 ] && rm -r /client/names"
  try "$version: locks" "python3 -c 'import fcntl; fcntl.lockf(open(\"/client/lock\", \"w\"), fcntl.LOCK_EX | fcntl.LOCK_NB)'"
  try "$version: git" "cd /client && git init -q repository && cd repository && cp -r /tree/docs . && git add -A && git -c user.name=x -c user.email=x@x commit -qm one && git fsck --full && cd / && rm -r /client/repository"
  # Before Linux 6.9 the pool ends with its process.
  kernel_is_at_least 6.9 && try "$version: the pool's process is killed" "exec 5< /client/tree/docs/pool.md 6>> /client/appended && echo one >&6 && head -c 100 <&5 > /tmp/read && kill -KILL \$(owner_of tank) && echo two >&6 && exec 6>&- && cat <&5 >> /tmp/read \
    && cmp /tmp/read /tree/docs/pool.md && [ \$(wc -l < /client/appended) = 2 ] && rm /client/appended"
  # What a client holds keeps the pool: version 4 says which files are open; of version 3 the server knows only locks.
  case $version in
    3) holder="python3 -c 'import fcntl, os, time; file = open(\"/client/held\", \"a\"); fcntl.lockf(file, fcntl.LOCK_EX); file.write(\"held\"); file.flush(); os.fsync(file.fileno()); time.sleep(600)'" why="locked" ;;
    *) holder="exec 7>> /client/held && echo -n held >&7 && sync /client/held && exec sleep 600" why="NFS client 127.0.0.1:[0-9]* has 'root/held'" ;;
  esac
  bash -c "$holder" &
  holder=$!
  await 60 "[ \"\$(cat /m/pool/held)\" = held ]"
  head -n 30 /proc/fs/nfsd/clients/*/{info,states} > "$out/clients-$version" 2>&1
  try "$version: a client that holds a file keeps the pool" "! nacre pool export tank 2> /tmp/refused && cat /tmp/refused >&2 && grep -q \"$why\" /tmp/refused && exportfs -v | grep -q /m/pool && diff -r --no-dereference /tree /client/tree"
  kill $holder
  wait $holder 2> /dev/null
  try "$version: the file is closed" "rm /client/held"
  # Delegations are left: files that the client may cache. Before Linux 6.9 the client has to return them.
  export="nacre pool export tank"
  kernel_is_at_least 6.9 || export="echo 3 > /proc/sys/vm/drop_caches && await 60 '$export'"
  say "INFO $version: $(cat /proc/fs/nfsd/clients/*/states 2> /dev/null | grep -c 'type: deleg') delegations, $(awk '/^total/ { print $3 }' /proc/fs/nfsd/filecache) open files of the server"
  try "$version: exported" "$export && ! exportfs -v | grep /m/pool"
  echo 3 > /proc/sys/vm/drop_caches
  try "$version: imported" "nacre pool import --survive tank && diff -r --no-dereference /tree /client/tree && echo new > /client/new && [ \"\$(cat /m/pool/new)\" = new ] && rm /client/new"
  try "$version: a snapshot is seen" "nacre fs snapshot tank@v$version && ls /client/.zfs/snapshot/v$version/tree"
  try "$version: unmounted" "rm -r /client/tree && umount /client"
done
try "end" "nacre pool export tank && ! exportfs -v | grep /m/pool"
echo 0 > /proc/fs/nfsd/threads
