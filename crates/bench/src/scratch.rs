//! The bench's own directory: marker, image, source and mount points. Nothing outside it is ever
//! changed, except one fresh subdirectory of the directory given with `--source`.
//!
//! ```text
//! SCRATCH/.nacre-bench   marker with our process number and the source's path: the directory is ours to empty
//! SCRATCH/image          file under the loop device         (--fs)
//! SCRATCH/lower          where it is mounted                (--fs)
//! SCRATCH/lower/source   mirrored directory                 (--source DIR: DIR/nacre-bench-PID; else SCRATCH/source)
//! SCRATCH/btrfs          mount point of a Btrfs next to the source, for targets that want one
//! SCRATCH/mnt/TARGET     measured path, as deep as the source so that paths cost the same
//! SCRATCH/run, state     run-time and state directories of the daemons
//! ```

use std::cell::OnceCell;
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nacre_bench_arguments::TablePlace;

use crate::failure::{Doing, Failure};
use crate::images;
use crate::mounts;
use crate::options::{Plan, Source};
use crate::target::Ground;
use crate::undo::{self, Effect, Undo};

const MARKER: &str = ".nacre-bench";
/// Deadline for the daemons of the mounts above to end; after it the lower file system is detached.
const LOWER_PATIENCE: Duration = Duration::from_secs(10);

/// Method of emptying caches before a "first" measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cold {
    /// Our own file system is unmounted and mounted again: only its caches are dropped.
    Remount,
    /// `echo 2 > /proc/sys/vm/drop_caches`: dentries and inodes of the whole machine are dropped.
    DropCaches,
    /// `echo 3 > /proc/sys/vm/drop_caches`: all caches of the whole machine are dropped, including those of images.
    DropEverything,
    /// Only the mount under test is new; the source stays warm.
    FreshMountOnly,
}

impl Cold {
    /// Describes the method for the report.
    pub fn describe(self) -> &'static str {
        match self {
            Self::Remount => "fresh mount over a freshly mounted source",
            Self::DropCaches => "fresh mount, names and inodes dropped system-wide",
            Self::DropEverything => "fresh mount, every cache dropped system-wide",
            Self::FreshMountOnly => "fresh mount over a warm source",
        }
    }
}

#[derive(Debug)]
struct Lower {
    device: PathBuf,
    point: PathBuf,
    kind: &'static str,
}

/// The prepared scratch directory.
#[derive(Debug)]
pub struct Scratch {
    root: PathBuf,
    source: PathBuf,
    lower: Option<Lower>,
    cold: Cold,
    /// Size of the Btrfs next to the source.
    btrfs_bytes: u64,
    /// Mount point of Btrfs, once it was requested, or why there is none.
    btrfs: OnceCell<Result<PathBuf, Failure>>,
    undo: Undo,
}

impl Scratch {
    /// Makes the directory, the image if one is requested, and the source.
    pub fn prepare(plan: &Plan, undo: &Undo) -> Result<Self, Failure> {
        let root = claim(&plan.scratch, undo)?;
        for name in ["mnt", "run", "state"] {
            let path = root.join(name);
            fs::create_dir(&path).doing("creating", &path)?;
        }
        let in_place = match (rustix::process::geteuid().is_root(), plan.table.arguments.place) {
            (false, _) => Cold::FreshMountOnly,
            (true, TablePlace::Images) => Cold::DropEverything,
            (true, _) => Cold::DropCaches,
        };
        let (source, lower, cold) = match &plan.source {
            Source::Directory(directory) => {
                let source = directory.join(source_name(&std::process::id().to_string()));
                undo.enter(Effect::Directory(source.clone()))?;
                mark(&root, &source)?;
                (source, None, in_place)
            }
            Source::Scratch => (root.join("source"), None, in_place),
            Source::Image { kind, bytes } => {
                let lower = make_image(&root, kind, *bytes, undo)?;
                (lower.point.join("source"), Some(lower), Cold::Remount)
            }
        };
        fs::create_dir(&source).doing("creating", &source)?;
        open_to_all(&source)?;
        let btrfs_bytes = plan.scale.cage.max(plan.scale.fill).saturating_mul(2);
        Ok(Self { root, source, lower, cold, btrfs_bytes, btrfs: OnceCell::new(), undo: undo.clone() })
    }

