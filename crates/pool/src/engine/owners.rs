//! Space used by users and groups in a file system or a snapshot: for `userspace`, `groupspace`,
//! and properties like `userused@`.

use std::collections::BTreeMap;

use super::Pool;
use crate::error::PoolError;
use crate::files::Table;
use crate::pointer::Txg;
use crate::rows::keys::{self, Key};
use crate::rows::{OwnerKind, OwnerUse};
use crate::space::OwnerQuota;

/// Usage and quota of a user or a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnerUsed {
    /// User or group.
    pub kind: OwnerKind,
    /// The uid or gid.
    pub id: u32,
    /// Its usage, including what the open txg has counted so far.
    pub used: OwnerUse,
    /// Its quota.
    pub quota: OwnerQuota,
}

impl Pool {
    /// Returns usage and quotas of all users and groups in a dataset, or in one of its snapshots;
    /// quotas are always the current ones. Users come before groups, ordered by number.
    ///
    /// # Errors
    /// Errors of the store; a snapshot that is not there.
    pub fn owner_uses(&self, id: u64, snapshot: Option<Txg>) -> Result<Vec<OwnerUsed>, PoolError> {
        let quotas = self.admin.lock().owner_quotas(id)?;
        let dataset = match snapshot {
            Some(txg) => self.snapshot_files(id, txg)?,
            None => self.dataset(id)?,
        };
        let mut found: BTreeMap<(u8, u32), OwnerUsed> = BTreeMap::new();
        for (kind, number) in quotas.own.keys().copied() {
            let quota = quotas.of((kind, number));
            found.insert((kind as u8, number), OwnerUsed { kind, id: number, used: OwnerUse::default(), quota });
        }
        let mut damage: Result<(), PoolError> = Ok(());
        dataset.files().look_at_table(|table| {
            table.scan(keys::of_kind(keys::OWNER_USE), &mut |key, row| {
                match read(key, row) {
                    Ok(Some((kind, id, used))) => {
                        let owner = OwnerUsed { kind, id, used, quota: quotas.of((kind, id)) };
                        found.entry((kind as u8, id)).or_insert(owner).used = used;
                    }
                    Ok(None) => {}
                    Err(error) => damage = Err(error),
                }
                damage.is_ok()
            })
        })?;
        damage?;
        Ok(found.into_values().collect())
    }
}

/// Decodes the row of a user's or group's usage.
fn read(key: &[u8], row: &[u8]) -> Result<Option<(OwnerKind, u32, OwnerUse)>, PoolError> {
    match Key::decode(key)? {
        Key::OwnerUse(kind, id) => Ok(Some((kind, id, OwnerUse::decode(row)?))),
        _ => Ok(None),
    }
}
