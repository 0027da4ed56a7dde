//! The ledger against a naive model: plain lists of charges, summed up anew for every question.

use super::*;
use crate::settings::LimitError;
use proptest::prelude::*;
use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize},
};

const NOBODY: Owner = Owner { uid: 9, group: None };

fn limits(bytes: u64) -> Limits {
    Limits { bytes: Some(bytes), ..Limits::default() }
}

fn owner(uid: u32, group: Option<usize>) -> Owner {
    Owner { uid, group }
}

#[test]
fn a_charge_fits_up_to_the_last_byte() {
    let ledger = Ledger::new(limits(100));
    assert_eq!(ledger.charge(NOBODY, 101, 0), Err(Full::Whole));
    assert_eq!(ledger.charge(NOBODY, 100, 0), Ok(()));
    assert_eq!(ledger.charge(NOBODY, 1, 0), Err(Full::Whole));
    assert_eq!(ledger.charge(NOBODY, 0, 1), Ok(()), "files are not limited");
    assert_eq!((ledger.room(), ledger.totals().free()), (0, Some(0)));
    ledger.release(NOBODY, 40, 0);
    assert_eq!(ledger.room(), 40);
    assert_eq!(ledger.charge(NOBODY, u64::MAX, 0), Err(Full::Whole));
}

#[test]
fn nothing_is_charged_unless_it_fits_everywhere() {
    let set =
        Limits { bytes: Some(100), inodes: Some(2), soft: None, users: BTreeMap::from([(1, 50)]), dirs: vec![30, 80] };
    let ledger = Ledger::new(set);
    for (who, bytes, inodes, full) in [
        (owner(1, Some(0)), 101, 3, Full::Whole),
        (owner(1, Some(0)), 60, 3, Full::Inodes),
        (owner(1, Some(0)), 60, 1, Full::User),
        (owner(1, Some(0)), 40, 1, Full::Dir),
        (owner(2, Some(0)), 40, 1, Full::Dir),
        (owner(1, Some(1)), 60, 1, Full::User),
    ] {
        assert_eq!(ledger.charge(who, bytes, inodes), Err(full));
        assert_eq!(ledger.sums(), Sums::default(), "{full:?}");
    }
    assert_eq!(ledger.charge(owner(1, Some(1)), 50, 1), Ok(()));
    assert_eq!(ledger.charge(owner(2, Some(1)), 31, 1), Err(Full::Dir));
    assert_eq!(ledger.charge(owner(2, None), 50, 1), Ok(()));
    assert_eq!(ledger.charge(owner(2, None), 0, 1), Err(Full::Inodes));
    for limit in [LimitError::NoSpace.errno(), LimitError::Quota.errno()] {
        assert_eq!(Full::User.errno(limit), Errno::EDQUOT);
        assert!([Full::Whole, Full::Inodes, Full::Dir].iter().all(|full| full.errno(limit) == limit));
    }
    assert_eq!([LimitError::default().errno(), LimitError::Quota.errno()], [Errno::ENOSPC, Errno::EDQUOT]);
}

#[test]
fn a_part_is_a_multiple_of_the_unit_and_says_what_was_in_the_way() {
    let set = Limits { bytes: Some(10_000), users: BTreeMap::from([(1, 9000)]), dirs: vec![5000], ..Limits::default() };
    let ledger = Ledger::new(set);
    assert_eq!(ledger.charge_up_to(owner(1, Some(0)), 12_288, 4096), (4096, Some(Full::Dir)));
    assert_eq!(ledger.charge_up_to(owner(1, None), 12_288, 4096), (4096, Some(Full::User)));
    assert_eq!(ledger.charge_up_to(owner(2, None), 100, 4096), (100, None), "all fits");
    assert_eq!(ledger.charge_up_to(owner(2, None), 4096, 4096), (0, Some(Full::Whole)));
    assert_eq!(ledger.charge_up_to(owner(2, None), u64::MAX, 0), (1708, Some(Full::Whole)), "unit 0 is 1");
    assert_eq!(ledger.room(), 0);
}

