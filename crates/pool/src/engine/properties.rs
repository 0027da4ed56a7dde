//! Properties of datasets: effective values, setting and inheriting them, and their immediate
//! effect on open datasets.
//!
//! Invariants:
//! - The edits of one call are applied all or none; they are durable when it returns.
//! - A limit that was accepted is in the accounts before the next write is admitted.

use std::collections::{BTreeMap, HashMap};

use super::{Admin, Pool};
use crate::catalog::{PropertyRow, PropertySource};
use crate::error::{Damage, LimitRefusal, PoolError};
use crate::files::AccessTimes;
use crate::pointer::Txg;
use crate::properties::{
    Behaviour, Chain, Property, PropertyError, chain::StoredProperty, dataset_property, effective, spelling,
};
use crate::space::{AccountError, Limits, OwnerQuotas, QuotaTree, Usage};

/// New state of a property.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Setting {
    /// Set locally to this value, as users write values.
    Local(String),
    /// Received with this value, in its stored form at the sender: effective if no local value is
    /// set.
    Received(String),
    /// The inherited value or the default, even if a value was received.
    Inherit,
    /// The received value, or else as [`Self::Inherit`].
    BackToReceived,
}

/// A change of one property of one dataset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edit {
    /// The dataset.
    pub dataset: u64,
    /// The property's stored name: its long one, an owner by number (`userquota@1000`).
    pub name: String,
    /// The new state.
    pub to: Setting,
}

/// Limits that the store sets to values.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// The largest record, as a power of two.
    pub(super) record_shift: u8,
    /// The longest frame, bytes.
    pub(super) frame: u64,
}

/// The combined edits of one property of one dataset: the new local row and the new received row;
/// `None` for a row that does not change.
pub(super) struct Planned {
    dataset: u64,
    name: String,
    local: Option<Option<PropertyRow>>,
    received: Option<PropertyRow>,
}

impl Pool {
    /// Returns the stored properties of a dataset and of its ancestors.
    ///
    /// # Errors
    /// Errors of the store; a dataset that is not there is damage.
    pub fn chain(&self, id: u64) -> Result<Chain, PoolError> {
        self.admin.lock().chain_of(id)
    }

    /// Returns the effective properties that control the engine and the mount of a dataset.
    ///
    /// # Errors
    /// As [`Self::chain`].
    pub fn behaviour(&self, id: u64) -> Result<Behaviour, PoolError> {
        self.admin.lock().behaviour_of(id)
    }

    /// Changes properties; returns the txg from which they are effective.
    ///
    /// # Errors
    /// [`PoolError::Property`] for an unknown property or an invalid value, [`PoolError::Limit`]
    /// for a limit that contradicts what is used or available.
    pub fn set_properties(&self, edits: &[Edit]) -> Result<Txg, PoolError> {
        self.commit_with(|admin, txg| {
            let planned = admin.plan_edits(edits, &self.bounds())?;
            admin.apply(&planned)?;
            admin.enter_planned(&planned)?;
            self.refresh(admin)?;
            Ok(txg)
        })
    }

    /// Turns the properties of a new dataset into rows to store.
    pub(super) fn parse_new(&self, properties: &[(String, String)]) -> Result<Vec<(String, PropertyRow)>, PoolError> {
        let bounds = self.bounds();
        let mut rows: Vec<(String, PropertyRow)> = Vec::new();
        for (name, text) in properties {
            let property = dataset_property(name)?;
            let value = property.parse(text, true)?;
            bounds.check(name, &value)?;
            let name = stored_name(&property, name)?;
            rows.retain(|(other, _)| *other != name);
            rows.push((name, PropertyRow { source: PropertySource::Local, value }));
        }
        Ok(rows)
    }

    pub(super) fn bounds(&self) -> Bounds {
        let most = self.storage.largest_frame().max(1);
        Bounds { record_shift: most.ilog2().clamp(9, 24) as u8, frame: most }
    }

    /// Applies the effective properties to every open dataset.
    pub(super) fn refresh(&self, admin: &Admin) -> Result<(), PoolError> {
        let bounds = self.bounds();
        for dataset in self.open_datasets() {
            dataset.adopt(admin.behaviour_of(dataset.id())?, &bounds, admin.owner_quotas(dataset.id())?);
        }
        Ok(())
    }
}

impl Bounds {
    fn check(&self, name: &str, value: &str) -> Result<(), PoolError> {
        let most = 1u64 << self.record_shift;
        if matches!(name, "recordsize" | "recsize") && value.parse::<u64>().is_ok_and(|bytes| bytes > most) {
            let most = crate::properties::size::human(most);
            return Err(PoolError::Refused(format!(
                "'recordsize' must be at most {most}: the segments of this pool hold no longer records"
            )));
        }
        Ok(())
    }
}

