//! The verbs on pools in memory, with mounts that are only noted. The words of refusals are ZFS',
//! so that scripts still understand them.

mod content;
mod forged_streams;
mod later_snapshots;
mod moving;
mod naming;
mod scheduling;
mod showing;
mod user_properties;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nacre_pool::device::{Device, Simulator};
use parking_lot::Mutex;

use super::*;
use crate::{AtOneMoment, MountOptions, Mounted, Opening, Silent, What};

/// A pool in memory, and its mounts.
struct World {
    pool: Imported,
    mounts: Noted,
}

/// Mounts that are only noted.
#[derive(Default)]
struct Noted {
    there: Mutex<Vec<Mounted>>,
    /// Datasets that somebody uses.
    used: Mutex<HashSet<u64>>,
    /// Other requests, in their order.
    asked: Mutex<Vec<String>>,
    /// Called before each change of a mount.
    before: Mutex<Option<Box<dyn Fn() + Send>>>,
}

impl Noted {
    fn changes(&self) {
        self.before.lock().iter().for_each(|before| before());
    }
}

impl Mounts for Noted {
    fn mount(&self, what: What, at: &Path, options: &MountOptions) -> Result<(), Refusal> {
        self.changes();
        if at.starts_with("/broken") {
            return Err(Refusal::new(Kind::Io, format!("cannot mount '{}': it is broken", at.display())));
        }
        self.there.lock().push(Mounted { what, at: at.to_owned(), options: options.clone() });
        Ok(())
    }

    fn make_place(&self, _: &Path, _: &MountOptions) -> Result<(), Refusal> {
        Ok(())
    }

    fn not_mounted(&self) {}

    fn unmount(&self, what: What, force: bool) -> Result<(), Refusal> {
        self.changes();
        let mut there = self.there.lock();
        let Some(place) = there.iter().position(|mounted| mounted.what == what) else { return Ok(()) };
        if self.used.lock().contains(&what.dataset) && !force {
            return Err(Refusal::new(
                Kind::Busy,
                format!("cannot unmount '{}': pool or dataset is busy", there[place].at.display()),
            ));
        }
        let above = |other: &&Mounted| other.at != there[place].at && there[place].at.starts_with(&other.at);
        if there[place..].iter().any(|other| above(&other)) {
            return Err(Refusal::new(
                Kind::Invalid,
                format!("cannot unmount '{}': it is hidden", there[place].at.display()),
            ));
        }
        let gone = there.remove(place);
        let on_it = |other: &Mounted| other.at.starts_with(&gone.at);
        assert!(!there[place..].iter().any(on_it), "{} below {} is still mounted", what.dataset, gone.at.display());
        Ok(())
    }

    fn is_free(&self, what: What) -> Result<(), Refusal> {
        self.asked.lock().push(format!("free {}", what.dataset));
        let used = self.used.lock().contains(&what.dataset);
        if used { Err(Refusal::new(Kind::Busy, "cannot unmount: pool or dataset is busy".to_owned())) } else { Ok(()) }
    }

    fn hidden(&self) -> Vec<u64> {
        let there = self.there.lock();
        let over = |place: usize| {
            there[place..].iter().any(|later| later.at != there[place].at && there[place].at.starts_with(&later.at))
        };
        (0..there.len()).filter(|place| over(*place)).map(|place| there[place].what.dataset).collect()
    }

    fn tidy(&self, at: &Path) {
        self.asked.lock().push(format!("tidy {}", at.display()));
    }

    fn remount(&self, what: What, options: &MountOptions) -> Result<(), Refusal> {
        self.changes();
        let mut there = self.there.lock();
        there.iter_mut().find(|mounted| mounted.what == what).unwrap().options = options.clone();
        Ok(())
    }

    fn mounted(&self) -> Vec<Mounted> {
        self.there.lock().clone()
    }

    fn settle(&self, datasets: &[u64]) -> Result<(), Refusal> {
        self.asked.lock().push(format!("settle {datasets:?}"));
        Ok(())
    }

    fn at_one_moment(&self, datasets: &[u64], act: &mut AtOneMoment<'_>) -> Result<(), Refusal> {
        self.settle(datasets)?;
        act(&mut || {})
    }

    fn replace(&self, dataset: u64, replace: &mut dyn FnMut() -> Result<(), Refusal>) -> Result<(), Refusal> {
        self.changes();
        replace()?;
        self.asked.lock().push(format!("replaced {dataset}"));
        Ok(())
    }

    fn examine(&self, at: &Path) -> Option<crate::system_places::PlaceState> {
        (!at.starts_with("/silent")).then(|| crate::system_places::examine(at))
    }

    fn root_changed(&self, dataset: u64) {
        self.asked.lock().push(format!("root changed {dataset}"));
    }
}

fn opening() -> Opening {
    let next = std::sync::atomic::AtomicU64::new(1);
    Opening {
        host: (1, "host".to_owned()),
        entropy: Arc::new(move || next.fetch_add(0x9e37_79b9_7f4a_7c15, std::sync::atomic::Ordering::Relaxed)),
        cache: 8 << 20,
        altroot: None,
        accepts_older: true,
        alias: None,
        home: PathBuf::from("/nowhere"),
        state: None,
        kept: None,
        after: None,
        failing: Arc::default(),
    }
}

impl World {
    fn new() -> World {
        World::within(opening())
    }

