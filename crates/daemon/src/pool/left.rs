//! Handoff state of the process that owns a pool for its successor, in addition to the state of the mounts' FUSE
//! front ends ([`nacre_fuse::Survival`]) and the replay journal.
//!
//! Recorded by [`super::process`] and `mounts.rs`, read by the next worker of the same supervisor
//! ([`crate::guardian`]). The state is a memory file whose descriptor number is in the supervisor's memory. Each
//! change writes another file, so the change is atomic. Invariants: a recorded descriptor is open as long as it is
//! recorded, and the next worker closes all others; a change is recorded before its effect is visible to anybody,
//! and an ending mount is removed from the state before its descriptors are closed.

use crate::{failure::Failure, left::Guarded, memory_file, report::path_text};
use nacre_admin::{MountOptions, mounts::What};
use nacre_fuse::Survival;
use nacre_pool::device::{Device, FileDevice};
use nacre_sys::descriptors;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::{
    fs::File,
    io,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::{Path, PathBuf},
    sync::OnceLock,
};

use super::mount_point::MountPoint;

/// Version of the format: its own, increased with each change, and that of the replay journal.
pub const VERSION: (u64, u64) = (2, nacre_pool::log::KEPT_VERSION);

/// An open device of the pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftDevice {
    path: PathBuf,
    number: i32,
    /// Device and inode number of the file: the pool may have closed the device, and the descriptor number may be
    /// another file's by now.
    file: (u64, u64),
}

/// A mount that exists, or is about to be made.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LeftMount {
    /// Number of the mount in this process: a dataset may be mounted again before the last user of its ended mount
    /// is gone.
    #[serde(skip)]
    pub number: u64,
    /// Mounted dataset or snapshot.
    pub what: What,
    /// Path at which the dataset is mounted.
    pub at: PathBuf,
    /// Options of the mount.
    pub options: MountOptions,
    /// Directory that the dataset is mounted on.
    pub place: MountPoint,
    /// FUSE front end that serves the mount.
    pub door: LeftDoor,
}

/// FUSE front end that serves a mount.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LeftDoor {
    /// A front end of its own.
    Own {
        /// Number of the descriptor of the front end's handoff state.
        memory: i32,
        /// Number of the descriptor of the FUSE device, once it is served.
        device: Option<i32>,
    },
    /// The front end of another mount (a shared mount), into which it is grafted.
    Within {
        /// The mount whose front end it is.
        mount: What,
        /// Inode number of the directory there that it is grafted onto.
        on: u64,
    },
}

impl LeftDoor {
    fn descriptors(&self) -> [Option<i32>; 2] {
        match self {
            LeftDoor::Own { memory, device } => [Some(*memory), *device],
            LeftDoor::Within { .. } => [None, None],
        }
    }
}

/// Handoff state of a pool.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct PoolLeft {
    version: (u64, u64),
    /// Number of the descriptor of the socket for commands.
    pub socket: i32,
    /// Number of the descriptor of the lock on the pool's name.
    pub name: i32,
    /// Number of the descriptor of the lock on its GUID; `None` where another copy of the pool holds it.
    pub number: Option<i32>,
    /// The pool's GUID.
    pub guid: u64,
    /// Writer number of this import, for a pool in a bucket.
    pub writer: Option<u64>,
    /// Open devices of the pool.
    pub devices: Vec<LeftDevice>,
    /// Devices that a command is about to add to the pool.
    pub coming: Vec<PathBuf>,
    /// Descriptors of the FUSE device and of the mount by which sync(2) is intercepted.
    pub hearing: Option<(i32, i32)>,
    /// Descriptors of sync(2) interception by earlier processes, until the operations that these acknowledged are
    /// durable.
    #[serde(default)]
    pub heard: Vec<(i32, i32)>,
    /// Descriptor of the replay journal.
    pub kept_log: Option<i32>,
    /// Directory that all mount points are below.
    pub altroot: Option<PathBuf>,
    /// The pool is untrusted: its datasets are mounted restricted.
    pub harmless: bool,
    /// The mounts, oldest first.
    pub mounts: Vec<LeftMount>,
}

/// Text in the supervisor's memory: the descriptor of the handoff state.
#[derive(Serialize, Deserialize)]
struct Where {
    notes: i32,
}

fn which(file: &File) -> io::Result<(u64, u64)> {
    let metadata = file.metadata()?;
    Ok((metadata.dev(), metadata.ino()))
}

