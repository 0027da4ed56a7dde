//! Shares of mounts by file servers of the machine: the properties `sharenfs` and `sharesmb`.
//!
//! Used by `mounts.rs`, which shares its mounts and removes the shares before it unmounts. The servers are not
//! ours: the kernel's NFS server is configured by exportfs(8) (`shares/kernel.rs`), Ganesha by a file that its
//! configuration includes (`shares/ganesha.rs`), Samba by `net usershare` (`shares/samba.rs`). States that the
//! kernel's server keeps of a mount are released before an unmount (`shares/nfs_clients.rs`). Ganesha's clients
//! need mounts that keep their device number (`shares/device_number.rs`). Invariants:
//! * only root shares, and nothing of a pool that others than root could have written;
//! * values are parsed anew ([`nacre_pool::properties::sharing`]), as a pool may come from anybody: no part of them
//!   reaches a command line or a configuration unchecked;
//! * a share is recorded before it is made, so that the next process removes it after a crash;
//! * a lock that is not released is waited for once (`shares/lock.rs`);
//! * shares are made, and shares of dead processes are removed, under a lock on the directory of records: a process
//!   never removes a new share of another process.

mod device_number;
mod ganesha;
mod kernel;
mod lock;
mod nfs_clients;
mod samba;

use self::{device_number::Reserved, lock::DirectoryLock};
use crate::{cage, failure::Failure, report::path_text, whole_file};
use nacre_admin::mounts::Sharing;
use nacre_pool::properties::sharing::{self, NfsShare, SmbShare};
use nacre_sys::worker::Process;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

/// Record of the shares of one dataset.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Note {
    /// The process that made them, and its start time.
    process: (u32, u64),
    at: PathBuf,
    /// Clients in the export of the kernel's NFS server.
    kernel: Vec<String>,
    /// Ganesha has an export file.
    ganesha: bool,
    /// Name of Samba's share.
    samba: Option<String>,
}

/// A dataset that is shared, or should be.
struct Shared {
    sharing: Sharing,
    at: PathBuf,
    source: String,
    note: Note,
    /// Why it is not shared, or not by all servers.
    failed: Option<String>,
}

/// The shares of one pool.
pub struct Shares {
    /// Why nothing is shared, independent of the properties.
    forbidden: Option<&'static str>,
    now: Mutex<BTreeMap<u64, Shared>>,
    /// GUIDs and records of shares that could not be taken back: it is tried again with each later change.
    remaining: Mutex<Vec<(u64, Note)>>,
}

impl Shares {
    /// Makes an empty set of shares. A `copy` of an imported pool shares nothing: its datasets have the same GUIDs, by
    /// which clients and servers know those of the original.
    pub fn new(harmless: bool, copy: bool) -> Shares {
        let forbidden = if copy {
            Some("a copy of an imported pool shares nothing: export both, and import this one alone")
        } else if !rustix::process::geteuid().is_root() {
            Some("only pools that root imports are shared")
        } else if harmless {
            Some("others than root could have written this pool: import it with -f if you trust it")
        } else {
            None
        };
        Shares { forbidden, now: Mutex::default(), remaining: Mutex::default() }
    }

    /// Removes the shares of dead processes, and calls `share` to share the present mounts. Shares by Ganesha of
    /// datasets that `share` shares again stay meanwhile: otherwise its clients would get errors in a failover.
    /// (Its file is rewritten as a whole; of other servers' shares, outdated ones might remain.) The mounts of this
    /// pool answer already: servers access them.
    pub fn begin(&self, share: impl FnOnce()) {
        let left = if self.forbidden.is_none() { left() } else { Vec::new() };
        let (stay, go): (Vec<_>, Vec<_>) =
            left.into_iter().partition(|(_, note)| note.ganesha && note.kernel.is_empty() && note.samba.is_none());
        go.iter().for_each(|(guid, note)| take_back_left(*guid, note));
        share();
        let now = self.now.lock();
        let is_shared = |guid| now.values().any(|shared| shared.sharing.guid == guid && shared.note.ganesha);
        stay.iter().filter(|(guid, _)| !is_shared(*guid)).for_each(|(guid, note)| take_back_left(*guid, note));
    }

