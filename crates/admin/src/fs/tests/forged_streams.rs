//! Streams of whole trees (`send -R`, `-R -I`) with right checksums, of which records are missing, repeated,
//! exchanged or forged. For everything that is received: every operation on it ends, `check` finds nothing, and its
//! destruction frees all of it.
//!
//! `NACRE_STREAM_CASES` makes a campaign of it, from `NACRE_POOL_SEED`. A case that does not end within
//! [`ENDS_WITHIN`] fails, and prints its seed.

use std::io::{self, Read};
use std::sync::mpsc;
use std::time::Duration;

use nacre_pool::device::Random;
use nacre_pool::send_stream::{Record, SentProperty, SnapshotHead, StreamReader, StreamWriter};

use super::*;
use crate::Progress;

/// How long the operations of one case may take.
const ENDS_WITHIN: Duration = Duration::from_secs(300);

/// The two ends of a stream.
#[derive(Default)]
struct Pipe<'a> {
    given: Vec<u8>,
    taken: io::Cursor<Vec<u8>>,
    /// Called before the byte at this position is taken.
    meanwhile: Option<(u64, Box<dyn FnOnce() + Send + 'a>)>,
}

impl Progress for Pipe<'_> {
    fn note(&mut self, _: &str) -> bool {
        true
    }

    fn give(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.given.extend_from_slice(bytes);
        Ok(())
    }

    fn take(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let position = self.taken.position();
        if let Some((_, act)) = self.meanwhile.take_if(|(at, _)| *at <= position) {
            act();
        }
        // Nothing behind that position is taken before.
        let left = self.meanwhile.as_ref().map_or(u64::MAX, |(at, _)| at - position);
        let length = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        self.taken.read(&mut buffer[..length])
    }
}

pub(super) fn send(world: &World, from: Option<&str>) -> Vec<Record> {
    let what = ToSendStream {
        snapshot: format!("t/a@{}", if from.is_some() { "2" } else { "1" }),
        from: from.map(ToOwned::to_owned),
        between: from.is_some(),
        package: true,
        skip_missing: true,
        properties: true,
        of_snapshots: true,
        holds: true,
        ..ToSendStream::default()
    };
    let mut pipe = Pipe::default();
    super::super::run(&world.pool, &world.mounts, FsRequest::Send(what), &mut pipe).unwrap();
    let mut reader = StreamReader::begin(&pipe.given[..]).unwrap();
    let mut records = Vec::new();
    while records.last() != Some(&Record::End) {
        records.push(reader.next().unwrap().record);
    }
    records
}

fn receive(world: &World, records: &[Record], force: bool) -> Result<(), Refusal> {
    receive_as(world, records, ToReceive { into: "t/in".to_owned(), force, ..ToReceive::default() })
}

pub(super) fn receive_as(world: &World, records: &[Record], what: ToReceive) -> Result<(), Refusal> {
    receive_while(world, records, what, || {})
}

/// Receives a stream; `act` is called when the head of its first snapshot has been received.
pub(super) fn receive_while(
    world: &World,
    records: &[Record],
    what: ToReceive,
    act: impl FnOnce() + Send,
) -> Result<(), Refusal> {
    let heads = records.iter().take_while(|record| !matches!(record, Record::Rows(_) | Record::SnapshotEnd(_))).count();
    let at = encoded(&records[..heads]).len() as u64;
    let mut pipe =
        Pipe { taken: io::Cursor::new(encoded(records)), meanwhile: Some((at, Box::new(act))), ..Pipe::default() };
    super::super::run(&world.pool, &world.mounts, FsRequest::Receive(what), &mut pipe).map(drop)
}

fn encoded(records: &[Record]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut sink = |piece: &[u8]| -> io::Result<()> {
        bytes.extend_from_slice(piece);
        Ok(())
    };
    let mut writer = StreamWriter::begin(&mut sink).unwrap();
    records.iter().for_each(|record| writer.record(record).unwrap());
    bytes
}