/// The name under which a property is stored.
fn stored_name(property: &Property, given: &str) -> Result<String, PoolError> {
    Ok(match property {
        Property::Known(definition) => definition.name.to_owned(),
        Property::User(name) => name.clone(),
        Property::Owner(owner) => {
            owner.stored_name(owner.id().ok_or_else(|| PropertyError::BadOwner(given.to_owned()))?)
        }
        Property::WrittenSince(_) | Property::Feature(_) => return Err(PropertyError::ReadOnly("written@").into()),
    })
}

/// Applies new limits to the accounts if they fit what is used and available. Limits equal to those
/// in `old` are not checked again.
fn apply_limits(quotas: &mut QuotaTree, id: u64, old: &Limits, new: &Limits) -> Result<(), PoolError> {
    let judged = |name: &str, outcome: Result<(), AccountError<LimitRefusal>>| {
        outcome.map_err(|error| error.pool_error(|why| PoolError::Limit { name: name.to_owned(), why }))
    };
    // Limits that are removed or lowered first: two limits that change together must fit each other
    // only afterwards.
    if new.reservation < old.reservation {
        judged("reservation", quotas.set_reservation(id, new.reservation))?;
    }
    if new.refreservation < old.refreservation {
        judged("refreservation", quotas.set_refreservation(id, new.refreservation))?;
    }
    if new.quota != old.quota {
        judged("quota", quotas.set_quota(id, new.quota))?;
    }
    if new.refquota != old.refquota {
        judged("refquota", quotas.set_refquota(id, new.refquota))?;
    }
    if new.reservation > old.reservation {
        judged("reservation", quotas.set_reservation(id, new.reservation))?;
    }
    if new.refreservation > old.refreservation {
        judged("refreservation", quotas.set_refreservation(id, new.refreservation))?;
    }
    quotas.set_filesystem_limit(id, new.filesystems)?;
    quotas.set_snapshot_limit(id, new.snapshots)
}

/// The rows of a dataset after the planned edits.
fn overlay(mut rows: Vec<(String, PropertyRow)>, planned: &[&Planned]) -> Vec<(String, PropertyRow)> {
    let by_name: HashMap<&str, &Planned> = planned.iter().map(|planned| (planned.name.as_str(), *planned)).collect();
    rows.retain(|(name, row)| match by_name.get(name.as_str()) {
        Some(planned) if row.source == PropertySource::Received => planned.received.is_none(),
        Some(planned) => planned.local.is_none(),
        None => true,
    });
    for planned in planned {
        let local = planned.local.iter().flatten();
        rows.extend(local.chain(&planned.received).map(|row| (planned.name.clone(), row.clone())));
    }
    rows
}

fn limits_of(rows: &[(String, PropertyRow)]) -> Result<Limits, PoolError> {
    effective::limits(&crate::properties::Level { name: "", rows })
}

impl Admin {
    pub(super) fn chain_of(&self, id: u64) -> Result<Chain, PoolError> {
        let mut levels: Vec<StoredProperty> = Vec::new();
        let mut at = id;
        while at != 0 {
            let row = self.catalog.dataset(at)?;
            for level in &mut levels {
                level.name = format!("{}/{}", row.name, level.name);
            }
            levels.push(StoredProperty { dataset: at, name: row.name, rows: self.catalog.properties(at)? });
            at = row.parent;
            if levels.len() > crate::names::NAME_MOST {
                return Err(PoolError::Format(Damage::Structure("a dataset that lies below itself")));
            }
        }
        Ok(Chain { levels })
    }

    pub(super) fn behaviour_of(&self, id: u64) -> Result<Behaviour, PoolError> {
        self.chain_of(id)?.behaviour()
    }

