//! Random operations, on the pool and on the model alike.

use std::rc::Rc;
use std::sync::Arc;

use nacre_pool::PoolError;
use nacre_pool::engine::{Dataset, NewDataset, Storage};
use nacre_pool::files::{AttributeChange, FileError, Inode, MayReplace, NewInode, ParentView, Range};
use nacre_pool::rows::{FileType, InodeRow};

use super::{FileId, ModelState, World};
use crate::pools::{Imported, Random};

fn open(imported: &Imported, name: &str) -> Result<Arc<Dataset>, PoolError> {
    let id = imported.pool.find(name)?.unwrap_or_else(|| panic!("no dataset {name}"));
    imported.pool.dataset(id)
}

/// What came of an operation.
#[derive(Debug)]
enum Came {
    /// Nothing was done, and that is right.
    Nothing,
    /// The device is gone: it may have been done or not.
    Gone,
}

const DIRECTORIES: [&str; 3] = ["", "d0/", "d1/"];

fn path(random: &mut Random) -> String {
    format!("{}f{}", DIRECTORIES[random.below(3) as usize], random.below(8))
}

/// Directory and last part of a path; the directory is made where it is missing.
fn place(dataset: &Dataset, path: &str) -> Result<(Arc<Inode>, String), FileError> {
    let files = dataset.files();
    let root = files.root();
    let Some((directory, name)) = path.split_once('/') else { return Ok((root, path.to_owned())) };
    let found = match files.look_up(&root, directory.as_bytes()) {
        Ok((found, _)) => found,
        Err(FileError::NotFound) => make(dataset, &root, directory, FileType::Directory)?,
        Err(error) => return Err(error),
    };
    Ok((found, name.to_owned()))
}

fn make(dataset: &Dataset, directory: &Inode, name: &str, kind: FileType) -> Result<Arc<Inode>, FileError> {
    let new = |parent: &ParentView| {
        Ok(NewInode { row: InodeRow::new(kind, 0o644, parent.now), target: None, attributes: Vec::new() })
    };
    dataset.files().make(directory, name.as_bytes(), b"", &new).map(|(inode, _)| inode)
}

fn find(dataset: &Dataset, path: &str) -> Result<Arc<Inode>, FileError> {
    let (directory, name) = place(dataset, path)?;
    dataset.files().look_up(&directory, name.as_bytes()).map(|(inode, _)| inode)
}

/// What an error of the engine means here.
#[track_caller]
fn judge<T>(result: Result<T, FileError>) -> Result<T, Came> {
    result.map_err(|error| match error {
        FileError::Pool(PoolError::NoSpace) => Came::Nothing,
        FileError::Pool(PoolError::Device { .. } | PoolError::Suspended { .. }) => Came::Gone,
        error => panic!("{error:?}"),
    })
}

/// The same of administration: refusals are part of it.
#[track_caller]
fn administered<T>(result: Result<T, PoolError>) -> Result<T, Came> {
    result.map_err(|error| match error {
        PoolError::Refused(_) | PoolError::NoSpace => Came::Nothing,
        PoolError::Device { .. } | PoolError::Suspended { .. } => Came::Gone,
        error => panic!("{error:?}"),
    })
}

/// Tells what is done, where that is asked for.
fn trace(what: impl Fn() -> String) {
    if std::env::var_os("NACRE_POOL_TRACE").is_some() {
        eprintln!("{}", what());
    }
}

