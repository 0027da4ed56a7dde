//! The bench's own directory: marker, image, source and mount points. Nothing outside it is ever changed, except one
//! fresh subdirectory of the directory given with `--source`.
//!
//! ```text
//! SCRATCH/.nacre-bench   marker with our process number: the directory is ours to empty
//! SCRATCH/image          file under the loop device         (--fs)
//! SCRATCH/lower          where it is mounted                (--fs)
//! SCRATCH/lower/source   what is mirrored                   (--source DIR: DIR/nacre-bench-PID)
//! SCRATCH/mnt/TARGET     what is measured, as deep as the source so that paths cost the same
//! SCRATCH/run            run-time directory of the daemons
//! ```

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::failure::{Doing, Failure};
use crate::mounts;
use crate::options::{Plan, Source};
use crate::programs;
use crate::undo::{self, Effect, Undo};

const MARKER: &str = ".nacre-bench";
/// Daemons of the mounts above need a moment to go; after this the lower file system is detached.
const LOWER_PATIENCE: Duration = Duration::from_secs(10);

/// How caches are emptied before a "first" measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cold {
    /// Our own file system is unmounted and mounted again: only its caches go.
    Remount,
    /// `echo 2 > /proc/sys/vm/drop_caches`: names and inodes of the whole machine go.
    DropCaches,
    /// Only the mount under test is new; the source stays warm.
    FreshMountOnly,
}

impl Cold {
    /// What it means, for the record.
    pub fn describe(self) -> &'static str {
        match self {
            Self::Remount => "fresh mount over a freshly mounted source",
            Self::DropCaches => "fresh mount, names and inodes dropped system-wide",
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
    undo: Undo,
}

impl Scratch {
    /// Makes the directory, the image if one is asked for, and the source.
    pub fn prepare(plan: &Plan, undo: &Undo) -> Result<Self, Failure> {
        let root = claim(&plan.scratch, undo)?;
        for name in ["mnt", "run"] {
            let path = root.join(name);
            fs::create_dir(&path).doing("creating", &path)?;
        }
        let (source, lower, cold) = match &plan.source {
            Source::Directory(directory) => {
                let source = directory.join(format!("nacre-bench-{}", std::process::id()));
                undo.enter(Effect::Directory(source.clone()))?;
                let root = rustix::process::geteuid().is_root();
                (source, None, if root { Cold::DropCaches } else { Cold::FreshMountOnly })
            }
            Source::Image { kind, bytes } => {
                let lower = make_image(&root, kind, *bytes, undo)?;
                (lower.point.join("source"), Some(lower), Cold::Remount)
            }
        };
        fs::create_dir(&source).doing("creating", &source)?;
        open_to_all(&source)?;
        Ok(Self { root, source, lower, cold, undo: undo.clone() })
    }

    /// The directory that is mirrored.
    pub fn source(&self) -> &Path {
        &self.source
    }

    /// Where the target of that name is shown; `depth` 0 is the outermost step.
    pub fn mount_point(&self, target: &str, depth: usize) -> PathBuf {
        let name = if depth == 0 { target.to_owned() } else { format!("{target}.{depth}") };
        self.root.join("mnt").join(name)
    }

    /// Output of the program run last.
    pub fn log(&self) -> PathBuf {
        self.root.join("log")
    }

    /// Run-time directory for daemons of the user with this number.
    pub fn run_directory(&self, uid: u32, gid: u32) -> Result<PathBuf, Failure> {
        let path = self.root.join("run").join(uid.to_string());
        if !path.exists() {
            fs::create_dir(&path).doing("creating", &path)?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).doing("protecting", &path)?;
            if rustix::process::geteuid().is_root() {
                chown(&path, Some(uid), Some(gid)).doing("giving away", &path)?;
            }
        }
        Ok(path)
    }

    /// How this scratch directory empties caches.
    pub fn cold(&self) -> Cold {
        self.cold
    }

    /// The list of effects to undo.
    pub fn undo(&self) -> &Undo {
        &self.undo
    }

    /// Writes out what the visit before left in the source, so that the next one does not pay for it.
    pub fn settle(&self) -> Result<(), Failure> {
        let directory = fs::File::open(&self.source).doing("opening", &self.source)?;
        rustix::fs::syncfs(&directory).doing("flushing", &self.source)
    }