impl LeftDevice {
    /// Describes an open device of the pool; `None` where it is missing.
    pub fn of(device: &dyn Device) -> Option<LeftDevice> {
        let number = device.descriptor()?;
        let file = which(&descriptors::another(number).ok()?.into()).ok()?;
        Some(LeftDevice { path: PathBuf::from(device.name()), number, file })
    }

    /// Takes the device over; `None` where it is not open any more.
    fn adopt(&self) -> Option<FileDevice> {
        let other = descriptors::another(self.number).ok().map(File::from)?;
        if which(&other).ok()? != self.file {
            return None;
        }
        let adopted = descriptors::take_over(self.number)
            .and_then(|descriptor| FileDevice::adopt(self.path.display().to_string(), descriptor));
        adopted
            .inspect_err(
                |error| tracing::warn!(device = %self.path.display(), %error, "a device is missing from here on"),
            )
            .ok()
    }
}

impl PoolLeft {
    /// Reads the handoff state.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn of(memory: &Survival) -> Result<PoolLeft, Failure> {
        PoolLeft::read(
            &noted(memory).map_err(|error| Failure::io("cannot read", "what the last process noted", &error))?,
        )
    }

    /// Parses the handoff state.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn read(text: &[u8]) -> Result<PoolLeft, Failure> {
        let left: PoolLeft = serde_json::from_slice(text)
            .map_err(|error| Failure::new(format!("what the last process noted cannot be read: {error}")))?;
        match left.version {
            VERSION => Ok(left),
            its => {
                let its = format!("{}.{}", its.0, its.1);
                let ours = format!("{}.{}", VERSION.0, VERSION.1);
                Err(Failure::new(format!("what it notes has version {its}, and this program reads version {ours}")))
            }
        }
    }

    /// Returns the descriptors that the next worker keeps, including that of the state itself.
    pub fn descriptors(&self, memory: &Survival) -> Vec<i32> {
        let hearing = self.heard().into_iter().flat_map(|(device, mount)| [device, mount]);
        self.stored(memory).into_iter().chain(hearing).collect()
    }

    /// Returns the descriptors that a service manager stores: all except those of sync(2) interception, whose mount
    /// ends with the last process. Closing its last descriptor waits for an answer of the process that served it.
    pub fn stored(&self, memory: &Survival) -> Vec<i32> {
        self.stored_with(place(memory).ok()).collect()
    }

    fn stored_with(&self, text: Option<i32>) -> impl Iterator<Item = i32> {
        let of_mounts = self.mounts.iter().flat_map(|mount| mount.door.descriptors());
        let own = [Some(self.socket), Some(self.name), self.number, self.kept_log];
        let devices = self.devices.iter().map(|device| Some(device.number));
        of_mounts.chain(own).chain(devices).chain([text]).flatten()
    }

    /// Returns the descriptors without which a takeover is impossible: those of devices are not among them, since
    /// the pool may have closed a device.
    pub fn needed(&self, memory: &Survival) -> Vec<i32> {
        let is_device = |number: &i32| self.devices.iter().any(|device| device.number == *number);
        self.stored(memory).into_iter().filter(|number| !is_device(number)).collect()
    }

    /// Returns the descriptors of all interceptions through which sync(2) may have been called.
    pub fn heard(&self) -> Vec<(i32, i32)> {
        self.heard.iter().copied().chain(self.hearing).collect()
    }

    /// Makes the kernel resend the requests that the mounts have not answered.
    pub fn send_again(&self) {
        for device in self.mounts.iter().filter_map(|mount| mount.door.descriptors()[1]) {
            let sent = descriptors::another(device).and_then(|device| fusewire::resend(device.as_fd()));
            // A mount that was unmounted meanwhile; its failover meets the same error again.
            let _ = sent;
        }
    }

    /// Takes over the devices, in no order. Devices that a command was about to add to the pool are opened.
    pub fn adopt(&self) -> Vec<FileDevice> {
        let mut adopted: Vec<FileDevice> = self.devices.iter().filter_map(LeftDevice::adopt).collect();
        for path in &self.coming {
            if adopted.iter().any(|device| Path::new(device.name()) == path) {
                continue;
            }
            match FileDevice::open(path, true) {
                Ok(device) => adopted.push(device),
                Err(error) => tracing::info!(device = %path.display(), %error, "the pool does not have it"),
            }
        }
        adopted
    }
}