fn bytes(random: &mut Random, length: u64) -> Vec<u8> {
    let length = usize::try_from(length).unwrap();
    if random.below(3) == 0 {
        return vec![1 + random.below(255) as u8; length];
    }
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        bytes.extend(random.next().to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

impl World {
    /// Does something. `false`: the device is gone.
    pub fn step(&mut self, imported: &Imported, random: &mut Random) -> bool {
        self.operation += 1;
        let mut next = self.now().clone();
        let came = match random.below(100) {
            0..64 => self.work(imported, random, &mut next),
            64..84 => self.promise(imported, random),
            _ => self.administer(imported, random, &mut next),
        };
        match came {
            Ok(()) => self.states.push((self.operation, next)),
            Err(Came::Nothing) => {}
            Err(Came::Gone) => {
                self.states.push((self.operation, next));
                return false;
            }
        }
        true
    }

    fn pick(&self, random: &mut Random) -> String {
        let names: Vec<&String> = self.now().datasets.keys().collect();
        (*random.pick(&names).unwrap()).clone()
    }

    /// Files, names and attributes.
    fn work(&mut self, imported: &Imported, random: &mut Random, next: &mut ModelState) -> Result<(), Came> {
        let id = self.pick(random);
        let dataset = administered(open(imported, &id))?;
        let path = path(random);
        let known = self.now().datasets[&id].get(&path).copied();
        let number = dataset.id();
        trace(|| {
            let inode = find(&dataset, &path).map_or(0, |inode| inode.number());
            format!(
                "{}: work in txg {} on {id} ({number}) {path} ({known:?}, inode {inode})",
                self.operation,
                imported.store.durable().0 + 1
            )
        });
        let Some(file) = known else { return self.make_file(&dataset, &id, &path, next) };
        match random.below(20) {
            0..8 => self.write(&dataset, &path, file, random),
            8 => self.share(&dataset, &id, &path, file, random),
            9 | 10 => self.resize(&dataset, &path, file, random),
            11 => self.punch(&dataset, &path, file, random),
            12 | 13 => self.rename(&dataset, &id, &path, random, next),
            14 => self.link(&dataset, &id, &path, file, random, next),
            15..18 => self.unlink(&dataset, &id, &path, next),
            _ => self.attribute(&dataset, &path, file, random, next),
        }
    }

    fn make_file(&mut self, dataset: &Dataset, id: &str, path: &str, next: &mut ModelState) -> Result<(), Came> {
        let file = self.next;
        self.next += 1;
        self.files.entry(file).or_default().list.push((self.operation, Rc::default()));
        Rc::make_mut(Rc::make_mut(&mut next.datasets).get_mut(id).unwrap()).insert(path.to_owned(), file);
        let (directory, name) = judge(place(dataset, path))?;
        judge(make(dataset, &directory, &name, FileType::Regular)).map(drop)
    }

    /// Remembers what a file holds now, before that is tried: it may come to be although the device
    /// fails.
    fn becomes(&mut self, file: FileId, content: Vec<u8>) {
        self.files.get_mut(&file).unwrap().list.push((self.operation, Rc::new(content)));
    }

    fn write(&mut self, dataset: &Dataset, path: &str, file: FileId, random: &mut Random) -> Result<(), Came> {
        let mut content = self.content(file).to_vec();
        let length = match random.below(6) {
            0 => random.below(400_000),
            1 | 2 => random.below(20_000),
            _ => random.below(3000),
        };
        let offset =
            if random.below(2) == 0 { content.len() as u64 } else { random.below(content.len() as u64 + 5000) };
        let data = bytes(random, length);
        let inode = judge(find(dataset, path))?;
        trace(|| format!("  write {} at {offset}", data.len()));
        let result = dataset.files().write(&inode, Some(offset), &data);
        let written = result.as_ref().map_or(data.len(), |outcome| outcome.written);
        let from = usize::try_from(offset).unwrap();
        if written > 0 {
            content.resize(content.len().max(from + written), 0);
            content[from..from + written].copy_from_slice(&data[..written]);
        }
        match judge(result) {
            // Nothing of it was accepted.
            Err(Came::Nothing) => return Err(Came::Nothing),
            Ok(_) => self.becomes(file, content),
            Err(gone) => {
                self.becomes(file, content);
                return Err(gone);
            }
        }
        Ok(())
    }

    fn resize(&mut self, dataset: &Dataset, path: &str, file: FileId, random: &mut Random) -> Result<(), Came> {
        let mut content = self.content(file).to_vec();
        let size = match random.below(4) {
            0 => 0,
            1 => random.below(300_000),
            _ => random.below(content.len() as u64 + 1),
        };
        trace(|| format!("  resize from {} to {size}", content.len()));
        content.resize(usize::try_from(size).unwrap(), 0);
        let inode = judge(find(dataset, path))?;
        let result = judge(
            dataset.files().set_attributes(&inode, &AttributeChange { size: Some(size), ..AttributeChange::default() }),
        );
        if !matches!(result, Err(Came::Nothing)) {
            self.becomes(file, content);
        }
        result.map(drop)
    }

    /// Makes a part of a file one with a part of another.
    fn share(
        &mut self,
        dataset: &Dataset,
        id: &str,
        path: &str,
        file: FileId,
        random: &mut Random,
    ) -> Result<(), Came> {
        let names = Rc::clone(&self.now().datasets[id]);
        let others: Vec<(&String, &FileId)> = names.iter().filter(|(_, other)| **other != file).collect();
        let Some((other_path, other)) = random.pick(&others).copied() else { return Err(Came::Nothing) };
        let (source, mut content) = (self.content(*other), self.content(file).to_vec());
        let aligned = |random: &mut Random, most: usize| (random.below(most as u64 / 131_072 + 1)) * 131_072;
        let (from, to) = (aligned(random, source.len()), aligned(random, content.len()));
        let length = (source.len() as u64 - from).min(random.below(4) * 131_072 + random.below(2) * 77);
        trace(|| format!("  share {length} from {other_path} at {from}, to {to}"));
        let (source_file, inode) = (judge(find(dataset, other_path))?, judge(find(dataset, path))?);
        let result = judge(dataset.files().share(&source_file, &inode, Range { from, to, length }));
        trace(|| format!("  shared {result:?}"));
        let shared = match &result {
            Ok(0) | Err(Came::Nothing) => return Err(Came::Nothing),
            Ok(shared) => *shared,
            Err(Came::Gone) => length,
        };
        let (from, to, shared) = (from as usize, to as usize, shared as usize);
        content.resize(content.len().max(to + shared), 0);
        content[to..to + shared].copy_from_slice(&source[from..from + shared]);
        self.becomes(file, content);
        result.map(drop)
    }

    fn punch(&mut self, dataset: &Dataset, path: &str, file: FileId, random: &mut Random) -> Result<(), Came> {
        let mut content = self.content(file).to_vec();
        let (offset, length) = (random.below(content.len() as u64 + 1), random.below(200_000));
        trace(|| format!("  punch {length} at {offset} of {}", content.len()));
        let end = content.len().min(usize::try_from(offset + length).unwrap());
        content[usize::try_from(offset).unwrap()..end].fill(0);
        let inode = judge(find(dataset, path))?;
        let result = judge(dataset.files().zero(&inode, offset, length, false));
        if !matches!(result, Err(Came::Nothing)) {
            self.becomes(file, content);
        }
        result
    }

    fn rename(
        &mut self,
        dataset: &Dataset,
        id: &str,
        path: &str,
        random: &mut Random,
        next: &mut ModelState,
    ) -> Result<(), Came> {
        let other = self::path(random);
        let exchange = random.below(3) == 0;
        let names = Rc::make_mut(Rc::make_mut(&mut next.datasets).get_mut(id).unwrap());
        let (one, two) = (names.get(path).copied().unwrap(), names.get(&other).copied());
        let (from, to) = (judge(place(dataset, path))?, judge(place(dataset, &other))?);
        let replace = if exchange && two.is_some() { MayReplace::Exchange } else { MayReplace::Yes };
        if replace == MayReplace::Exchange {
            names.insert(path.to_owned(), two.unwrap());
            names.insert(other, one);
        } else if two != Some(one) {
            names.remove(path);
            names.insert(other, one);
        }
        judge(dataset.files().rename((&from.0, from.1.as_bytes()), (&to.0, to.1.as_bytes()), replace))
    }

    fn link(
        &mut self,
        dataset: &Dataset,
        id: &str,
        path: &str,
        file: FileId,
        random: &mut Random,
        next: &mut ModelState,
    ) -> Result<(), Came> {
        let other = self::path(random);
        let names = Rc::make_mut(Rc::make_mut(&mut next.datasets).get_mut(id).unwrap());
        let inode = judge(find(dataset, path))?;
        let (directory, name) = judge(place(dataset, &other))?;
        match dataset.files().link(&inode, &directory, name.as_bytes()) {
            Err(FileError::Exists) => {
                assert!(names.contains_key(&other), "{other} exists in the pool and not in the model");
                Err(Came::Nothing)
            }
            result => {
                assert!(names.insert(other, file).is_none(), "a name was given twice");
                judge(result).map(drop)
            }
        }
    }

    fn unlink(&mut self, dataset: &Dataset, id: &str, path: &str, next: &mut ModelState) -> Result<(), Came> {
        Rc::make_mut(Rc::make_mut(&mut next.datasets).get_mut(id).unwrap()).remove(path);
        let (directory, name) = judge(place(dataset, path))?;
        judge(dataset.files().unlink(&directory, name.as_bytes()))
    }

    fn attribute(
        &mut self,
        dataset: &Dataset,
        path: &str,
        file: FileId,
        random: &mut Random,
        next: &mut ModelState,
    ) -> Result<(), Came> {
        let name = format!("user.{}", random.below(3));
        let attributes = Rc::make_mut(Rc::make_mut(&mut next.attributes).entry(file).or_default());
        let inode = judge(find(dataset, path))?;
        if random.below(4) == 0 && attributes.remove(&name).is_some() {
            return judge(dataset.files().remove_attribute(&inode, name.as_bytes()));
        }
        let length = random.below(9000);
        let value = bytes(random, length);
        attributes.insert(name.clone(), value.clone());
        judge(dataset.files().set_attribute(&inode, name.as_bytes(), &value, None, None))
    }

    /// Fsyncs and commits.
    fn promise(&mut self, imported: &Imported, random: &mut Random) -> Result<(), Came> {
        trace(|| format!("{}: a promise in txg {}", self.operation, imported.store.durable().0 + 1));
        match random.below(20) {
            0..13 => {
                let id = self.pick(random);
                let path = path(random);
                let Some(file) = self.now().datasets[&id].get(&path).copied() else { return Err(Came::Nothing) };
                let dataset = administered(open(imported, &id))?;
                let inode = judge(find(&dataset, &path))?;
                judge(imported.pool.sync_file(&dataset, &inode))?;
                self.promise_names();
                self.files.get_mut(&file).unwrap().synced = self.operation;
            }
            13 | 14 => {
                administered(imported.pool.sync_names())?;
                self.promise_names();
            }
            15..17 => {
                administered(imported.store.tend(1 << 20))?;
            }
            _ => {
                administered(imported.pool.commit())?;
                self.promise_all();
            }
        }
        Ok(())
    }

    /// Snapshots, clones and datasets.
    fn administer(&mut self, imported: &Imported, random: &mut Random, next: &mut ModelState) -> Result<(), Came> {
        let pool = &imported.pool;
        let names: Vec<String> = self.now().datasets.keys().cloned().collect();
        let name = self.pick(random);
        let id = administered(pool.find(&name))?.unwrap();
        let snapshots: Vec<(String, String)> = self.now().snapshots.keys().cloned().collect();
        let new = format!("n{}", self.operation);
        trace(|| format!("{}: administration of {name}", self.operation));
        match random.below(12) {
            0..4 if snapshots.len() < 12 => {
                let mut wanted = vec![(id, new.clone())];
                for other in names.iter().filter(|other| **other == name || random.below(3) == 0) {
                    Rc::make_mut(&mut next.snapshots).insert((other.clone(), new.clone()), Rc::new(self.tree(other)));
                    if *other != name {
                        wanted.push((administered(pool.find(other))?.unwrap(), new.clone()));
                    }
                }
                administered(pool.snapshot(&wanted))?;
            }
            4..7 => {
                let Some((name, snapshot)) = random.pick(&snapshots).cloned() else { return Err(Came::Nothing) };
                Rc::make_mut(&mut next.snapshots).remove(&(name.clone(), snapshot.clone()));
                let id = administered(pool.find(&name))?.unwrap();
                administered(pool.destroy_snapshot(id, &snapshot, false))?;
            }
            7 if names.len() < 6 => {
                let root = administered(pool.root())?;
                Rc::make_mut(&mut next.datasets).insert(format!("tank/{new}"), Rc::default());
                administered(pool.create_dataset(&NewDataset::named(root, &new)))?;
            }
            8 if names.len() < 6 => {
                let Some(snapshot) = random.pick(&snapshots).cloned() else { return Err(Came::Nothing) };
                let copy = self.copy_of(&snapshot, next);
                Rc::make_mut(&mut next.datasets).insert(format!("tank/{new}"), copy);
                let (root, from) = (administered(pool.root())?, administered(pool.find(&snapshot.0))?.unwrap());
                administered(pool.clone_snapshot(from, &snapshot.1, &NewDataset::named(root, &new)))?;
            }
            9 => {
                let rows = administered(pool.snapshot_rows(id))?;
                let Some((_, newest)) = rows.last() else { return Err(Came::Nothing) };
                let copy = self.copy_of(&(name.clone(), newest.name.clone()), next);
                Rc::make_mut(&mut next.datasets).insert(name, copy);
                administered(pool.roll_back(id, &newest.name))?;
            }
            10 if name != "tank" => {
                let origin = administered(pool.describe(&name))?.and_then(|(_, row)| row.origin);
                let Some((from, last)) = origin else { return Err(Came::Nothing) };
                let from_name = administered(pool.catalog_view().name(from))?;
                for (txg, row) in administered(pool.snapshot_rows(from))? {
                    if txg <= last {
                        let tree =
                            Rc::make_mut(&mut next.snapshots).remove(&(from_name.clone(), row.name.clone())).unwrap();
                        assert!(Rc::make_mut(&mut next.snapshots).insert((name.clone(), row.name), tree).is_none());
                    }
                }
                administered(pool.promote(id))?;
            }
            11 if name != "tank" => {
                Rc::make_mut(&mut next.datasets).remove(&name);
                administered(pool.destroy_dataset(id))?;
            }
            _ => return Err(Came::Nothing),
        }
        // Administration is a commit.
        self.states.push((self.operation, next.clone()));
        self.promise_all();
        Ok(())
    }

    /// New files with the content of a snapshot.
    fn copy_of(&mut self, snapshot: &(String, String), next: &mut ModelState) -> Rc<super::Names> {
        let tree = Rc::clone(&self.now().snapshots[snapshot]);
        let mut names = super::Names::new();
        for (name, (content, attributes, first)) in tree.iter() {
            let file = match names.get(first) {
                Some(file) => *file,
                None => {
                    let file = self.next;
                    self.next += 1;
                    self.files.entry(file).or_default().list.push((self.operation, Rc::new(content.clone())));
                    self.files.get_mut(&file).unwrap().synced = self.operation;
                    Rc::make_mut(&mut next.attributes).insert(file, Rc::new(attributes.clone()));
                    file
                }
            };
            names.insert(name.clone(), file);
        }
        Rc::new(names)
    }
}
