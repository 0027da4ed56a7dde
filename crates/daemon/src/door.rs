//! Options of the FUSE front end for a mount: from settings, the stack, and the file systems of the sources.

use crate::plan::{Atime, Door, MountPlan, Transport};
use nacre_fuse::{AclChoice, FuseOptions, PassthroughChoice, TransportChoice, XattrChoice};
use nacre_layers::context::Context;
use nacre_stack::spec::{LayerSpec, RemapSpec, StackSpec, Symlinks};
use std::{path::Path, sync::Arc};

/// Returns the type in the mount table, after `fuse.`: `mount.fuse.nacre` and `nacre` are the same there.
pub fn subtype(plan: &MountPlan) -> String {
    let program = plan.program.rsplit('.').next().unwrap_or("nacre");
    plan.door.subtype.clone().unwrap_or_else(|| program.to_owned())
}

/// File systems that are themselves stacked on others.
const STACKED: &[u64] = &[OVERLAY, FUSE];

/// File systems that may report a failed write as late as at close(2): NFS, SMB1, SMB2, CIFS, 9P, Ceph, AFS, and
/// FUSE, which may be any of these.
const REPORTING_AT_CLOSE: &[u64] =
    &[0x6969, 0x517b, 0xfe53_4d42, 0xff53_4d42, 0x0102_1997, 0x00c3_6400, 0x6b41_4653, FUSE];

// Magic numbers of statfs(2).
const OVERLAY: u64 = 0x794c_7630;
const FUSE: u64 = 0x6573_5546;

/// Whether a source lies on one of these kinds of file system.
fn lies_on(spec: &StackSpec, context: &Context, kinds: &[u64]) -> bool {
    // A source that statfs(2) fails for fails with its own message when it is opened.
    spec.directories()
        .into_iter()
        .filter_map(|source| rustix::fs::statfs(context.reached(source)).ok())
        .any(|figures| kinds.contains(&u64::from(figures.f_type.cast_unsigned() as u32)))
}

/// Whether permissions are checked by the file system below: an ordinary user mounts a directory without changes
/// for himself alone, and this process has his rights. `default_permissions` would make the kernel check once more
/// with the attributes that it sees, at the price of requests (for ACLs, at each component).
fn is_judged_below(door: &Door, spec: &StackSpec) -> bool {
    let as_it_is = |layer: &LayerSpec| match layer {
        LayerSpec::Host(host) => host.symlinks == Symlinks::Keep,
        LayerSpec::Throttle(_) | LayerSpec::Trace(_) | LayerSpec::Cage(_) => true,
        LayerSpec::Remap(remap) => **remap == RemapSpec::default(),
        LayerSpec::Mem(_)
        | LayerSpec::Union(_)
        | LayerSpec::Readonly(_)
        | LayerSpec::Shift(_)
        | LayerSpec::OverrideStat(_) => false,
    };
    !door.allow_other && !door.immutable && !door.no_open && spec.layers.iter().all(as_it_is) && is_ordinary()
}

/// Whether this process has the rights of its user, and no others.
fn is_ordinary() -> bool {
    use rustix::{process, thread};
    let own_ids = process::geteuid() == process::getuid() && process::getegid() == process::getgid();
    let powerless = thread::capabilities(None).is_ok_and(|sets| sets.effective.is_empty());
    own_ids && powerless && !process::geteuid().is_root()
}

/// Returns the options of the FUSE front end.
pub fn options(plan: &MountPlan, spec: &StackSpec, context: &Context, mountpoint: &Path, source: &str) -> FuseOptions {
    let door = &plan.door;
    FuseOptions {
        fsname: source.to_owned(),
        subtype: subtype(plan),
        read_only: door.read_only,
        allow_other: door.allow_other,
        default_permissions: !is_judged_below(door, spec),
        nosuid: !door.suid,
        nodev: !door.dev,
        noexec: !door.exec,
        noatime: door.atime == Some(Atime::No),
        nosymfollow: !door.symfollow,
        sync: door.sync,
        dirsync: door.dirsync,
        extra: door.kernel_words.clone(),
        transport: match door.transport {
            Transport::Auto => TransportChoice::Auto,
            Transport::Uring => TransportChoice::Uring,
            Transport::Device => TransportChoice::Device,
        },
        passthrough: if door.passthrough { PassthroughChoice::Auto } else { PassthroughChoice::Off },
        stacked: lies_on(spec, context, STACKED),
        reports_at_close: lies_on(spec, context, REPORTING_AT_CLOSE),
        immutable: door.immutable,
        no_open: door.no_open,
        lock_forwarding: door.lock_forwarding,
        direct_io: door.direct_io,
        xattr: if door.xattr { XattrChoice::Full } else { XattrChoice::Off },
        acl: if door.acl { AclChoice::Auto } else { AclChoice::Off },
        entry_timeout: door.entry_timeout,
        attr_timeout: door.attr_timeout,
        negative_timeout: door.negative_timeout,
        notify_watchers: door.notify_watchers,
        worker_setup: Some(Arc::new(|| {
            // Threads without it work correctly, only slower.
            if let Err(error) = nacre_layers::host::prepare_worker() {
                tracing::debug!(%error, "a thread keeps switching ids");
            }
        })),
        ..FuseOptions::new(mountpoint)
    }
}
