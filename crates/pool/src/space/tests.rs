//! The accounting rules: random forests against a recomputation from the definitions, and the rules
//! one by one.

use std::collections::HashMap;

use super::*;
use crate::error::LimitRefusal;
use crate::rows::OwnerUse;
use proptest::prelude::*;

const UNIT: u64 = MIB;

/// A dataset as the definitions know it: nothing is kept that can be computed.
#[derive(Clone, Debug, Default)]
struct Plain {
    parent: Option<u64>,
    usage: Usage,
    limits: Limits,
}

#[derive(Clone, Debug, Default)]
struct Naive(HashMap<u64, Plain>);

impl Naive {
    fn children(&self, id: u64) -> Vec<u64> {
        self.0.iter().filter(|(_, plain)| plain.parent == Some(id)).map(|(id, _)| *id).collect()
    }

    fn by_children(&self, id: u64) -> u64 {
        self.children(id).iter().map(|child| self.used(*child).max(self.0[child].limits.reservation)).sum()
    }

    fn by_refreservation(&self, id: u64) -> u64 {
        let plain = &self.0[&id];
        plain.limits.refreservation.saturating_sub(plain.usage.unique)
    }

    fn used(&self, id: u64) -> u64 {
        let usage = &self.0[&id].usage;
        usage.dataset + usage.snapshots + self.by_children(id) + self.by_refreservation(id)
    }

    fn available(&self, id: u64, size: u64) -> u64 {
        let (plain, used) = (&self.0[&id], self.used(id));
        let above = match plain.parent {
            Some(parent) => self.available(parent, size) + plain.limits.reservation.saturating_sub(used),
            None => usable(size, Purpose::Write).saturating_sub(used),
        };
        plain.limits.quota.map_or(above, |quota| above.min(quota.saturating_sub(used)))
    }

    /// Whether every quota that holds something holds it, and the pool does.
    fn fits(&self, size: u64) -> bool {
        self.0.iter().all(|(id, plain)| {
            let referenced = plain.limits.refquota.is_none_or(|limit| plain.usage.referenced <= limit);
            referenced && plain.limits.quota.is_none_or(|quota| self.used(*id) <= quota)
        }) && self.0.iter().all(|(id, plain)| plain.parent.is_some() || self.used(*id) <= usable(size, Purpose::Write))
    }
}

#[derive(Clone, Debug)]
enum Step {
    Add { parent: usize },
    Remove { id: usize },
    Write { id: usize, bytes: u64 },
    Delete { id: usize, share: u8 },
    Snapshot { ids: Vec<usize> },
    Drop { id: usize, share: u8 },
    Quota { id: usize, limit: Option<u64> },
    Refquota { id: usize, limit: Option<u64> },
    Reservation { id: usize, limit: u64 },
    Refreservation { id: usize, limit: u64 },
    Move { id: usize, parent: usize },
}

fn step() -> impl Strategy<Value = Step> {
    let id = 0usize..12;
    let limit = (0u64..200).prop_map(|units| units * UNIT);
    let maybe = proptest::option::of(limit.clone());
    prop_oneof![
        2 => id.clone().prop_map(|parent| Step::Add { parent }),
        1 => id.clone().prop_map(|id| Step::Remove { id }),
        6 => (id.clone(), 0u64..60).prop_map(|(id, units)| Step::Write { id, bytes: units * UNIT }),
        2 => (id.clone(), 0u8..=100).prop_map(|(id, share)| Step::Delete { id, share }),
        2 => proptest::collection::vec(id.clone(), 1..4).prop_map(|ids| Step::Snapshot { ids }),
        1 => (id.clone(), 0u8..=100).prop_map(|(id, share)| Step::Drop { id, share }),
        1 => (id.clone(), maybe.clone()).prop_map(|(id, limit)| Step::Quota { id, limit }),
        1 => (id.clone(), maybe).prop_map(|(id, limit)| Step::Refquota { id, limit }),
        1 => (id.clone(), limit.clone()).prop_map(|(id, limit)| Step::Reservation { id, limit }),
        1 => (id.clone(), limit).prop_map(|(id, limit)| Step::Refreservation { id, limit }),
        1 => (id.clone(), id).prop_map(|(id, parent)| Step::Move { id, parent }),
    ]
}