    /// Reserves the device number that NFS-Ganesha needs, until a dataset is mounted.
    pub fn before_mount(&self, sharing: &Sharing) -> Option<Reserved> {
        let by_ganesha = self.forbidden.is_none() && !kernel::is_there();
        by_ganesha.then(|| ganesha::reserve_number(sharing)).flatten()
    }

    /// Shares a mount according to its properties, or ends the share; errors are logged, and returned by
    /// [`Shares::failure`].
    pub fn set(&self, dataset: u64, source: &str, at: &Path, sharing: &Sharing) {
        let mut now = self.now.lock();
        let same = |there: &Shared| there.sharing == *sharing && there.at == at && there.source == source;
        if now.get(&dataset).is_some_and(|there| same(there) && there.failed.is_none()) {
            return;
        }
        self.take_back_remaining();
        if let Some(before) = now.remove(&dataset) {
            self.take_back(before);
        }
        if !sharing.is_wanted() {
            return;
        }
        let (note, failed) = match self.forbidden {
            Some(why) => (Note::default(), Some(why.to_owned())),
            None => share(source, at, sharing),
        };
        // What remains under this GUID is the new share.
        self.remaining.lock().retain(|(guid, _)| *guid != sharing.guid);
        if let Some(why) = &failed {
            tracing::warn!(source, why, "a file system is not shared as its properties say");
        } else {
            tracing::info!(source, at = %path_text(at), "shared");
        }
        let shared = Shared { sharing: sharing.clone(), at: at.to_owned(), source: source.to_owned(), note, failed };
        now.insert(dataset, shared);
    }

    /// Returns where the kernel's NFS server exports a dataset.
    fn exported_at(&self, dataset: u64) -> Option<PathBuf> {
        let now = self.now.lock();
        let shared = now.get(&dataset)?;
        if shared.note.kernel.is_empty() { None } else { Some(shared.at.clone()) }
    }

    /// Describes the clients of the kernel's NFS server that hold files of a shared mount with this device number;
    /// empty where there are none.
    pub fn holders(&self, dataset: u64, device: (u32, u32)) -> String {
        if self.exported_at(dataset).is_some() { nfs_clients::holders(device) } else { String::new() }
    }

    /// Removes the shares as [`Shares::stop`], of a mount with this device number that is about to end: the
    /// kernel's NFS server releases its states.
    pub fn release(&self, dataset: u64, device: Option<(u32, u32)>) -> bool {
        let exported = self.exported_at(dataset);
        let stopped = self.stop(dataset);
        if let (Some(at), Some(device)) = (exported, device) {
            nfs_clients::release(&at, device);
        }
        stopped
    }

    /// Removes the shares of a mount; returns whether there were any.
    pub fn stop(&self, dataset: u64) -> bool {
        let mut now = self.now.lock();
        self.take_back_remaining();
        let Some(before) = now.remove(&dataset) else { return false };
        let was_shared = before.note != Note::default();
        self.take_back(before);
        was_shared
    }

    /// Removes the shares of all datasets except `there`.
    pub fn retain(&self, there: &[u64]) {
        let mut now = self.now.lock();
        self.take_back_remaining();
        let gone: Vec<u64> = now.keys().filter(|dataset| !there.contains(dataset)).copied().collect();
        gone.iter().filter_map(|dataset| now.remove(dataset)).for_each(|shared| self.take_back(shared));
    }

    /// Removes the shares of a dataset, or remembers that they remain.
    fn take_back(&self, shared: Shared) {
        if !take_back(shared.sharing.guid, &shared.note) {
            self.remaining.lock().push((shared.sharing.guid, shared.note));
        }
    }

    fn take_back_remaining(&self) {
        self.remaining.lock().retain(|(guid, note)| !take_back(*guid, note));
    }

    /// Returns why a mount is not shared although its properties request it.
    pub fn failure(&self, dataset: u64) -> Option<String> {
        self.now.lock().get(&dataset)?.failed.clone()
    }
}

impl Drop for Shares {
    fn drop(&mut self) {
        self.retain(&[]);
    }
}

