//! Devices as a command names them: opened, locked, and checked before anything is written.
//!
//! Invariant: a device with other content (a file system, another pool, a file's content) is used
//! only if forced; one that is mounted or locked is never used.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nacre_pool::backend::{Bucket, NewGroup};
use nacre_pool::device::{Device, FileDevice};
use nacre_pool::label::{self, GroupKind};
use nacre_remote::Address;

use super::signatures::{self, Accepted};
use crate::refusal::{Kind, Refusal};

/// Part of a device that may be unused in its group without being forced, bytes: devices of one
/// nominal size differ by less.
const UNUSED_MOST: u64 = 16 << 20;

/// The opened devices or bucket of a pool.
#[derive(Clone)]
pub enum Opened {
    /// Devices.
    Devices(Vec<Arc<dyn Device>>),
    /// A bucket, and its whole address.
    Bucket(Arc<dyn Bucket>, String),
}

impl From<Vec<Arc<dyn Device>>> for Opened {
    fn from(devices: Vec<Arc<dyn Device>>) -> Self {
        Self::Devices(devices)
    }
}

impl Opened {
    /// The devices; none of a bucket.
    #[must_use]
    pub fn devices(&self) -> &[Arc<dyn Device>] {
        match self {
            Self::Devices(devices) => devices,
            Self::Bucket(..) => &[],
        }
    }
}

/// Opens the existing devices, or the bucket, of a pool.
///
/// # Errors
/// Errors of [`open`], and a bucket without credentials.
pub fn open_home(paths: &[PathBuf], writable: bool) -> Result<Opened, Refusal> {
    match paths {
        [one] if nacre_remote::is_address(one) => open_bucket(one),
        devices => Ok(Opened::Devices(open(devices, writable)?)),
    }
}

/// Opens the bucket at an address.
///
/// # Errors
/// The address is invalid; there are no credentials.
pub fn open_bucket(address: &Path) -> Result<Opened, Refusal> {
    let text = address.to_string_lossy();
    let address = Address::parse(&text).map_err(|error| Refusal::new(Kind::Invalid, error.to_string()))?;
    let bucket = nacre_remote::open(&address).map_err(|error| {
        let refusal = Refusal::new(kind_of(&error), format!("cannot open '{}': {error}", address.name()));
        match error.kind() {
            io::ErrorKind::PermissionDenied | io::ErrorKind::NotFound => {
                refusal.next("--profile NAME or --credentials-file FILE name credentials that a restart finds as well")
            }
            _ => refusal,
        }
    })?;
    Ok(Opened::Bucket(bucket, address.to_string()))
}

/// Opens the devices of an existing pool.
///
/// # Errors
/// A device that is missing, or in use by another process.
pub fn open(paths: &[PathBuf], writable: bool) -> Result<Vec<Arc<dyn Device>>, Refusal> {
    let open = |path: &PathBuf| match FileDevice::open(path, writable) {
        Ok(device) => Ok(Arc::new(device) as Arc<dyn Device>),
        Err(error) => Err(refusal("cannot open", path, &error)),
    };
    paths.iter().map(open).collect()
}

/// Devices that may become part of a pool. Files that were made for it are removed again unless they are used.
pub struct Fresh {
    devices: Vec<Arc<dyn Device>>,
    made: Vec<PathBuf>,
}

impl std::fmt::Debug for Fresh {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fresh").field("made", &self.made).finish_non_exhaustive()
    }
}

impl Fresh {
    /// No devices.
    #[must_use]
    pub fn none() -> Self {
        Self { devices: Vec::new(), made: Vec::new() }
    }

    /// Checks that all are long enough, before anything is written to any.
    ///
    /// # Errors
    /// A device that is too short.
    pub fn check_size(&self, doing: &str, least: u64) -> Result<(), Refusal> {
        let Some(short) = self.devices.iter().find(|device| device.length() < least) else { return Ok(()) };
        let human = nacre_pool::properties::size::human_bytes;
        let what = format!(
            "{doing}: device is too small: '{}' has {}, and {} are needed",
            short.name(),
            human(short.length()),
            human(least)
        );
        Err(Refusal::new(Kind::Invalid, what).next("truncate -s SIZE makes a file longer"))
    }

    /// Checks that all of each device can be used in its group, unless forced: each segment has at
    /// least one column more than the parity.
    ///
    /// # Errors
    /// A device that is much longer than that, in the words of ZFS.
    pub fn check_groups(&self, groups: &[NewGroup], force: bool) -> Result<(), Refusal> {
        let mut rest = self.devices.as_slice();
        for group in groups.iter().filter(|_| !force) {
            let (own, others) = rest.split_at(group.devices.min(rest.len()));
            rest = others;
            let mut lengths: Vec<u64> = own.iter().map(|device| device.length()).collect();
            lengths.sort_unstable_by_key(|length| std::cmp::Reverse(*length));
            let (longest, used) = (lengths.first(), lengths.get(group.parity()).filter(|_| group.parity() > 0));
            let Some((longest, used)) = longest.zip(used) else { continue };
            if *longest > used + UNUSED_MOST {
                let kind = if group.kind == GroupKind::Mirror { "mirror" } else { "raidz" };
                let human = nacre_pool::properties::size::human_bytes;
                let why = format!(
                    "use '-f' to override the following errors:\n{kind} contains devices of different sizes: {} of a device cannot be used",
                    human(longest - used)
                );
                return Err(Refusal::new(Kind::Invalid, "invalid vdev specification").next(why));
            }
        }
        Ok(())
    }

