//! What the process that owns a pool leaves to the one that goes on with it, beside what the doors of
//! its mounts note ([`nacre_fuse::Survival`]) and what the kept log holds.
//!
//! Noted by [`super::process`] and `mounts.rs`, read by the next worker of the same guardian
//! ([`crate::guardian`]). It lies in a file in memory, whose number the guardian's memory has: another
//! file with each change, so it is the one or the other. Invariants: a descriptor that is noted is open
//! as long as it is, and the next worker closes all others; what is noted is noted before anybody is
//! told of it, and a mount that goes is taken out before its descriptors are closed.

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

/// Which way it is noted: another number with each change, and that of the kept log.
pub const VERSION: (u64, u64) = (2, nacre_pool::log::KEPT_VERSION);

/// A device that is open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftDevice {
    path: PathBuf,
    number: i32,
    /// Which file it is: the number may have become another's, where the pool has let the device go.
    file: (u64, u64),
}

/// A mount that is there, or about to be.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LeftMount {
    /// Which of the mounts that this process has, or had: the same may be mounted anew before the last of
    /// an ended one is gone.
    #[serde(skip)]
    pub number: u64,
    /// What.
    pub what: What,
    /// Where.
    pub at: PathBuf,
    /// How.
    pub options: MountOptions,
    /// The directory.
    pub place: MountPoint,
    /// By which door it is seen.
    pub door: LeftDoor,
}

/// By which door something is seen.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LeftDoor {
    /// One of its own.
    Own {
        /// The number of the descriptor of what the door notes.
        memory: i32,
        /// That of the kernel's device, once it is served.
        device: Option<i32>,
    },
    /// That of another one.
    Within {
        /// Which.
        mount: What,
        /// On the directory with this number there.
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

/// See the file's head.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct PoolLeft {
    version: (u64, u64),
    /// The numbers of descriptors: of the socket for commands, and of the locks on the pool's name and
    /// number.
    pub socket: i32,
    /// See above.
    pub name: i32,
    /// See above; none where another copy has it.
    pub number: Option<i32>,
    /// The pool's number.
    pub guid: u64,
    /// The number by which it is written to a store, where it lies in one.
    pub writer: Option<u64>,
    /// What it lies on, as far as that is there.
    pub devices: Vec<LeftDevice>,
    /// What a command is about to take into the pool.
    pub coming: Vec<PathBuf>,
    /// The device and the mount by which sync(2) is heard.
    pub hearing: Option<(i32, i32)>,
    /// Those of processes before, until what these had acknowledged is durable.
    #[serde(default)]
    pub heard: Vec<(i32, i32)>,
    /// The log of what was acknowledged.
    pub kept_log: Option<i32>,
    /// All mount points lie below it.
    pub altroot: Option<PathBuf>,
    /// What is mounted is not trusted.
    pub harmless: bool,
    /// The mounts, the oldest first.
    pub mounts: Vec<LeftMount>,
}

/// What the guardian's memory says.
#[derive(Serialize, Deserialize)]
struct Where {
    notes: i32,
}

fn which(file: &File) -> io::Result<(u64, u64)> {
    let metadata = file.metadata()?;
    Ok((metadata.dev(), metadata.ino()))
}

impl LeftDevice {
    /// One of the pool's; none where it is not there.
    pub fn of(device: &dyn Device) -> Option<LeftDevice> {
        let number = device.descriptor()?;
        let file = which(&descriptors::another(number).ok()?.into()).ok()?;
        Some(LeftDevice { path: PathBuf::from(device.name()), number, file })
    }