    /// Empties the caches below the mounts under test, none of which may be mounted now.
    pub fn empty_caches(&self) -> Result<(), Failure> {
        match (&self.lower, self.cold) {
            (Some(lower), _) => {
                mounts::unmount(&lower.point, LOWER_PATIENCE)?;
                mount_lower(lower, &self.log())
            }
            (None, Cold::DropCaches) => {
                rustix::fs::sync();
                let switch = Path::new("/proc/sys/vm/drop_caches");
                fs::write(switch, "2\n").doing("writing", switch)
            }
            (None, _) => Ok(()),
        }
    }
}

/// Takes `path` as ours: it must not exist, be empty, or carry the marker of a bench that is gone.
fn claim(path: &Path, undo: &Undo) -> Result<PathBuf, Failure> {
    match fs::read_dir(path) {
        Ok(mut entries) => {
            let marker = path.join(MARKER);
            if marker.exists() {
                reclaim(path, &marker)?;
            } else if entries.next().is_some() {
                return Err(Failure::new(format!("{} is not empty and not a scratch directory of nacre bench", path.display())));
            }
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(Failure::io("reading", path, error)),
    }
    fs::create_dir_all(path).doing("creating", path)?;
    let path = fs::canonicalize(path).doing("resolving", path)?;
    undo.enter(Effect::Directory(path.clone()))?;
    let marker = path.join(MARKER);
    fs::write(&marker, format!("{}\n", std::process::id())).doing("writing", &marker)?;
    open_to_all(&path)?;
    Ok(path)
}

/// Clears what a bench that was killed left behind.
fn reclaim(path: &Path, marker: &Path) -> Result<(), Failure> {
    let text = fs::read_to_string(marker).doing("reading", marker)?;
    let process = Path::new("/proc").join(text.trim());
    if text.trim().parse::<u32>().is_ok() && process.exists() {
        return Err(Failure::new(format!("{} is in use by process {}", path.display(), text.trim())));
    }
    let path = fs::canonicalize(path).doing("resolving", path)?;
    let image = path.join("image");
    if image.exists() && programs::find("losetup").is_some() {
        for point in mounts::below(&path)? {
            mounts::detach(&point)?;
        }
        let output =
            Command::new("losetup").arg("-n").args(["-O", "NAME", "-j"]).arg(&image).output().doing("asking losetup for", &image)?;
        for device in String::from_utf8_lossy(&output.stdout).lines() {
            undo::release_loop(Path::new(device.trim()))?;
        }
    }
    undo::remove_tree(&path)
}

fn open_to_all(path: &Path) -> Result<(), Failure> {
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).doing("opening to all", path)
}

fn make_image(root: &Path, kind: &'static str, bytes: u64, undo: &Undo) -> Result<Lower, Failure> {
    let (image, point, log) = (root.join("image"), root.join("lower"), root.join("log"));
    let file = fs::File::create(&image).doing("creating", &image)?;
    file.set_len(bytes).doing("sizing", &image)?;
    drop(file);
    let maker = format!("mkfs.{kind}");
    let program = programs::find(&maker).ok_or_else(|| Failure::new(format!("{maker} is not installed")))?;
    // Lazy initialisation would write in the background during the measurements.
    let arguments: &[&str] = if kind == "xfs" { &["-q", "-f"] } else { &["-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0"] };
    programs::run(Command::new(program).args(arguments).arg(&image), &log)?;
    fs::create_dir(&point).doing("creating", &point)?;
    let device = PathBuf::from(programs::run(Command::new("losetup").args(["-f", "--show"]).arg(&image), &log)?);
    // Entered after the fact, because its name is the program's answer; a bench killed in between is cleared by `reclaim`.
    undo.enter(Effect::Loop(device.clone())).inspect_err(|_| drop(undo::release_loop(&device)))?;
    undo.enter(Effect::Mount(point.clone()))?;
    let lower = Lower { device, point, kind };
    mount_lower(&lower, &log)?;
    open_to_all(&lower.point)?;
    Ok(lower)
}

fn mount_lower(lower: &Lower, log: &Path) -> Result<(), Failure> {
    programs::run(Command::new("mount").args(["-t", lower.kind]).arg(&lower.device).arg(&lower.point), log).map(drop)
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
}