fn share(of: u64, percent: u8) -> i64 {
    i64::try_from(of * u64::from(percent) / 100).unwrap()
}

/// Unwraps the decision of the rules; the accounts are consistent.
pub(crate) fn judged<R>(outcome: Result<(), AccountError<R>>) -> Result<(), R> {
    outcome.map_err(|error| match error {
        AccountError::Refused(why) => why,
        AccountError::Pool(error) => panic!("{error}"),
    })
}

/// How a limit is set on the tree.
type Setter = fn(&mut QuotaTree, u64, u64) -> Result<(), AccountError<LimitRefusal>>;

/// Both forests, side by side.
struct Pair {
    quotas: QuotaTree,
    naive: Naive,
    ids: Vec<u64>,
    next: u64,
    size: u64,
}

impl Pair {
    fn id(&self, index: usize) -> u64 {
        self.ids[index % self.ids.len()]
    }

    fn apply(&mut self, step: &Step) {
        match step {
            Step::Add { parent } => {
                let (id, parent) = (self.next, self.id(*parent));
                self.next += 1;
                self.quotas.add(id, parent, Usage::default(), Limits::default()).unwrap();
                self.naive.0.insert(id, Plain { parent: Some(parent), ..Plain::default() });
                self.ids.push(id);
            }
            Step::Remove { id } => {
                let id = self.id(*id);
                let allowed = self.naive.0[&id].parent.is_some() && self.naive.children(id).is_empty();
                assert_eq!(self.quotas.remove(id).is_ok(), allowed);
                if allowed {
                    self.naive.0.remove(&id);
                    self.ids.retain(|other| *other != id);
                }
            }
            Step::Write { id, bytes } => self.write(self.id(*id), *bytes),
            Step::Delete { id, share: percent } => {
                let id = self.id(*id);
                let usage = self.naive.0[&id].usage;
                let freed = share(usage.unique, *percent);
                let kept = share(usage.dataset - usage.unique, *percent);
                self.change(
                    id,
                    UsageChange { snapshots: kept, ..written(-freed - kept) }
                        .and(UsageChange { unique: kept, ..UsageChange::default() })
                        .unwrap(),
                );
            }
            Step::Snapshot { ids } => self.snapshot(ids.iter().map(|id| self.id(*id)).collect()),
            Step::Drop { id, share: percent } => {
                let id = self.id(*id);
                let freed = share(self.naive.0[&id].usage.snapshots, *percent);
                self.change(id, UsageChange { snapshots: -freed, ..UsageChange::default() });
            }
            Step::Quota { id, limit } => {
                let id = self.id(*id);
                let fits = limit
                    .is_none_or(|limit| limit >= self.naive.used(id) && limit >= self.naive.0[&id].limits.reservation);
                let outcome = judged(self.quotas.set_quota(id, *limit));
                assert_eq!(outcome, if fits { Ok(()) } else { Err(LimitRefusal::BelowUse) });
                if fits {
                    self.naive.0.get_mut(&id).unwrap().limits.quota = *limit;
                }
            }
            Step::Refquota { id, limit } => {
                let id = self.id(*id);
                let plain = self.naive.0.get_mut(&id).unwrap();
                let least = plain.usage.referenced.max(plain.limits.refreservation);
                let fits = limit.is_none_or(|limit| limit >= least);
                assert_eq!(judged(self.quotas.set_refquota(id, *limit)).is_ok(), fits);
                if fits {
                    plain.limits.refquota = *limit;
                }
            }
            Step::Reservation { id, limit } => self.reserve(
                self.id(*id),
                *limit,
                |limits, limit| limits.reservation = limit,
                QuotaTree::set_reservation,
            ),
            Step::Refreservation { id, limit } => {
                self.reserve(
                    self.id(*id),
                    *limit,
                    |limits, limit| limits.refreservation = limit,
                    QuotaTree::set_refreservation,
                );
            }
            Step::Move { id, parent } => self.reparent(self.id(*id), self.id(*parent)),
        }
    }

