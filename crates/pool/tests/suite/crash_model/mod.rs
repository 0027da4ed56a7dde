//! What the pool should hold: the states that it went through since the last promise, and the
//! contents that its files had.
mod steps;

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use nacre_pool::engine::Dataset;
use nacre_pool::files::{Files, Inode, Table};
use nacre_pool::rows::FileType;

use crate::pools::Imported;

/// A file of the model, the same one through renames and links.
pub type FileId = u64;

/// A dataset: names (`directory/name`, the directory may be empty) and what is at them.
pub type Names = BTreeMap<String, FileId>;

/// Attributes of a file.
pub type Attributes = BTreeMap<String, Vec<u8>>;

/// What administration and names look like at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelState {
    /// By the name of the dataset.
    pub datasets: Rc<BTreeMap<String, Rc<Names>>>,
    /// By dataset and name, as they were taken.
    pub snapshots: Rc<BTreeMap<(String, String), Rc<Tree>>>,
    /// Of all files.
    pub attributes: Rc<BTreeMap<FileId, Rc<Attributes>>>,
}

/// A whole dataset: for each name its content, its attributes, and the first name of the same file.
pub type Tree = BTreeMap<String, (Vec<u8>, Attributes, String)>;

/// The contents that a file had: after which operation, and what.
#[derive(Clone, Debug, Default)]
pub struct Versions {
    pub list: Vec<(u64, Rc<Vec<u8>>)>,
    /// The last operation after which it was made durable.
    pub synced: u64,
}

/// The model.
pub struct World {
    /// The states that the pool may be in after a crash, oldest first, with the operation that led
    /// there.
    pub states: Vec<(u64, ModelState)>,
    pub files: BTreeMap<FileId, Versions>,
    pub operation: u64,
    pub next: FileId,
}

impl World {
    /// Of a new pool.
    pub fn new() -> World {
        let state = ModelState {
            datasets: Rc::new(BTreeMap::from([("tank".to_owned(), Rc::default())])),
            ..ModelState::default()
        };
        World { states: vec![(0, state)], files: BTreeMap::new(), operation: 0, next: 1 }
    }

    /// The present state.
    pub fn now(&self) -> &ModelState {
        &self.states.last().unwrap().1
    }

    /// The content of a file now.
    pub fn content(&self, file: FileId) -> Rc<Vec<u8>> {
        self.files[&file].list.last().map(|(_, content)| Rc::clone(content)).unwrap_or_default()
    }

    /// Names and administration of everything up to now are durable.
    pub fn promise_names(&mut self) {
        let last = self.states.pop().unwrap();
        self.states = vec![last];
    }

    /// Everything up to now is durable.
    pub fn promise_all(&mut self) {
        self.promise_names();
        let alive = self.alive();
        self.files.retain(|file, _| alive.contains(file));
        for (_, state) in &mut self.states {
            Rc::make_mut(&mut state.attributes).retain(|file, _| alive.contains(file));
        }
        for versions in self.files.values_mut() {
            versions.synced = self.operation;
            let keep = versions.list.len().saturating_sub(1);
            versions.list.drain(..keep);
        }
    }

    fn alive(&self) -> BTreeSet<FileId> {
        self.states
            .iter()
            .flat_map(|(_, state)| state.datasets.values().flat_map(|names| names.values().copied()))
            .collect()
    }

    /// What a snapshot taken now holds.
    pub fn tree(&self, dataset: &str) -> Tree {
        let mut firsts: BTreeMap<FileId, String> = BTreeMap::new();
        let state = self.now();
        let each = |(name, file): (&String, &FileId)| {
            let first = firsts.entry(*file).or_insert_with(|| name.clone()).clone();
            let attributes = state.attributes.get(file).map(|attributes| (**attributes).clone()).unwrap_or_default();
            (name.clone(), (self.content(*file).to_vec(), attributes, first))
        };
        state.datasets[dataset].iter().map(each).collect()
    }

    /// Panics unless the pool is exactly as the model.
    pub fn compare(&self, imported: &Imported, what: &str) {
        for dataset in self.now().datasets.keys() {
            let found = read(imported.pool.dataset(id_of(imported, dataset)).unwrap().files());
            assert_same(&self.tree(dataset), &found, &format!("{what}, {dataset}"));
        }
        self.compare_snapshots(imported, self.now(), what);
    }