    /// Checks that the areas of labels can be written on all devices: their content is written back
    /// unchanged. A write to a device of a pool may wait for ever (`failmode=wait`), and these
    /// belong to none yet.
    ///
    /// # Errors
    /// A device that cannot be written.
    pub fn try_writing(&self, doing: &str) -> Result<(), Refusal> {
        self.devices.iter().try_for_each(|device| {
            let ends = [0, device.length().saturating_sub(label::ENDS)];
            let mut there = vec![0; label::ENDS as usize];
            let written = ends
                .into_iter()
                .try_for_each(|at| device.read_at(&mut there, at).and_then(|()| device.write_at(&there, at)));
            written.and_then(|()| device.sync()).map_err(|error| {
                let refusal = refusal("cannot write", Path::new(device.name()), &error);
                Refusal { what: format!("{doing}: {}", refusal.what), ..refusal }
            })
        })
    }

    /// Returns the devices, which are about to be written to.
    #[must_use]
    pub fn devices(&self) -> Vec<Arc<dyn Device>> {
        self.devices.clone()
    }

    /// Marks the first so many of them as part of a pool now: their files are not removed.
    pub fn keep(&mut self, count: usize) {
        let taken: HashSet<&Path> = self.devices.iter().take(count).map(|device| Path::new(device.name())).collect();
        self.made.retain(|path| !taken.contains(path.as_path()));
    }

    /// Returns the devices, which are part of a pool now: their files are not removed.
    #[must_use]
    pub fn take(mut self) -> Vec<Arc<dyn Device>> {
        self.made.clear();
        std::mem::take(&mut self.devices)
    }
}

impl Drop for Fresh {
    fn drop(&mut self) {
        for path in &self.made {
            if let Err(error) = fs::remove_file(path) {
                tracing::warn!(path = %path.display(), %error, "a file that was made for a pool stays behind");
            }
        }
    }
}

/// Opens devices that are to become part of a pool, and makes files of this length where one is given.
///
/// # Errors
/// A file that cannot be a device, and content that is not `accepted`.
pub fn fresh(paths: &[PathBuf], size: Option<u64>, accepted: Accepted) -> Result<Fresh, Refusal> {
    once(paths)?;
    let mut fresh = Fresh { devices: Vec::new(), made: Vec::new() };
    let mut seen = HashSet::new();
    for path in paths {
        if let Ok(there) = fs::metadata(path) {
            let number =
                if there.file_type().is_block_device() { (u64::MAX, there.rdev()) } else { (there.dev(), there.ino()) };
            if !seen.insert(number) {
                return Err(twice(path));
            }
        }
        if let Some(loop_device) = behind(path) {
            let what = format!("cannot use '{}': it is what {loop_device} shows", path.display());
            return Err(Refusal::new(Kind::Busy, what).next(format!("losetup -d /dev/{loop_device} lets it go")));
        }
        let device = match (size, fs::symlink_metadata(path)) {
            (Some(size), Err(error)) if error.kind() == io::ErrorKind::NotFound => {
                let device = FileDevice::create(path, size).map_err(|error| unmade(path, &error))?;
                fresh.made.push(path.clone());
                device
            }
            (Some(_), Ok(_)) => return Err(exists(path)),
            _ => FileDevice::open(path, true).map_err(|error| missing(path, &error))?,
        };
        let metadata = fs::metadata(path).map_err(|error| refusal("cannot look at", path, &error))?;
        if let Some(holds) = signatures::refused(&device, metadata.is_file(), accepted) {
            return Err(Refusal::new(Kind::Exists, format!("cannot use '{}': it {holds}", path.display()))
                .next("-f takes it all the same; what is on it is lost then"));
        }
        fresh.devices.push(Arc::new(device));
    }
    Ok(fresh)
}

fn twice(path: &Path) -> Refusal {
    Refusal::new(Kind::Invalid, format!("'{}' is named twice", path.display()))
}

/// Checks that no path is given twice, also among files that are still to be made.
fn once(paths: &[PathBuf]) -> Result<(), Refusal> {
    let mut seen = HashSet::new();
    paths.iter().find(|path| !seen.insert(path.as_path())).map_or(Ok(()), |path| Err(twice(path)))
}

/// Returns the loop device that is backed by a file: the file is not locked meanwhile, and a file
/// system on the device may be mounted.
fn behind(path: &Path) -> Option<String> {
    let itself =
        |path: &Path| fs::metadata(path).ok().filter(|there| there.is_file()).map(|there| (there.dev(), there.ino()));
    let wanted = itself(path)?;
    let names =
        fs::read_dir("/sys/block").ok()?.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.starts_with("loop")).find(|name| {
        let shown = fs::read_to_string(format!("/sys/block/{name}/loop/backing_file"));
        shown.is_ok_and(|shown| itself(Path::new(shown.trim_end_matches('\n'))) == Some(wanted))
    })
}

