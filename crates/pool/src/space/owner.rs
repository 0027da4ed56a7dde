//! Quotas of users and groups within one dataset: `userquota@`, `groupquota@` and their `obj` variants.

use crate::rows::OwnerUse;

/// The limits of one owner; `None` is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OwnerQuota {
    /// Of charged bytes.
    pub bytes: Option<u64>,
    /// Of inodes.
    pub objects: Option<u64>,
}

/// Which limit of an owner is in the way (EDQUOT).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnerShortage {
    /// Of charged bytes.
    Bytes,
    /// Of inodes.
    Objects,
}

impl OwnerQuota {
    /// Whether an owner who uses so much may use so many bytes and inodes more. An owner beyond a limit may still do what does not grow.
    ///
    /// # Errors
    /// Which limit is in the way.
    pub fn admits(&self, used: &OwnerUse, bytes: u64, objects: u64) -> Result<(), OwnerShortage> {
        if bytes > 0 && self.bytes.is_some_and(|limit| used.bytes.saturating_add(bytes) > limit) {
            return Err(OwnerShortage::Bytes);
        }
        if objects > 0 && self.objects.is_some_and(|limit| used.objects.saturating_add(objects) > limit) {
            return Err(OwnerShortage::Objects);
        }
        Ok(())
    }

    /// What the owner may use more, bytes.
    #[must_use]
    pub fn available(&self, used: &OwnerUse) -> u64 {
        self.bytes.map_or(u64::MAX, |limit| limit.saturating_sub(used.bytes))
    }
}
