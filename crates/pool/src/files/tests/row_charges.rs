//! Charges for the rows of inodes, and quotas of owners for them.

use super::cuts::{Log, replay};
use super::*;
use crate::space::{OwnerQuota, OwnerQuotas};

/// Bytes charged to a user.
fn used(files: &MapFiles, uid: u32) -> u64 {
    files.owner_use((OwnerKind::User, uid)).unwrap().bytes
}

fn owned(uid: u32, file_type: FileType, target: Option<&[u8]>) -> impl Fn(&ParentView) -> Result<NewInode> {
    let target = target.map(<[u8]>::to_vec);
    move |parent| {
        let mut row = InodeRow::new(file_type, 0o644, parent.now);
        (row.uid, row.gid) = (uid, uid);
        Ok(NewInode { row, target: target.clone(), attributes: Vec::new() })
    }
}

fn limited(files: &MapFiles, uid: u32, bytes: u64) {
    let mut quotas = OwnerQuotas::default();
    quotas.own.insert((OwnerKind::User, uid), OwnerQuota { bytes: Some(bytes), objects: None });
    files.set_rules(Rules { quotas, ..Rules::default() });
}

#[test]
fn each_row_is_charged_to_the_owner_of_its_inode() {
    let (files, frames) = empty();
    let root = files.root();
    let mut before = 0;
    let mut grown = |files: &MapFiles| {
        let now = used(files, 7);
        let grown = now as i64 - before as i64;
        before = now;
        grown
    };
    let (file, _) = files.make(&root, b"f", b"", &owned(7, FileType::Regular, None)).unwrap();
    assert!((60..150).contains(&grown(&files)), "an inode and a name");
    files.set_attribute(&file, b"user.a", &[1; 4000], None, None).unwrap();
    assert!((4000..4100).contains(&grown(&files)), "an attribute");
    files.set_attribute(&file, b"user.a", &[1; 1000], None, None).unwrap();
    assert_eq!(grown(&files), -3000);
    files.link(&file, &root, &[b'n'; 255]).unwrap();
    assert!((255..350).contains(&grown(&files)), "a name");
    files.write(&file, None, &[1; 2000]).unwrap();
    assert!((2000..2100).contains(&grown(&files)), "small content");
    files.make(&root, b"l", b"", &owned(7, FileType::Symlink, Some(&[b't'; 3000]))).unwrap();
    assert!((3060..3250).contains(&grown(&files)), "a link target");
    files.unlink(&root, &[b'n'; 255]).unwrap();
    assert!((-350..-255).contains(&grown(&files)));
    files.rename((&root, b"f"), (&root, &[b'm'; 101]), MayReplace::No).unwrap();
    assert_eq!(grown(&files), 100);
    files.remove_attribute(&file, b"user.a").unwrap();
    assert!((-1100..-1000).contains(&grown(&files)));
    let mut freed = Vec::new();
    check(&files, &frames, &mut freed);
    // The new owner is charged what the old one was.
    let all = used(&files, 7);
    let change = AttributeChange { uid: Some(8), ..AttributeChange::default() };
    files.set_attributes(&file, &change).unwrap();
    assert!(used(&files, 8) > 2000);
    assert_eq!(used(&files, 7) + used(&files, 8), all);
    check(&files, &frames, &mut freed);
    files.unlink(&root, &[b'm'; 101]).unwrap();
    files.unlink(&root, b"l").unwrap();
    drop(file);
    files.free_orphans().unwrap();
    assert_eq!((used(&files, 7), used(&files, 8)), (0, 0));
    check(&files, &frames, &mut freed);
}

#[test]
fn small_content_is_overwritten_at_the_limit() {
    let (files, _) = empty();
    let root = files.root();
    let (file, _) = files.make(&root, b"f", b"", &owned(7, FileType::Regular, None)).unwrap();
    files.write(&file, None, &[1; 1000]).unwrap();
    for held in [0, u64::MAX] {
        files.set_held_by_snapshots(Txg(held));
        limited(&files, 7, used(&files, 7));
        files.write(&file, Some(0), &[2; 1000]).unwrap();
        files.write(&file, Some(300), &[3; 200]).unwrap();
        files.flush(Txg(7)).unwrap();
        let longer = files.write(&file, Some(900), &[4; 500]);
        assert!(matches!(longer, Err(FileError::Quota)), "{longer:?}");
        files.set_attributes(&file, &AttributeChange { size: Some(0), ..AttributeChange::default() }).unwrap();
        files.write(&file, Some(0), &[5; 1000]).unwrap();
    }
}

