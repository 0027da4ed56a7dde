//! Reads from `/etc/fuse.conf` what ordinary users may do (mount.fuse3(8)). Used where mounts are made for them,
//! and by `nacre doctor`.

use rustix::thread::{CapabilitySet, capabilities};

/// Path of the file.
pub const PATH: &str = "/etc/fuse.conf";

/// Whether the system allows ordinary users to make mounts that others can access.
#[must_use]
pub fn may_show_others() -> bool {
    std::fs::read_to_string(PATH).is_ok_and(|text| allows_others(&text))
}

/// Whether this process can make mounts that others can access: by CAP_SYS_ADMIN or by `/etc/fuse.conf`. Whether it
/// may call mount(2) at all is not checked.
#[must_use]
pub(crate) fn can_show_others() -> bool {
    capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN)) || may_show_others()
}

fn allows_others(text: &str) -> bool {
    text.lines().any(|line| line.trim() == "user_allow_other")
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_comment_allows_nothing() {
        assert!(super::allows_others("mount_max = 1000\n  user_allow_other\n"));
        assert!(!super::allows_others("#user_allow_other\n# user_allow_other\nuser_allow_others\n"));
    }
}
