//! Forged streams with valid checksums and wrong rows, as a sender that knows the format could make
//! them: full and incremental ones. Each is refused and leaves nothing, or its result is a file
//! system on which every operation ends, and nothing remains when it is destroyed.
//!
//! `NACRE_STREAM_CASES` makes a campaign of each test, from `NACRE_POOL_SEED`. A case that does not end within
//! [`ENDS_WITHIN`] fails, and reports its seed.

use std::sync::mpsc;
use std::time::Duration;

use super::*;
use crate::checksum;
use crate::pointer::{ChecksumKind, Compression};
use crate::rows::{DatasetHead, Entry, InodeRow, NameTarget};
use crate::send_stream::{RowOp, SentFrame};

/// How long the operations of one case may take.
const ENDS_WITHIN: Duration = Duration::from_secs(300);

/// A row of a stream, to be changed.
#[derive(Clone)]
enum Sent {
    Put(Vec<u8>, Vec<u8>),
    Gone(Vec<u8>),
    Nothing(Vec<u8>, Vec<u8>),
    Framed(Vec<u8>, SentContent),
}

/// The frame of a row, with a valid checksum.
#[derive(Clone)]
struct SentContent {
    pieces: Vec<u8>,
    compression: Compression,
    checksum_kind: ChecksumKind,
    checksum: [u8; 16],
    logical: u32,
    bytes: Vec<u8>,
}

impl Sent {
    fn of(op: RowOp<'_>) -> Self {
        match op {
            RowOp::Put { key, value } => Self::Put(key.to_vec(), value.to_vec()),
            RowOp::Gone { key } => Self::Gone(key.to_vec()),
            RowOp::Nothing { key, until } => Self::Nothing(key.to_vec(), until.to_vec()),
            RowOp::Framed { key, pieces, frame } => {
                let SentFrame { compression, checksum_kind, checksum, logical, bytes } = frame;
                let (pieces, bytes) = (pieces.to_vec(), bytes.to_vec());
                let content = SentContent { pieces, compression, checksum_kind, checksum, logical, bytes };
                Self::Framed(key.to_vec(), content)
            }
        }
    }

    fn key(&self) -> &[u8] {
        match self {
            Self::Put(key, _) | Self::Gone(key) | Self::Nothing(key, _) | Self::Framed(key, _) => key,
        }
    }

    fn key_mut(&mut self) -> &mut Vec<u8> {
        match self {
            Self::Put(key, _) | Self::Gone(key) | Self::Nothing(key, _) | Self::Framed(key, _) => key,
        }
    }

    fn encode(&self, to: &mut Writer) {
        match self {
            Self::Put(key, value) => RowOp::Put { key, value }.encode(to),
            Self::Gone(key) => RowOp::Gone { key }.encode(to),
            Self::Nothing(key, until) => RowOp::Nothing { key, until }.encode(to),
            Self::Framed(key, content) => {
                let SentContent { pieces, compression, checksum_kind, checksum, logical, bytes } = content;
                let (compression, checksum_kind) = (*compression, *checksum_kind);
                let frame = SentFrame { compression, checksum_kind, checksum: *checksum, logical: *logical, bytes };
                RowOp::Framed { key, pieces, frame }.encode(to);
            }
        }
    }
}

fn taken_apart(payloads: &[Vec<u8>]) -> Vec<Sent> {
    let rows = |payload: &Vec<u8>| {
        let ops = crate::send_stream::record::rows(payload).unwrap();
        ops.into_iter().map(Sent::of).collect::<Vec<_>>()
    };
    payloads.iter().flat_map(rows).collect()
}

fn put_together(mut rows: Vec<Sent>) -> Vec<u8> {
    rows.sort_by(|a, b| a.key().cmp(b.key()));
    let mut to = Writer::default();
    rows.iter().for_each(|row| row.encode(&mut to));
    to.finish()
}

fn one_of<T: Clone>(all: &[T], random: &mut Random) -> Option<T> {
    all.get(random.below(all.len().max(1) as u64) as usize).cloned()
}

/// Sets some byte.
fn scratch(bytes: &mut [u8], random: &mut Random) {
    let place = random.below(bytes.len().max(1) as u64) as usize;
    if let Some(byte) = bytes.get_mut(place) {
        *byte = random.below(256) as u8;
    }
}

