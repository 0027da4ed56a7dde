//! The calls: create, remove, mount, unmount, and what a volume is.
//!
//! Each call takes the volume's lock, does its steps in an order in which a kill after any of them
//! leaves something that the same call, or [`Volumes::tend`](crate::Volumes::tend), completes or
//! undoes: a mount is made before its holder is stored, and a holder is taken away before the mount
//! ends, so a mount without a holder is never needed by anybody.

use crate::{
    command::Nacre,
    dataset,
    failure::{Failure, Kind},
    mount_table::MountTable,
    options::{Options, Place, Spec, check_caller, check_name, shown},
    store::{Locked, Phase, Record, Store},
};
use std::{
    fs,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

/// Maximum number of turns of a creation beside other calls for the same name.
const MAX_ATTEMPTS: usize = 16;
/// Maximum number of callers that have one volume mounted.
const HOLDERS_MAX: usize = 1000;

/// All volumes of a state directory.
pub struct Volumes {
    /// Records and locks.
    pub(crate) store: Store,
    /// The program that does the work.
    pub(crate) nacre: Nacre,
    /// This boot of the machine: holders of another one are gone.
    boot: String,
}

/// A volume as the protocols show it.
pub struct Shown {
    /// Its record.
    pub(crate) record: Record,
    /// The volume as its options describe it.
    pub(crate) spec: Spec,
    /// The directory that containers see.
    pub at: PathBuf,
}

impl Shown {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.record.name
    }

    /// Number of callers that have it mounted.
    pub fn holders(&self) -> usize {
        self.record.holders.len()
    }
}

impl Volumes {
    /// The volumes of a state directory.
    ///
    /// # Errors
    /// Proc is not mounted.
    pub fn new(store: Store, nacre: Nacre) -> Result<Volumes, Failure> {
        let path = Path::new("/proc/sys/kernel/random/boot_id");
        let boot = fs::read_to_string(path).map_err(|error| Failure::io("read", path, &error))?;
        Ok(Volumes { store, nacre, boot: boot.trim().to_owned() })
    }

    /// Creates a volume. It may exist with the same options.
    ///
    /// # Errors
    /// [`Kind::Exists`] with other options; [`Kind::Invalid`]; whatever `nacre` refuses: nothing is left
    /// then.
    pub fn create(&self, name: &str, options: &Options) -> Result<(), Failure> {
        check_name(name)?;
        let spec = Spec::new(options)?;
        for _ in 0..MAX_ATTEMPTS {
            let Some(mut locked) = self.store.lock(name)? else {
                match self.store.begin(Record::new(name, options.clone(), now(), &self.boot)?)? {
                    Some(locked) => return self.make_new(locked, &spec),
                    // Another call was faster.
                    None => continue,
                }
            };
            match locked.record.phase {
                Phase::Ready if locked.record.options == *options => return Ok(()),
                Phase::Ready => {
                    return Err(Failure::new(Kind::Exists, format!("volume {name} exists with other options")));
                }
                Phase::Making if locked.record.options == *options => return self.make(&mut locked, &spec),
                // Left by a killed call.
                Phase::Making | Phase::Removing => self.destroy(locked)?,
            }
        }
        Err(Failure::new(
            Kind::Failed,
            format!("the directory of volume {name} in the state directory is no volume: look at it, and remove it"),
        ))
    }

    /// Makes a volume whose record was just begun: where it fails, nothing is left.
    fn make_new(&self, mut locked: Locked, spec: &Spec) -> Result<(), Failure> {
        let Err(failure) = self.make(&mut locked, spec) else { return Ok(()) };
        // Without its pool or source nothing was made. Otherwise, where it cannot be undone now, the
        // record stays for the next round of `tend`.
        if failure.kind == Kind::Missing || self.destroyed(&locked).is_ok() {
            self.store.discard(locked)?;
        }
        Err(failure)
    }

    /// Makes what the volume consists of, or completes what a killed call began.
    fn make(&self, locked: &mut Locked, spec: &Spec) -> Result<(), Failure> {
        if let Place::Dataset(dataset) = &spec.place {
            let mountpoint = dataset_mountpoint(locked, spec);
            dataset::make(&self.nacre, &self.store, locked, dataset, &mountpoint)?;
        }
        locked.record.phase = Phase::Ready;
        locked.save()
    }

    /// Removes a volume with its files. One that does not exist is removed already.
    ///
    /// # Errors
    /// [`Kind::InUse`] while it is mounted or has clones.
    pub fn remove(&self, name: &str) -> Result<(), Failure> {
        let Some(mut locked) = self.store.lock(name)? else { return Ok(()) };
        self.forget_other_boots(&mut locked)?;
        if locked.record.phase == Phase::Ready && !locked.record.holders.is_empty() {
            let message = format!("volume {name} is mounted by {} callers", locked.record.holders.len());
            return Err(Failure::new(Kind::InUse, message));
        }
        self.destroy(locked)
    }