/// A tree with a clone, snapshots at two moments, names that have changed, properties and holds.
pub(super) fn source() -> World {
    let world = World::new();
    for name in ["t/a", "t/a/b", "t/a/b/c", "t/a/d"] {
        world.create(name);
        world.write(name, "file", 3000, 1);
    }
    world.ok(set("t/a/b", "compression", "zstd"));
    world.ok(set("t/a/d", "a:b", "c"));
    world.ok(snapshot(&["t/a@1"], true));
    world.ok(clone("t/a/b@1", "t/a/clone"));
    world.write("t/a/clone", "more", 5000, 2);
    world.write("t/a/b", "file", 9000, 3);
    world.ok(snapshot(&["t/a@2"], true));
    world
}

fn one_of<T: Clone>(all: &[T], random: &mut Random) -> Option<T> {
    all.get(random.below(all.len().max(1) as u64) as usize).cloned()
}

/// Forges the header of a snapshot.
fn forge_head(head: &mut SnapshotHead, other: Option<SnapshotHead>, random: &mut Random) {
    const NAMES: [&str; 8] = ["", "/b", "/b/c", "/x/y", "/..", "b", "//", "/b@1"];
    const WHOLE: [&str; 6] = ["t/a@1", "t/a", "@", "a@b@c", "t/a/b@2", "x@\u{1b}"];
    const PROPERTIES: [(&str, &str); 7] = [
        ("mountpoint", "/etc"),
        ("quota", "1"),
        ("compression", "none such"),
        ("casesensitivity", "insensitive"),
        ("recordsize", "3"),
        ("\u{1b}", ""),
        ("volsize", "1"),
    ];
    let other = other.unwrap_or_default();
    let number = random.below(8) as usize;
    let property = PROPERTIES[number % PROPERTIES.len()];
    let property = SentProperty { name: property.0.to_owned(), value: property.1.to_owned() };
    match random.below(11) {
        0 => NAMES[number].clone_into(&mut head.below),
        1 => WHOLE[number % WHOLE.len()].clone_into(&mut head.name),
        2 => head.guid = other.guid,
        3 => head.from = other.from,
        4 => head.from = head.guid,
        5 => head.clone = !head.clone,
        6 => head.stored = !head.stored,
        7 => head.after = vec![random.below(256) as u8; number],
        8 => head.spelling.push(property),
        9 => head.properties.push(property),
        _ => head.holds.push(WHOLE[number % WHOLE.len()].to_owned()),
    }
}

/// Makes a stream wrong in one way.
fn mutate(records: &mut Vec<Record>, random: &mut Random) {
    let count = records.len() as u64;
    let (at, other) = (random.below(count) as usize, random.below(count) as usize);
    let heads: Vec<SnapshotHead> = records
        .iter()
        .filter_map(|record| if let Record::Snapshot(head) = record { Some(head.clone()) } else { None })
        .collect();
    match random.below(6) {
        0 => drop(records.remove(at)),
        1 => records.insert(at, records[other].clone()),
        2 => records.swap(at, other),
        _ => match &mut records[at] {
            Record::Stream(head) => match random.below(4) {
                0 => head.package = !head.package,
                1 => head.there.clear(),
                2 => head.there.iter_mut().for_each(|(_, _, guid)| *guid = random.below(3)),
                _ => "x/../y".clone_into(&mut head.root),
            },
            Record::Snapshot(head) => forge_head(head, one_of(&heads, random), random),
            Record::Rows(rows) => {
                let place = random.below(rows.len().max(1) as u64) as usize;
                if let Some(byte) = rows.get_mut(place) {
                    *byte = random.below(256) as u8;
                }
            }
            Record::SnapshotEnd(guid) => *guid ^= 1,
            Record::End => {}
        },
    }
}