/// Makes a row refer to another inode.
fn lead_elsewhere(key: &[u8], value: &mut Vec<u8>, random: &mut Random) {
    let number = 1 + random.below(30);
    match Key::decode(key) {
        Ok(Key::Entry { .. }) => {
            if let Ok(entry) = Entry::decode(value) {
                *value = Entry { inode: number, ..entry }.encode();
            }
        }
        Ok(Key::Name { .. }) => {
            if let Ok(target) = NameTarget::decode(value) {
                *value = NameTarget { inode: number, ..target }.encode();
            }
        }
        Ok(Key::Inode(_)) => {
            if let Ok(row) = InodeRow::decode(value) {
                *value = InodeRow { links: random.below(4) as u32, ..row }.encode();
            }
        }
        _ => {
            value.pop();
        }
    }
}

/// Gives a row another type, length, or hint of a name.
fn be_another(key: &[u8], value: &mut Vec<u8>, random: &mut Random) {
    let number = 1 + random.below(30);
    match (Key::decode(key), value.first_mut()) {
        (Ok(Key::Entry { .. }), Some(first)) => *first = [4, 8, 10][random.below(3) as usize],
        (Ok(Key::Inode(_)), _) => {
            if let Ok(row) = InodeRow::decode(value) {
                let mode = row.mode & 0o7777 | [4, 8, 10][random.below(3) as usize] << 12;
                let hint = row.hint.map(|hint| crate::rows::NameHint { directory: number, ..hint });
                *value = InodeRow { mode, hint, size: random.below(1 << 40), ..row }.encode();
            }
        }
        (_, Some(first)) => *first ^= 1,
        (_, None) => {}
    }
}

/// Changes content, where it is, or how much it claims to be.
fn forge_content(content: &mut SentContent, random: &mut Random) {
    match random.below(3) {
        0 => scratch(&mut content.pieces, random),
        1 => content.logical = random.below(1 << 22) as u32,
        _ => {
            content.compression = Compression::Off;
            content.bytes = vec![7; [0, 1, 100, 131_072, 131_073, 300_000][random.below(6) as usize]];
            content.logical = content.bytes.len() as u32;
            content.checksum = checksum::content(content.checksum_kind, &content.bytes).unwrap();
        }
    }
}

/// Makes a stream wrong in one way; `base`: the rows of its incremental base.
fn mutate(rows: &mut Vec<Sent>, base: &[Sent], random: &mut Random) {
    let elsewhere = || rows.iter().chain(base).cloned().collect::<Vec<_>>();
    let Some(other) = one_of(&elsewhere(), random) else { return };
    // A row of the base is sent once more with a wrong value, or its removal.
    match random.below(8) {
        0 => {
            rows.push(other);
            let Some(at) = rows.len().checked_sub(1) else { return };
            return mutate_row(rows, at, None, random);
        }
        1 => return rows.push(Sent::Gone(other.key().to_vec())),
        2 => {
            let until = one_of(&elsewhere(), random).map(|row| row.key().to_vec()).unwrap_or_default();
            return rows.push(Sent::Nothing(other.key().to_vec(), until));
        }
        _ => {}
    }
    let at = random.below(rows.len() as u64) as usize;
    if at < rows.len() {
        mutate_row(rows, at, Some(other), random);
    }
}

fn mutate_row(rows: &mut Vec<Sent>, at: usize, other: Option<Sent>, random: &mut Random) {
    let number = 1 + random.below(30) as u8;
    let kind = random.below(6);
    if kind == 0 {
        drop(rows.remove(at));
        return;
    }
    match (kind, &mut rows[at]) {
        (1, Sent::Put(key, value)) => lead_elsewhere(key, value, random),
        (2, Sent::Put(key, value)) => be_another(key, value, random),
        (3, row) if row.key().len() > 8 => row.key_mut()[8] = number,
        (4, Sent::Put(_, value)) => {
            if let Some(Sent::Put(_, from)) = other {
                *value = from;
            }
        }
        (5, row @ Sent::Put(..)) if random.below(4) == 0 => *row = Sent::Gone(row.key().to_vec()),
        (_, Sent::Put(_, value)) => scratch(value, random),
        (_, Sent::Framed(_, content)) => forge_content(content, random),
        (_, Sent::Nothing(_, until)) => scratch(until, random),
        (_, Sent::Gone(key)) => scratch(key, random),
    }
}