#[test]
fn a_limit_lowered_below_use_stops_growth_and_nothing_else() {
    let ledger = Ledger::new(limits(1000));
    ledger.charge(NOBODY, 900, 1).unwrap();
    ledger.set_limits(limits(500));
    assert_eq!((ledger.room(), ledger.totals().free()), (0, Some(0)));
    assert_eq!(ledger.charge(NOBODY, 1, 0), Err(Full::Whole));
    assert_eq!(ledger.charge(NOBODY, 0, 0), Ok(()));
    assert_eq!(ledger.charge_up_to(NOBODY, 4096, 512), (0, Some(Full::Whole)));
    assert_eq!(ledger.transfer(NOBODY, owner(3, None), 900, 1), Ok(()), "the whole does not grow");
    ledger.release(owner(3, None), 401, 0);
    assert_eq!(ledger.charge(owner(3, None), 1, 0), Ok(()));
    assert_eq!(ledger.charge(owner(3, None), 1, 0), Err(Full::Whole));
    ledger.set_limits(Limits::default());
    assert_eq!((ledger.room(), ledger.totals().free()), (u64::MAX - 500, None));
}

#[test]
fn a_charge_moves_only_where_it_fits() {
    let set = Limits { bytes: Some(100), users: BTreeMap::from([(2, 10)]), dirs: vec![100, 20], ..Limits::default() };
    let ledger = Ledger::new(set);
    let (from, to) = (owner(1, Some(0)), owner(2, Some(1)));
    ledger.charge(from, 30, 1).unwrap();
    let before = ledger.sums();
    assert_eq!(ledger.transfer(from, to, 30, 1), Err(Full::User));
    assert_eq!(ledger.transfer(from, owner(1, Some(1)), 30, 1), Err(Full::Dir));
    assert_eq!(ledger.sums(), before);
    assert_eq!(ledger.transfer(from, from, 30, 1), Ok(()));
    assert_eq!(ledger.sums(), before);
    ledger.force_transfer(from, to, 30, 1);
    let sum = Sum { bytes: 30, inodes: 1 };
    assert_eq!(ledger.sums(), Sums { whole: sum, users: BTreeMap::from([(2, sum)]), dirs: BTreeMap::from([(1, sum)]) });
    assert_eq!(ledger.transfer(to, owner(2, None), 30, 1), Ok(()), "the user's account, full as it is, stays the same");
}

#[test]
fn what_cannot_be_is_stopped_and_counted() {
    let ledger = Ledger::new(Limits::default());
    ledger.charge(NOBODY, 10, 1).unwrap();
    ledger.release(NOBODY, 11, 1);
    assert_eq!(ledger.sums(), Sums::default());
    assert_eq!(ledger.totals().clamped, 2, "the whole cage's account and the user's");
    ledger.force(NOBODY, u64::MAX, 1);
    assert_eq!(ledger.totals().clamped, 2);
    assert_eq!(ledger.charge(NOBODY, 1, 0), Err(Full::Whole), "numbers end, even without a limit");
    ledger.force(NOBODY, 1, 0);
    assert_eq!(ledger.totals().clamped, 4);
    assert_eq!(ledger.sums().whole.bytes, u64::MAX);
    assert_eq!(ledger.room(), 0);
}

#[test]
fn corrections_are_facts() {
    let ledger = Ledger::new(limits(10));
    ledger.charge(NOBODY, 8, 1).unwrap();
    ledger.correct(NOBODY, 8, 20);
    assert_eq!(ledger.sums().whole, Sum { bytes: 20, inodes: 1 });
    ledger.correct(NOBODY, 20, 5);
    ledger.correct(NOBODY, 5, 5);
    assert_eq!((ledger.sums().whole, ledger.room()), (Sum { bytes: 5, inodes: 1 }, 5));
}

