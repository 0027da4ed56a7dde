//! Negotiation with the kernel: the flags of INIT, and the cache timeouts.
//!
//! Called by `door.rs` at INIT and for each reply that the kernel may cache. Pure functions of options, offer and
//! coherence.

use crate::options::{AclChoice, FuseOptions, PassthroughChoice, XattrChoice};
use fusewire::{Offer, Settings, abi::init};
use nacre_vfs::{Coherence, Layer, Scope};
use std::time::Duration;

/// Timeout where nobody else changes the file, or every change is notified.
const LONG: Duration = Duration::from_secs(24 * 60 * 60);
/// Timeout where the file never changes.
const FOREVER: Duration = Duration::from_secs(365 * 24 * 60 * 60);
/// Maximum timeout of watched names, where the kernel cannot invalidate all names at once after a lost event (before
/// 6.16).
const WITHOUT_EPOCH: Duration = Duration::from_secs(1);

/// The mount's cache timeouts, decided once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CacheTimes {
    names: Option<Duration>,
    attributes: Option<Duration>,
    missing: Option<Duration>,
    immutable: bool,
    /// The kernel can invalidate all names at once.
    pub epoch: bool,
}

impl CacheTimes {
    /// Takes the timeouts from the options.
    pub fn new(options: &FuseOptions) -> CacheTimes {
        CacheTimes {
            names: options.entry_timeout,
            attributes: options.attr_timeout,
            missing: options.negative_timeout,
            immutable: options.immutable,
            epoch: true,
        }
    }

    /// Timeout of an existing name.
    pub fn names(&self, coherence: Coherence) -> Duration {
        self.names.unwrap_or_else(|| self.name_time(coherence))
    }

    /// Timeout of a missing name (negative dentry).
    pub fn missing(&self, coherence: Coherence) -> Duration {
        self.missing.unwrap_or_else(|| self.name_time(coherence))
    }

    /// Timeout of attributes.
    pub fn attributes(&self, coherence: Coherence) -> Duration {
        match coherence {
            _ if self.attributes.is_some() => self.attributes.unwrap_or_default(),
            _ if self.immutable => FOREVER,
            Coherence::Exclusive | Coherence::Watched => LONG,
            Coherence::Shared | Coherence::PerCaller => Duration::ZERO,
        }
    }

    fn name_time(&self, coherence: Coherence) -> Duration {
        match coherence {
            _ if self.immutable => FOREVER,
            // Also where nobody else changes anything: new rules may hide names or deny access to users.
            Coherence::Exclusive | Coherence::Watched if !self.epoch => WITHOUT_EPOCH,
            Coherence::Exclusive | Coherence::Watched => LONG,
            Coherence::Shared | Coherence::PerCaller => Duration::ZERO,
        }
    }
}

/// Features decided at INIT and at the start, which do not change.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Agreement {
    /// The kernel enforces ACLs.
    pub acls: bool,
    /// The kernel does not apply the umask: with ACLs, a new file's mode may depend on its directory's default ACL
    /// instead.
    pub masks: bool,
    /// Directories are opened without a request, and their listings are cached.
    pub opens_directories_itself: bool,
    /// Files are opened without a request.
    pub opens_files_itself: bool,
    /// Why files are opened by requests, where they are.
    pub asks_at_open: Option<&'static str>,
    /// The kernel offered passthrough.
    pub passthrough: bool,
    /// The kernel caches writes (FUSE_WRITEBACK_CACHE).
    pub writeback: bool,
    /// The kernel checks that a caller may change a file's flags (owner, CAP_FOWNER, CAP_LINUX_IMMUTABLE).
    pub judges_flags: bool,
}

/// Minor protocol version of Linux 5.14. `vfs_fileattr_set` is in Linux 5.13, which has the protocol of 5.12.
const JUDGES_FLAGS: u32 = 34;

/// Flags that are always wanted; the session drops those not offered.
const ALWAYS: u64 = init::ASYNC_READ
    | init::BIG_WRITES
    | init::DO_READDIRPLUS
    | init::READDIRPLUS_AUTO
    | init::PARALLEL_DIROPS
    | init::HAS_IOCTL_DIR
    // Without it, each write in passthrough asks for `security.capability`. In return the front end clears set-id
    // bits.
    | init::HANDLE_KILLPRIV_V2
    | init::SETXATTR_EXT
    | init::DIRECT_IO_ALLOW_MMAP
    | init::HAS_EXPIRE_ONLY;