/// Makes two names of each directory and its files refer to the same inodes, as a hostile sender
/// would.
fn small_source(seed: u64) -> (Side, u64, Random) {
    let side = Side::new();
    let home = side.pool.create_dataset(&NewDataset::named(side.top, "home")).unwrap();
    let dataset = side.pool.dataset(home).unwrap();
    let files = dataset.files();
    let (a, b) = (
        make(&dataset, &files.root(), "a", FileType::Directory),
        make(&dataset, &files.root(), "b", FileType::Directory),
    );
    for (directory, name) in [(&a, "x"), (&b, "y"), (&a, "z")] {
        let file = make(&dataset, directory, name, FileType::Regular);
        files.write(&file, Some(0), &[1; 3000]).unwrap();
        files.set_attribute(&file, b"user.x", &[2; 100], None, None).unwrap();
    }
    make(&dataset, &b, "c", FileType::Directory);
    (side, home, Random(seed))
}

/// Does everything to the file, directory or other thing of a name.
fn use_one(dataset: &Dataset, directory: &Arc<Inode>, name: &[u8], inode: &Arc<Inode>) {
    let files = dataset.files();
    let _ = files.path(inode);
    let _ = files.parent(inode);
    let _ = files.attributes(inode);
    let _ = files.read_link(inode);
    let _ = files.read(inode, 0, &mut [0; 10_000]);
    let _ = files.read(inode, 1 << 39, &mut [0; 10_000]);
    let _ = files.write(inode, Some(5), &[3; 200_000]);
    for name in files.attribute_names(inode).unwrap_or_default() {
        let _ = files.attribute(inode, &name);
        let _ = files.remove_attribute(inode, &name);
    }
    let _ = files.set_attribute(inode, b"user.new", &[1; 5000], None, None);
    for size in [100, 1 << 38, 0] {
        let _ = files.set_attributes(inode, &AttributeChange { size: Some(size), ..Default::default() });
    }
    let _ = files.set_attributes(inode, &AttributeChange { uid: Some(5), ..Default::default() });
    let _ = files.share(inode, inode, Range { from: 0, to: 1 << 17, length: 1 << 17 });
    let _ = files.rename((directory, name), (directory, b"renamed"), MayReplace::No);
    let _ = files.rename((directory, b"renamed"), (directory, name), MayReplace::No);
    let _ = files.link(inode, directory, b"linked");
    let _ = files.unlink(directory, b"linked");
}

/// Does everything to all files and directories, and removes them.
fn use_up(pool: &Pool, id: u64) {
    fn below(dataset: &Dataset, directory: &Arc<Inode>, depth: usize) {
        let files = dataset.files();
        for entry in files.list(directory, 0, true, usize::MAX).unwrap_or_default() {
            let Ok((inode, row)) = files.look_up(directory, &entry.name) else { continue };
            use_one(dataset, directory, &entry.name, &inode);
            if row.file_type() == Some(FileType::Directory) && depth < 20 {
                below(dataset, &inode, depth + 1);
            }
            let _ = files.unlink(directory, &entry.name);
            let _ = files.remove_directory(directory, &entry.name);
        }
    }
    let dataset = pool.dataset(id).unwrap();
    below(&dataset, &dataset.files().root(), 0);
    pool.commit().unwrap();
    assert!(dataset.files().list(&dataset.files().root(), 0, false, usize::MAX).unwrap().is_empty());
}

