//! All that can be seen of a pool's files, to be compared with itself, and files without a name.
use std::collections::BTreeMap;
use std::sync::Arc;

use nacre_pool::engine::Dataset;
use nacre_pool::files::Inode;
use nacre_pool::rows::inode::flags::{CUT, HAS_PATCHES};
use nacre_pool::rows::{FileType, InodeRow};

use crate::pools::Imported;

/// A file as it is seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    row: InodeRow,
    content: Vec<u8>,
    attributes: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// By dataset and path, with the place in the listing; files without a name by their number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Everything {
    named: BTreeMap<(String, String), (u64, u64)>,
    files: BTreeMap<(String, u64), Seen>,
}

/// Somebody holds a file: its dataset and its number.
pub type Held = (String, u64);

fn see(dataset: &Dataset, inode: &Inode) -> Seen {
    let files = dataset.files();
    let mut row = files.attributes(inode).unwrap();
    let content = match row.file_type() {
        Some(FileType::Regular) => {
            let mut content = vec![0; usize::try_from(row.size).unwrap()];
            assert_eq!(files.read(inode, 0, &mut content).unwrap(), content.len());
            content
        }
        Some(FileType::Symlink) => files.read_link(inode).unwrap(),
        _ => Vec::new(),
    };
    let names = files.attribute_names(inode).unwrap();
    let attributes = names.into_iter().map(|name| (name.clone(), files.attribute(inode, &name).unwrap())).collect();
    // How content lies is the engine's affair.
    (row.charged, row.record_shift, row.flags) = (0, 0, row.flags & !(CUT | HAS_PATCHES));
    Seen { row, content, attributes }
}

/// The names of all datasets.
pub fn datasets(imported: &Imported) -> Vec<(u64, String)> {
    let look = imported.pool.catalog_view();
    let mut ids = vec![look.root().unwrap()];
    let mut at = 0;
    while at < ids.len() {
        ids.extend(look.children(ids[at]).unwrap());
        at += 1;
    }
    ids.into_iter().map(|id| (id, look.name(id).unwrap())).collect()
}

/// Looks at everything; what is held and gone is missing.
pub fn look(imported: &Imported, held: &[Held]) -> Everything {
    let mut everything = Everything::default();
    for (id, name) in datasets(imported) {
        let dataset: Arc<Dataset> = imported.pool.dataset(id).unwrap();
        let files = dataset.files();
        let mut waiting = vec![(String::new(), files.root())];
        while let Some((path, directory)) = waiting.pop() {
            everything.files.insert((name.clone(), directory.number()), see(&dataset, &directory));
            let mut behind = 0;
            loop {
                let listed = files.list(&directory, behind, true, 7).unwrap();
                let Some(last) = listed.last() else { break };
                behind = last.sequence;
                for entry in listed {
                    let path = format!("{path}{}", String::from_utf8(entry.name.clone()).unwrap());
                    let (inode, row) = entry.file.unwrap();
                    assert_eq!(files.look_up(&directory, &entry.name).unwrap().0.number(), inode.number());
                    everything.named.insert((name.clone(), path.clone()), (entry.sequence, inode.number()));
                    if row.file_type() == Some(FileType::Directory) {
                        waiting.push((format!("{path}/"), inode));
                    } else {
                        everything.files.entry((name.clone(), inode.number())).or_insert_with(|| see(&dataset, &inode));
                    }
                }
            }
        }
        for (_, number) in held.iter().filter(|(of, _)| *of == name) {
            let inode = files.inode(*number);
            if files.attributes(&inode).is_ok() {
                everything.files.insert((name.clone(), *number), see(&dataset, &inode));
            }
        }
    }
    everything
}

/// Panics unless both are the same.
#[track_caller]
pub fn assert_same(before: &Everything, after: &Everything, what: &str) {
    for (name, place) in &before.named {
        assert_eq!(after.named.get(name), Some(place), "{what}: the name {name:?}");
    }
    for name in after.named.keys() {
        assert!(before.named.contains_key(name), "{what}: the name {name:?} is new");
    }
    for (file, seen) in &before.files {
        let Some(now) = after.files.get(file) else { panic!("{what}: {file:?} is gone: {:?}", seen.row) };
        assert_eq!(seen.row, now.row, "{what}: {file:?}");
        let apart = seen.content.iter().zip(&now.content).position(|(one, other)| one != other);
        assert!(seen.content == now.content, "{what}: {file:?}, {:?} differs first at {apart:?}", seen.row);
        assert!(seen.attributes == now.attributes, "{what}: {file:?} has other attributes");
    }
    assert_eq!(before.files.len(), after.files.len(), "{what}: there are other files");
}