    fn change(&mut self, id: u64, change: UsageChange) {
        self.quotas.charge(id, change).unwrap();
        let usage = &mut self.naive.0.get_mut(&id).unwrap().usage;
        *usage = change.applied(usage).unwrap();
    }

    /// A write is admitted exactly if afterwards everything that it makes grow is within its limit.
    fn write(&mut self, id: u64, bytes: u64) {
        let mut after = self.naive.clone();
        let usage = &mut after.0.get_mut(&id).unwrap().usage;
        *usage = written(i64::try_from(bytes).unwrap()).applied(usage).unwrap();
        let admitted = judged(self.quotas.admits(id, bytes, Purpose::Write));
        assert_eq!(admitted.is_ok(), bytes == 0 || after.fits(self.size), "{admitted:?}");
        assert_eq!(admitted.is_ok(), bytes <= self.quotas.available_to_head(id).unwrap());
        if admitted.is_ok() {
            self.change(id, written(i64::try_from(bytes).unwrap()));
        }
    }

    fn snapshot(&mut self, mut ids: Vec<u64>) {
        ids.sort_unstable();
        ids.dedup();
        let mut after = self.naive.clone();
        for id in &ids {
            after.0.get_mut(id).unwrap().usage.unique = 0;
        }
        let needs: u64 = ids.iter().map(|id| self.quotas.snapshot_needs(*id).unwrap()).sum();
        let grown: u64 = ids.iter().map(|id| after.by_refreservation(*id) - self.naive.by_refreservation(*id)).sum();
        assert_eq!(needs, grown);
        let taken = judged(self.quotas.take_snapshots(&ids));
        assert_eq!(taken.is_ok(), after.fits(self.size), "{taken:?}");
        if taken.is_ok() {
            self.naive = after;
        }
    }

    fn reserve(&mut self, id: u64, limit: u64, put: fn(&mut Limits, u64), set: Setter) {
        let mut after = self.naive.clone();
        put(&mut after.0.get_mut(&id).unwrap().limits, limit);
        let limits = after.0[&id].limits;
        let set = judged(set(&mut self.quotas, id, limit));
        let within = limits.quota.is_none_or(|quota| limits.reservation <= quota)
            && limits.refquota.is_none_or(|quota| limits.refreservation <= quota);
        assert_eq!(set.is_ok(), within && after.fits(self.size), "{set:?}");
        if set.is_ok() {
            self.naive = after;
        }
    }

    fn reparent(&mut self, id: u64, parent: u64) {
        let mut above = Some(parent);
        let mut below_itself = self.naive.0[&id].parent.is_none();
        while let Some(ancestor) = above {
            below_itself |= ancestor == id;
            above = self.naive.0[&ancestor].parent;
        }
        let mut after = self.naive.clone();
        after.0.get_mut(&id).unwrap().parent = Some(parent);
        match self.quotas.reparent(id, parent) {
            Err(AccountError::Pool(_)) => assert!(below_itself),
            moved => {
                assert!(!below_itself);
                assert_eq!(moved.is_ok(), after.fits(self.size), "{moved:?}");
                if moved.is_ok() {
                    self.naive = after;
                }
            }
        }
    }