    /// Goes on with it; none where it is not open any more.
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
    /// What is noted.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn of(memory: &Survival) -> Result<PoolLeft, Failure> {
        PoolLeft::read(
            &noted(memory).map_err(|error| Failure::io("cannot read", "what the last process noted", &error))?,
        )
    }

    /// What is noted as this text.
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

    /// The descriptors that the next worker keeps, that of this text among them.
    pub fn descriptors(&self, memory: &Survival) -> Vec<i32> {
        let hearing = self.heard().into_iter().flat_map(|(device, mount)| [device, mount]);
        self.stored(memory).into_iter().chain(hearing).collect()
    }

    /// Those of them that a service manager keeps: all but those of the mount that hears of sync(2), which goes
    /// with the last process. Whoever closes that last has to wait for an answer of the process that served it.
    pub fn stored(&self, memory: &Survival) -> Vec<i32> {
        self.stored_with(place(memory).ok()).collect()
    }

    fn stored_with(&self, text: Option<i32>) -> impl Iterator<Item = i32> {
        let of_mounts = self.mounts.iter().flat_map(|mount| mount.door.descriptors());
        let own = [Some(self.socket), Some(self.name), self.number, self.kept_log];
        let devices = self.devices.iter().map(|device| Some(device.number));
        of_mounts.chain(own).chain(devices).chain([text]).flatten()
    }

    /// Those of these without which nobody can go on: of a device, the pool may have let go.
    pub fn needed(&self, memory: &Survival) -> Vec<i32> {
        let is_device = |number: &i32| self.devices.iter().any(|device| device.number == *number);
        self.stored(memory).into_iter().filter(|number| !is_device(number)).collect()
    }

    /// By which anybody may have called sync(2).
    pub fn heard(&self) -> Vec<(i32, i32)> {
        self.heard.iter().copied().chain(self.hearing).collect()
    }

    /// Makes the kernel send again what the mounts have not answered.
    pub fn send_again(&self) {
        for device in self.mounts.iter().filter_map(|mount| mount.door.descriptors()[1]) {
            let sent = descriptors::another(device).and_then(|device| fusewire::resend(device.as_fd()));
            // One that was unmounted meanwhile; whoever goes on with it hears of that again.
            let _ = sent;
        }
    }

    /// The devices, in no order. What a command was about to take into the pool is opened.
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

/// The number of the descriptor of what is noted.
fn place(memory: &Survival) -> io::Result<i32> {
    let at = memory.text().ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
    Ok(serde_json::from_slice::<Where>(&at)?.notes)
}

fn noted(memory: &Survival) -> io::Result<Vec<u8>> {
    memory_file::read(&descriptors::another(place(memory)?)?.into())
}

/// What is noted, by whom it is kept in step. Until the pool is imported nothing is written: nobody
/// could go on.
#[derive(Debug)]
pub struct PoolNotes {
    /// The guardian.
    pub guarded: Guarded,
    /// What the next process opens before it serves the mounts.
    needed: OnceLock<Vec<PathBuf>>,
    now: Mutex<Noted>,
}

#[derive(Debug, Default)]
struct Noted {
    left: PoolLeft,
    file: Option<OwnedFd>,
    begun: bool,
    /// How many mounts have a number.
    numbers: u64,
}

impl PoolNotes {
    /// Those of this worker, and what the one before it has left.
    ///
    /// # Errors
    /// That cannot be read.
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

    /// Whether this worker goes on with what another one left.
    pub fn resumes(&self) -> bool {
        self.guarded.memory.resumes()
    }

    /// These the next process opens before it serves the mounts, in which none of them may lie.
    pub fn needs(&self, paths: Vec<PathBuf>) {
        // The pool lies in one place as long as it is imported.
        let _ = self.needed.set(paths);
    }

    /// The pool is imported.
    pub fn begin(&self, change: impl FnOnce(&mut PoolLeft)) {
        self.now.lock().begun = true;
        self.change(|left| {
            left.version = VERSION;
            change(left);
        });
    }

    /// Something has changed.
    pub fn change(&self, change: impl FnOnce(&mut PoolLeft)) {
        let mut now = self.now.lock();
        change(&mut now.left);
        if !now.begun {
            return;
        }
        match self.write(&now.left) {
            // The one before is closed when this one holds.
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

    /// The number of a mount that is about to be.
    pub fn number(&self) -> u64 {
        let mut now = self.now.lock();
        now.numbers += 1;
        now.numbers
    }

    /// A mount is there, or about to be. Another one of the same, and what lies in that, has ended.
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

    /// A mount has other options.
    pub fn changed(&self, what: What, options: &MountOptions) {
        self.change(|left| {
            let mount = left.mounts.iter_mut().find(|there| there.what == what);
            mount.into_iter().for_each(|mount| mount.options = options.clone());
        });
    }

    /// The mount with this number is gone.
    pub fn forget(&self, number: u64) {
        self.change(|left| left.mounts.retain(|there| there.number != number));
    }

    /// What is noted, as another program would read it.
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
        // It is unmounted from outside and mounted again, before the process has let go of it.
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
        // As of a process that is gone: nobody else owns the descriptor.
        left.number = descriptors::another(number).unwrap().into_raw_fd();
        let adopted = left.adopt().unwrap();
        assert_eq!((adopted.name(), adopted.length()), (path.to_str().unwrap(), 1 << 20));
    }
}