/// Makes the shares; returns the record, and which of them failed.
fn share(source: &str, at: &Path, sharing: &Sharing) -> (Note, Option<String>) {
    let _locked = match directory().as_deref().map(lock).transpose() {
        Ok(locked) => locked,
        Err(why) => return (Note::default(), Some(why)),
    };
    let mut note = Note { process: ourselves(), at: at.to_owned(), ..Note::default() };
    let mut failed = Vec::new();
    let mut tried = |done: Result<(), String>| failed.extend(done.err());
    match sharing::nfs(&sharing.nfs) {
        Ok(None) => {}
        Ok(Some(wanted)) => tried(share_nfs(at, sharing.guid, &wanted, &mut note)),
        Err(()) => tried(Err(format!("the value of sharenfs means nothing: '{}'", sharing.nfs.escape_debug()))),
    }
    match sharing::smb(&sharing.smb) {
        Ok(None) => {}
        Ok(Some(wanted)) => tried(share_smb(source, at, sharing.guid, &wanted, &mut note)),
        Err(()) => tried(Err(format!("the value of sharesmb means nothing: '{}'", sharing.smb.escape_debug()))),
    }
    (note, (!failed.is_empty()).then(|| failed.join("; ")))
}

fn share_nfs(at: &Path, guid: u64, wanted: &NfsShare, note: &mut Note) -> Result<(), String> {
    let path = plain(at)?;
    if kernel::is_there() {
        note.kernel = wanted.clients.iter().map(|(host, _)| host.clone()).collect();
        write_down(guid, note)?;
        kernel::share(path, guid, wanted)
    } else if ganesha::is_there() {
        note.ganesha = true;
        write_down(guid, note)?;
        ganesha::share(path, guid, wanted)
    } else {
        Err("there is no server of NFS on this machine: install nfs-kernel-server or nfs-ganesha-vfs".to_owned())
    }
}

fn share_smb(source: &str, at: &Path, guid: u64, wanted: &SmbShare, note: &mut Note) -> Result<(), String> {
    let path = plain(at)?;
    let name = wanted.name.clone().or_else(|| sharing::share_name(source));
    let name = name.ok_or_else(|| format!("'{source}' makes no name of a share: sharesmb=name=NAME gives one"))?;
    if !samba::is_there() {
        return Err("there is no Samba on this machine: install samba".to_owned());
    }
    if let Some(other) = samba::path_of(&name).filter(|other| other != at) {
        return Err(format!("the share '{name}' is that of {} already", path_text(&other)));
    }
    note.samba = Some(name.clone());
    write_down(guid, note)?;
    samba::share(path, &name, source, wanted)
}

/// Returns a path as text if it can be written in a line of any configuration.
fn plain(at: &Path) -> Result<&str, String> {
    let fits = |text: &&str| !text.chars().any(|c| c.is_control() || matches!(c, '"' | '\\' | '\'' | '%'));
    at.to_str().filter(fits).ok_or_else(|| format!("the mountpoint {} cannot be named to a server", path_text(at)))
}

/// Removes the shares of a record; returns whether nothing of them remains.
fn take_back(guid: u64, note: &Note) -> bool {
    if *note == Note::default() {
        return true;
    }
    let mut all = Ok(());
    for client in &note.kernel {
        all = all.and(kernel::take_back(client, &note.at));
    }
    if note.ganesha {
        all = all.and(ganesha::take_back(guid));
    }
    if let Some(name) = &note.samba {
        all = all.and(samba::take_back(name, &note.at));
    }
    match all {
        Ok(()) => forget(guid),
        Err(why) => {
            tracing::warn!(at = %path_text(&note.at), why, "a share could not be taken back");
            return false;
        }
    }
    true
}

/// Removes the shares of a dead process, as its record has them.
fn take_back_left(guid: u64, left: &Note) {
    let Some(directory) = directory() else { return };
    if let Err(why) = if_unchanged(&directory, guid, left, || {
        take_back(guid, left);
    }) {
        tracing::warn!(at = %path_text(&left.at), why, "a share could not be taken back");
    }
}