#[test]
fn refusals_are_counted_by_limit() {
    let ledger = Ledger::new(Limits::default());
    for full in [Full::Whole, Full::Inodes, Full::Inodes, Full::User, Full::Dir, Full::Dir, Full::Dir] {
        ledger.refused(full);
    }
    assert_eq!(ledger.totals().refused, Refused { bytes: 1, inodes: 2, user: 1, dir: 3 });
}

#[test]
fn the_soft_limit_is_told_up_and_down_in_turn() {
    let told = Arc::new(Mutex::new(Vec::new()));
    let ledger = Ledger::new(Limits { soft: Some(100), ..Limits::default() });
    let hook = Arc::clone(&told);
    ledger.on_soft(move |above| hook.lock().push(above));
    ledger.charge(NOBODY, 99, 0).unwrap();
    assert!(told.lock().is_empty());
    ledger.charge(NOBODY, 1, 0).unwrap();
    ledger.charge(NOBODY, 1, 0).unwrap();
    assert_eq!(*told.lock(), [true]);
    ledger.release(NOBODY, 6, 0);
    assert_eq!((told.lock().clone(), ledger.totals().soft_exceeded), (vec![true], true), "not below by a twentieth");
    ledger.release(NOBODY, 1, 0);
    ledger.charge(NOBODY, 5, 0).unwrap();
    assert_eq!(*told.lock(), [true, false]);
    ledger.replace(&Sums { whole: Sum { bytes: 200, inodes: 1 }, ..Sums::default() });
    ledger.set_limits(Limits { soft: Some(1000), ..Limits::default() });
    assert_eq!(*told.lock(), [true, false, true, false]);
    ledger.set_limits(Limits { soft: Some(10), ..Limits::default() });
    ledger.set_limits(Limits::default());
    assert_eq!(*told.lock(), [true, false, true, false, true, false]);
}

#[test]
fn a_hook_that_comes_late_is_told_at_once_and_may_ask() {
    let ledger = Arc::new(Ledger::new(Limits { soft: Some(0), ..Limits::default() }));
    ledger.charge(NOBODY, 1, 0).unwrap();
    let seen = Arc::new(AtomicU64::new(0));
    let (asked, noted) = (Arc::downgrade(&ledger), Arc::clone(&seen));
    ledger.on_soft(move |_| {
        noted.store(asked.upgrade().map_or(0, |ledger| ledger.sums().whole.bytes), Ordering::Relaxed)
    });
    assert_eq!(seen.load(Ordering::Relaxed), 1);
}

#[test]
fn sums_can_be_replaced_and_raised() {
    let sum = |bytes, inodes| Sum { bytes, inodes };
    let ledger = Ledger::new(limits(1000));
    ledger.charge(owner(1, Some(0)), 100, 5).unwrap();
    let fresh = Sums {
        whole: sum(70, 3),
        users: BTreeMap::from([(1, sum(20, 1)), (2, sum(50, 2)), (3, sum(0, 0))]),
        dirs: BTreeMap::from([(1, sum(70, 3))]),
    };
    ledger.replace(&fresh);
    assert_eq!(ledger.sums().users.len(), 2, "who owns nothing is left out");
    assert_eq!((ledger.sums().whole, ledger.room()), (sum(70, 3), 930));
    let counted =
        Sums { whole: sum(60, 4), users: BTreeMap::from([(1, sum(60, 4))]), dirs: BTreeMap::from([(0, sum(60, 4))]) };
    ledger.raise(&counted);
    let sums = ledger.sums();
    assert_eq!(sums.users, BTreeMap::from([(1, sum(60, 4)), (2, sum(50, 2))]));
    assert_eq!(sums.dirs, BTreeMap::from([(0, sum(60, 4)), (1, sum(70, 3))]));
    assert_eq!(sums.whole, sum(110, 6), "as much as the users together");
    ledger.release(owner(1, None), 60, 4);
    ledger.release(owner(2, None), 50, 2);
    assert_eq!(ledger.totals().clamped, 0);
}

