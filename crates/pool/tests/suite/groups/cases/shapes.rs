//! Pools that change their shape at random, while devices fail and the power does: whatever is done with
//! them, in any order, nothing is lost.

use std::sync::Mutex;
use std::sync::atomic::Ordering;

use crate::groups::*;
use crate::pools::shapes;

use nacre_pool::label::{ChangeKind, GroupClass};

/// A crash in a life of a pool, at most so many writes and syncs after a change was begun or ended: most
/// of these are those of labels.
const NEAR: u64 = 40;

/// What was done, and how often.
static DONE: Mutex<BTreeMap<String, u64>> = Mutex::new(BTreeMap::new());

fn tally(what: impl Into<String>) {
    *DONE.lock().unwrap().entry(what.into()).or_default() += 1;
}

impl Model {
    /// A change of shape begins, goes on, or is given up.
    fn change(&mut self) -> Result<(), PoolError> {
        if self.random.below(8) == 0 && !self.fuse.is_set() {
            self.fuse.set(self.random.below(NEAR));
        }
        if self.store().shape_change().is_some() {
            return match self.random.below(16) {
                0 => {
                    let given_up = self.store().give_up_change();
                    if given_up.is_ok() {
                        tally("given up");
                    }
                    self.done(given_up)
                }
                1 => {
                    let second = self.store().begin_change(&shapes::expansion(self.disks(), 0), &[], &[]);
                    assert!(second.unwrap_err().to_string().contains("is under way"));
                    Ok(())
                }
                // A conversion may become another.
                2 => self.begin(),
                _ => {
                    let budget = [MIB / 4, 2 * MIB, 1 << 40][self.random.below(3) as usize];
                    let missing = self.health().iter().any(|one| one.is_own() && (one.stale || one.absent));
                    let ended = self.go_on(budget)?;
                    if ended {
                        tally(if missing { "ended without a device" } else { "ended" });
                    }
                    Ok(())
                }
            };
        }
        match self.random.below(8) {
            0 => self.even_out(),
            1 if self.is_noticed() => self.log_devices(),
            _ => self.begin(),
        }
    }

    /// What is about to happen, and how everything is.
    fn show(&self, step: u64, what: u64) {
        let groups: Vec<_> = self.disks().groups().into_iter().map(|(group, parity)| (group.kind, parity)).collect();
        println!("{step}: {what}; {groups:?}, {:?}", self.disks().shape_change());
        for (device, one) in self.disks().devices().iter().zip(self.health()) {
            let away = if self.away.contains(device.name()) { ", away" } else { "" };
            let DeviceHealth { group, role, status, stale, absent } = one;
            println!("   {}: {group} {role:?} {status:?}, stale {stale}, absent {absent}{away}", device.name());
        }
    }

    /// A change that could be; what cannot is refused.
    fn begin(&mut self) -> Result<(), PoolError> {
        let number = self.any_number();
        // What nobody has noticed may be more than can be done without afterwards.
        if self.devices.len() > 24 || !self.is_noticed() {
            return Ok(());
        }
        let mut random = Random(self.random.next());
        let shape = shapes::any(self.disks(), number as u16, &mut random);
        let Some(shape) = shape else { return Ok(()) };
        let (devices, guids): (Vec<Arc<dyn Device>>, Vec<u64>) = (0..shape.coming).map(|_| self.fresh()).unzip();
        let from = self.disks().kind_of(shape.group);
        let begun = self.store().begin_change(&shape, &devices, &guids);
        if begun.is_ok() {
            let what = match (shape.kind, shape.leaving.len()) {
                (ChangeKind::Removal, 1) => format!("a device leaves {from:?}"),
                (ChangeKind::Removal, _) => format!("{from:?} leaves"),
                (ChangeKind::Expansion, _) => format!("{from:?} becomes wider"),
                (ChangeKind::Conversion, _) => format!("{from:?} becomes {:?}", shape.becomes),
            };
            tally(what);
        }
        self.done(begun)
    }

