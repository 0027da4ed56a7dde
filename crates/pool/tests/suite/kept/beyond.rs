//! Random operations beyond those of the model: files without a name, times, owners, links, long attributes.
use std::sync::Arc;

use nacre_pool::PoolError;
use nacre_pool::engine::Dataset;
use nacre_pool::files::{
    AttributeChange, ChangedTime, FileError, Inode, MayReplace, NewInode, ParentView, Range, TimeChange,
};
use nacre_pool::rows::{FileType, InodeRow, Timestamp};

use crate::pools::Random;

/// The files of one dataset, and who holds what there.
pub struct Beyond {
    pub dataset: Arc<Dataset>,
    pub held: Vec<Arc<Inode>>,
    /// The largest number that was given.
    pub given: u64,
}

fn new(random: &mut Random, kind: FileType) -> NewInode {
    let now = Timestamp { seconds: 0, nanoseconds: 0 };
    let mut row = InodeRow::new(kind, (random.below(0o1000)) as u16, now);
    (row.uid, row.gid) = (random.below(3) as u32, random.below(3) as u32);
    let attributes = (0..random.below(3)).map(|at| {
        let length = [3, 900, 9000, 65536][random.below(4) as usize];
        (format!("user.born{at}").into_bytes(), vec![random.next() as u8; length])
    });
    let attributes = attributes.collect();
    let target = (kind == FileType::Symlink).then(|| format!("to/{}", random.next()).into_bytes());
    NewInode { row, target, attributes }
}

/// Whether it was done. What the device or the room refuses is not; all else is a mistake of the test.
#[track_caller]
fn judge<T>(result: Result<T, FileError>) -> Option<T> {
    match result {
        Ok(done) => Some(done),
        Err(
            FileError::Pool(PoolError::NoSpace | PoolError::Device { .. } | PoolError::Suspended { .. })
            | FileError::NotFound
            | FileError::Exists
            | FileError::NotEmpty
            | FileError::Invalid
            | FileError::NoData
            | FileError::IsDirectory
            | FileError::NotPermitted
            | FileError::NotDirectory,
        ) => None,
        Err(error) => panic!("{error:?}"),
    }
}