/// Operations of the state machine on the ledger.
#[derive(Clone, Copy, Debug)]
enum Step {
    Charge(Owner, u64, u64),
    ChargeUpTo(Owner, u64, u64),
    Force(Owner, u64, u64),
    /// Releases all or a part of a charge, found by its number.
    Release(usize, u64),
    Transfer(usize, Owner),
    ForceTransfer(usize, Owner),
    Correct(usize, u64),
    Limit(u8, Option<u64>),
    ReplaceBySelf,
}

fn amounts() -> impl Strategy<Value = u64> {
    prop_oneof![4 => 0u64..20_000, 2 => (0u64..40).prop_map(|blocks| blocks * 4096), 1 => any::<u64>(), 1 => Just(u64::MAX), 1 => Just(0)]
}

fn owners() -> impl Strategy<Value = Owner> {
    (0u32..4, prop::option::of(0usize..4)).prop_map(|(uid, group)| Owner { uid, group })
}

fn steps() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (owners(), amounts(), 0u64..3).prop_map(|(who, bytes, inodes)| Step::Charge(who, bytes, inodes)),
        3 => (owners(), amounts(), prop_oneof![Just(0u64), Just(1), Just(512), Just(4096)]).prop_map(|(who, bytes, unit)| Step::ChargeUpTo(who, bytes, unit)),
        1 => (owners(), 0u64..100_000, 0u64..3).prop_map(|(who, bytes, inodes)| Step::Force(who, bytes, inodes)),
        4 => (any::<usize>(), amounts()).prop_map(|(which, bytes)| Step::Release(which, bytes)),
        2 => (any::<usize>(), owners()).prop_map(|(which, to)| Step::Transfer(which, to)),
        1 => (any::<usize>(), owners()).prop_map(|(which, to)| Step::ForceTransfer(which, to)),
        1 => (any::<usize>(), 0u64..50_000).prop_map(|(which, bytes)| Step::Correct(which, bytes)),
        2 => (0u8..9, prop::option::of(prop_oneof![0u64..200_000, any::<u64>()])).prop_map(|(which, limit)| Step::Limit(which, limit)),
        1 => Just(Step::ReplaceBySelf),
    ]
}

/// Every charge by itself.
#[derive(Default)]
struct Naive {
    held: Vec<(Owner, u64, u64)>,
    limits: Limits,
}

impl Naive {
    fn used(&self, counts: impl Fn(Owner) -> bool) -> (u128, u128) {
        let held = self.held.iter().filter(|held| counts(held.0));
        held.fold((0, 0), |(bytes, inodes), held| (bytes + u128::from(held.1), inodes + u128::from(held.2)))
    }

    fn fits(limit: Option<u64>, used: u128, more: u64) -> bool {
        more == 0 || used + u128::from(more) <= u128::from(limit.unwrap_or(u64::MAX))
    }

    fn user_fits(&self, uid: u32, bytes: u64) -> bool {
        Naive::fits(self.limits.users.get(&uid).copied(), self.used(|owner| owner.uid == uid).0, bytes)
    }

    fn dir_fits(&self, group: Option<usize>, bytes: u64) -> bool {
        group.is_none_or(|index| {
            Naive::fits(self.limits.dirs.get(index).copied(), self.used(|owner| owner.group == group).0, bytes)
        })
    }

    fn obstacle(&self, who: Owner, bytes: u64, inodes: u64) -> Option<Full> {
        let whole = self.used(|_| true);
        if !Naive::fits(self.limits.bytes, whole.0, bytes) {
            Some(Full::Whole)
        } else if !Naive::fits(self.limits.inodes, whole.1, inodes) {
            Some(Full::Inodes)
        } else if !self.user_fits(who.uid, bytes) {
            Some(Full::User)
        } else if !self.dir_fits(who.group, bytes) {
            Some(Full::Dir)
        } else {
            None
        }
    }