    /// What there is goes from full devices to empty ones.
    fn even_out(&mut self) -> Result<(), PoolError> {
        let (budget, mut stuck) = ([MIB, 1 << 40][self.random.below(2) as usize], BTreeSet::new());
        self.store().even_step(budget, &mut stuck)?;
        self.store().commit_moved()
    }

    /// Devices for the log alone come or go.
    fn log_devices(&mut self) -> Result<(), PoolError> {
        let is_log = |at: usize| self.disks().groups().get(at).is_some_and(|(group, _)| group.class == GroupClass::Log);
        let health = self.health();
        let log = (0..health.len()).find(|at| health[*at].is_own() && is_log(health[*at].group));
        let Some(log) = log else {
            if self.devices.len() > 22 {
                return Ok(());
            }
            let count = 1 + self.random.below(2) as usize;
            let kind = if count == 1 { GroupKind::Plain } else { GroupKind::Mirror };
            let (new, guids): (Vec<Arc<dyn Device>>, Vec<u64>) = (0..count).map(|_| self.fresh()).unzip();
            return self.done(self.store().add_logs(&new, &guids, &new_groups(&[(kind, count)])));
        };
        self.store().hold_log(true)?;
        for _ in 0..2 {
            self.commit()?;
        }
        let removed = self.store().remove_log(log as u16);
        self.store().hold_log(false)?;
        self.done(removed)
    }
}

/// Groups, and the lengths of their devices in turn, MiB.
fn pools() -> Vec<Kind> {
    let more = [
        (vec![(GroupKind::RaidZ(1), 3), (GroupKind::RaidZ(2), 5)], vec![64]),
        (vec![(GroupKind::Mirror, 2), (GroupKind::Mirror, 2)], vec![64, 64, 96, 96]),
        (vec![(GroupKind::RaidZ(2), 4)], vec![64, 96]),
    ];
    kinds().into_iter().chain(more).collect()
}

/// Everything that can happen to devices and to the machine, in any order, while the pool changes its
/// shape.
#[test]
fn nothing_is_lost_while_shapes_change() {
    let number = |name: &str| std::env::var(name).ok().and_then(|number| number.parse::<u64>().ok());
    let (rounds, from) = (number("NACRE_SHAPE_ROUNDS").unwrap_or(3), number("NACRE_GROUP_SEED").unwrap_or(0));
    println!("campaign: {rounds} rounds of changes of shape, each on another kind of group (NACRE_SHAPE_ROUNDS)");
    let (pools, trace) = (pools(), std::env::var_os("NACRE_SHAPE_TRACE").is_some());
    for round in from..from + rounds {
        let (groups, sizes) = &pools[(round % pools.len() as u64) as usize];
        println!("round {round}, {groups:?}");
        let mut model = Model::new(groups, sizes, 50_000 + round);
        for _ in 0..4 {
            let steps = 40 + model.random.below(60);
            let cut = (model.random.below(3) > 0).then(|| model.random.below(steps));
            for step in 0..steps {
                if cut == Some(step) {
                    model.fuse.set(model.random.below(400));
                }
                let what = model.random.below(24);
                if trace {
                    model.show(step, what);
                }
                let happened = match what {
                    0..3 => model.change(),
                    3 => model.commit().map(|()| model.survives_losses()),
                    _ => model.happens(),
                };
                if model.fuse.is_blown() {
                    break;
                }
                happened.unwrap();
            }
            if trace {
                model.show(steps, 0);
            }
            model.again();
        }
        while !model.away.is_empty() {
            model.bring_one().unwrap();
        }
        model.resilver().unwrap();
        if model.store().shape_change().is_some() {
            model.end_change();
        }
        model.scrub().unwrap();
        model.ruin_one().unwrap();
        model.again();
        println!("campaign: {} crashes, {:?}", CRASHES.load(Ordering::Relaxed), DONE.lock().unwrap());
    }
}