#[test]
fn quotas_of_owners_hold_for_rows() {
    let (files, frames) = empty();
    let root = files.root();
    let (file, _) = files.make(&root, b"f", b"", &owned(7, FileType::Regular, None)).unwrap();
    limited(&files, 7, 100_000);
    let until_refused = |one: &dyn Fn(usize) -> Result<()>| {
        let refused = (0..10_000).find_map(|at| one(at).err());
        assert!(matches!(refused, Some(FileError::Quota)), "{refused:?}");
        let used = used(&files, 7);
        assert!((90_000..=100_000).contains(&used), "{used}");
    };
    until_refused(&|at| files.set_attribute(&file, format!("user.{at}").as_bytes(), &[9; 4000], None, None));
    // Operations without growth are not refused.
    files.set_attribute(&file, b"user.0", &[8; 4000], None, None).unwrap();
    limited(&files, 7, 1 << 30);
    files.set_attribute(&file, b"user.long", &[7; 60_000], None, None).unwrap();
    limited(&files, 7, used(&files, 7));
    files.set_attribute(&file, b"user.long", &[7; 100], None, None).unwrap();
    limited(&files, 7, 100_000);
    for name in files.attribute_names(&file).unwrap() {
        files.remove_attribute(&file, &name).unwrap();
    }
    let name = |at: usize| format!("{at:0>200}").into_bytes();
    until_refused(&|at| files.link(&file, &root, &name(at)).map(drop));
    for at in 0..10_000 {
        if files.unlink(&root, &name(at)).is_err() {
            break;
        }
    }
    let link =
        |at: usize| files.make(&root, &name(at), b"", &owned(7, FileType::Symlink, Some(&[b't'; 3000]))).map(drop);
    until_refused(&link);
    for at in 0..10_000 {
        if files.unlink(&root, &name(at)).is_err() {
            break;
        }
    }
    files.free_orphans().unwrap();
    until_refused(&|at| {
        let (small, _) = files.make(&root, &name(at), b"", &owned(7, FileType::Regular, None))?;
        files.write(&small, None, &[5; 2000]).map(drop)
    });
    let room = files.owner_use((OwnerKind::User, 7)).unwrap().bytes;
    limited(&files, 7, room);
    let longer = files.rename((&root, &name(0)), (&root, &[b'm'; 255]), MayReplace::No);
    assert!(matches!(longer, Err(FileError::Quota)), "{longer:?}");
    files.rename((&root, &name(0)), (&root, b"short"), MayReplace::No).unwrap();
    limited(&files, 7, 100_000);
    // Another user has an own quota, and cannot give the file away.
    let (other, _) = files.make(&root, b"o", b"", &owned(9, FileType::Regular, None)).unwrap();
    (0..30)
        .for_each(|at| files.set_attribute(&other, format!("user.{at}").as_bytes(), &[9; 4000], None, None).unwrap());
    let given = files.set_attributes(&other, &AttributeChange { uid: Some(7), ..AttributeChange::default() });
    assert!(matches!(given, Err(FileError::Quota)), "{given:?}");
    check(&files, &frames, &mut Vec::new());
}

/// The table as written by a version without charges for rows.
fn of_older_version(mut old: MapTable) -> MapTable {
    let keys: Vec<Vec<u8>> = old.0.keys().cloned().collect();
    for key in keys {
        match keys::Key::decode(&key).unwrap() {
            keys::Key::Inode(_) => {
                let row = InodeRow::decode(&old.0[&key]).unwrap();
                old.0.insert(key, row.encode());
            }
            keys::Key::Recounted => drop(old.0.remove(&key)),
            keys::Key::OwnerUse(..) => {
                let objects = crate::rows::OwnerUse::decode(&old.0[&key]).unwrap().objects;
                old.0.insert(key, crate::rows::OwnerUse { bytes: 0, objects }.encode());
            }
            _ => {}
        }
    }
    old
}

#[test]
fn inodes_of_older_versions_are_charged_with_their_next_change_or_by_and_by() {
    let (files, frames) = empty();
    let root = files.root();
    let (file, _) = files.make(&root, b"f", b"", &owned(7, FileType::Regular, None)).unwrap();
    files.link(&file, &root, b"g").unwrap();
    files.set_attribute(&file, b"user.a", &[1; 500], None, None).unwrap();
    files.write(&file, None, &[1; 1500]).unwrap();
    files.make(&root, b"d", b"", &owned(7, FileType::Directory, None)).unwrap();
    let charged = used(&files, 7);
    let mut freed = Vec::new();
    check(&files, &frames, &mut freed);
    let old = of_older_version(files.with_table(|table| table.clone()));
    drop((file, root, files));
    let files = Files::open(config(&frames), old).unwrap();
    let root = files.root();
    assert_eq!(used(&files, 7), 0);
    for name in [b"f", b"d"] {
        let (inode, _) = files.look_up(&root, name).unwrap();
        let change = AttributeChange { permissions: Some(0o600), ..AttributeChange::default() };
        files.set_attributes(&inode, &change).unwrap();
    }
    assert_eq!(used(&files, 7), charged);
    // The root directory is counted in the background.
    while files.recount_rows().unwrap() {}
    check(&files, &frames, &mut freed);
}