    fn compare_snapshots(&self, imported: &Imported, state: &ModelState, what: &str) {
        for ((dataset, name), expected) in state.snapshots.iter() {
            let id = id_of(imported, dataset);
            let txg =
                imported.pool.find_snapshot(id, name).unwrap().unwrap_or_else(|| panic!("{what}: no {dataset}@{name}"));
            let then = imported.pool.snapshot_files(id, txg).unwrap();
            assert_same(expected, &read(then.files()), &format!("{what}, {dataset}@{name}"));
        }
    }

    /// After a crash: finds the state that the pool is in, and goes on from there. `snapshots`:
    /// whether these are read as well.
    pub fn recover(&mut self, imported: &Imported, snapshots: bool, what: &str) {
        let found = look(imported);
        let mut reasons = Vec::new();
        let chosen = self.states.iter().position(|(operation, state)| match self.fits(state, &found) {
            Ok(()) => true,
            Err(reason) => {
                reasons.push(format!("after operation {operation}: {reason}"));
                false
            }
        });
        let last: Vec<_> = reasons.iter().rev().take(12).collect();
        let Some(chosen) = chosen else {
            panic!("{what}: none of the {} states since the last promise is there: {last:#?}", self.states.len())
        };
        let (_, state) = self.states[chosen].clone();
        if snapshots {
            self.compare_snapshots(imported, &state, what);
        }
        self.adopt(state, &found);
    }

    /// Whether what was found can be this state.
    fn fits(&self, state: &ModelState, found: &FoundState) -> Result<(), String> {
        let snapshots: BTreeSet<_> = state.snapshots.keys().cloned().collect();
        if snapshots != found.snapshots {
            return Err(format!("snapshots {snapshots:?}, found {:?}", found.snapshots));
        }
        let datasets: BTreeSet<_> = state.datasets.keys().collect();
        let there: BTreeSet<_> = found.datasets.keys().collect();
        if datasets != there {
            return Err(format!("datasets {datasets:?}, found {there:?}"));
        }
        for (dataset, names) in state.datasets.iter() {
            let tree = &found.datasets[dataset];
            if !names.keys().eq(tree.keys()) {
                let missing: Vec<_> = names.keys().filter(|name| !tree.contains_key(*name)).collect();
                let more: Vec<_> = tree.keys().filter(|name| !names.contains_key(*name)).collect();
                return Err(format!("{dataset}: missing {missing:?}, more {more:?}"));
            }
            let mut firsts: BTreeMap<FileId, &String> = BTreeMap::new();
            for (name, file) in names.iter() {
                let (content, attributes, first) = &tree[name];
                let wanted = *firsts.entry(*file).or_insert(name);
                if wanted != first {
                    return Err(format!("{dataset}/{name} is the same file as {first}, not as {wanted}"));
                }
                if state.attributes.get(file).map(|attributes| (**attributes).clone()).unwrap_or_default()
                    != *attributes
                {
                    return Err(format!("{dataset}/{name} has other attributes"));
                }
                self.content_fits(*file, content).map_err(|reason| format!("{dataset}/{name}: {reason}"))?;
            }
        }
        Ok(())
    }

    /// Whether a file may have this content.
    fn content_fits(&self, file: FileId, content: &[u8]) -> Result<(), String> {
        let versions = &self.files[&file];
        let promised = versions.list.iter().rposition(|(at, _)| *at <= versions.synced).unwrap_or(0);
        let possible = &versions.list[promised..];
        if let [(_, only)] = possible {
            return if **only == content {
                Ok(())
            } else {
                let apart = only.iter().zip(content).position(|(one, other)| one != other);
                Err(format!("{} bytes of the synced {}, the first that differs: {apart:?}", content.len(), only.len()))
            };
        }
        if !possible.iter().any(|(_, version)| version.len() == content.len()) {
            let lengths: Vec<_> = possible.iter().map(|(_, version)| version.len()).collect();
            return Err(format!("{} bytes, and had {lengths:?}", content.len()));
        }
        let strange = content
            .iter()
            .enumerate()
            .find(|(at, byte)| **byte != 0 && !possible.iter().any(|(_, version)| version.get(*at) == Some(byte)));
        match strange {
            None => Ok(()),
            Some((at, byte)) => Err(format!("byte {at} is {byte}, which it never was")),
        }
    }