/// Uses all that was received, and destroys it.
fn use_up(world: &World) {
    let names = world.names();
    for name in names.iter().filter(|name| name.starts_with("t/in")) {
        let _ = world.value(name, "used");
        if let Some((filesystem, _)) = name.split_once('@') {
            let _ = world.run(clone(name, &format!("t/in/clone{}", filesystem.len())));
        }
    }
    for name in names.iter().filter(|name| name.starts_with("t/in") && !name.contains(['@', '#'])) {
        let Ok(dataset) = world.pool.pool.dataset(world.id(name)) else { continue };
        let files = dataset.files();
        for entry in files.list(&files.root(), 0, true, usize::MAX).unwrap_or_default() {
            let Ok((inode, _)) = files.look_up(&files.root(), &entry.name) else { continue };
            let _ = files.read(&inode, 0, &mut [0; 10_000]);
            let _ = files.write(&inode, Some(10), &[1; 10_000]);
            let _ = files.unlink(&files.root(), &entry.name);
        }
    }
    let checked = crate::pool::check::run(&world.pool, &mut Silent).unwrap();
    assert_eq!(checked.problems, 0);
    // Holds are the sender's, or a forger's.
    for name in names.iter().filter(|name| name.contains('@')) {
        let (filesystem, snapshot) = name.split_once('@').unwrap();
        let id = world.id(filesystem);
        let rows = world.pool.pool.snapshot_rows(id).unwrap();
        for (txg, _) in rows.iter().filter(|(_, row)| row.name == snapshot) {
            let holds = world.pool.pool.catalog_view().holds(id, *txg).unwrap();
            for (tag, _) in holds {
                world.pool.pool.hold(id, snapshot, &tag, false).unwrap();
            }
        }
    }
    if names.iter().any(|name| name == "t/in") {
        world.ok(FsRequest::Destroy(ToDestroy { clones: true, recursive: true, force: true, ..destroy("t/in") }));
    }
    assert_eq!(world.names(), ["t"]);
    let checked = crate::pool::check::run(&world.pool, &mut Silent).unwrap();
    assert_eq!(checked.problems, 0);
}

fn case(source: &[Vec<Record>; 2], seed: u64) -> bool {
    let mut random = Random(seed);
    let world = World::new();
    let [full, difference] = source;
    let is_of_difference = random.below(2) == 0;
    let mut records = if is_of_difference { difference.clone() } else { full.clone() };
    for _ in 0..=random.below(3) {
        mutate(&mut records, &mut random);
    }
    if is_of_difference {
        receive(&world, full, false).unwrap();
    }
    let is_received = receive(&world, &records, random.below(2) == 0).is_ok();
    use_up(&world);
    is_received
}

#[test]
fn a_stream_of_a_tree_stays_below_its_target() {
    let world = World::new();
    let mut records = send(&source(), None);
    for record in &mut records {
        if let Record::Snapshot(head) = record
            && head.below == "/b"
        {
            "b".clone_into(&mut head.below);
        }
    }
    let refusal = receive(&world, &records, false).unwrap_err();
    assert!(refusal.what.contains("'b' is no name below a file system"), "{refusal}");
    let is_below = |name: &String| name == "t" || name.split(['/', '@']).nth(1) == Some("in");
    assert!(world.names().iter().all(is_below), "{:?}", world.names());
}

#[test]
fn a_forged_stream_of_a_tree_harms_nothing() {
    let set = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let (count, first) = (set("NACRE_STREAM_CASES").unwrap_or(60), set("NACRE_POOL_SEED").unwrap_or(0));
    println!("campaign: {count} streams of trees from seed {first} (NACRE_STREAM_CASES, NACRE_POOL_SEED)");
    let world = source();
    let source = Arc::new([send(&world, None), send(&world, Some("@1"))]);
    let mut received = 0;
    for seed in (0..count).map(|number| first.wrapping_add(number)) {
        let (sender, done) = mpsc::channel();
        let source = Arc::clone(&source);
        let thread = std::thread::spawn(move || sender.send(case(&source, seed)));
        match done.recv_timeout(ENDS_WITHIN) {
            Ok(is_received) => received += u64::from(is_received),
            Err(mpsc::RecvTimeoutError::Timeout) => panic!("seed {seed} does not end"),
            Err(mpsc::RecvTimeoutError::Disconnected) => {}
        }
        assert!(thread.join().is_ok(), "seed {seed} fails");
    }
    assert!(received > 0 && received < count, "{received} of {count} received");
}

#[test]
fn a_stream_brings_only_holds_that_may_be_set() {
    let records = send(&source(), None);
    for (tag, is_refused) in [(".own", true), ("", true), ("a\nb", true), ("own.", false)] {
        let mut records = records.clone();
        let heads = records.iter_mut().filter_map(|record| match record {
            Record::Snapshot(head) => Some(head),
            _ => None,
        });
        heads.for_each(|head| head.holds.push(tag.to_owned()));
        let received = receive(&World::new(), &records, false);
        let is_of_tag = |refusal: &Refusal| refusal.to_string().contains("which is no tag");
        assert_eq!(received.as_ref().is_err_and(is_of_tag), is_refused, "{tag:?}: {received:?}");
    }
}