    /// Returns the directory in which the steps of a target begin.
    pub fn ground(&self, ground: Ground) -> Result<PathBuf, Failure> {
        match ground {
            Ground::Source | Ground::Fresh | Ground::Branches => Ok(self.source.clone()),
            Ground::FreshBtrfs => self.btrfs.get_or_init(|| self.find_btrfs()).clone(),
        }
    }

    fn find_btrfs(&self) -> Result<PathBuf, Failure> {
        if mounts::of(&self.source)?.is_some_and(|line| line.kind == "btrfs") {
            return Ok(self.source.clone());
        }
        let (image, point) = (self.source.join("btrfs.image"), self.root.join("btrfs"));
        images::make(&image, "btrfs", self.btrfs_bytes, 0, &self.log())?;
        fs::create_dir(&point).doing("creating", &point)?;
        // Direct I/O: nothing is cached twice.
        let device = images::attach(&image, true, &self.undo, &self.log())?;
        self.undo.enter(Effect::Mount(point.clone()))?;
        images::mount(&device, "btrfs", "", &point, &self.log())?;
        open_to_all(&point)?;
        Ok(point)
    }

    /// Returns the directory that is mirrored.
    pub fn source(&self) -> &Path {
        &self.source
    }

    /// Returns the mount point of a target; `depth` 0 is the outermost step.
    pub fn mount_point(&self, target: &str, depth: usize) -> PathBuf {
        let name = if depth == 0 { target.to_owned() } else { format!("{target}.{depth}") };
        self.root.join("mnt").join(name)
    }

    /// Returns the file with the output of the program run last.
    pub fn log(&self) -> PathBuf {
        self.root.join("log")
    }

    /// Returns the run-time directory for daemons of this user.
    pub fn run_directory(&self, uid: u32, gid: u32) -> Result<PathBuf, Failure> {
        self.directory_of("run", uid, gid)
    }

    /// Returns the state directory for daemons of this user.
    pub fn state_directory(&self, uid: u32, gid: u32) -> Result<PathBuf, Failure> {
        self.directory_of("state", uid, gid)
    }

    fn directory_of(&self, kind: &str, uid: u32, gid: u32) -> Result<PathBuf, Failure> {
        let path = self.root.join(kind).join(uid.to_string());
        if !path.exists() {
            fs::create_dir(&path).doing("creating", &path)?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).doing("protecting", &path)?;
            if rustix::process::geteuid().is_root() {
                chown(&path, Some(uid), Some(gid)).doing("giving away", &path)?;
            }
        }
        Ok(path)
    }

    /// Returns how this scratch directory empties caches.
    pub fn cold(&self) -> Cold {
        self.cold
    }

    /// Returns the list of effects to undo.
    pub fn undo(&self) -> &Undo {
        &self.undo
    }

    /// Syncs the source, so that the next visit does not pay for the dirty data of the last one.
    pub fn settle(&self) -> Result<(), Failure> {
        let btrfs = self.btrfs.get().and_then(|place| place.as_ref().ok());
        // The upper file system first: its data go to the lower one.
        for place in btrfs.into_iter().chain([&self.source]) {
            let directory = fs::File::open(place).doing("opening", place)?;
            rustix::fs::syncfs(&directory).doing("flushing", place)?;
        }
        Ok(())
    }

    /// Empties the caches below the mounts under test, none of which may be mounted now.
    pub fn empty_caches(&self) -> Result<(), Failure> {
        match (&self.lower, self.cold) {
            (Some(lower), _) => {
                mounts::unmount(&lower.point, LOWER_PATIENCE)?;
                mount_lower(lower, &self.log())
            }
            (None, cold @ (Cold::DropCaches | Cold::DropEverything)) => {
                rustix::fs::sync();
                let switch = Path::new("/proc/sys/vm/drop_caches");
                fs::write(switch, if cold == Cold::DropCaches { "2\n" } else { "3\n" }).doing("writing", switch)
            }
            (None, _) => Ok(()),
        }
    }
}