    fn compare(&self) {
        for id in &self.ids {
            let breakdown = self.quotas.breakdown(*id).unwrap();
            assert_eq!(breakdown.used, self.naive.used(*id), "used of {id}");
            assert_eq!(breakdown.by_children, self.naive.by_children(*id));
            assert_eq!(breakdown.by_refreservation, self.naive.by_refreservation(*id));
            let parts =
                breakdown.by_dataset + breakdown.by_snapshots + breakdown.by_children + breakdown.by_refreservation;
            assert_eq!(breakdown.used, parts);
            assert_eq!(self.quotas.available(*id).unwrap(), self.naive.available(*id, self.size), "available of {id}");
            assert_eq!(self.quotas.usage(*id).unwrap(), self.naive.0[id].usage);
            assert_eq!(self.quotas.limits(*id).unwrap(), self.naive.0[id].limits);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn forests_agree_with_the_definitions(steps in proptest::collection::vec(step(), 1..80)) {
        let size = 512 * MIB;
        let quotas = QuotaTree::new(1, size, Usage::default(), Limits::default());
        let naive = Naive(HashMap::from([(1, Plain::default())]));
        let mut pair = Pair { quotas, naive, ids: vec![1], next: 2, size };
        for step in &steps {
            pair.apply(step);
            pair.compare();
        }
    }

    #[test]
    fn slop_has_its_bounds(size in 0u64..1 << 50) {
        let slop = slop(size);
        prop_assert!(slop <= size / 2 && slop <= 128 * GIB);
        prop_assert!(slop >= (size / 2).min(128 * MIB));
        prop_assert!(usable(size, Purpose::Write) <= usable(size, Purpose::Free));
        prop_assert!(usable(size, Purpose::Free) <= usable(size, Purpose::Destroy) && usable(size, Purpose::Destroy) <= size);
    }
}

#[test]
fn slop_of_known_sizes() {
    assert_eq!(slop(64 * MIB), 32 * MIB);
    assert_eq!(slop(GIB), 128 * MIB);
    assert_eq!(slop(64 * GIB), 2 * GIB);
    assert_eq!(slop(100 * 1024 * GIB), 128 * GIB);
    assert_eq!(usable(64 * GIB, Purpose::Free), 63 * GIB);
    assert_eq!(usable(64 * GIB, Purpose::Destroy), 63 * GIB + GIB / 2);
}

#[test]
fn a_full_pool_and_a_full_quota_let_deletes_through() {
    let mut quotas = QuotaTree::new(1, GIB, Usage::default(), Limits::default());
    quotas
        .add(2, 1, Usage::default(), Limits { quota: Some(10 * MIB), refquota: Some(10 * MIB), ..Limits::default() })
        .unwrap();
    quotas.charge(2, written((10 * MIB) as i64)).unwrap();
    assert_eq!(judged(quotas.admits(2, 1, Purpose::Write)), Err(Shortage::Refquota(2)));
    quotas.set_refquota(2, None).unwrap();
    assert_eq!(judged(quotas.admits(2, 1, Purpose::Write)), Err(Shortage::Quota(2)));
    assert_eq!(judged(quotas.admits(2, 0, Purpose::Write)), Ok(()));
    assert_eq!(judged(quotas.admits(2, 4096, Purpose::Free)), Ok(()));
    quotas.charge(1, written((886 * MIB) as i64)).unwrap();
    assert_eq!(judged(quotas.admits(1, 1, Purpose::Write)), Err(Shortage::Pool));
    assert_eq!(judged(quotas.admits(1, 64 * MIB, Purpose::Free)), Ok(()));
    assert_eq!(judged(quotas.admits(1, 64 * MIB + 1, Purpose::Free)), Err(Shortage::Pool));
    assert_eq!(judged(quotas.admits(1, 96 * MIB, Purpose::Destroy)), Ok(()));
    assert_eq!(judged(quotas.admits(1, 96 * MIB + 1, Purpose::Destroy)), Err(Shortage::Pool));
    quotas.resize(2 * GIB);
    assert_eq!(judged(quotas.admits(1, GIB, Purpose::Write)), Ok(()));
}

#[test]
fn moving_space_between_relatives_asks_the_receiver_only() {
    let used = Usage { dataset: 40 * MIB, referenced: 40 * MIB, unique: 40 * MIB, ..Usage::default() };
    let mut quotas = QuotaTree::new(1, GIB, Usage::default(), Limits { quota: Some(50 * MIB), ..Limits::default() });
    quotas.add(2, 1, used, Limits::default()).unwrap();
    quotas.add(3, 1, Usage::default(), Limits { quota: Some(30 * MIB), ..Limits::default() }).unwrap();
    let bytes = (40 * MIB) as i64;
    let moves = [
        (2, UsageChange { dataset: -bytes, ..UsageChange::default() }),
        (3, UsageChange { snapshots: bytes, ..UsageChange::default() }),
    ];
    let before = quotas.breakdown(1).unwrap();
    assert_eq!(judged(quotas.charge_if_allowed(&moves, Purpose::Free)), Err(Shortage::Quota(3)));
    assert_eq!(quotas.breakdown(2).unwrap().used, 40 * MIB);
    quotas.set_quota(3, None).unwrap();
    assert_eq!(judged(quotas.charge_if_allowed(&moves, Purpose::Free)), Ok(()));
    assert_eq!(quotas.breakdown(1).unwrap(), before);
    assert_eq!((quotas.breakdown(2).unwrap().used, quotas.breakdown(3).unwrap().used), (0, 40 * MIB));
}

#[test]
fn counters_do_not_fall_below_zero() {
    let mut quotas = QuotaTree::new(1, GIB, Usage::default(), Limits::default());
    quotas.charge(1, written(5)).unwrap();
    assert!(matches!(quotas.charge(1, written(-6)), Err(PoolError::Format(_))));
    assert_eq!(quotas.breakdown(1).unwrap().used, 5);
    assert!(quotas.count_snapshots(1, -1).is_err());
    assert!(quotas.charge(7, UsageChange::default()).is_err());
    assert!(quotas.add(1, 1, Usage::default(), Limits::default()).is_err());
    assert!(quotas.add(2, 7, Usage::default(), Limits::default()).is_err());
    assert!(quotas.remove(1).is_err());
}

#[test]
fn numbers_of_snapshots_and_file_systems_are_limited_up_the_chain() {
    let mut quotas = QuotaTree::new(1, GIB, Usage::default(), Limits::default());
    quotas.add(2, 1, Usage::default(), Limits::default()).unwrap();
    quotas.add(3, 2, Usage::default(), Limits::default()).unwrap();
    quotas.count_snapshots(3, 2).unwrap();
    quotas.set_snapshot_limit(1, Some(3)).unwrap();
    quotas.set_filesystem_limit(2, Some(1)).unwrap();
    assert_eq!(quotas.snapshot_limit_hit(3, 1).unwrap(), None);
    assert_eq!(quotas.snapshot_limit_hit(3, 2).unwrap(), Some(1));
    assert_eq!(quotas.filesystem_limit_hit(3, 1).unwrap(), Some(2));
    assert_eq!(quotas.filesystem_limit_hit(1, 1).unwrap(), None);
    quotas.remove(3).unwrap();
    assert_eq!(quotas.snapshot_limit_hit(2, 3).unwrap(), None);
    assert_eq!(quotas.filesystem_limit_hit(2, 1).unwrap(), None);
}

#[test]
fn owners_have_quotas_of_their_own() {
    let quota = OwnerQuota { bytes: Some(100), objects: Some(2) };
    let used = OwnerUse { bytes: 90, objects: 1 };
    assert_eq!(quota.admits(&used, 10, 1), Ok(()));
    assert_eq!(quota.admits(&used, 11, 0), Err(OwnerShortage::Bytes));
    assert_eq!(quota.admits(&used, 0, 2), Err(OwnerShortage::Objects));
    assert_eq!(quota.admits(&OwnerUse { bytes: 500, objects: 9 }, 0, 0), Ok(()));
    assert_eq!((quota.available(&used), OwnerQuota::default().available(&used)), (10, u64::MAX));
}

/// Adds this much incompressible data.
fn written(bytes: i64) -> UsageChange {
    UsageChange::stored(bytes, bytes)
}
