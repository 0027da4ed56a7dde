# A part of pjdfstest, the rules of POSIX for names, modes and times: a mount fails no case that the native folder passes.
host_disk
chmod 755 /d
rules=$jobs/../judging/pjdfstest.toml
judge() { # FOLDER
  # pjdfstest fails by itself ("capacity overflow") where the path of its folder is short.
  local folder=$1/rules-of-posix-for-names-modes-and-times
  mkdir -p "$folder"
  (cd "$folder" && timeout 400 "$jobs/../../target/tools/bin/pjdfstest" -c "$rules" -s /tmp -p "$folder" chmod chown link mkdir mkfifo open rename rmdir symlink truncate unlink utimensat) > /tmp/judged 2>&1
  grep -E 'FAILED' /tmp/judged | sort > /tmp/failed
  grep -q '^Summary' /tmp/judged || echo "no summary: $(tail -n 2 /tmp/judged | tr '\n' '|')" >> /tmp/failed
}
against_native() { # NAME FOLDER
  judge "$2"
  if new=$(comm -13 /tmp/native /tmp/failed | tr '\n' '|') && [ -z "$new" ]; then say "PASS $1: $(grep '^Summary' /tmp/judged)"; else say "FAIL $1: $new"; fi
}
mkdir -p /d/native /d/source /d/up /d/low /d/cage /m/{mirror,union,pool}
judge /d/native
cp /tmp/failed /tmp/native
cp /tmp/judged "$out/native"
say "INFO native: $(grep '^Summary' /tmp/judged) $(tr '\n' '|' < /tmp/native)"
grep -q '^no summary' /tmp/native && say "FAIL native: pjdfstest did not run"
try mirror "nacre mirror /d/source /m/mirror" && against_native mirror /m/mirror && try "mirror: unmounted" "nacre umount /m/mirror"
try union "nacre union /d/up=rw:/d/low=ro /m/union" && against_native union /m/union && try "union: unmounted" "nacre umount /m/union"
try cage "nacre cage --size 500M /d/cage" && against_native cage /d/cage && try "cage: unmounted" "nacre umount /d/cage"
try pool "nacre pool create -f -m /m/pool tank ${disks[1]}" && against_native pool /m/pool && try "pool: checked" "nacre pool check tank && nacre pool destroy tank"