    /// Returns the quotas of users and groups in a dataset.
    pub(super) fn owner_quotas(&self, id: u64) -> Result<OwnerQuotas, PoolError> {
        use crate::properties::owner::OwnerFigure;
        let (mut quotas, rows) = (OwnerQuotas::default(), self.catalog.properties(id)?);
        // `none` is no number, or 0.
        let limit = |value: &str| value.parse::<u64>().ok().filter(|limit| *limit > 0);
        for (name, row) in &rows {
            let Ok(Property::Owner(owner)) = dataset_property(name) else { continue };
            let (Some(number), Some(limit)) = (owner.id(), limit(&row.value)) else { continue };
            if row.source == PropertySource::Masked {
                continue;
            }
            let quota = quotas.own.entry((owner.kind, number)).or_default();
            match owner.figure {
                OwnerFigure::Quota => quota.bytes = quota.bytes.or(Some(limit)),
                OwnerFigure::ObjectQuota => quota.objects = quota.objects.or(Some(limit)),
                OwnerFigure::Used | OwnerFigure::ObjectsUsed => {}
            }
        }
        let chain = [crate::properties::Level { name: "", rows: &rows }];
        for (name, of) in [
            ("defaultuserquota", &mut quotas.users.bytes),
            ("defaultuserobjquota", &mut quotas.users.objects),
            ("defaultgroupquota", &mut quotas.groups.bytes),
            ("defaultgroupobjquota", &mut quotas.groups.objects),
        ] {
            *of = effective::effective(&dataset_property(name)?, &chain).and_then(|found| limit(&found.value));
        }
        Ok(quotas)
    }

    /// Combines edits, in their order, into one plan for each property of each dataset.
    pub(super) fn plan_edits(&self, edits: &[Edit], bounds: &Bounds) -> Result<Vec<Planned>, PoolError> {
        let mut all: Vec<Planned> = Vec::new();
        let mut places: HashMap<(u64, String), usize> = HashMap::new();
        for edit in edits {
            let property = dataset_property(&edit.name)?;
            let name = stored_name(&property, &edit.name)?;
            let place = *places.entry((edit.dataset, name.clone())).or_insert(all.len());
            if place == all.len() {
                all.push(Planned { dataset: edit.dataset, name, local: None, received: None });
            }
            if let Some(planned) = all.get_mut(place) {
                self.plan(edit, &property, bounds, planned)?;
            }
        }
        Ok(all)
    }

