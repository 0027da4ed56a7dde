//! `realistic-permissions`: hides permissions that the mounter itself lacks. Pure.
//!
//! Computed from owner, group and mode of the file below and from the ids of the mounter, by the
//! kernel's rule for files without an ACL: the superuser may read and write everything, and execute
//! directories and files with an x bit; other users get the bits of the first class that fits. ACLs
//! and read-only file systems below are ignored.

use crate::context::Mounter;
use nacre_vfs::{Attr, Kind};

/// The rwx bits that `mounter` has on the file, as 0 to 7.
pub fn access(mounter: &Mounter, below: &Attr) -> u32 {
    if mounter.is_root() {
        let x = below.kind == Kind::Directory || below.mode & 0o111 != 0;
        return 6 | u32::from(x);
    }
    let shift = if below.uid == mounter.uid {
        6
    } else if below.gid == mounter.gid || mounter.groups.contains(&below.gid) {
        3
    } else {
        0
    };
    (below.mode >> shift) & 7
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::remap::tests::attr;

    #[test]
    fn the_first_class_that_fits_decides() {
        let mounter = Mounter { uid: 1000, gid: 100, groups: vec![50] };
        let file = |uid, gid| Attr { uid, gid, mode: 0o741, ..attr(Kind::File) };
        assert_eq!(
            [file(1000, 100), file(5, 100), file(5, 50), file(5, 5)].map(|file| access(&mounter, &file)),
            [7, 4, 4, 1]
        );
    }

    #[test]
    fn root_executes_only_what_can_be_executed() {
        let root = Mounter::default();
        assert_eq!(access(&root, &Attr { mode: 0, ..attr(Kind::File) }), 6);
        assert_eq!(access(&root, &Attr { mode: 0o001, ..attr(Kind::File) }), 7);
        assert_eq!(access(&root, &Attr { mode: 0, ..attr(Kind::Directory) }), 7);
    }
}