impl Beyond {
    pub fn step(&mut self, random: &mut Random) {
        let dataset = Arc::clone(&self.dataset);
        let files = dataset.files();
        let root = files.root();
        let names = ["a", "b", "c", "d", "e", "f", "g"];
        let name = |random: &mut Random| names[random.below(7) as usize].as_bytes();
        let directory = |random: &mut Random| match files.look_up(&root, b"dir") {
            Ok((found, _)) if random.below(2) == 0 => found,
            _ => files.root(),
        };
        let (place, name_here) = (directory(random), name(random));
        let found = files.look_up(&place, name_here).map(|(inode, _)| inode);
        // Somebody's file: by its name, or held.
        let any = match random.pick(&self.held).cloned() {
            Some(held) if random.below(2) == 0 => Ok(held),
            _ => found.as_ref().map(Arc::clone).map_err(Clone::clone),
        };
        match random.below(24) {
            0..4 => {
                let kind =
                    [FileType::Regular, FileType::Regular, FileType::Symlink, FileType::Fifo][random.below(4) as usize];
                let made = new(random, kind);
                if let Some((inode, _)) = judge(files.make(&place, name_here, b"", &|_: &ParentView| Ok(made.clone())))
                {
                    self.was_given(&inode);
                }
            }
            4 => {
                let made = new(random, FileType::Directory);
                judge(files.make(&root, b"dir", b"", &|_: &ParentView| Ok(made.clone())));
            }
            5 | 6 => {
                let made = new(random, FileType::Regular);
                let linkable = random.below(2) == 0;
                let inode = judge(files.make_nameless(&place, b"", linkable, &|_: &ParentView| Ok(made.clone())));
                if let Some((inode, _)) = inode {
                    self.was_given(&inode);
                    self.held.push(inode);
                }
            }
            7 => drop(found.map(|inode| self.held.push(inode))),
            8 | 9 => drop(judge(files.unlink(&place, name_here))),
            10 => {
                if !self.held.is_empty() {
                    self.held.swap_remove(random.below(self.held.len() as u64) as usize);
                }
            }
            11 => {
                let Ok(any) = any else { return };
                judge(files.link(&any, &directory(random), name(random)));
            }
            12 => {
                let to = (&*directory(random), name(random));
                if random.below(2) == 0 {
                    let left = new(random, FileType::Fifo);
                    judge(
                        files.rename_leaving((&place, name_here), to, MayReplace::Yes, &|_: &ParentView| {
                            Ok(left.clone())
                        }),
                    );
                } else {
                    judge(files.rename((&place, name_here), to, MayReplace::Yes));
                }
            }
            13 => {
                judge(files.remove_directory(&root, b"dir"));
            }
            14..17 => {
                let Ok(any) = any else { return };
                let data = vec![random.next() as u8; [1, 77, 5000, 140_000, 270_000][random.below(5) as usize]];
                let size = files.attributes(&any).map_or(0, |row| row.size);
                let offset = Some(random.below(size + 9000)).filter(|_| random.below(3) > 0);
                match random.below(3) {
                    0 => drop(judge(files.write(&any, offset, &data))),
                    1 => drop(judge(files.write_held(&any, offset, &data, random.below(2) == 0))),
                    _ => drop(judge(files.write_stored(&any, offset.unwrap_or(0), &data, random.below(2) == 0))),
                }
            }
            17 => {
                let Ok(any) = any else { return };
                judge(files.zero(&any, random.below(200_000), random.below(300_000), random.below(2) == 0));
            }
            18 | 19 => {
                let Ok(any) = any else { return };
                judge(files.set_attributes(&any, &change(random)));
            }
            20 => {
                let Ok(any) = any else { return };
                let value = vec![random.next() as u8; [0, 9, 4096, 4097, 65536][random.below(5) as usize]];
                let permissions = Some(random.below(0o1000) as u16).filter(|_| random.below(2) == 0);
                judge(files.set_attribute(&any, b"user.one", &value, None, permissions));
            }
            21 => {
                let Ok(any) = any else { return };
                judge(files.remove_attribute(&any, [&b"user.one"[..], b"user.born0"][random.below(2) as usize]));
            }
            22 => {
                let Ok(any) = any else { return };
                files.touch(&any);
            }
            _ => {
                let (Ok(any), Ok(found)) = (any, found) else { return };
                let at = |random: &mut Random| random.below(3) * 131_072;
                let range =
                    Range { from: at(random), to: at(random), length: random.below(4) * 131_072 + random.below(99) };
                judge(files.share(&found, &any, range));
            }
        }
    }

    fn was_given(&mut self, inode: &Inode) {
        assert!(inode.number() > self.given, "{} is given again: {} was", inode.number(), self.given);
        self.given = inode.number();
    }
}

fn change(random: &mut Random) -> AttributeChange {
    let some = |random: &mut Random, most: u64| Some(random.below(most)).filter(|_| random.below(3) == 0);
    let time = |random: &mut Random| match random.below(3) {
        0 => None,
        1 => Some(TimeChange::Now),
        _ => Some(TimeChange::To(Timestamp { seconds: random.below(1000) as i64, nanoseconds: 5 })),
    };
    AttributeChange {
        permissions: some(random, 0o10000).map(|bits| bits as u16),
        uid: some(random, 3).map(|id| id as u32),
        gid: some(random, 3).map(|id| id as u32),
        size: some(random, 400_000),
        only_longer: random.below(4) == 0,
        accessed: time(random),
        modified: time(random),
        changed: match random.below(3) {
            0 => ChangedTime::Stays,
            1 => ChangedTime::Now,
            _ => ChangedTime::To(Timestamp { seconds: random.below(1000) as i64, nanoseconds: 5 }),
        },
        kill_privileges: random.below(4) == 0,
        outside_group: random.below(2) == 0,
        flags: None,
        refused_by: 0,
    }
}