    fn within(opening: Opening) -> World {
        let device: Arc<dyn Device> = Arc::new(Simulator::new("memory", 256 << 20));
        let pool = Imported::create(vec![device], &[], "t", &[], opening).unwrap();
        World { pool, mounts: Noted::default() }
    }

    fn run(&self, request: FsRequest) -> Result<FsAnswer, Refusal> {
        super::run(&self.pool, &self.mounts, request, &mut Silent)
    }

    fn ok(&self, request: FsRequest) -> FsAnswer {
        self.run(request).unwrap_or_else(|refusal| panic!("{refusal}"))
    }

    /// Sentence, next step and kind of the refusal.
    fn refused(&self, request: FsRequest) -> (String, String, Kind) {
        let refusal = self.run(request).unwrap_err();
        (refusal.what, refusal.next, refusal.kind)
    }

    fn create(&self, name: &str) {
        self.ok(create(name));
    }

    fn snapshot(&self, names: &[&str]) {
        self.ok(snapshot(names, false));
    }

    /// The names of everything, file systems, snapshots, bookmarks.
    fn names(&self) -> Vec<String> {
        let types = Types { filesystems: true, snapshots: true, bookmarks: true };
        let listing = Listing { types: Some(types), properties: Some(Vec::new()), ..Listing::default() };
        let FsAnswer::Listed(listed) = self.ok(FsRequest::List(listing)) else { panic!() };
        let mut names: Vec<String> = listed.into_iter().map(|listed| listed.name).collect();
        names.sort();
        names
    }

    fn value(&self, name: &str, property: &str) -> (Option<String>, From) {
        let listing = Listing {
            names: vec![name.to_owned()],
            depth: Some(0),
            types: Some(Types { filesystems: true, snapshots: true, bookmarks: true }),
            properties: Some(vec![property.to_owned()]),
        };
        let FsAnswer::Listed(mut listed) = self.ok(FsRequest::List(listing)) else { panic!() };
        let shown = listed.pop().unwrap().values.pop().unwrap();
        (shown.value, shown.source)
    }

    /// The mounts: dataset names and mount points.
    fn mounted(&self) -> Vec<(String, String)> {
        let FsAnswer::Mounted(mounted) = self.ok(FsRequest::Mounted) else { panic!() };
        let mut found: Vec<(String, String)> =
            mounted.into_iter().map(|mounted| (mounted.name, mounted.at.display().to_string())).collect();
        found.sort();
        found
    }

    fn id(&self, name: &str) -> u64 {
        self.pool.pool.find(name).unwrap().unwrap()
    }

    /// Writes a file of noise into a file system.
    fn write(&self, name: &str, file: &str, bytes: usize, fill: u64) {
        let mut state = fill.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as u8
        };
        self.put(name, file, &std::iter::repeat_with(&mut next).take(bytes).collect::<Vec<u8>>());
    }

    /// Writes a file that compresses well.
    fn write_text(&self, name: &str, file: &str, bytes: usize) {
        self.put(name, file, &b"all work and no play ".iter().copied().cycle().take(bytes).collect::<Vec<u8>>());
    }

    fn put(&self, name: &str, file: &str, content: &[u8]) {
        let dataset = self.pool.pool.dataset(self.id(name)).unwrap();
        let files = dataset.files();
        let inode = match files.look_up(&files.root(), file.as_bytes()) {
            Ok((inode, _)) => inode,
            Err(_) => files.make(&files.root(), file.as_bytes(), b"", &|view| Ok(plain(view.now))).unwrap().0,
        };
        files.write(&inode, Some(0), content).unwrap();
        self.pool.pool.commit().unwrap();
    }
}

fn plain(now: nacre_pool::rows::Timestamp) -> nacre_pool::files::NewInode {
    let row = nacre_pool::rows::InodeRow::new(nacre_pool::rows::FileType::Regular, 0o644, now);
    nacre_pool::files::NewInode { row, target: None, attributes: Vec::new() }
}

fn create(name: &str) -> FsRequest {
    FsRequest::Create(ToCreate { name: name.to_owned(), ..ToCreate::default() })
}

fn create_with(name: &str, properties: &[(&str, &str)]) -> FsRequest {
    let properties = properties.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    FsRequest::Create(ToCreate { name: name.to_owned(), properties, ..ToCreate::default() })
}

fn clone(from: &str, name: &str) -> FsRequest {
    FsRequest::Create(ToCreate { name: name.to_owned(), from: Some(from.to_owned()), ..ToCreate::default() })
}

fn snapshot(names: &[&str], recursive: bool) -> FsRequest {
    FsRequest::Snapshot(ToSnapshot {
        names: names.iter().map(|name| (*name).to_owned()).collect(),
        recursive,
        properties: Vec::new(),
    })
}

fn destroy(target: &str) -> ToDestroy {
    ToDestroy { target: target.to_owned(), ..ToDestroy::default() }
}

fn set(name: &str, property: &str, value: &str) -> FsRequest {
    let properties = vec![(property.to_owned(), NewValue::Local(value.to_owned()))];
    FsRequest::Set(ToSet { names: vec![name.to_owned()], properties, ..ToSet::default() })
}

fn inherit(name: &str, property: &str, recursive: bool) -> FsRequest {
    FsRequest::Set(ToSet {
        names: vec![name.to_owned()],
        recursive,
        properties: vec![(property.to_owned(), NewValue::Inherit)],
        ..ToSet::default()
    })
}