    /// Writes planned edits into the catalog.
    fn enter_planned<'p>(&mut self, planned: impl IntoIterator<Item = &'p Planned>) -> Result<(), PoolError> {
        for Planned { dataset, name, local, received } in planned {
            if let Some(local) = local {
                self.catalog.set_property(*dataset, name, local.as_ref())?;
            }
            if let Some(received) = received {
                self.catalog.set_property(*dataset, name, Some(received))?;
            }
        }
        Ok(())
    }

    /// As [`Self::enter_planned`] for the properties of a stream, whose limits need not fit here:
    /// those that do not fit are skipped, and returned with the reason.
    pub(super) fn enter_what_fits(&mut self, planned: &[Planned]) -> Result<Vec<(String, PoolError)>, PoolError> {
        match self.apply(planned) {
            Ok(()) => return self.enter_planned(planned).map(|()| Vec::new()),
            Err(PoolError::Limit { .. }) => {}
            Err(error) => return Err(error),
        }
        let (limits, others): (Vec<&Planned>, Vec<&Planned>) =
            planned.iter().partition(|one| effective::LIMITS.contains(&one.name.as_str()));
        self.enter_planned(others)?;
        let mut left = Vec::new();
        for one in limits {
            let one = std::slice::from_ref(one);
            match self.apply(one) {
                Ok(()) => self.enter_planned(one)?,
                Err(error @ PoolError::Limit { .. }) => {
                    left.extend(one.iter().map(|one| (one.name.clone(), error.clone())))
                }
                Err(error) => return Err(error),
            }
        }
        Ok(left)
    }

    /// Adds an edit to the plan, after earlier edits of the same property.
    fn plan(&self, edit: &Edit, property: &Property, bounds: &Bounds, planned: &mut Planned) -> Result<(), PoolError> {
        let row = |source, value| PropertyRow { source, value };
        let comes = planned.received.is_some();
        match &edit.to {
            Setting::Local(text) => {
                let value = property.parse(text, false)?;
                bounds.check(&edit.name, &value)?;
                // An owner without a limit has no row.
                let lifted = matches!(property, Property::Owner(_)) && value == "0";
                planned.local = Some((!lifted).then(|| row(PropertySource::Local, value)));
            }
            Setting::Received(text) => {
                let value = match property {
                    Property::Known(definition) => definition.canonical(text)?,
                    _ => property.parse(text, true)?,
                };
                planned.received = Some(row(PropertySource::Received, value));
            }
            Setting::Inherit => {
                property.check_inherit()?;
                let received = comes || self.catalog.has_received(edit.dataset, &planned.name)?;
                planned.local = Some(received.then(|| row(PropertySource::Masked, String::new())));
            }
            Setting::BackToReceived => {
                // A property that cannot be inherited may have a received value all the same.
                if !comes && !self.catalog.has_received(edit.dataset, &planned.name)? {
                    property.check_revert()?;
                }
                planned.local = Some(None);
            }
        }
        Ok(())
    }

    /// Enters planned limits into the accounts, if all of them fit.
    fn apply<'p>(&self, planned: impl IntoIterator<Item = &'p Planned>) -> Result<(), PoolError> {
        let mut datasets: BTreeMap<u64, Vec<&Planned>> = BTreeMap::new();
        for one in planned {
            datasets.entry(one.dataset).or_default().push(one);
        }
        let mut changes = Vec::new();
        for (id, planned) in datasets {
            let stored = self.catalog.properties(id)?;
            let old = limits_of(&stored)?;
            changes.push((id, old, limits_of(&overlay(stored, &planned))?));
        }
        // Under one lock, so that no write is admitted in between.
        let mut quotas = self.quota_tree();
        let mut next = quotas.clone();
        for (id, old, new) in changes {
            apply_limits(&mut next, id, &old, &new)?;
        }
        *quotas = next;
        Ok(())
    }

    /// Returns the rows for a new dataset below a parent (0: it is the root dataset): rules for
    /// names that are not among them come from the parent.
    pub(super) fn with_rules_for_names(
        &self,
        parent: u64,
        rows: Vec<(String, PropertyRow)>,
    ) -> Result<Vec<(String, PropertyRow)>, PoolError> {
        let above = if parent == 0 { Vec::new() } else { self.catalog.properties(parent)? };
        Ok(spelling::of_new(rows, &above)?)
    }

    /// Checks whether a dataset with these properties and this usage may be created below a parent
    /// (0: it is the root dataset); returns its limits.
    pub(super) fn judge_new(
        &self,
        parent: u64,
        rows: &[(String, PropertyRow)],
        usage: Usage,
    ) -> Result<Limits, PoolError> {
        let limits = limits_of(rows)?;
        if parent == 0 {
            return Ok(limits);
        }
        self.judge_parent(parent)?;
        if let Some(dataset) = self.quota_tree().filesystem_limit_hit(parent, 1)? {
            return Err(PoolError::CountLimit { what: "filesystem", dataset });
        }
        let mut quotas = self.quota_tree().clone();
        // The number that the new dataset will have.
        let id = self.catalog.head()?.next;
        quotas.add(id, parent, usage, Limits::default())?;
        apply_limits(&mut quotas, id, &Limits::default(), &limits)?;
        Ok(limits)
    }

    /// Checks the snapshot limits for a new snapshot of each of these datasets.
    pub(super) fn judge_snapshots(&self, ids: &[u64]) -> Result<(), PoolError> {
        let mut quotas = self.quota_tree().clone();
        for id in ids {
            if let Some(dataset) = quotas.snapshot_limit_hit(*id, 1)? {
                return Err(PoolError::CountLimit { what: "snapshot", dataset });
            }
            quotas.count_snapshots(*id, 1)?;
        }
        Ok(())
    }

    /// Checks the filesystem and snapshot limits of a new parent and its ancestors for a dataset
    /// that moves there with its descendants. Ancestors common to the old and the new parent count
    /// nothing new.
    pub(super) fn judge_move(&self, id: u64, parent: u64) -> Result<(), PoolError> {
        let mut quotas = self.quota_tree().clone();
        let (_, snapshots) = quotas.counts(id)?;
        let before: Vec<u64> = quotas.ancestors(id)?;
        match quotas.reparent(id, parent) {
            Ok(()) => {}
            // The move itself reports the shortage.
            Err(AccountError::Refused(_)) => return Ok(()),
            Err(AccountError::Pool(error)) => return Err(error),
        }
        let new = |dataset: &u64| !before.contains(dataset);
        if let Some(dataset) = quotas.filesystem_limit_hit(parent, 0)?.filter(new) {
            return Err(PoolError::CountLimit { what: "filesystem", dataset });
        }
        match quotas.snapshot_limit_hit(parent, 0)?.filter(new) {
            Some(dataset) if snapshots > 0 => Err(PoolError::CountLimit { what: "snapshot", dataset }),
            _ => Ok(()),
        }
    }

    pub(super) fn put_rows(&mut self, id: u64, rows: &[(String, PropertyRow)]) -> Result<(), PoolError> {
        rows.iter().try_for_each(|(name, row)| self.catalog.set_property(id, name, Some(row)))
    }
}

/// The update mode of access times that the properties select.
pub(super) fn access_times(behaviour: &Behaviour) -> AccessTimes {
    match (behaviour.atime, behaviour.relatime) {
        (false, _) => AccessTimes::Off,
        (true, true) => AccessTimes::Relative,
        (true, false) => AccessTimes::Strict,
    }
}