    /// Destroys what a volume consists of, and its record last.
    pub(crate) fn destroy(&self, mut locked: Locked) -> Result<(), Failure> {
        let was = locked.record.phase;
        locked.record.phase = Phase::Removing;
        locked.save()?;
        match self.destroyed(&locked) {
            Ok(()) => self.store.discard(locked),
            Err(failure) => {
                // The volume stays usable, with the clones that refuse its removal: also after a removal that was
                // interrupted before the refusal.
                let is_refused = was == Phase::Removing && failure.kind == Kind::InUse && self.is_there(&locked)?;
                if was == Phase::Ready || is_refused {
                    locked.record.phase = Phase::Ready;
                    locked.save()?;
                }
                Err(failure)
            }
        }
    }

    /// Whether nothing of what a volume consists of has been destroyed.
    fn is_there(&self, locked: &Locked) -> Result<bool, Failure> {
        match &locked.record.spec()?.place {
            Place::Directory { .. } => Ok(true),
            Place::Dataset(dataset) => dataset::is_there(&self.nacre, locked, dataset),
        }
    }

    fn destroyed(&self, locked: &Locked) -> Result<(), Failure> {
        let spec = locked.record.spec()?;
        self.end_mounts(locked, &spec)?;
        match &spec.place {
            Place::Directory { .. } => Ok(()),
            Place::Dataset(dataset) => dataset::destroy(&self.nacre, &self.store, locked, dataset),
        }
    }

    /// Mounts a volume for a caller; returns the mount point.
    ///
    /// # Errors
    /// There is no such volume; the mount failed.
    pub fn mount(&self, name: &str, caller: &str) -> Result<PathBuf, Failure> {
        check_caller(caller)?;
        let mut locked = self.ready(name)?;
        let spec = locked.record.spec()?;
        self.forget_other_boots(&mut locked)?;
        if locked.record.holders.len() >= HOLDERS_MAX {
            return Err(Failure::new(Kind::Failed, format!("volume {name} is mounted by {HOLDERS_MAX} callers")));
        }
        self.begin_mounts(&locked, &spec)?;
        if !locked.record.holders.iter().any(|holder| holder == caller) {
            locked.record.holders.push(caller.to_owned());
            locked.save()?;
        }
        Ok(seen(&locked.directory, &spec))
    }

    /// Takes back one caller's mount; the volume is unmounted after the last one.
    ///
    /// # Errors
    /// [`Kind::InUse`] where files are open; the caller's mount is taken back all the same.
    pub fn unmount(&self, name: &str, caller: &str) -> Result<(), Failure> {
        check_caller(caller)?;
        self.release(name, |holder| holder != caller)
    }

    /// Takes back the mounts of all callers.
    ///
    /// # Errors
    /// As [`Volumes::unmount`].
    pub fn unmount_all(&self, name: &str) -> Result<(), Failure> {
        self.release(name, |_| false)
    }

    fn release(&self, name: &str, keep: impl Fn(&str) -> bool) -> Result<(), Failure> {
        let Some(mut locked) = self.store.lock(name)? else { return Ok(()) };
        self.forget_other_boots(&mut locked)?;
        let before = locked.record.holders.len();
        locked.record.holders.retain(|holder| keep(holder));
        if locked.record.holders.len() != before {
            locked.save()?;
        }
        if locked.record.holders.is_empty() {
            let spec = locked.record.spec()?;
            self.end_mounts(&locked, &spec)?;
        }
        Ok(())
    }

    /// A volume.
    ///
    /// # Errors
    /// [`Kind::Missing`].
    pub fn get(&self, name: &str) -> Result<Shown, Failure> {
        match self.store.read(name)? {
            Some(record) if record.phase == Phase::Ready => {
                let spec = record.spec()?;
                Ok(Shown { at: seen(&self.store.directory(name), &spec), spec, record })
            }
            _ => Err(missing(name)),
        }
    }

    /// All volumes, by name. A record that cannot be read is logged and left out.
    ///
    /// # Errors
    /// The state directory cannot be read.
    pub fn list(&self) -> Result<Vec<Shown>, Failure> {
        let mut list = Vec::new();
        for name in self.store.names()? {
            match self.get(&name) {
                Ok(volume) => list.push(volume),
                Err(failure) if failure.kind == Kind::Missing => {}
                Err(failure) => crate::log::line(&failure.message),
            }
        }
        Ok(list)
    }

    /// Locks a volume that was created to its end.
    fn ready(&self, name: &str) -> Result<Locked, Failure> {
        match self.store.lock(name)? {
            Some(locked) if locked.record.phase == Phase::Ready => Ok(locked),
            _ => Err(missing(name)),
        }
    }

