//! What the door knows of the kernel's side of its mount: what was agreed in INIT, how long it may
//! keep what, and the ways to it while the session runs.
//!
//! Set up by `mount.rs`, asked by the handlers.

use crate::{
    inodes::ROOT,
    negotiate::{Agreement, CacheTimes},
    options::FuseOptions,
};
use fusewire::{Notifier, Observer, Session};
use parking_lot::RwLock;
use std::sync::{
    OnceLock,
    atomic::{AtomicBool, Ordering},
};

/// See the file's head.
pub(crate) struct KernelSide {
    times: CacheTimes,
    /// Whether the host knows SELinux labels at all.
    pub selinux: bool,
    agreement: OnceLock<Agreement>,
    /// None before the session runs and after its end.
    session: RwLock<Option<Observer>>,
    /// As long as the session runs; for what takes no lock in the kernel.
    notifier: RwLock<Option<Notifier>>,
    /// Whether all names can be dropped at once.
    epoch: AtomicBool,
    device: OnceLock<u64>,
    /// Whether attributes of the root have been taken; see [`KernelSide::root_is_taken`].
    root_taken: AtomicBool,
}

/// Kernels of this minor version can drop all names at once.
const WITH_EPOCH: u32 = 44;

impl KernelSide {
    /// Nothing is agreed yet.
    pub fn new(options: &FuseOptions) -> KernelSide {
        KernelSide {
            times: CacheTimes::new(options),
            selinux: std::path::Path::new("/sys/fs/selinux/enforce").exists(),
            agreement: OnceLock::new(),
            session: RwLock::new(None),
            notifier: RwLock::new(None),
            epoch: AtomicBool::new(true),
            device: OnceLock::new(),
            root_taken: AtomicBool::new(false),
        }
    }

    /// What was agreed. A second INIT (the session falls back to the device) offers the same; what
    /// was agreed first holds.
    pub fn agree(&self, agreement: Agreement) {
        let _ = self.agreement.set(agreement);
    }

    /// What was agreed; nothing before INIT.
    pub fn agreement(&self) -> Agreement {
        self.agreement.get().copied().unwrap_or_default()
    }

    /// The session runs; of a mount that goes on after another process nothing is forgotten by this.
    pub fn connect(&self, session: &Session, goes_on: bool) {
        *self.session.write() = Some(session.observer());
        *self.notifier.write() = Some(session.notifier());
        let knows_epoch = match goes_on {
            // It would take away what others have mounted within.
            true => session.offer().minor >= WITH_EPOCH,
            // Harmless on a fresh mount, and shows whether the kernel knows it.
            false => session.notifier().inc_epoch().is_ok(),
        };
        self.epoch.store(knows_epoch, Ordering::Relaxed);
    }

    /// The session has ended. It holds the door; this ends the circle.
    pub fn disconnect(&self) {
        *self.session.write() = None;
        *self.notifier.write() = None;
    }

    /// The mount has this device number. The first one stays.
    pub fn found(&self, device: u64) {
        let _ = self.device.set(device);
    }

    /// The mount's device number, where it is known.
    pub fn device(&self) -> Option<u64> {
        self.device.get().copied()
    }

    /// Whether a thread of this process that serves the session asks.
    pub fn is_own_thread(&self, tid: u32) -> bool {
        self.session.read().as_ref().is_some_and(|session| session.is_own_thread(tid))
    }

    /// Tells the kernel something for which it takes no lock. False where that cannot be done now.
    pub fn tell(&self, tell: impl FnOnce(&Notifier) -> bool) -> bool {
        self.notifier.read().as_ref().is_some_and(tell)
    }

    /// How long it may keep what.
    pub fn times(&self) -> CacheTimes {
        let mut times = self.times;
        times.epoch = self.epoch.load(Ordering::Relaxed);
        times
    }

    /// Whether others have mounted something within the mount, as far as that can be seen. The
    /// kernel takes it away where a name above it goes, and that is what becomes of all names at
    /// once.
    pub fn carries_mounts(&self) -> bool {
        let carries = |device: &u64| fusewire::carries_mounts((rustix::fs::major(*device), rustix::fs::minor(*device)));
        self.device.get().is_some_and(carries)
    }

    /// Whether the root's attributes may be kept, and taken back. A mount begins with a root that
    /// nobody may enter, until the kernel has asked for its attributes; an answer that an
    /// invalidation overtakes is dropped, and whoever waited for it would meet that root (EACCES).
    /// So the root is not invalidated before it has been entered, and until then nothing of it is
    /// kept. To be asked before the layer is.
    pub fn root_is_taken(&self) -> bool {
        self.root_taken.load(Ordering::Acquire)
    }

    /// Somebody looks into a directory. Into the root: while its attributes are not kept, he asked
    /// for them first, and has taken the answer.
    pub fn entered_directory(&self, nodeid: u64) {
        if nodeid == ROOT && !self.root_taken.load(Ordering::Relaxed) {
            self.root_taken.store(true, Ordering::Release);
        }
    }
}