/// Maximum bytes of one request and of read-ahead. Also where the kernel does the I/O itself: whether passthrough
/// works is known only later, and untouched parts of buffers cost nothing.
const MAX_IO: u32 = 1 << 20;

/// Maximum bytes of one request with this much memory ([`MAX_IO`] at most). Each serving thread has a buffer of that
/// size, and a mount whose requests wait has tens of threads: together they take an eighth of memory at most. Pure.
fn max_io(memory: Option<u64>) -> u32 {
    let share = memory.and_then(|memory| u32::try_from(memory / 256).ok()).unwrap_or(MAX_IO);
    (1 << share.max(1).ilog2()).clamp(MAX_IO / 8, MAX_IO)
}

/// Maximum number of background requests (write-back, read-ahead, AIO) with write-back caching: more than a layer
/// lets wait until dirty data has been written back, which itself comes in such requests.
const BACKGROUND: u16 = 4096;

/// Answers the kernel's offer. `collect`: write-back caching is wanted; `before`: the flags agreed on by a previous
/// process, which stay: the layers may have changed since, but the kernel cannot be notified of that.
pub(crate) fn answer(
    offer: &Offer,
    options: &FuseOptions,
    layer: &dyn Layer,
    (collect, before): (bool, Option<u64>),
) -> (Settings, Agreement) {
    // Whether files are opened by requests depends on the time of mounting: on mounts inside the source.
    let opens_before = before;
    // Of layers without inode numbers, no other flag can have changed.
    let before = before.filter(|_| layer.capabilities().numbered.is_some());
    let root = root_coherence(layer);
    let shared = root >= Coherence::Shared;
    let acls = wants_acls(options, layer) && offer.has(init::POSIX_ACL | init::DONT_MASK);
    let acls = before.map_or(acls, |before| before & init::POSIX_ACL != 0);
    let masks = acls || !options.default_permissions && layer.capabilities().acls && offer.has(init::DONT_MASK);
    let writeback = collect && offer.has(init::WRITEBACK_CACHE);
    let asks_at_open = match opens_before {
        Some(before) if before & init::NO_OPEN_SUPPORT != 0 => None,
        Some(_) => Some("so it was agreed on when it was mounted"),
        None => asks_at_open(offer, options, layer, (root, writeback)),
    };
    let opens_files_itself = asks_at_open.is_none();
    // The three exclude each other in the kernel.
    let passthrough = wants_passthrough(options) && !writeback && !opens_files_itself && offer.has(init::PASSTHROUGH);
    let agreement = Agreement {
        acls,
        masks,
        // Where the kernel checks no permissions, OPENDIR has to check who may list a directory.
        opens_directories_itself: options.default_permissions
            && (options.immutable || !shared)
            && offer.has(init::NO_OPENDIR_SUPPORT),
        opens_files_itself,
        asks_at_open,
        passthrough,
        writeback,
        judges_flags: offer.minor >= JUDGES_FLAGS,
    };
    let mut flags = ALWAYS;
    let mut when = |condition: bool, flag: u64| flags |= if condition { flag } else { 0 };
    // AUTO_INVAL_DATA, for pages of files that change unnoticed: the kernel drops them when it gets new times, for
    // which it asks at each read(2). Where changes are notified, it still drops them when it gets another length (no
    // EXPLICIT_INVAL_DATA): the length arrives before the notification, and after an append by others the last page
    // would show zeros, which a store to a mapping would even write back. Without OPEN requests, nothing else drops
    // the pages of a file in a directory that could not be watched.
    when((shared || opens_files_itself && !writeback) && !options.immutable, init::AUTO_INVAL_DATA);
    when(!shared && !layer.capabilities().reuses_numbers, init::CACHE_SYMLINKS);
    when(agreement.opens_directories_itself, init::NO_OPENDIR_SUPPORT);
    when(agreement.opens_files_itself, init::NO_OPEN_SUPPORT);
    // Otherwise no request would truncate.
    when(!agreement.opens_files_itself, init::ATOMIC_O_TRUNC);
    when(acls, init::POSIX_ACL);
    when(masks, init::DONT_MASK);
    // In return, the kernel sends the caller's ids only with creations: not enough where answers depend on the
    // caller.
    when(
        options.default_permissions && root != Coherence::PerCaller && !layer.capabilities().judges_callers,
        init::ALLOW_IDMAP,
    );
    when(options.lock_forwarding, init::POSIX_LOCKS | init::FLOCK_LOCKS);
    when(passthrough, init::PASSTHROUGH);
    // Not ASYNC_DIO: after an asynchronous write the kernel drops no pages, and pages that others have read meanwhile
    // would stay stale for good. Files in passthrough need no flag for it, and there may be other files as well
    // (rates, cages).
    when(writeback, init::WRITEBACK_CACHE);
    // A file found by inode number can be found again by any old file handle.
    let numbered = layer.capabilities().numbered.is_some();
    when(numbered, init::EXPORT_SUPPORT);
    // Our own threads open files of the mount by handle.
    when(!numbered && !options.notify_watchers && !writeback, init::NO_EXPORT_SUPPORT);
    let max_io = max_io(nacre_sys::memory_limit::limit());
    let settings = Settings {
        flags: flags & offer.flags,
        max_io,
        max_readahead: max_io,
        // 0 selects the kernel's default, 12.
        max_background: if writeback { BACKGROUND } else { 0 },
        congestion_threshold: if writeback { BACKGROUND / 4 * 3 } else { 0 },
        // The stacking depth of the file system below has to be smaller (FILESYSTEM_MAX_STACK_DEPTH is 2).
        max_stack_depth: if passthrough { 1 + u32::from(options.stacked) } else { 0 },
        ..Settings::default()
    };
    (settings, agreement)
}

