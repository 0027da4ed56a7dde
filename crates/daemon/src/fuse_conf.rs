//! What `/etc/fuse.conf` lets ordinary users do (mount.fuse3(8)). Read by whoever mounts for them,
//! and by `nacre doctor`.

use rustix::thread::{CapabilitySet, capabilities};

/// The file.
pub const PATH: &str = "/etc/fuse.conf";

/// Whether the system lets ordinary users show their mounts to others.
#[must_use]
pub fn may_show_others() -> bool {
    std::fs::read_to_string(PATH).is_ok_and(|text| allows_others(&text))
}

/// Whether a mount of this process can be shown to others: who may call mount(2) is not asked.
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
