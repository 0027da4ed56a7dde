//! The table `exports`: file systems exported by NFS-Ganesha and Samba.

use nacre_bench_arguments as arguments;

use super::pool::{IMAGE, NACRE, NACRE_OFF, XFS};
use super::{Table, Test, bytes, operations};
use crate::table::Group;
use crate::target::Target;

/// Exports of a pool to clients of NFS and SMB, on loopback. Ratios refer to an exported XFS on a loop device whose
/// image is next to the others.
pub static EXPORTS: Table = Table {
    arguments: arguments::EXPORTS,
    tests: TESTS,
    targets: TARGETS,
    default_targets: &["xfs", "nacre-pool", "nacre-pool-off"],
    programs: &[("mkfs.xfs", "-V"), ("ganesha.nfsd", "-v"), ("smbd", "-V"), ("smbclient", "-V")],
};

static TARGETS: &[Target] = &[
    Target { id: "xfs", title: "XFS", steps: &[XFS], ..IMAGE },
    Target { id: "nacre-pool", title: "nacre", steps: &[NACRE], ..IMAGE },
    Target { id: "nacre-pool-off", title: "nacre, off", steps: &[NACRE_OFF], ..IMAGE },
];

static TESTS: &[Test] = &[
    bytes("nfs-in", "a file copied in by NFS, and synced", Group::Served, true),
    bytes("nfs-out", "copied out", Group::Served, true),
    operations("nfs-list", "names listed by NFS, with attributes", Group::Served, true),
    bytes("smb-in", "a file copied in by SMB, and synced", Group::Served, true),
    bytes("smb-out", "copied out", Group::Served, true),
    operations("smb-files-in", "small files copied in by SMB, and synced", Group::Served, true),
    operations("smb-files-out", "copied out", Group::Served, true),
];
