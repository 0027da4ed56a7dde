//! Quotas of users and groups within one dataset: `userquota@`, `groupquota@`, `defaultuserquota`,
//! `defaultgroupquota` and their `obj` variants.

use std::collections::HashMap;

use crate::rows::{OwnerKind, OwnerUse};

/// Limits of one owner; `None` is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OwnerQuota {
    /// Limit of charged bytes.
    pub bytes: Option<u64>,
    /// Limit of the number of inodes.
    pub objects: Option<u64>,
}

/// Limits of all owners in one dataset.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OwnerQuotas {
    /// Limits of individual owners.
    pub own: HashMap<(OwnerKind, u32), OwnerQuota>,
    /// Default limits of users.
    pub users: OwnerQuota,
    /// Default limits of groups.
    pub groups: OwnerQuota,
}

impl OwnerQuotas {
    /// Whether there are no limits at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.own.is_empty() && self.users == OwnerQuota::default() && self.groups == OwnerQuota::default()
    }

    /// The limits of an owner: its own, otherwise the defaults.
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

/// The exceeded limit of an owner (EDQUOT).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnerShortage {
    /// The limit of charged bytes.
    Bytes,
    /// The limit of the number of inodes.
    Objects,
}

impl OwnerQuota {
    /// Checks whether an owner with this usage may use more bytes and inodes. An owner beyond a limit may still do
    /// operations that need no more.
    ///
    /// # Errors
    /// The exceeded limit.
    pub fn admits(&self, used: &OwnerUse, bytes: u64, objects: u64) -> Result<(), OwnerShortage> {
        if bytes > 0 && self.bytes.is_some_and(|limit| used.bytes.saturating_add(bytes) > limit) {
            return Err(OwnerShortage::Bytes);
        }
        if objects > 0 && self.objects.is_some_and(|limit| used.objects.saturating_add(objects) > limit) {
            return Err(OwnerShortage::Objects);
        }
        Ok(())
    }

    /// Remaining bytes of the owner.
    #[must_use]
    pub fn available(&self, used: &OwnerUse) -> u64 {
        self.bytes.map_or(u64::MAX, |limit| limit.saturating_sub(used.bytes))
    }
}