/// Sends on, clones, promotes, uses and destroys the received file system; nothing of it remains.
fn use_received(to: &Side, snapshots: &[&str]) {
    let id = to.child("copy").unwrap();
    let newest = *snapshots.last().unwrap();
    let txg = to.pool.admin.lock().catalog.snapshot_named(id, newest).unwrap().unwrap();
    let full = ToSend { to: Later::Snapshot((id, txg)), from: None, after: Vec::new(), stored: false };
    let again = Side::new();
    let receiving = again.pool.receive(into(&again, "again"), &head(to, id, txg, None)).unwrap();
    whole(receiving, &sent(to, &full));
    let clone = to.pool.clone_snapshot(id, newest, &NewDataset::named(to.top, "clone")).unwrap();
    use_up(&to.pool, clone);
    use_up(&to.pool, id);
    check(&to.pool, &to.storage);
    to.pool.promote(clone).unwrap();
    let pool = Arc::new(reopen(&to.storage));
    use_up(&pool, id);
    pool.destroy_dataset(id).unwrap();
    for name in snapshots {
        pool.destroy_snapshot(clone, name, false).unwrap();
    }
    pool.destroy_dataset(clone).unwrap();
    check(&pool, &to.storage);
    assert_eq!(pool.admin.lock().catalog.datasets().unwrap().len(), 1);
}

/// Runs cases of these seeds, each in a thread that has to end.
fn cases(usual: u64, case: fn(u64) -> bool) -> (u64, u64) {
    let set = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let (count, seed) = (set("NACRE_STREAM_CASES").unwrap_or(usual), set("NACRE_POOL_SEED").unwrap_or(0));
    println!("campaign: {count} streams from seed {seed} (NACRE_STREAM_CASES, NACRE_POOL_SEED)");
    let mut received = 0;
    for seed in (0..count).map(|number| seed.wrapping_add(number)) {
        let (sender, done) = mpsc::channel();
        let thread = std::thread::spawn(move || sender.send(case(seed)));
        match done.recv_timeout(ENDS_WITHIN) {
            Ok(is_received) => received += u64::from(is_received),
            Err(mpsc::RecvTimeoutError::Timeout) => panic!("seed {seed} does not end"),
            Err(mpsc::RecvTimeoutError::Disconnected) => {}
        }
        assert!(thread.join().is_ok(), "seed {seed} fails");
    }
    (count - received, received)
}

/// Receives a forged stream; returns whether it was accepted. If not, it has left nothing behind.
fn receive(to: &Side, name: &str, head: &SnapshotHead, rows: Vec<Sent>) -> bool {
    let mut receiving = to.pool.receive(into(to, name), head).unwrap();
    let done = receiving.rows(&put_together(rows)).map_err(|error| error.to_string());
    let done = done.and_then(|()| receiving.finish().map_err(|error| error.to_string()));
    drop(receiving);
    done.is_ok()
}

fn whole_stream(seed: u64) -> bool {
    let (from, home, mut random) = small_source(seed);
    let first = from.snapshot(home, "a");
    let full = ToSend { to: Later::Snapshot((home, first)), from: None, after: Vec::new(), stored: false };
    let mut rows = taken_apart(&sent(&from, &full));
    for _ in 0..=random.below(2) {
        mutate(&mut rows, &[], &mut random);
    }
    let to = Side::new();
    let is_received = receive(&to, "a", &head(&from, home, first, None), rows);
    check(&to.pool, &to.storage);
    if is_received {
        use_received(&to, &["a"]);
    } else {
        assert_eq!(to.child("copy"), None);
    }
    is_received
}

fn difference(seed: u64) -> bool {
    let (from, home, mut random) = small_source(seed);
    let first = from.snapshot(home, "a");
    change(&from.pool.dataset(home).unwrap(), &mut random, 12);
    let second = from.snapshot(home, "b");
    let full = ToSend { to: Later::Snapshot((home, first)), from: None, after: Vec::new(), stored: false };
    let base = Some(earlier((home, first), random.below(2) == 0));
    let difference = ToSend { to: Later::Snapshot((home, second)), from: base, ..full.clone() };
    let to = Side::new();
    let of_base = sent(&from, &full);
    whole(to.pool.receive(into(&to, "a"), &head(&from, home, first, None)).unwrap(), &of_base);
    let mut rows = taken_apart(&sent(&from, &difference));
    for _ in 0..=random.below(3) {
        mutate(&mut rows, &taken_apart(&of_base), &mut random);
    }
    let id = to.child("copy").unwrap();
    let before = to.rows(id, None);
    let is_received = receive(&to, "b", &head(&from, home, second, Some(first)), rows);
    check(&to.pool, &to.storage);
    if !is_received {
        assert!(to.rows(id, None) == before, "what was refused has changed something");
    }
    use_received(&to, if is_received { &["a", "b"] } else { &["a"] });
    is_received
}

