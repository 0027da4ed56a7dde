//! Housekeeping: completes or undoes what a kill or a reboot left, deletes removed files, and runs
//! backups that are due.

use crate::{
    command::LONG,
    dataset,
    failure::Failure,
    log,
    options::Place,
    store::{Attempt, Phase},
    volumes::{Volumes, now},
};
use rustix::fs::{FlockOperation, flock};
use std::{fs::OpenOptions, os::unix::fs::OpenOptionsExt};

/// Snapshots that a backup keeps on both sides.
const KEEP: [&str; 6] = ["--keep-hourly", "24", "--keep-daily", "30", "--keep-monthly", "12"];

impl Volumes {
    /// Puts all volumes in order, except those that another call is changing. Failures are logged;
    /// the next round tries again.
    ///
    /// # Errors
    /// The state directory cannot be read.
    pub fn tend(&self) -> Result<(), Failure> {
        for name in self.store.names()? {
            if let Err(failure) = self.tend_one(&name) {
                log::line(&format!("volume {name}: {failure}"));
            }
        }
        self.sweep()
    }

    /// Deletes the files of removed volumes.
    ///
    /// # Errors
    /// The first deletion that failed; the others are done.
    pub fn sweep(&self) -> Result<(), Failure> {
        self.store.sweep()
    }

    fn tend_one(&self, name: &str) -> Result<(), Failure> {
        let Attempt::Locked(mut locked) = self.store.try_lock(name)? else { return Ok(()) };
        match locked.record.phase {
            // Its caller was never answered; a repeated call makes it anew.
            Phase::Making | Phase::Removing => self.destroy(*locked),
            Phase::Ready => {
                self.forget_other_boots(&mut locked)?;
                if locked.record.holders.is_empty() {
                    let spec = locked.record.spec()?;
                    self.end_mounts(&locked, &spec)?;
                }
                Ok(())
            }
        }
    }

    /// Runs the backups that are due, one after the other.
    ///
    /// # Errors
    /// The state directory cannot be read.
    pub fn back_up(&self) -> Result<(), Failure> {
        for name in self.store.names()? {
            if let Err(failure) = self.back_up_one(&name) {
                log::line(&format!("backup of volume {name}: {failure}"));
            }
        }
        Ok(())
    }

    fn back_up_one(&self, name: &str) -> Result<(), Failure> {
        let Some(record) = self.store.read(name)? else { return Ok(()) };
        let Place::Dataset(dataset) = record.spec()?.place else { return Ok(()) };
        let Some(backup) = &dataset.backup else { return Ok(()) };
        if record.phase != Phase::Ready || now().abs_diff(record.backup.tried) < backup.every.as_secs() {
            return Ok(());
        }
        // A lock of its own: mounts do not wait for a backup.
        let path = self.store.directory(name).join("backup.lock");
        let mut options = OpenOptions::new();
        let opened = options.write(true).create(true).truncate(false).mode(0o600).open(&path);
        let lock = opened.map_err(|error| Failure::io("open", &path, &error))?;
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Ok(());
        }
        let source = dataset::name(&dataset, name);
        let mut words = vec!["fs", "replicate"];
        words.extend(KEEP);
        words.extend(["--", &source, &backup.target]);
        let result = match self.nacre.run(Some(&lock), &words, LONG) {
            Ok(finished) if finished.is_done() => Ok(()),
            Ok(finished) => Err(finished.failure()),
            Err(failure) => Err(failure),
        };
        let Some(mut locked) = self.store.lock(name)? else { return Ok(()) };
        if locked.record.id != record.id {
            return Ok(());
        }
        locked.record.backup.tried = now();
        match &result {
            Ok(()) => {
                locked.record.backup.done = locked.record.backup.tried;
                locked.record.backup.failure = None;
            }
            Err(failure) => locked.record.backup.failure = Some(failure.message.clone()),
        }
        locked.save()?;
        result
    }
}