/// Claims `path` for this bench: it must not exist, be empty, or carry the marker of a bench that has ended.
fn claim(path: &Path, undo: &Undo) -> Result<PathBuf, Failure> {
    match fs::read_dir(path) {
        Ok(mut entries) => {
            let marker = path.join(MARKER);
            if marker.exists() {
                reclaim(path, &marker)?;
            } else if entries.next().is_some() {
                return Err(Failure::new(format!(
                    "{} is not empty and not a scratch directory of nacre bench",
                    path.display()
                )));
            }
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(Failure::io("reading", path, error)),
    }
    fs::create_dir_all(path).doing("creating", path)?;
    let path = fs::canonicalize(path).doing("resolving", path)?;
    undo.enter(Effect::Directory(path.clone()))?;
    mark(&path, Path::new(""))?;
    open_to_all(&path)?;
    Ok(path)
}

fn mark(root: &Path, source: &Path) -> Result<(), Failure> {
    let marker = root.join(MARKER);
    fs::write(&marker, format!("{}\n{}\n", std::process::id(), source.display())).doing("writing", &marker)
}

/// Returns the name of the subdirectory that the bench with this process id makes in the directory given with
/// `--source`.
fn source_name(process: &str) -> String {
    format!("nacre-bench-{process}")
}

/// Removes everything that a killed bench left behind.
fn reclaim(path: &Path, marker: &Path) -> Result<(), Failure> {
    let text = fs::read_to_string(marker).doing("reading", marker)?;
    let mut lines = text.lines();
    let (process, source) = (lines.next().unwrap_or_default().trim(), Path::new(lines.next().unwrap_or_default()));
    if process.parse::<u32>().is_ok() && Path::new("/proc").join(process).exists() {
        return Err(Failure::new(format!("{} is in use by process {process}", path.display())));
    }
    let path = fs::canonicalize(path).doing("resolving", path)?;
    // Images of targets are in the source, their mount points here.
    mounts::below(&path)?.iter().try_for_each(|point| mounts::detach(point))?;
    if source.is_absolute() && source.file_name().is_some_and(|name| name == source_name(process).as_str()) {
        undo::remove_tree(source)?;
    }
    undo::remove_tree(&path)
}

fn open_to_all(path: &Path) -> Result<(), Failure> {
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).doing("opening to all", path)
}

fn make_image(root: &Path, kind: &'static str, bytes: u64, undo: &Undo) -> Result<Lower, Failure> {
    let (image, point, log) = (root.join("image"), root.join("lower"), root.join("log"));
    images::make(&image, kind, bytes, 0, &log)?;
    fs::create_dir(&point).doing("creating", &point)?;
    let device = images::attach(&image, false, undo, &log)?;
    undo.enter(Effect::Mount(point.clone()))?;
    let lower = Lower { device, point, kind };
    mount_lower(&lower, &log)?;
    open_to_all(&lower.point)?;
    Ok(lower)
}

fn mount_lower(lower: &Lower, log: &Path) -> Result<(), Failure> {
    images::mount(&lower.device, lower.kind, "", &lower.point, log)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_of_somebody_else_is_refused_untouched() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("precious"), "x").unwrap();
        let failure = claim(directory.path(), &Undo::default()).unwrap_err();
        assert!(failure.to_string().contains("not empty"), "{failure}");
        assert_eq!(fs::read_to_string(directory.path().join("precious")).unwrap(), "x");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_dead_bench_is_cleared_and_a_live_one_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("scratch");
        fs::create_dir(&path).unwrap();
        fs::write(path.join("left"), "x").unwrap();
        fs::write(path.join(MARKER), format!("{}\n", std::process::id())).unwrap();
        assert!(claim(&path, &Undo::default()).unwrap_err().to_string().contains("in use"));
        assert!(path.join("left").exists());
        fs::write(path.join(MARKER), "4294967295\n").unwrap();
        claim(&path, &Undo::default()).unwrap();
        assert!(!path.join("left").exists());
    }

    #[test]
    fn the_source_of_a_dead_bench_is_cleared_by_its_name_only() {
        let directory = tempfile::tempdir().unwrap();
        let (scratch, precious, ours) =
            (directory.path().join("s"), directory.path().join("p"), directory.path().join("nacre-bench-4294967295"));
        for source in [&precious, &ours] {
            fs::create_dir_all(&scratch).unwrap();
            fs::create_dir(source).unwrap();
            fs::write(scratch.join(MARKER), format!("4294967295\n{}\n", source.display())).unwrap();
            claim(&scratch, &Undo::default()).unwrap();
        }
        assert!(precious.exists() && !ours.exists());
    }
}