fn missing(path: &Path, error: &io::Error) -> Refusal {
    let refusal = refusal("cannot open", path, error);
    match refusal.kind {
        Kind::NotFound => refusal.next("--size=SIZE makes files"),
        Kind::Busy => refusal.next("is it mounted, or part of a pool that is imported?"),
        Kind::Permission => refusal.next("root may use it, or whoever it belongs to"),
        _ if error.kind() == io::ErrorKind::InvalidInput => refusal.next("--size=SIZE FILE makes a file"),
        _ => refusal,
    }
}

fn unmade(path: &Path, error: &io::Error) -> Refusal {
    let refusal = refusal("cannot make", path, error);
    match refusal.kind {
        Kind::NotFound => refusal.next("make the directory first that it is to lie in"),
        Kind::Permission => refusal.next("name a place in a directory that you may write to"),
        _ => refusal,
    }
}

fn exists(path: &Path) -> Refusal {
    Refusal::new(Kind::Exists, format!("cannot make '{}': it exists", path.display()))
        .next("without --size, a file that is there is taken")
}

/// Checks that paths can be part of a pool in these groups, without a lock and without writing: for
/// `create -n` and `add -n`.
///
/// # Errors
/// Errors of [`fresh`].
pub fn foresee(
    paths: &[PathBuf],
    groups: &[NewGroup],
    size: Option<u64>,
    accepted: Accepted,
    (doing, least): (&str, u64),
) -> Result<(), Refusal> {
    if size.is_none() {
        let fresh = fresh(paths, None, accepted)?;
        fresh.check_size(doing, least)?;
        return fresh.check_groups(groups, accepted == Accepted::Anything);
    }
    once(paths)?;
    match paths.iter().find(|path| fs::symlink_metadata(path).is_ok()) {
        Some(there) => Err(exists(there)),
        None => Ok(()),
    }
}

fn kind_of(error: &io::Error) -> Kind {
    match error.kind() {
        io::ErrorKind::NotFound => Kind::NotFound,
        io::ErrorKind::ResourceBusy => Kind::Busy,
        io::ErrorKind::PermissionDenied => Kind::Permission,
        _ => Kind::Io,
    }
}

fn refusal(doing: &str, path: &Path, error: &io::Error) -> Refusal {
    let (kind, text) = (kind_of(error), error.to_string());
    let text = text.split(" (os error").next().unwrap_or_default();
    Refusal::new(kind, format!("{doing} '{}': {text}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn what_holds_something_is_not_taken() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("d");
        let file = fs::File::create(&path).unwrap();
        file.set_len(64 << 20).unwrap();
        let paths = [path.clone()];
        assert!(fresh(&paths, None, Accepted::Empty).is_ok());
        file.write_all_at(b"XFSB", 0).unwrap();
        assert!(fresh(&paths, None, Accepted::Empty).unwrap_err().what.contains("contains a filesystem of type 'xfs'"));
        assert!(fresh(&paths, None, Accepted::Anything).is_ok());
        file.write_all_at(&[0; 4], 0).unwrap();
        file.write_all_at(b"a", (64 << 20) - 1).unwrap();
        assert!(fresh(&paths, None, Accepted::Empty).unwrap_err().what.ends_with("it is not empty"));
        assert!(fresh(&paths, None, Accepted::Unrecognized).is_ok(), "no signature");
        let locked = FileDevice::open(&path, true).unwrap();
        assert_eq!(fresh(&paths, None, Accepted::Anything).unwrap_err().kind, Kind::Busy);
        drop(locked);
        assert!(fresh(&[path.clone(), path], None, Accepted::Anything).unwrap_err().what.ends_with("is named twice"));
    }

    #[test]
    fn files_that_were_made_go_again() {
        let scratch = tempfile::tempdir().unwrap();
        let paths = [scratch.path().join("a"), scratch.path().join("b")];
        assert!(fresh(&paths, Some(1 << 20), Accepted::Empty).unwrap().check_size("cannot create", 64 << 20).is_err());
        assert!(!paths[0].exists());
        let taken = fresh(&paths, Some(64 << 20), Accepted::Empty).unwrap().take();
        assert_eq!(taken.len(), 2);
        drop(taken);
        assert!(paths[1].exists());
        let missing = fresh(&[scratch.path().join("c")], None, Accepted::Empty).unwrap_err();
        assert_eq!((missing.kind, missing.next.as_str()), (Kind::NotFound, "--size=SIZE makes files"));
        let nowhere = fresh(&[scratch.path().join("none/c")], Some(64 << 20), Accepted::Empty).unwrap_err();
        assert!(nowhere.next.contains("make the directory first") && nowhere.what.contains("none/c"), "{nowhere}");
        assert!(fresh(&[scratch.path().join("c")], Some(i64::MAX as u64), Accepted::Empty).is_err());
        assert!(!scratch.path().join("c").exists(), "longer than a file can be");
    }
}
