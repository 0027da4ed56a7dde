# systemd is process 1: the units and lines of fstab that users write. The first boot installs and sets them up; after the second everything is there again.
lines() {
  cat <<'F'
fs:tank/old    /srv/old    fuse.nacre nofail,x-systemd.requires=nacre-import.service 0 0
/srv/source    /srv/mirror fuse.nacre nofail,force-user=nobody 0 0
cage:/srv/cage /srv/cage   fuse.nacre nofail,size=10M 0 0
union:/srv/up=rw:/srv/low=ro /srv/union fuse.nacre nofail 0 0
F
}
service() {
  cat <<'F'
[Service]
Type=notify
NotifyAccess=all
ExecStart=/usr/local/bin/nacre mirror --foreground --survive /srv/source /srv/service
Restart=on-failure
FileDescriptorStoreMax=64
KillMode=mixed
OOMPolicy=continue
[Install]
WantedBy=multi-user.target
F
}
everything() {
  try "boot $round: the pool" "findmnt /tank && [ \"\$(cat /tank/file)\" = tank ]"
  try "boot $round: the pool in a file" "[ \"\$(cat /image/file)\" = image ]"
  try "boot $round: fstab" "[ \"\$(cat /srv/old/file)\" = old ] && [ \$(stat -c %U /srv/mirror/file) = nobody ] && nacre cage status /srv/cage | grep '^limit *10M' && findmnt /srv/union"
  try "boot $round: the service" "systemctl is-active mirror.service && [ \"\$(cat /srv/service/file)\" = source ]"
  try "boot $round: none of ours has failed" "! systemctl --failed --no-legend | grep -E 'nacre|srv|mirror'"
}
mkdir -p /srv/{old,source,mirror,cage,up,low,union,service}
if [ "$round" = 0 ]; then
  say "INFO $(systemctl --version | head -n 1)"
  rm -f /usr/local/bin/nacre
  mkdir /tmp/parts && ln -s "$nacre" /tmp/parts/nacre
  LIMIT=300 try "install" "PROGRAMS=/tmp/parts $jobs/../install /usr/local && systemctl daemon-reload && systemd-tmpfiles --create nacre.conf && systemctl enable --now nacre-import.service"
  echo source > /srv/source/file
  try "pools" "nacre pool create -f -m /tank tank ${disks[1]} && echo tank > /tank/file && nacre fs create -o mountpoint=legacy tank/old && nacre pool create --size 200M -m /image image /srv/image && echo image > /image/file"
  lines >> /etc/fstab
  service > /etc/systemd/system/mirror.service
  try "fstab" "systemctl daemon-reload && systemctl start srv-old.mount srv-mirror.mount srv-cage.mount srv-union.mount && echo old > /srv/old/file"
  try "service" "systemctl enable --now mirror.service"
  try "timers" "systemctl enable --now nacre-scrub@tank.timer nacre-snapshot@tank.timer nacre-trim@tank.timer && systemctl start nacre-scrub@tank.service nacre-snapshot@tank.service && nacre fs list -t snapshot | grep tank@"
  everything
  # Before Linux 6.9 no mount survives: the service begins anew.
  if kernel_is_at_least 6.9; then
    try "service: its process is killed" "before=\$(nacre status -H -o pid /srv/service) && exec 5< /srv/service/file && kill -KILL \$before && [ \"\$(cat <&5)\" = source ] && await 60 \"[ \\\$(nacre status -H -o pid /srv/service) != \$before ]\" && systemctl is-active mirror.service"
    kept=' && [ "$(cat <&5)" = source ]'
  else
    try "service: its process is killed" "kill -KILL \$(nacre status -H -o pid /srv/service) && await 60 '[ \"\$(cat /srv/service/file)\" = source ] && systemctl is-active mirror.service'"
    kept=
  fi
  try "service: all its processes are killed" "exec 5< /srv/service/file && systemctl kill -s KILL mirror.service && await 60 '[ \"\$(cat /srv/service/file)\" = source ] && systemctl is-active mirror.service'$kept"
  touch "$out/again"
else
  everything
fi
journalctl -b --no-pager > "$out/journal-$round"
{ systemctl status --no-pager mirror.service; ls -lR /etc/systemd/system; } > "$out/units-$round" 2>&1