/// Returns the number of the descriptor of the handoff state.
fn place(memory: &Survival) -> io::Result<i32> {
    let at = memory.text().ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
    Ok(serde_json::from_slice::<Where>(&at)?.notes)
}

fn noted(memory: &Survival) -> io::Result<Vec<u8>> {
    memory_file::read(&descriptors::another(place(memory)?)?.into())
}

/// Handoff state that is kept up to date. Until the pool is imported nothing is recorded: no process could take
/// over.
#[derive(Debug)]
pub struct PoolNotes {
    /// Supervision of this process.
    pub guarded: Guarded,
    /// Paths that the next process opens before it serves the mounts.
    needed: OnceLock<Vec<PathBuf>>,
    now: Mutex<Noted>,
}

#[derive(Debug, Default)]
struct Noted {
    left: PoolLeft,
    file: Option<OwnedFd>,
    begun: bool,
    /// Number of mounts that have been numbered.
    numbers: u64,
}

impl PoolNotes {
    /// Returns the state of this worker, and that of the worker before it.
    ///
    /// # Errors
    /// The latter cannot be read.
    pub fn of(guarded: Guarded) -> Result<(PoolNotes, Option<PoolLeft>), Failure> {
        let mut left = guarded.memory.resumes().then(|| PoolLeft::of(&guarded.memory)).transpose()?;
        let mut numbers = 0;
        for mount in left.iter_mut().flat_map(|left| &mut left.mounts) {
            numbers += 1;
            mount.number = numbers;
        }
        let file = left.as_ref().map(|_| place(&guarded.memory).and_then(descriptors::take_over)).transpose();
        let file = file.map_err(|error| Failure::io("cannot go on with", "what the last process noted", &error))?;
        let now = Noted { left: left.clone().unwrap_or_default(), file, begun: left.is_some(), numbers };
        Ok((PoolNotes { guarded, needed: OnceLock::new(), now: Mutex::new(now) }, left))
    }

    /// Whether this worker takes over from another one.
    pub fn resumes(&self) -> bool {
        self.guarded.memory.resumes()
    }

    /// Sets the paths that the next process opens before it serves the mounts: none of them may lie in a mount.
    pub fn needs(&self, paths: Vec<PathBuf>) {
        // The pool's address is constant as long as it is imported.
        let _ = self.needed.set(paths);
    }

    /// Starts recording: the pool is imported.
    pub fn begin(&self, change: impl FnOnce(&mut PoolLeft)) {
        self.now.lock().begun = true;
        self.change(|left| {
            left.version = VERSION;
            change(left);
        });
    }

    /// Applies a change and records the result.
    pub fn change(&self, change: impl FnOnce(&mut PoolLeft)) {
        let mut now = self.now.lock();
        change(&mut now.left);
        if !now.begun {
            return;
        }
        match self.write(&now.left) {
            // The previous file is closed when the new one is recorded.
            Ok(file) => now.file = Some(file),
            Err(error) => self.guarded.memory.give_up(&format!("what it has cannot be noted: {error}")),
        }
    }

    fn write(&self, left: &PoolLeft) -> io::Result<OwnedFd> {
        let file = memory_file::write(c"nacre-pool", &serde_json::to_vec(left)?)?;
        let at = serde_json::to_vec(&Where { notes: file.as_raw_fd() })?;
        let stored = left.stored_with(Some(file.as_raw_fd())).collect();
        match self.guarded.note(stored, || self.guarded.memory.set_text(&at)) {
            true => Ok(file.into()),
            false => Err(io::ErrorKind::FileTooLarge.into()),
        }
    }

    /// Returns a number for a mount that is about to be made.
    pub fn number(&self) -> u64 {
        let mut now = self.now.lock();
        now.numbers += 1;
        now.numbers
    }

    /// Records a mount that exists, or is about to be made. Other mounts of the same dataset, and those grafted
    /// into them, have ended.
    pub fn put(&self, mount: LeftMount) {
        let within = self.needed.get().and_then(|needed| needed.iter().find(|path| path.starts_with(&mount.at)));
        if let Some(path) = within {
            let (path, at) = (path_text(path), path_text(&mount.at));
            self.guarded.memory.give_up(&format!("{path}, which the next process needs, is below {at}"));
        }
        self.change(|left| {
            if let Some(there) = left.mounts.iter_mut().find(|there| there.number == mount.number) {
                *there = mount;
                return;
            }
            let lies_in = |door: &LeftDoor| matches!(door, LeftDoor::Within { mount: of, .. } if *of == mount.what);
            left.mounts.retain(|there| there.what != mount.what && !lies_in(&there.door));
            left.mounts.push(mount);
        });
    }