/// Whatever a stream contains: it is refused and leaves nothing, or the result is a consistent file
/// system.
#[test]
fn a_stream_with_right_checksums_and_wrong_rows_harms_nothing() {
    let (refused, received) = cases(150, whole_stream);
    // Some changes result in a valid file system: another time, another owner.
    assert!(refused > 0 && received > 0, "{refused} refused, {received} received");
}

/// Incremental streams are checked as well, together with the unchanged rows of the base.
#[test]
fn a_difference_with_wrong_rows_harms_nothing() {
    let (refused, received) = cases(80, difference);
    assert!(refused > 0 && received > 0, "{refused} refused, {received} received");
}

#[test]
fn an_attribute_longer_than_attributes_are_is_refused() {
    let (from, home, _) = small_source(1);
    let first = from.snapshot(home, "a");
    let to = Side::new();
    let mut receiving = to.pool.receive(into(&to, "a"), &head(&from, home, first, None)).unwrap();
    let full = ToSend { to: Later::Snapshot((home, first)), from: None, after: Vec::new(), stored: false };
    let inode = taken_apart(&sent(&from, &full)).iter().find_map(|row| match Key::decode(row.key()) {
        Ok(Key::Xattr { inode, .. }) => Some(inode),
        _ => None,
    });
    let long = vec![7; 70_000];
    let content = SentContent {
        pieces: Vec::new(),
        compression: Compression::Off,
        checksum_kind: ChecksumKind::Xxh3,
        checksum: checksum::content(ChecksumKind::Xxh3, &long).unwrap(),
        logical: 70_000,
        bytes: long,
    };
    let mut rows = taken_apart(&sent(&from, &full));
    let key = keys::xattr(inode.unwrap(), b"user.x");
    rows.retain(|row| row.key() != key);
    rows.push(Sent::Framed(key, content));
    assert!(receiving.rows(&put_together(rows)).is_err());
    receiving.abort().unwrap();
    check(&to.pool, &to.storage);
}

/// Changes the value of a row.
fn edit(rows: &mut [Sent], wanted: &[u8], change: impl Fn(&mut Vec<u8>)) {
    let row = rows.iter_mut().find(|row| row.key() == wanted);
    let Some(Sent::Put(_, value)) = row else { panic!("no such row") };
    change(value);
}

fn edit_head(rows: &mut [Sent], change: impl Fn(&mut DatasetHead)) {
    edit(rows, &keys::head(), |value| {
        let mut head = DatasetHead::decode(value).unwrap();
        change(&mut head);
        *value = head.encode();
    });
}

fn edit_inode(rows: &mut [Sent], number: u64, change: impl Fn(&mut InodeRow)) {
    edit(rows, &keys::inode(number), |value| {
        let mut row = InodeRow::decode(value).unwrap();
        change(&mut row);
        *value = row.encode();
    });
}

/// A name in a whole stream: its directory, its sequence, and the inode that it leads to.
struct SentName {
    directory: u64,
    sequence: u64,
    inode: u64,
}

fn named(rows: &[Sent], wanted: &[u8]) -> SentName {
    let name = |row: &Sent| match (row, Key::decode(row.key())) {
        (Sent::Put(_, value), Ok(Key::Entry { directory, sequence })) => {
            let entry = Entry::decode(value).ok().filter(|entry| entry.name == wanted)?;
            Some(SentName { directory, sequence, inode: entry.inode })
        }
        _ => None,
    };
    rows.iter().find_map(name).unwrap()
}

fn head_of(rows: &[Sent]) -> DatasetHead {
    let row = rows.iter().find(|row| row.key() == keys::head());
    let Some(Sent::Put(_, value)) = row else { panic!("no head") };
    DatasetHead::decode(value).unwrap()
}