    fn sums(&self) -> Sums {
        let mut sums = Sums::default();
        for &(owner, bytes, inodes) in &self.held {
            for sum in [
                Some(&mut sums.whole),
                Some(sums.users.entry(owner.uid).or_default()),
                owner.group.map(|group| sums.dirs.entry(group).or_default()),
            ]
            .into_iter()
            .flatten()
            {
                sum.bytes += bytes;
                sum.inodes += inodes;
            }
        }
        sums.users.retain(|_, sum| *sum != Sum::default());
        sums.dirs.retain(|_, sum| *sum != Sum::default());
        sums
    }

    fn set(&mut self, which: u8, limit: Option<u64>) {
        match which {
            0 => self.limits.bytes = limit,
            1 => self.limits.inodes = limit,
            2 => self.limits.soft = limit,
            3..6 => {
                let uid = u32::from(which - 3);
                match limit {
                    Some(limit) => self.limits.users.insert(uid, limit),
                    None => self.limits.users.remove(&uid),
                };
            }
            _ => {
                let index = usize::from(which - 6);
                self.limits.dirs.resize(3, u64::MAX);
                self.limits.dirs[index] = limit.unwrap_or(u64::MAX);
            }
        }
    }

    fn step(&mut self, ledger: &Ledger, step: Step) {
        let count = self.held.len();
        match step {
            Step::Charge(who, bytes, inodes) => {
                let expected = self.obstacle(who, bytes, inodes);
                assert_eq!(ledger.charge(who, bytes, inodes).err(), expected);
                if expected.is_none() {
                    self.held.push((who, bytes, inodes));
                }
            }
            Step::ChargeUpTo(who, bytes, unit) => {
                let (charged, obstacle) = ledger.charge_up_to(who, bytes, unit);
                let unit = unit.max(1);
                assert_eq!(self.obstacle(who, charged, 0), None, "more than fits");
                if charged != bytes {
                    assert!(charged < bytes && charged % unit == 0);
                    let next = charged.saturating_add(unit).min(bytes);
                    assert!(self.obstacle(who, next, 0).is_some(), "less than fits");
                    assert!(obstacle.is_some());
                } else {
                    assert!(obstacle.is_none() || bytes == 0);
                }
                self.held.push((who, charged, 0));
            }
            Step::Force(who, bytes, inodes) => {
                // The data on a disk never exceeds the range of numbers.
                if self.used(|_| true).0 + u128::from(bytes) <= u128::from(u64::MAX) {
                    ledger.force(who, bytes, inodes);
                    self.held.push((who, bytes, inodes));
                }
            }
            _ if count == 0 => {}
            Step::Release(which, bytes) => {
                let held = &mut self.held[which % count];
                let bytes = bytes.min(held.1);
                let inodes = if bytes == held.1 { held.2 } else { 0 };
                ledger.release(held.0, bytes, inodes);
                (held.1, held.2) = (held.1 - bytes, held.2 - inodes);
            }
            Step::Transfer(which, to) => {
                let (from, bytes, inodes) = self.held[which % count];
                let expected = if from.uid != to.uid && !self.user_fits(to.uid, bytes) {
                    Err(Full::User)
                } else if from.group != to.group && !self.dir_fits(to.group, bytes) {
                    Err(Full::Dir)
                } else {
                    Ok(())
                };
                assert_eq!(ledger.transfer(from, to, bytes, inodes), expected);
                if expected.is_ok() {
                    self.held[which % count].0 = to;
                }
            }
            Step::ForceTransfer(which, to) => {
                let (from, bytes, inodes) = self.held[which % count];
                ledger.force_transfer(from, to, bytes, inodes);
                self.held[which % count].0 = to;
            }
            Step::Correct(which, is) => {
                let (who, was, _) = self.held[which % count];
                if self.used(|_| true).0 + u128::from(is) <= u128::from(u64::MAX) {
                    ledger.correct(who, was, is);
                    self.held[which % count].1 = is;
                }
            }
            Step::Limit(which, limit) => {
                self.set(which, limit);
                ledger.set_limits(self.limits.clone());
            }
            Step::ReplaceBySelf => ledger.replace(&ledger.sums()),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// 400 sequences of up to 200 steps.
    #[test]
    fn the_ledger_is_the_naive_one(steps in prop::collection::vec(steps(), 1..200)) {
        let ledger = Ledger::new(Limits::default());
        let mut naive = Naive::default();
        for step in steps {
            naive.step(&ledger, step);
            let totals = ledger.totals();
            prop_assert_eq!(&totals.sums, &naive.sums());
            prop_assert_eq!(totals.clamped, 0);
            let room = naive.limits.bytes.unwrap_or(u64::MAX).saturating_sub(totals.sums.whole.bytes);
            prop_assert_eq!(ledger.room(), room);
        }
        // Everything can be released, and then the usage is zero.
        for (who, bytes, inodes) in naive.held {
            ledger.release(who, bytes, inodes);
        }
        prop_assert_eq!(ledger.sums(), Sums::default());
        prop_assert_eq!(ledger.totals().clamped, 0);
    }
}

/// Many threads at the limit, while it moves: the granted bytes are the booked ones, and no charge
/// exceeds the limit of its time.
#[test]
fn threads_at_the_edge_never_exceed_the_limit() {
    const HIGH: u64 = 1 << 20;
    const LOW: u64 = HIGH / 2;
    let ledger = Ledger::new(Limits { soft: Some(LOW), ..limits(HIGH) });
    let turns = Arc::new((AtomicUsize::new(0), AtomicBool::new(false)));
    let seen = Arc::clone(&turns);
    ledger.on_soft(move |above| {
        assert_ne!(seen.1.swap(above, Ordering::SeqCst), above, "told twice");
        seen.0.fetch_add(1, Ordering::SeqCst);
    });
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..8)
            .map(|uid| {
                let ledger = &ledger;
                scope.spawn(move || {
                    let who = owner(uid, Some(uid as usize % 2));
                    let (mut held, mut state) = (0, u64::from(uid) + 1);
                    for _ in 0..20_000 {
                        // xorshift64: any sequence will do, as long as it is not all the same.
                        state ^= state << 13;
                        state ^= state >> 7;
                        state ^= state << 17;
                        let bytes = state % 40_000;
                        match state >> 60 {
                            0..6 if ledger.charge(who, bytes, 0).is_ok() => held += bytes,
                            6..9 => held += ledger.charge_up_to(who, bytes, 512).0,
                            9..15 => {
                                let back = bytes.min(held);
                                ledger.release(who, back, 0);
                                held -= back;
                            }
                            15 => ledger.set_limits(Limits {
                                soft: Some(LOW),
                                ..limits(if bytes & 1 == 0 { HIGH } else { LOW })
                            }),
                            _ => {}
                        }
                        assert!(ledger.sums().whole.bytes <= HIGH);
                    }
                    (uid, held)
                })
            })
            .collect();
        let mut together = 0;
        for (uid, held) in writers.into_iter().map(|writer| writer.join().unwrap()) {
            assert_eq!(ledger.sums().users.get(&uid).map_or(0, |sum| sum.bytes), held);
            together += held;
        }
        assert_eq!(ledger.sums().whole.bytes, together);
    });
    assert_eq!(ledger.totals().clamped, 0);
    assert!(turns.0.load(Ordering::SeqCst) > 0);
    assert_eq!(turns.1.load(Ordering::SeqCst), ledger.totals().soft_exceeded);
}
