//! Quotas of users and groups within one dataset: `userquota@`, `groupquota@`, `defaultuserquota`,
//! `defaultgroupquota` and their `obj` variants.

use std::collections::HashMap;

use crate::rows::{OwnerKind, OwnerUse};

/// The limits of one owner; `None` is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OwnerQuota {
    /// Of charged bytes.
    pub bytes: Option<u64>,
    /// Of inodes.
    pub objects: Option<u64>,
}

/// All limits of owners in one dataset.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OwnerQuotas {
    /// Of owners who have limits of their own.
    pub own: HashMap<(OwnerKind, u32), OwnerQuota>,
    /// Of every user, where there is none of its own.
    pub users: OwnerQuota,
    /// Of every group, where there is none of its own.
    pub groups: OwnerQuota,
}

impl OwnerQuotas {
    /// Whether nobody has any limit.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.own.is_empty() && self.users == OwnerQuota::default() && self.groups == OwnerQuota::default()
    }

    /// The limits of an owner: its own, or else those of its kind.
    #[must_use]
    pub fn of(&self, (kind, id): (OwnerKind, u32)) -> OwnerQuota {
        let every = match kind {
            OwnerKind::User => self.users,
            OwnerKind::Group => self.groups,
        };
        let own = self.own.get(&(kind, id)).copied().unwrap_or_default();
        OwnerQuota { bytes: own.bytes.or(every.bytes), objects: own.objects.or(every.objects) }
    }
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
    /// Whether an owner who uses so much may use so many bytes and inodes more. An owner beyond a
    /// limit may still do what does not grow.
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