/// Takes both rows of a name out.
fn take_name(rows: &mut Vec<Sent>, SentName { directory, sequence, .. }: &SentName) {
    let is_of_it = |row: &Sent| match Key::decode(row.key()) {
        Ok(Key::Entry { directory: of, sequence: at } | Key::Name { directory: of, sequence: at, .. }) => {
            (of, at) == (*directory, *sequence)
        }
        _ => false,
    };
    rows.retain(|row| !is_of_it(row));
}

fn put_name(rows: &mut Vec<Sent>, name: &[u8], kind: FileType, at: &SentName) {
    let entry = Entry { inode: at.inode, file_type: kind, name };
    rows.push(Sent::Put(keys::entry(at.directory, at.sequence).to_vec(), entry.encode()));
    let key = keys::name(at.directory, head_of(rows).hash(name), at.sequence);
    rows.push(Sent::Put(key.to_vec(), NameTarget { inode: at.inode, file_type: kind }.encode()));
}

#[test]
fn what_is_no_file_system_is_refused_with_the_reason() {
    let (from, home, _) = small_source(1);
    let first = from.snapshot(home, "a");
    let full = ToSend { to: Later::Snapshot((home, first)), from: None, after: Vec::new(), stored: false };
    type Forge = fn(&mut Vec<Sent>);
    let cases: [(&str, Forge); 7] = [
        ("the head", |rows| edit_head(rows, |head| head.next = 1 << 50)),
        ("no room for more", |rows| edit_head(rows, |head| head.next = keys::NUMBER_MOST)),
        ("another number", |rows| {
            let other = named(rows, b"a").inode;
            edit_head(rows, |head| head.root = other);
        }),
        ("without a number", |rows| {
            let name = named(rows, b"x");
            take_name(rows, &name);
            put_name(rows, b"x", FileType::Regular, &SentName { sequence: 0, ..name });
        }),
        ("that holds names", |rows| {
            let directory = named(rows, b"a");
            take_name(rows, &directory);
            edit_inode(rows, directory.directory, |row| (row.size, row.links) = (row.size - 1, row.links - 1));
            edit_inode(rows, directory.inode, |row| (row.links, row.hint) = (0, None));
            rows.push(Sent::Put(keys::orphan(directory.inode).to_vec(), Vec::new()));
        }),
        ("counts other names", |rows| {
            let (name, next) = (named(rows, b"x"), head_of(rows).next);
            edit_head(rows, |head| head.next += 1);
            edit_inode(rows, name.directory, |row| row.size += 1);
            put_name(rows, b"nowhere", FileType::Regular, &SentName { sequence: next, inode: u64::MAX, ..name });
        }),
        ("that are the same", |rows| {
            let (name, next) = (named(rows, b"x"), head_of(rows).next);
            edit_head(rows, |head| head.next += 1);
            edit_inode(rows, name.inode, |row| row.links += 1);
            edit_inode(rows, name.directory, |row| row.size += 1);
            put_name(rows, b"x", FileType::Regular, &SentName { sequence: next, ..name });
        }),
    ];
    let to = Side::new();
    for (reason, forge) in cases {
        let mut rows = taken_apart(&sent(&from, &full));
        forge(&mut rows);
        let mut receiving = to.pool.receive(into(&to, "a"), &head(&from, home, first, None)).unwrap();
        let taken = receiving.rows(&put_together(rows)).map_err(|error| error.to_string());
        let refused = taken.and_then(|()| receiving.finish().map(drop).map_err(|error| error.to_string()));
        assert!(refused.as_ref().is_err_and(|why| why.contains(reason)), "{reason}: {refused:?}");
    }
    // No property but the rules for names comes as one of these.
    let setuid = crate::send_stream::record::SentProperty { name: "setuid".to_owned(), value: "on".to_owned() };
    let with_more = SnapshotHead { spelling: vec![setuid], ..head(&from, home, first, None) };
    let refused = to.pool.receive(into(&to, "a"), &with_more).map(drop);
    assert!(matches!(&refused, Err(PoolError::Refused(why)) if why.contains("setuid")), "{refused:?}");
    assert_eq!(to.child("copy"), None);
    // An incremental stream: the counter continues, and unchanged content fits its file.
    whole(to.pool.receive(into(&to, "a"), &head(&from, home, first, None)).unwrap(), &sent(&from, &full));
    put(&from.pool.dataset(home).unwrap(), "later", b"content");
    let second = from.snapshot(home, "b");
    let difference =
        ToSend { to: Later::Snapshot((home, second)), from: Some(Earlier::Snapshot((home, first))), ..full.clone() };
    let base = taken_apart(&sent(&from, &full));
    let file = named(&base, b"x").inode;
    let unchanged = base.iter().find(|row| row.key() == keys::inode(file)).unwrap();
    for reason in ["lower than in the base", "does not fit its file"] {
        let mut rows = taken_apart(&sent(&from, &difference));
        if reason == "lower than in the base" {
            let next = head_of(&base).next - 1;
            rows.retain(|row| row.key() == keys::head());
            edit_head(&mut rows, |head| head.next = next);
        } else {
            rows.push(unchanged.clone());
            edit_inode(&mut rows, file, |row| row.record_shift = 9);
        }
        let mut receiving = to.pool.receive(into(&to, "b"), &head(&from, home, second, Some(first))).unwrap();
        receiving.rows(&put_together(rows)).unwrap();
        let refused = receiving.finish().map(drop).unwrap_err().to_string();
        assert!(refused.contains(reason), "{reason}: {refused}");
    }
    check(&to.pool, &to.storage);
}