    /// Drops the holders of another boot: their containers ended with it.
    pub(crate) fn forget_other_boots(&self, locked: &mut Locked) -> Result<(), Failure> {
        if locked.record.boot != self.boot {
            locked.record.boot.clone_from(&self.boot);
            locked.record.holders.clear();
            locked.save()?;
        }
        Ok(())
    }

    /// Mounts what the volume needs, and clears what a dead process left.
    fn begin_mounts(&self, locked: &Locked, spec: &Spec) -> Result<(), Failure> {
        let at = locked.at();
        if is_dead(&at) || is_dead(&locked.directory.join("below")) {
            self.end_mounts(locked, spec)?;
        }
        if let Place::Dataset(dataset) = &spec.place {
            let mountpoint = dataset_mountpoint(locked, spec);
            if MountTable::read()?.count(&mountpoint) == 0 {
                dataset::mount(&self.nacre, locked, dataset)?;
            }
            if MountTable::read()?.count(&mountpoint) == 0 {
                let message = format!("its file system is mounted elsewhere, not at {}", mountpoint.display());
                return Err(Failure::new(Kind::InUse, message));
            }
        }
        if let Some(stack) = stack(locked, spec)
            && MountTable::read()?.count(&at) == 0
        {
            let at = text(&at)?;
            self.nacre.done(Some(&locked.lock), &["mount", "--survive", "--", &stack, at])?;
        }
        Ok(())
    }

    /// Ends all mounts of the volume.
    pub(crate) fn end_mounts(&self, locked: &Locked, spec: &Spec) -> Result<(), Failure> {
        for mountpoint in [locked.at(), locked.directory.join("below")] {
            let is_dataset = matches!(spec.place, Place::Dataset(_)) && mountpoint == dataset_mountpoint(locked, spec);
            let mut count = MountTable::read()?.count(&mountpoint);
            while count > 0 {
                let at = text(&mountpoint)?;
                // The pool of a dead mount may not be imported.
                let by_pool = is_dataset && !is_dead(&mountpoint);
                let words: &[&str] = if by_pool { &["fs", "unmount", "--", at] } else { &["umount", "--", at] };
                let done = self.nacre.done(Some(&locked.lock), words);
                let now = MountTable::read()?.count(&mountpoint);
                if now >= count {
                    done?;
                    let message = format!("{} is still mounted", mountpoint.display());
                    return Err(Failure::new(Kind::Failed, message));
                }
                count = now;
            }
        }
        Ok(())
    }
}

/// Where a volume's file system of a pool is mounted: where containers see it, unless a view lies
/// above.
fn dataset_mountpoint(locked: &Locked, spec: &Spec) -> PathBuf {
    if spec.view.layer().is_some() { locked.directory.join("below") } else { locked.at() }
}

/// The directory that containers see: a mount point, or the files themselves where nothing is
/// limited or translated.
fn seen(directory: &Path, spec: &Spec) -> PathBuf {
    let plain = spec.place == Place::Directory { limit: None } && spec.view.layer().is_none();
    directory.join(if plain { "data" } else { "at" })
}

/// The stack that is mounted for containers; `None` where no layer is needed.
fn stack(locked: &Locked, spec: &Spec) -> Option<String> {
    let directory = match &spec.place {
        Place::Directory { .. } => locked.directory.join("data"),
        Place::Dataset(_) => locked.directory.join("below"),
    };
    let view = spec.view.layer();
    if view.is_none() && !matches!(spec.place, Place::Directory { limit: Some(_) }) {
        return None;
    }
    let mut layers = vec![format!("host:{}", escaped(&directory))];
    if let Place::Directory { limit: Some(limit) } = &spec.place {
        let files = limit.files.map(|files| format!(",inodes={files}")).unwrap_or_default();
        let accounts = escaped(&locked.directory.join("accounts"));
        layers.push(format!("cage:size={}{files},state={accounts}", limit.size));
    }
    layers.extend(view);
    Some(layers.join(" | "))
}

/// A path as a setting of a stack.
fn escaped(path: &Path) -> String {
    let mut written = String::new();
    for byte in path.as_os_str().as_encoded_bytes() {
        if byte.is_ascii_alphanumeric() || b"/._-".contains(byte) {
            written.push(char::from(*byte));
        } else {
            written.push_str(&format!("\\x{byte:02x}"));
        }
    }
    written
}

fn text(path: &Path) -> Result<&str, Failure> {
    path.to_str().ok_or_else(|| Failure::new(Kind::Failed, format!("{} is not UTF-8", path.display())))
}

/// Whether the process that served a mount is gone. The requests that it had not answered fail with
/// ECONNABORTED, all later ones with ENOTCONN.
fn is_dead(at: &Path) -> bool {
    use rustix::io::Errno;
    matches!(rustix::fs::statfs(at), Err(Errno::NOTCONN | Errno::CONNABORTED))
}

fn missing(name: &str) -> Failure {
    Failure::new(Kind::Missing, format!("there is no volume {}", shown(name)))
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map(|since| since.as_secs()).unwrap_or(0)
}