/// Why files are opened by requests; `None` where the kernel opens them itself. It does so for all files of a mount
/// and for good, so no file can have settings of its own: there is write-back caching for all writes or there are no
/// writes, and changes by others are notified.
fn asks_at_open(
    offer: &Offer,
    options: &FuseOptions,
    layer: &dyn Layer,
    (root, writeback): (Coherence, bool),
) -> Option<&'static str> {
    let capabilities = layer.capabilities();
    let reads = options.immutable || options.read_only;
    let reasons = [
        (!reads && !writeback, "files can be written through this mount"),
        // Before the first write to a file the kernel asks for `security.capability`, which announces the write.
        (!reads && options.xattr != XattrChoice::Full, "extended attributes are off"),
        (reads && !options.immutable && !options.no_open, "not asked for (--no-open)"),
        (!options.immutable && root > Coherence::Watched, "others may change files unnoticed"),
        (!options.default_permissions, "the kernel checks no permissions here"),
        (options.direct_io, "the kernel caches no content of this mount"),
        (options.lock_forwarding, "locks are taken on the files of the source"),
        (!offer.has(init::NO_OPEN_SUPPORT), "not offered by this kernel"),
    ];
    capabilities.needs_opens.or_else(|| reasons.iter().find(|(applies, _)| *applies).map(|(_, why)| *why))
}

/// Whether the kernel is to enforce ACLs, where it can.
pub(crate) fn wants_acls(options: &FuseOptions, layer: &dyn Layer) -> bool {
    options.acl == AclChoice::Auto
        && options.xattr == XattrChoice::Full
        && options.default_permissions
        && layer.capabilities().acls
}

/// Whether passthrough has to be tried at all.
pub(crate) fn wants_passthrough(options: &FuseOptions) -> bool {
    options.passthrough == PassthroughChoice::Auto && !options.direct_io && !options.immutable
}