#[test]
fn records_are_no_longer_than_the_segments_of_the_pool() {
    let (from, home, _) = small_source(1);
    let first = from.snapshot(home, "a");
    let full = ToSend { to: Later::Snapshot((home, first)), from: None, after: Vec::new(), stored: false };
    let device = Arc::new(crate::device::Simulator::new("disk", 128 << 20));
    let pool = Arc::new(on_device(&device, true));
    let most = pool.bounds().record_shift;
    let longest = pool.bounds().frame;
    let mut rows = taken_apart(&sent(&from, &full));
    let file = named(&rows, b"x").inode;
    edit_inode(&mut rows, file, |row| row.record_shift = most + 1);
    let parent = pool.root().unwrap();
    let begun = pool.receive(ReceiveInto { parent, ..into(&from, "a") }, &head(&from, home, first, None));
    let receiving = begun.unwrap();
    let copy = receiving.target();
    whole(receiving, &[put_together(rows)]);
    // The file can be written as far as its records find room; a refused write blocks no other
    // operation.
    let dataset = pool.dataset(copy).unwrap();
    let files = dataset.files();
    let (directory, _) = files.look_up(&files.root(), b"a").unwrap();
    let (file, _) = files.look_up(&directory, b"x").unwrap();
    let data = vec![1; 1000];
    let too_long = files.write(&file, Some(longest), &data);
    assert!(matches!(too_long, Err(crate::files::FileError::TooLarge)), "{too_long:?}");
    files.write(&file, Some(longest - 1000), &data).unwrap();
    files.write(&file, Some(2 << most), &data).unwrap();
    pool.commit().unwrap();
}

#[test]
fn no_count_of_a_stream_is_relied_on() {
    let (from, home, _) = source(4);
    (0..20).for_each(|at| put(&from.pool.dataset(home).unwrap(), &format!("more {at}"), b"content"));
    let first = from.snapshot(home, "a");
    let full = ToSend { to: Later::Snapshot((home, first)), from: None, after: Vec::new(), stored: false };
    for objects in [0, 1, u64::MAX] {
        for is_forged in [false, true] {
            let mut rows = taken_apart(&sent(&from, &full));
            let inodes: Vec<u64> = rows.iter().filter_map(|row| inode_of(row.key())).collect();
            assert!(inodes.len() > 8, "they fit one slice");
            edit_head(&mut rows, |head| head.objects = objects);
            if is_forged {
                edit_inode(&mut rows, inodes[inodes.len() - 1], |row| row.links += 1);
            }
            let to = Side::new();
            let mut receiving = to.pool.receive(into(&to, "a"), &head(&from, home, first, None)).unwrap();
            receiving.rows(&put_together(rows)).unwrap();
            assert_eq!(receiving.finish().is_err(), is_forged, "{objects} objects");
        }
    }
}

fn inode_of(key: &[u8]) -> Option<u64> {
    if let Ok(Key::Inode(number)) = Key::decode(key) { Some(number) } else { None }
}