    /// The state found is the only one from now on.
    fn adopt(&mut self, state: ModelState, found: &FoundState) {
        self.states = vec![(self.operation, state)];
        for (dataset, names) in self.states[0].1.datasets.clone().iter() {
            for (name, file) in names.iter() {
                let content = Rc::new(found.datasets[dataset][name].0.clone());
                self.files.insert(*file, Versions { list: vec![(self.operation, content)], synced: self.operation });
            }
        }
        self.promise_all();
    }
}

/// The number of a dataset that is there.
pub fn id_of(imported: &Imported, name: &str) -> u64 {
    imported.pool.find(name).unwrap().unwrap_or_else(|| panic!("no dataset {name}"))
}

/// What a pool holds.
pub struct FoundState {
    datasets: BTreeMap<String, Tree>,
    snapshots: BTreeSet<(String, String)>,
}

fn look(imported: &Imported) -> FoundState {
    let ids: Vec<(u64, String)> = {
        let look = imported.pool.catalog_view();
        let mut ids = vec![look.root().unwrap()];
        let mut at = 0;
        while at < ids.len() {
            ids.extend(look.children(ids[at]).unwrap());
            at += 1;
        }
        ids.into_iter().map(|id| (id, look.name(id).unwrap())).collect()
    };
    let mut found = FoundState { datasets: BTreeMap::new(), snapshots: BTreeSet::new() };
    for (id, name) in ids {
        for (_, row) in imported.pool.snapshot_rows(id).unwrap() {
            found.snapshots.insert((name.clone(), row.name));
        }
        let dataset: std::sync::Arc<Dataset> = imported.pool.dataset(id).unwrap();
        found.datasets.insert(name, read(dataset.files()));
    }
    found
}

/// Everything in a dataset.
pub fn read<T: Table>(files: &Files<T>) -> Tree {
    let mut tree = Tree::new();
    let mut firsts = BTreeMap::new();
    // In the order of names, so that the first name of a file is the first in that order.
    let mut entries: Vec<(String, std::sync::Arc<Inode>)> = Vec::new();
    let mut waiting = vec![(String::new(), files.root())];
    while let Some((path, directory)) = waiting.pop() {
        let mut behind = 0;
        loop {
            let listed = files.list(&directory, behind, true, 7).unwrap();
            let Some(last) = listed.last() else { break };
            behind = last.sequence;
            for entry in listed {
                let name = String::from_utf8(entry.name.clone()).unwrap();
                let (inode, row) = entry.file.unwrap();
                assert_eq!(files.look_up(&directory, name.as_bytes()).unwrap().0.number(), inode.number());
                if row.file_type() == Some(FileType::Directory) {
                    waiting.push((format!("{path}{name}/"), inode));
                } else {
                    entries.push((format!("{path}{name}"), inode));
                }
            }
        }
    }
    entries.sort_by(|(one, _), (other, _)| one.cmp(other));
    for (name, inode) in entries {
        let row = files.attributes(&inode).unwrap();
        let content = match row.file_type() {
            Some(FileType::Regular) => {
                let mut content = vec![0; usize::try_from(row.size).unwrap()];
                assert_eq!(files.read(&inode, 0, &mut content).unwrap(), content.len());
                content
            }
            Some(FileType::Symlink) => files.read_link(&inode).unwrap(),
            _ => Vec::new(),
        };
        let names = files.attribute_names(&inode).unwrap();
        let value = |name: &Vec<u8>| (String::from_utf8(name.clone()).unwrap(), files.attribute(&inode, name).unwrap());
        let first = firsts.entry(inode.number()).or_insert_with(|| name.clone()).clone();
        tree.insert(name, (content, names.iter().map(value).collect(), first));
    }
    tree
}

#[track_caller]
fn assert_same(expected: &Tree, found: &Tree, what: &str) {
    assert!(expected.keys().eq(found.keys()), "{what}: {:?} instead of {:?}", found.keys(), expected.keys());
    for (name, (content, attributes, first)) in expected {
        let (there, values, same_as) = &found[name];
        let apart = || content.iter().zip(there).position(|(one, other)| one != other);
        assert!(
            content == there,
            "{what}/{name}: {} bytes instead of {}, the first that differs: {:?}",
            there.len(),
            content.len(),
            apart()
        );
        assert_eq!((attributes, first), (values, same_as), "{what}/{name}");
    }
}
