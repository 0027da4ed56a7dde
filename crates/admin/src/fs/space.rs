//! `userspace` and `groupspace`: space and quotas by owner, of a file system or snapshot.
//! Properties like `userused@1000` as well.

use std::collections::HashMap;

use nacre_pool::engine::OwnerUsed;
use nacre_pool::properties::effective::effective;
use nacre_pool::properties::owner::OwnerFigure;
use nacre_pool::properties::{Effective, OwnerProperty, Property, Source};
use nacre_pool::rows::OwnerKind;
use nacre_pool::{PoolError, Txg};
use serde::{Deserialize, Serialize};

use super::objects::{Object, Objects};
use crate::{Imported, Kind, Mounts, Refusal};

/// Space of one owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnerSpace {
    /// Whether it is a group, not a user.
    pub group: bool,
    /// The uid or gid.
    pub id: u32,
    /// Space in use, bytes.
    pub used: u64,
    /// Quota, bytes.
    pub quota: Option<u64>,
    /// Number of inodes.
    pub objects: u64,
    /// Quota of inodes.
    pub object_quota: Option<u64>,
}

/// Space by owner of those objects for which it is wanted: read before the pool's objects are locked.
#[derive(Debug, Default)]
pub(super) struct Uses(HashMap<(u64, Option<Txg>), Vec<OwnerUsed>>);

impl Uses {
    /// Reads the space of objects, where one of the properties is about owners' use.
    pub fn gather(
        pool: &Imported,
        properties: &[Property],
        objects: impl FnOnce() -> Result<Vec<Object>, Refusal>,
    ) -> Result<Self, Refusal> {
        let asks = |property: &Property| matches!(property, Property::Owner(owner) if matches!(owner.figure, OwnerFigure::Used | OwnerFigure::ObjectsUsed));
        let mut uses = Self::default();
        if !properties.iter().any(asks) {
            return Ok(uses);
        }
        for object in objects()? {
            let (id, snapshot) = match object {
                Object::Filesystem(id) => (id, None),
                Object::Snapshot { of, txg } => (of, Some(txg)),
                Object::Bookmark { .. } => continue,
            };
            uses.0.insert((id, snapshot), pool.pool.owner_uses(id, snapshot)?);
        }
        Ok(uses)
    }

    fn of(&self, id: u64, snapshot: Option<Txg>, kind: OwnerKind, number: u32) -> Option<&OwnerUsed> {
        self.0.get(&(id, snapshot))?.iter().find(|used| used.kind == kind && used.id == number)
    }
}

/// Returns the property with the default quota of all owners of a kind.
fn of_all(owner: &OwnerProperty) -> &'static str {
    match (owner.kind, owner.figure) {
        (OwnerKind::User, OwnerFigure::ObjectQuota) => "defaultuserobjquota",
        (OwnerKind::User, _) => "defaultuserquota",
        (OwnerKind::Group, OwnerFigure::ObjectQuota) => "defaultgroupobjquota",
        (OwnerKind::Group, _) => "defaultgroupquota",
    }
}

/// Returns the value of an owner's property.
pub(super) fn value(
    objects: &mut Objects<'_>,
    uses: &Uses,
    (id, snapshot): (u64, Option<Txg>),
    owner: &OwnerProperty,
) -> Result<Option<Effective>, Refusal> {
    let number =
        owner.id().ok_or_else(|| Refusal::new(Kind::Invalid, format!("invalid user or group in '{}'", owner.owner)))?;
    let used = || uses.of(id, snapshot, owner.kind, number).map(|used| used.used).unwrap_or_default();
    let value = match owner.figure {
        OwnerFigure::Used => used().bytes,
        OwnerFigure::ObjectsUsed => used().objects,
        OwnerFigure::Quota | OwnerFigure::ObjectQuota => {
            let found = objects.with_chain(id, |chain| effective(&Property::Owner(owner.clone()), chain))?;
            if found.as_ref().is_none_or(|found| found.value == "0") {
                // An owner without a quota has the default one, if there is one.
                let of_all = objects.effective(id, of_all(owner))?;
                if of_all.value != "0" && of_all.value != "none" {
                    return Ok(Some(Effective { source: Source::Default, ..of_all }));
                }
            }
            return Ok(found.map(|found| Effective { source: Source::Local, ..found }));
        }
    };
    Ok(Some(Effective { value: value.to_string(), source: Source::Local }))
}

/// Lists the owners of a file system or snapshot.
pub(super) fn run(pool: &Imported, mounts: &dyn Mounts, name: &str) -> Result<Vec<OwnerSpace>, Refusal> {
    let (id, snapshot) = match Objects::now(pool, mounts).open("open", name)? {
        Object::Filesystem(id) => (id, None),
        Object::Snapshot { of, txg } => (of, Some(txg)),
        Object::Bookmark { .. } => {
            return Err(Refusal::new(
                Kind::Invalid,
                format!("cannot get used/quota for '{name}': a bookmark has no content"),
            ));
        }
    };
    let owners = pool
        .pool
        .owner_uses(id, snapshot)
        .map_err(|error: PoolError| super::refused(&format!("cannot get used/quota for '{name}'"), &error))?;
    let shown = |owner: OwnerUsed| OwnerSpace {
        group: owner.kind == OwnerKind::Group,
        id: owner.id,
        used: owner.used.bytes,
        quota: owner.quota.bytes,
        objects: owner.used.objects,
        object_quota: owner.quota.objects,
    };
    Ok(owners.into_iter().map(shown).collect())
}