    /// Records new options of a mount.
    pub fn changed(&self, what: What, options: &MountOptions) {
        self.change(|left| {
            let mount = left.mounts.iter_mut().find(|there| there.what == what);
            mount.into_iter().for_each(|mount| mount.options = options.clone());
        });
    }

    /// Removes the mount with this number.
    pub fn forget(&self, number: u64) {
        self.change(|left| left.mounts.retain(|there| there.number != number));
    }

    /// Returns the recorded state as text, for another program.
    pub fn text(&self) -> Vec<u8> {
        noted(&self.guarded.memory).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::mount_point::PlaceRules;
    use std::{os::fd::IntoRawFd, sync::Arc};

    fn guarded(memory: &Survival) -> Guarded {
        Guarded { memory: memory.clone(), guardian: 1, handover: Arc::from(""), service: None }
    }

    #[test]
    fn what_is_noted_is_read_again_and_follows() {
        let mut memory = Survival::new().unwrap();
        let (notes, left) = PoolNotes::of(guarded(&memory)).unwrap();
        assert!(left.is_none());
        notes.change(|left| left.guid = 1);
        assert!(memory.text().is_none(), "nobody could go on with it");
        notes.begin(|left| left.socket = 7);
        notes.change(|left| left.coming = vec![PathBuf::from("/dev/a")]);
        memory.next_life();
        // As if its process were dead: the descriptor is the next one's.
        std::mem::forget(notes);
        let (again, left) = PoolNotes::of(guarded(&memory)).unwrap();
        let left = left.unwrap();
        assert_eq!((left.guid, left.socket, left.coming.len()), (1, 7, 1));
        again.change(|left| left.coming.clear());
        assert!(PoolLeft::of(&memory).unwrap().coming.is_empty());
        assert!(PoolLeft::read(&serde_json::to_vec(&PoolLeft::default()).unwrap()).is_err(), "another version");
    }

    #[test]
    fn a_mount_that_ended_takes_no_note_of_the_next_one_along() {
        let scratch = tempfile::tempdir().unwrap();
        let memory = Survival::new().unwrap();
        let (notes, _) = PoolNotes::of(guarded(&memory)).unwrap();
        notes.begin(|left| left.socket = 7);
        let place =
            MountPoint::prepare(&scratch.path().join("at"), &MountOptions::default(), &PlaceRules::default()).unwrap();
        let own = |memory| LeftDoor::Own { memory, device: None };
        let put = |number, dataset, door| {
            let (what, at, options) = (What::head(dataset), place.path().to_owned(), MountOptions::default());
            notes.put(LeftMount { number, what, at, options, place: place.clone(), door });
        };
        let noted = || -> Vec<(u64, Option<i32>)> {
            let left = PoolLeft::of(&memory).unwrap().mounts.into_iter();
            left.map(|mount| (mount.what.dataset, mount.door.descriptors()[0])).collect()
        };
        let [first, within, second] = [(); 3].map(|()| notes.number());
        put(first, 1, own(10));
        put(within, 2, LeftDoor::Within { mount: What::head(1), on: 5 });
        assert_eq!(noted(), [(1, Some(10)), (2, None)]);
        // It is unmounted from outside and mounted again, before the process has released it.
        put(second, 1, own(11));
        notes.forget(within);
        notes.forget(first);
        assert_eq!(noted(), [(1, Some(11))]);
        // It answers now.
        put(second, 1, LeftDoor::Own { memory: 11, device: Some(12) });
        assert_eq!(noted(), [(1, Some(11))]);
        notes.forget(second);
        assert_eq!(noted(), []);
    }

    #[test]
    fn a_number_that_is_another_files_is_not_taken_for_the_device() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("device");
        let device = FileDevice::create(&path, 1 << 20).unwrap();
        let mut left = LeftDevice::of(&device).unwrap();
        let other = File::create(scratch.path().join("other")).unwrap();
        let number = std::mem::replace(&mut left.number, other.as_raw_fd());
        assert!(left.adopt().is_none());
        // As the descriptor of a dead process: nobody else owns it.
        left.number = descriptors::another(number).unwrap().into_raw_fd();
        let adopted = left.adopt().unwrap();
        assert_eq!((adopted.name(), adopted.length()), (path.to_str().unwrap(), 1 << 20));
    }
}
