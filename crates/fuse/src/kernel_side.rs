//! The kernel's side of a mount: the features agreed on in INIT, the cache timeouts, and the channels to the kernel
//! while the session runs.
//!
//! Set up by `mount.rs`, used by the handlers.

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

/// The kernel's side of a mount.
pub(crate) struct KernelSide {
    times: CacheTimes,
    /// Whether the host knows SELinux labels at all.
    pub selinux: bool,
    agreement: OnceLock<Agreement>,
    /// None before the session runs and after its end.
    session: RwLock<Option<Observer>>,
    /// None unless the session runs; for notifications that take no lock in the kernel.
    notifier: RwLock<Option<Notifier>>,
    /// Whether the kernel can invalidate all dentries at once (FUSE_NOTIFY_INC_EPOCH).
    epoch: AtomicBool,
    device: OnceLock<u64>,
    /// Whether a caller has got attributes of the root; see [`KernelSide::root_is_taken`].
    root_taken: AtomicBool,
}

/// First minor protocol version with FUSE_NOTIFY_INC_EPOCH.
const WITH_EPOCH: u32 = 44;

impl KernelSide {
    /// The state before INIT.
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

    /// Sets the features agreed on. A second INIT (the session falls back to the device) offers the same; the first
    /// agreement stays.
    pub fn agree(&self, agreement: Agreement) {
        let _ = self.agreement.set(agreement);
    }

    /// Returns the features agreed on; none before INIT.
    pub fn agreement(&self) -> Agreement {
        self.agreement.get().copied().unwrap_or_default()
    }

    /// Sets the session. `goes_on`: the session was taken over from another process, and no dentry is dropped.
    pub fn connect(&self, session: &Session, goes_on: bool) {
        *self.session.write() = Some(session.observer());
        *self.notifier.write() = Some(session.notifier());
        let knows_epoch = match goes_on {
            // Incrementing the epoch would detach file systems that others have mounted inside.
            true => session.offer().minor >= WITH_EPOCH,
            // Has no effect on a fresh mount, and shows whether the kernel supports it.
            false => session.notifier().inc_epoch().is_ok(),
        };
        self.epoch.store(knows_epoch, Ordering::Relaxed);
    }

    /// Drops the session, which has ended. It holds the front end; this breaks the reference cycle.
    pub fn disconnect(&self) {
        *self.session.write() = None;
        *self.notifier.write() = None;
    }

    /// Sets the mount's device number; the first one stays.
    pub fn found(&self, device: u64) {
        let _ = self.device.set(device);
    }

    /// Returns the mount's device number, where it is known.
    pub fn device(&self) -> Option<u64> {
        self.device.get().copied()
    }

    /// Whether the thread is one of this process that serves the session.
    pub fn is_own_thread(&self, tid: u32) -> bool {
        self.session.read().as_ref().is_some_and(|session| session.is_own_thread(tid))
    }

    /// Sends a notification for which the kernel takes no lock. False where that is not possible now.
    pub fn tell(&self, tell: impl FnOnce(&Notifier) -> bool) -> bool {
        self.notifier.read().as_ref().is_some_and(tell)
    }

    /// Returns the cache timeouts.
    pub fn times(&self) -> CacheTimes {
        let mut times = self.times;
        times.epoch = self.epoch.load(Ordering::Relaxed);
        times
    }

    /// Whether others have mounted something inside the mount, as far as that can be seen. The kernel detaches it
    /// when a dentry above it is dropped, which is what incrementing the epoch does to all dentries.
    pub fn carries_mounts(&self) -> bool {
        let carries = |device: &u64| fusewire::carries_mounts((rustix::fs::major(*device), rustix::fs::minor(*device)));
        self.device.get().is_some_and(carries)
    }

    /// Whether the root's attributes may be cached and invalidated. A new mount's root has mode 0 in the kernel until
    /// a caller has got its attributes; the kernel drops a reply that an invalidation overtakes, and the caller
    /// waiting for it would be refused by that mode (EACCES). So the root is not invalidated before it has been
    /// entered, and until then its attributes are not cached. To be asked before the layer is.
    pub fn root_is_taken(&self) -> bool {
        self.root_taken.load(Ordering::Acquire)
    }

    /// Notes that a caller reads or looks up in a directory. If that is the root: while its attributes are not
    /// cached, the caller has requested and got them first.
    pub fn entered_directory(&self, nodeid: u64) {
        if nodeid == ROOT && !self.root_taken.load(Ordering::Relaxed) {
            self.root_taken.store(true, Ordering::Release);
        }
    }
}