/// Coherence of the root's names; the weakest where the layer reports no root.
pub(crate) fn root_coherence(layer: &dyn Layer) -> Coherence {
    layer.root().map_or(Coherence::Shared, |root| layer.coherence(Scope::Names(&root.node)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(change: impl FnOnce(&mut FuseOptions)) -> CacheTimes {
        let mut options = FuseOptions::new("/");
        change(&mut options);
        CacheTimes::new(&options)
    }

    #[test]
    fn what_may_change_unnoticed_is_not_cached() {
        let times = times(|_| {});
        for coherence in [Coherence::Shared, Coherence::PerCaller] {
            assert_eq!(times.names(coherence), Duration::ZERO);
            assert_eq!(times.missing(coherence), Duration::ZERO);
            assert_eq!(times.attributes(coherence), Duration::ZERO);
        }
        assert_eq!(times.names(Coherence::Exclusive), LONG);
        assert_eq!(times.attributes(Coherence::Watched), LONG);
    }

    #[test]
    fn names_stay_short_where_they_cannot_all_be_dropped() {
        let times = CacheTimes { epoch: false, ..times(|_| {}) };
        assert_eq!(times.names(Coherence::Watched), WITHOUT_EPOCH);
        assert_eq!(times.names(Coherence::Exclusive), WITHOUT_EPOCH);
        assert_eq!(times.attributes(Coherence::Watched), LONG);
    }

    #[test]
    fn targets_of_links_are_cached_where_a_number_is_one_file_for_good() {
        use nacre_layers::host::{Host, HostOptions};
        use nacre_stack::spec::HostCoherence;
        let offer = Offer { minor: 45, flags: u64::MAX, max_readahead: MAX_IO };
        let caches = |layer: &dyn Layer| {
            let (settings, _) = answer(&offer, &FuseOptions::new("/"), layer, (false, None));
            settings.flags & init::CACHE_SYMLINKS != 0
        };
        assert!(caches(&nacre_layers::mem::Mem::new()));
        // No file there has a birth time.
        let options = HostOptions { coherence: HostCoherence::Exclusive, ..HostOptions::new("/proc") };
        assert!(!caches(&Host::open(options).unwrap()));
    }

    #[test]
    fn requests_are_smaller_where_memory_is_short() {
        for (memory, expected) in [
            (None, MAX_IO),
            (Some(u64::MAX), MAX_IO),
            (Some(256 << 20), MAX_IO),
            (Some(100 << 20), 256 << 10),
            (Some(64 << 20), 256 << 10),
            (Some(0), 128 << 10),
        ] {
            assert_eq!(max_io(memory), expected, "{memory:?}");
        }
    }

    #[test]
    fn writeback_excludes_passthrough_and_needs_handles() {
        let layer = nacre_layers::mem::Mem::new();
        let offer = |flags| Offer { minor: 45, flags, max_readahead: MAX_IO };
        let all = offer(u64::MAX);
        let options = FuseOptions::new("/");
        let (settings, agreement) = answer(&all, &options, &layer, (true, None));
        assert!(agreement.writeback && !agreement.passthrough);
        assert_eq!(settings.flags & init::ASYNC_DIO, 0);
        assert_eq!(
            settings.flags & (init::WRITEBACK_CACHE | init::PASSTHROUGH | init::NO_EXPORT_SUPPORT),
            init::WRITEBACK_CACHE
        );
        let kept = init::DIRECT_IO_ALLOW_MMAP | init::HANDLE_KILLPRIV_V2;
        assert_eq!(settings.flags & kept, kept);
        for (offer, collect) in [(all, false), (offer(!init::WRITEBACK_CACHE), true)] {
            let (settings, agreement) = answer(&offer, &options, &layer, (collect, None));
            assert!(!agreement.writeback && agreement.passthrough);
            assert_eq!(settings.flags & init::ASYNC_DIO, 0);
            assert_eq!(settings.flags & (init::WRITEBACK_CACHE | init::PASSTHROUGH), init::PASSTHROUGH);
        }
    }

    #[test]
    fn files_are_opened_without_requests_where_nothing_has_to_be_chosen_for_one() {
        let layer = nacre_layers::mem::Mem::new();
        let all = Offer { minor: 45, flags: u64::MAX, max_readahead: MAX_IO };
        let agreed = |change: &dyn Fn(&mut FuseOptions)| {
            let mut options = FuseOptions::new("/");
            (options.no_open, options.read_only) = (true, true);
            change(&mut options);
            let (settings, agreement) = answer(&all, &options, &layer, (false, None));
            assert_eq!(settings.flags & init::NO_OPEN_SUPPORT != 0, agreement.opens_files_itself);
            let excluded = settings.flags & (init::PASSTHROUGH | init::ATOMIC_O_TRUNC);
            assert_eq!(excluded == 0, agreement.opens_files_itself);
            assert_eq!(agreement.asks_at_open.is_none(), agreement.opens_files_itself);
            agreement.opens_files_itself
        };
        assert!(agreed(&|_| {}));
        assert!(!agreed(&|options| options.no_open = false));
        assert!(!agreed(&|options| options.read_only = false));
        assert!(!agreed(&|options| options.default_permissions = false));
        let (settings, agreement) = {
            let mut options = FuseOptions::new("/");
            (options.no_open, options.read_only, options.lock_forwarding) = (true, true, true);
            answer(&all, &options, &layer, (false, None))
        };
        assert!(!agreement.opens_files_itself && settings.flags & init::POSIX_LOCKS != 0);
    }

    #[test]
    fn options_outweigh_coherence() {
        let times = times(|options| {
            options.entry_timeout = Some(Duration::from_secs(7));
            options.immutable = true;
        });
        assert_eq!(times.names(Coherence::Shared), Duration::from_secs(7));
        assert_eq!(times.missing(Coherence::Shared), FOREVER);
        assert_eq!(times.attributes(Coherence::PerCaller), FOREVER);
    }
}