#[test]
fn rows_that_cannot_be_read_are_charged_to_nobody() {
    let (files, frames) = empty();
    let (file, _) = files.make(&files.root(), b"f", b"", &owned(7, FileType::Regular, None)).unwrap();
    files.set_attribute(&file, b"user.a", &[1; 500], None, None).unwrap();
    files.write(&file, Some(0), &[1; 4096 * 3]).unwrap();
    check(&files, &frames, &mut Vec::new());
    let row = files.attributes(&file).unwrap();
    let hint = row.hint.unwrap();
    let old = of_older_version(files.with_table(|table| table.clone()));
    let number = file.number();
    drop((file, files));
    let entry = keys::entry(hint.directory, hint.sequence).to_vec();
    for rotten in [keys::xattr(number, b"user.a").to_vec(), entry] {
        let files = Files::open(config(&frames), old.clone()).unwrap();
        let watched = files.look_at_table(|table| Arc::clone(&table.1));
        watched.rotten.lock().push(rotten);
        let file = files.inode(number);
        files.write(&file, Some(10), b"part").unwrap();
        files.flush(Txg(7)).unwrap();
        let change = AttributeChange { permissions: Some(0o600), ..AttributeChange::default() };
        files.set_attributes(&file, &change).unwrap();
        assert_eq!(files.buffered(), 0);
        watched.rotten.lock().clear();
    }
}

#[test]
fn a_replay_charges_what_was_charged() {
    let (files, frames) = empty();
    let log = Arc::new(Log::default());
    let mut freed = Vec::new();
    check(&files, &frames, &mut freed);
    let table = files.with_table(|table| table.clone());
    files.record_to(Arc::clone(&log) as Arc<dyn Recorder>);
    let root = files.root();
    let (file, _) = files.make(&root, b"f", b"", &owned(7, FileType::Regular, None)).unwrap();
    files.set_attribute(&file, b"user.a", &[1; 500], None, None).unwrap();
    files.link(&file, &root, b"second").unwrap();
    files.write(&file, None, &[1; 1500]).unwrap();
    files.make(&root, b"l", b"", &owned(8, FileType::Symlink, Some(&[b't'; 3000]))).unwrap();
    files.rename((&root, b"l"), (&root, b"longer"), MayReplace::No).unwrap();
    files.set_attributes(&file, &AttributeChange { uid: Some(9), ..AttributeChange::default() }).unwrap();
    files.remove_attribute(&file, b"user.a").unwrap();
    let charged = [7, 8, 9].map(|uid| used(&files, uid));
    assert!(charged[0] == 0 && charged[1] > 3000 && charged[2] > 1500);
    // A second replay has nothing to do.
    let after = Files::open(config(&frames), table).unwrap();
    for _ in 0..2 {
        log.0.lock().iter().for_each(|record| replay(&after, record));
        assert_eq!([7, 8, 9].map(|uid| used(&after, uid)), charged);
    }
    check(&after, &frames, &mut freed);
}

#[test]
fn a_whiteout_beyond_the_quota_takes_no_name_from_the_file_to_replace() {
    let (files, frames) = empty();
    let root = files.root();
    let (source, _) = files.make(&root, b"source", b"", &owned(7, FileType::Regular, None)).unwrap();
    let (target, _) = files.make(&root, b"target", b"", &owned(7, FileType::Regular, None)).unwrap();
    files.link(&target, &root, b"second name").unwrap();
    // It is active.
    files.write(&target, Some(0), &[1; 5000]).unwrap();
    let rows = || [&source, &target].map(|inode| files.attributes(inode).unwrap());
    let before = rows();
    limited(&files, 7, used(&files, 7));
    let whiteout = owned(7, FileType::Regular, None);
    let moved = files.rename_leaving((&root, b"source"), (&root, b"target"), MayReplace::Yes, &whiteout);
    assert!(matches!(moved, Err(FileError::Quota)), "{moved:?}");
    assert_eq!(rows(), before);
    check(&files, &frames, &mut Vec::new());
    files.unlink(&root, b"target").unwrap();
    drop(target);
    files.free_released(u64::MAX).unwrap();
    assert_eq!(content(&files, &files.look_up(&root, b"second name").unwrap().0), [1; 5000]);
}

/// A sealed frame of an attribute is charged like the one in the clear, also where a replaced one makes room in a quota.
#[test]
fn a_replaced_attribute_makes_as_much_room_sealed_as_in_the_clear() {
    let room_of = |sealed: bool| {
        let (files, frames) = empty();
        frames.sealed.store(sealed, std::sync::atomic::Ordering::Relaxed);
        let file = make(&files, &files.root(), b"file", FileType::Regular);
        // Longer than what a row takes.
        files.set_attribute(&file, b"user.a", &[1; 6000], None, None).unwrap();
        let charged = files.attributes(&file).unwrap().charged;
        let (old, room) = files.old_frame(file.number(), b"user.a", None).unwrap();
        assert_eq!(old.unwrap().is_sealed(), sealed);
        (charged, room)
    };
    assert_eq!(room_of(true), room_of(false));
}
