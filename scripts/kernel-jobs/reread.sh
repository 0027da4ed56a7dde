# What tar has just unpacked in a pool on raidz1 is read at once: sizes and contents are there from the first look on.
rounds=66
[ -z "$short" ] || rounds=8
mkdir -p /m/pool /tmp/tree && cp -r "$jobs/../../crates/size" "$jobs/../../docs" /tmp/tree && tar cf /tmp/tree.tar -C /tmp/tree .
(cd /tmp/tree && find . -type f -printf '%s %P\n' | sort > /tmp/expected)
try pool "nacre pool create -f -m /m/pool tank raidz1 ${disks[1]} ${disks[2]} ${disks[3]}"
wrong=0
for round in $(seq $rounds); do
  mkdir /m/pool/$round && tar xf /tmp/tree.tar -C /m/pool/$round
  (cd /m/pool/$round && find . -type f -printf '%s %P\n' | sort) | diff /tmp/expected - > /tmp/difference || { wrong=$((wrong + 1)); say "INFO round $round: $(head -4 /tmp/difference | tr '\n' '|')"; }
  diff -r /tmp/tree /m/pool/$round > /tmp/difference || say "FAIL round $round: $(head -4 /tmp/difference | tr '\n' '|')"
  rm -rf /m/pool/$round
done
[ $wrong = 0 ] && say "PASS sizes in $rounds rounds" || say "FAIL sizes in $wrong of $rounds rounds"
try "end" "nacre pool check tank && nacre pool export tank"
