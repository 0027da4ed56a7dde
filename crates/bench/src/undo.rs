//! Effects on the machine that are undone when the bench ends, however it ends: by return, panic or signal.
//!
//! Every effect is entered here *before* it is made, so that it cannot be left behind at any moment. Undoing an
//! effect that was never made is harmless. After [`Undo::all`] nothing more may be entered.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};

use crate::clock::Deadline;
use crate::failure::{Doing, Failure};
use crate::holders;
use crate::limits;
use crate::mounts;
use crate::programs;
use crate::transport;

/// How long to look for mounts that a stopped program was still making.
const LATE_MOUNTS: Duration = Duration::from_millis(60);

/// An effect on the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// A mount at the path.
    Mount(PathBuf),
    /// A loop device with a file.
    Loop(PathBuf),
    /// A device with limited throughput.
    Limit(PathBuf),
    /// Processes that serve a pool in the image.
    Holders(PathBuf),
    /// A directory that belongs to the bench alone.
    Directory(PathBuf),
    /// The previous state of FUSE over io_uring: on or off.
    Switch(bool),
}

#[derive(Debug, Default)]
struct Effects {
    list: Vec<Effect>,
    closed: bool,
}

/// The list of effects, shared with the thread that waits for signals.
#[derive(Debug, Clone, Default)]
pub struct Undo(Arc<Mutex<Effects>>);

impl Undo {
    /// Enters an effect that is about to be made; fails once the bench is being stopped.
    pub fn enter(&self, effect: Effect) -> Result<(), Failure> {
        let mut effects = self.lock();
        if effects.closed {
            return Err(Failure::new("stopped"));
        }
        effects.list.push(effect);
        Ok(())
    }

    /// Removes an effect that has been undone in the ordinary course.
    pub fn strike(&self, effect: &Effect) {
        self.lock().list.retain(|entered| entered != effect);
    }

    /// Undoes everything, newest first. Returns the failures.
    pub fn all(&self) -> Vec<Failure> {
        let effects = {
            let mut effects = self.lock();
            effects.closed = true;
            std::mem::take(&mut effects.list)
        };
        effects.iter().rev().filter_map(|effect| undo(effect).err()).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Effects> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn undo(effect: &Effect) -> Result<(), Failure> {
    match effect {
        Effect::Mount(path) if mounts::is_mounted(path)? => mounts::detach(path),
        Effect::Mount(_) => Ok(()),
        Effect::Loop(device) => release_loop(device),
        Effect::Limit(device) => limits::set(device, 0),
        Effect::Holders(image) => holders::end(image),
        Effect::Directory(path) => remove_tree(path),
        Effect::Switch(on) => transport::switch(*on),
    }
}

/// Releases a loop device; the kernel waits for its last user by itself.
pub fn release_loop(device: &Path) -> Result<(), Failure> {
    let status = Command::new("losetup").arg("-d").arg(device).stdout(Stdio::null()).stderr(Stdio::null()).status();
    let status = status.doing("running losetup for", device)?;
    if status.success() { Ok(()) } else { Err(Failure::new(format!("losetup -d {} failed", device.display()))) }
}

/// Returns the devices in `losetup -n -O NAME,BACK-FILE` whose files are below `directory`.
fn loops_below(text: &str, directory: &Path) -> Vec<PathBuf> {
    let lines = text.lines().filter_map(|line| line.trim_start().split_once(char::is_whitespace));
    lines
        .filter(|(_, file)| Path::new(file.trim()).starts_with(directory))
        .map(|(device, _)| PathBuf::from(device))
        .collect()
}

/// Releases the loop devices of images below `directory` that were never entered, for example those of a program
/// that was stopped half-way.
fn release_loops_below(directory: &Path) -> Result<(), Failure> {
    if !rustix::process::geteuid().is_root() || programs::find("losetup").is_none() {
        return Ok(());
    }
    let output =
        Command::new("losetup").args(["-n", "-O", "NAME,BACK-FILE"]).output().doing("asking losetup for", directory)?;
    loops_below(&String::from_utf8_lossy(&output.stdout), directory).iter().try_for_each(|device| release_loop(device))
}

/// Removes a directory of the bench. Mounts below it are detached first: removal must never go through a mount into
/// files of others, so it is refused if that fails.
pub fn remove_tree(path: &Path) -> Result<(), Failure> {
    // A program that was running when the bench was stopped may still complete a mount.
    let (watch, deadline) = (mounts::Watch::start()?, Deadline::after(LATE_MOUNTS));
    loop {
        for point in mounts::below(path)? {
            mounts::detach(&point)?;
        }
        if !watch.changed(deadline)? || deadline.is_over() {
            break;
        }
    }
    if !mounts::below(path)?.is_empty() {
        return Err(Failure::new(format!("{} is kept: something is still mounted below it", path.display())));
    }
    release_loops_below(path)?;
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        result => result.doing("removing", path),
    }
}

/// Guard that undoes everything when a signal asks the process to stop, and when it is dropped.
#[derive(Debug)]
pub struct Guard {
    undo: Undo,
    signals: Handle,
    waiter: Option<thread::JoinHandle<()>>,
}

impl Guard {
    /// Starts to wait for SIGINT, SIGTERM and SIGHUP. The process then exits with 128 plus the
    /// signal's number.
    pub fn start(undo: Undo) -> Result<Self, Failure> {
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])
            .map_err(|error| Failure::new(format!("waiting for signals: {error}")))?;
        let handle = signals.handle();
        let of_waiter = undo.clone();
        let waiter = thread::spawn(move || {
            if let Some(signal) = signals.forever().next() {
                for failure in of_waiter.all() {
                    eprintln!("nacre bench: {failure}");
                }
                std::process::exit(128 + signal);
            }
        });
        Ok(Self { undo, signals: handle, waiter: Some(waiter) })
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        for failure in self.undo.all() {
            eprintln!("nacre bench: {failure}");
        }
        self.signals.close();
        // Joined only for order: a waiter that panicked has nothing more to do.
        if let Some(Err(_)) = self.waiter.take().map(thread::JoinHandle::join) {
            eprintln!("nacre bench: the thread that waits for signals failed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn effects_are_undone_and_the_list_closes() {
        let directory = tempfile::tempdir().unwrap();
        let ours = directory.path().join("ours");
        fs::create_dir_all(ours.join("a/b")).unwrap();
        let undo = Undo::default();
        undo.enter(Effect::Directory(ours.clone())).unwrap();
        undo.enter(Effect::Mount(ours.join("never-mounted"))).unwrap();
        assert_eq!(undo.all(), []);
        assert!(!ours.exists());
        assert!(undo.enter(Effect::Directory(ours)).is_err());
    }

    #[test]
    fn loops_are_known_by_their_files() {
        let text = "/dev/loop0 /tmp/a b/image\n/dev/loop12 /tmp/a/image\n/dev/loop3 /tmp/ab/image (deleted)\n";
        assert_eq!(loops_below(text, Path::new("/tmp/a")), [PathBuf::from("/dev/loop12")]);
        assert_eq!(loops_below(text, Path::new("/tmp/a b")), [PathBuf::from("/dev/loop0")]);
    }

    #[test]
    fn a_struck_effect_stays() {
        let directory = tempfile::tempdir().unwrap();
        let effect = Effect::Directory(directory.path().to_owned());
        let undo = Undo::default();
        undo.enter(effect.clone()).unwrap();
        undo.strike(&effect);
        assert_eq!(undo.all(), []);
        assert!(directory.path().exists());
    }
}