/// Calls `act` under the lock, if the record of this dataset is still this one: after another process has removed
/// the shares, they may have been made anew.
fn if_unchanged(directory: &Path, guid: u64, left: &Note, act: impl FnOnce()) -> Result<(), String> {
    let _locked = lock(directory)?;
    if read(&file(directory, guid)).is_ok_and(|now| now == *left) {
        act();
    }
    Ok(())
}

/// Locks the directory of records until the returned file is closed.
fn lock(directory: &Path) -> Result<fs::File, String> {
    static RECORDS: DirectoryLock = DirectoryLock::new();
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(directory);
    let locked = made.and_then(|()| RECORDS.take(directory));
    locked.map_err(|error| Failure::io("cannot lock", directory.display(), &error).what)
}

fn directory() -> Option<PathBuf> {
    Some(cage::state::base()?.join("shares"))
}

fn file(directory: &Path, guid: u64) -> PathBuf {
    directory.join(format!("{guid:016x}.json"))
}

/// Writes the record of a dataset; the caller holds the lock.
fn write_down(guid: u64, note: &Note) -> Result<(), String> {
    let Some(path) = directory().map(|directory| file(&directory, guid)) else { return Ok(()) };
    let options = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).clone();
    let text = serde_json::to_vec(note).map_err(io::Error::from);
    let written = text.and_then(|text| whole_file::replace(&path, &path.with_extension("new"), &options, &text));
    written.map_err(|error| Failure::io("cannot note what is shared in", path.display(), &error).what)
}

fn read(path: &Path) -> Result<Note, String> {
    let text = fs::read(path).map_err(|error| error.to_string())?;
    serde_json::from_slice(&text).map_err(|error| error.to_string())
}

fn forget(guid: u64) {
    if let Some(error) = directory().and_then(|directory| fs::remove_file(file(&directory, guid)).err())
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(%error, "what is shared no more stays noted");
    }
}

/// Returns the records of dead processes.
fn left() -> Vec<(u64, Note)> {
    let mut left = Vec::new();
    for path in directory().map(|directory| crate::runtime::children(&directory)).unwrap_or_default() {
        let guid = path.file_name().and_then(|name| name.to_str()?.strip_suffix(".json"));
        let Some(guid) = guid.and_then(|guid| u64::from_str_radix(guid, 16).ok()) else { continue };
        match read(&path) {
            Ok(note) if Process::with(note.process.0).is_ok_and(|now| now.began == note.process.1) => {}
            Ok(note) => left.push((guid, note)),
            Err(why) => tracing::warn!(path = %path_text(&path), why, "what was shared is not known"),
        }
    }
    left
}

fn ourselves() -> (u32, u64) {
    Process::this().map_or((std::process::id(), 0), |this| (this.number, this.began))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{FlockOperation, flock};
    use std::cell::Cell;

    #[test]
    fn a_copy_shares_nothing() {
        let shares = Shares::new(false, true);
        let sharing = Sharing { guid: 7, nfs: "on".to_owned(), smb: "off".to_owned() };
        shares.set(1, "t/a", Path::new("/srv/a"), &sharing);
        assert!(shares.failure(1).unwrap().contains("a copy"));
        assert!(!shares.stop(1), "nothing was shared");
    }

    #[test]
    fn what_another_process_has_shared_anew_stays() {
        let directory = tempfile::tempdir().unwrap();
        let left = Note { process: (1, 5), at: PathBuf::from("/srv/a"), ganesha: true, ..Note::default() };
        let anew = Note { process: (2, 6), ..left.clone() };
        let taken_back = || {
            let called = Cell::new(false);
            let act = || {
                let other = fs::File::open(&directory).unwrap();
                assert!(
                    flock(&other, FlockOperation::NonBlockingLockExclusive).is_err(),
                    "others could share meanwhile"
                );
                called.set(true);
            };
            if_unchanged(directory.path(), 7, &left, act).unwrap();
            called.get()
        };
        let write = |note: &Note| fs::write(file(directory.path(), 7), serde_json::to_vec(note).unwrap()).unwrap();
        assert!(!taken_back());
        write(&left);
        assert!(taken_back());
        write(&anew);
        assert!(!taken_back());
    }
}
