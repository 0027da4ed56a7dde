//! Pools on groups of devices: devices fail, vanish, come back older, are replaced, rot; the power
//! fails in between. As long as no group misses more than it has parity, nothing is lost.

// A failed expectation in a test is what the test reports.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::collections::BTreeMap;
use std::sync::Arc;

use nacre_pool::backend::NewGroup;
use nacre_pool::device::{Device, Random, Simulator};
use nacre_pool::label::{GroupKind, LogStart, MemberStatus};
use nacre_pool::store::{Access, Checked, Commit, Import, NewPool};
use nacre_pool::{
    ChecksumKind, CompressionSetting, FrameKind, Frames, NewFrame, Owner, Pointer, PoolError, Store, Txg, WriteStream,
};

const MIB: u64 = 1 << 20;

fn new_pool() -> NewPool {
    NewPool { name: "tank".into(), guid: 7, host: (1, "here".into()), time: 1_800_000_000, redundant_metadata: true }
}

fn content(number: u64) -> Vec<u8> {
    let mut random = Random(number);
    let length = 100 + random.below(150_000) as usize;
    (0..length).map(|at| if at % 3 == 0 { random.next() as u8 } else { at as u8 }).collect()
}

/// A pool in use, what must be in it, and its devices.
struct Model {
    groups: Vec<NewGroup>,
    devices: Vec<Arc<Simulator>>,
    /// Which of them are not given to an import, or have failed since.
    away: Vec<bool>,
    store: Option<Store>,
    random: Random,
    txg: u64,
    now: BTreeMap<u64, Pointer>,
    states: BTreeMap<u64, BTreeMap<u64, Pointer>>,
    durable: u64,
    made: u64,
}

impl Model {
    fn new(groups: &[(GroupKind, usize)], sizes: &[u64], seed: u64) -> Self {
        let groups: Vec<NewGroup> =
            groups.iter().map(|(kind, devices)| NewGroup { kind: *kind, devices: *devices }).collect();
        let count = groups.iter().map(|group| group.devices).sum();
        let size = |at: usize| sizes[at % sizes.len()] * MIB;
        let devices: Vec<Arc<Simulator>> =
            (0..count).map(|at| Arc::new(Simulator::new(&format!("sim{at}"), size(at)))).collect();
        let given = devices.iter().map(|device| Arc::clone(device) as Arc<dyn Device>).collect();
        let (store, _) = Store::create_groups(given, &groups, &new_pool()).unwrap();
        Self {
            groups,
            devices,
            away: vec![false; count],
            store: Some(store),
            random: Random(seed),
            txg: 1,
            now: BTreeMap::new(),
            states: BTreeMap::from([(0, BTreeMap::new())]),
            durable: 0,
            made: 0,
        }
    }

    fn store(&self) -> &Store {
        self.store.as_ref().unwrap()
    }

    fn write(&mut self) -> Result<(), PoolError> {
        let number = self.random.next();
        let stream = if number.is_multiple_of(3) { WriteStream::Metadata } else { WriteStream::Data };
        let frame = NewFrame {
            stream,
            kind: if stream == WriteStream::Data { FrameKind::Data } else { FrameKind::Leaf },
            owner: Owner { dataset: 1, object: number, offset: 0 },
            birth: Txg(self.txg),
            content: &content(number),
            compression: CompressionSetting::Off,
            checksum: ChecksumKind::Xxh3,
        };
        match self.store().write(&frame) {
            Ok(pointer) => drop(self.now.insert(number, pointer)),
            Err(PoolError::NoSpace) => self.free(12),
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn free(&mut self, count: usize) {
        for _ in 0..count {
            let numbers: Vec<u64> = self.now.keys().copied().collect();
            if let Some(number) = self.random.pick(&numbers) {
                let pointer = self.now.remove(number).unwrap();
                self.store().free(&pointer, Txg(self.txg));
            }
        }
    }

    fn commit(&mut self) -> Result<(), PoolError> {
        self.states.insert(self.txg, self.now.clone());
        self.txg += 1;
        let (txg, log_start) = (Txg(self.txg - 1), LogStart::default());
        self.store().commit(&Commit { txg, catalog: None, upper: &[], log_start, time: self.txg })?;
        self.durable = txg.0;
        Ok(())
    }

    fn step(&mut self) -> Result<(), PoolError> {
        match self.random.below(20) {
            0..11 => self.write()?,
            11..14 => self.free(1),
            14..17 => {
                let numbers: Vec<u64> = self.now.keys().copied().collect();
                if let Some(number) = self.random.pick(&numbers) {
                    assert!(*self.store().read(&self.now[number])? == *content(*number));
                }
            }
            17 => drop(self.store().clean_step(MIB)?),
            _ => self.commit()?,
        }
        Ok(())
    }

    fn group_of(&self, device: usize) -> usize {
        let mut first = 0;
        self.groups
            .iter()
            .position(|group| {
                first += group.devices;
                device < first
            })
            .unwrap()
    }

    fn parity(&self, group: usize) -> usize {
        match self.groups[group].kind {
            GroupKind::Plain => 0,
            GroupKind::Mirror => self.groups[group].devices - 1,
            GroupKind::RaidZ(parity) => usize::from(parity),
        }
    }

    /// How many devices of a group lack something, as the pool sees it.
    fn lacking(&self, group: usize) -> usize {
        let health = self.store().on_devices().unwrap().health();
        let lacks = |(at, health): (usize, &nacre_pool::backend::DeviceHealth)| {
            let pool = health.stale || health.absent || health.status != MemberStatus::Online;
            self.group_of(at) == group && (pool || self.away[at])
        };
        health.iter().enumerate().filter(|(at, health)| lacks((*at, health))).count()
    }

    /// A device fails, if its group can do without it.
    fn fail_one(&mut self) {
        let device = self.random.below(self.devices.len() as u64) as usize;
        let group = self.group_of(device);
        if self.away[device] || self.lacking(group) >= self.parity(group) {
            return;
        }
        if self.is_lacking(device) {
            return;
        }
        let allowed = self.random.below(40);
        self.devices[device].fail_after(allowed);
        if self.random.below(2) == 0 {
            self.devices[device].fail_reads(true);
        }
        self.away[device] = true;
    }

    fn is_lacking(&self, device: usize) -> bool {
        let health = self.store().on_devices().unwrap().health()[device];
        health.stale || health.absent || health.status != MemberStatus::Online
    }

    /// A device that was away is there again, in use; or another one instead of it.
    fn bring_one(&mut self) -> Result<(), PoolError> {
        let away: Vec<usize> = (0..self.devices.len()).filter(|at| self.away[*at]).collect();
        let Some(device) = self.random.pick(&away).copied() else { return Ok(()) };
        let health = self.store().on_devices().unwrap().health()[device];
        if health.status == MemberStatus::Online && !health.absent {
            // It has not been noticed: the pool writes to it, which fails.
            return self.commit();
        }
        if self.random.below(3) == 0 {
            self.made += 1;
            let length = self.devices[device].length();
            let new = Arc::new(Simulator::new(&format!("new{}", self.made), length));
            self.devices[device] = Arc::clone(&new);
            self.store().replace(device as u16, new, 1000 + self.made)?;
        } else {
            self.devices[device].crash(self.random.next());
            self.store().online(device as u16, Arc::clone(&self.devices[device]) as _)?;
        }
        self.away[device] = false;
        Ok(())
    }

    /// All that is there is made whole.
    fn resilver(&mut self) -> Result<(), PoolError> {
        let (stale, changes) = self.store().stale_devices()?;
        let mut damaged = Vec::new();
        let mut visit = |checked: &Checked| {
            if checked.damage.is_some() && !checked.mended {
                damaged.push(checked.clone());
            }
            true
        };
        assert!(self.store().resilver(&mut visit, &mut |_| {})?);
        assert!(damaged.is_empty(), "{damaged:?}");
        self.commit()?;
        match self.store().strengthen() {
            // There is no room for copies: they stay stale.
            Err(PoolError::NoSpace) => return Ok(()),
            strengthened => strengthened?,
        }
        self.commit()?;
        self.store().resilvered(&stale, changes).map(drop)
    }

    /// Bytes of a device rot, if its group can do without it.
    fn rot_one(&mut self) {
        let device = self.random.below(self.devices.len() as u64) as usize;
        let group = self.group_of(device);
        if self.lacking(group) > 0 || self.parity(group) == 0 {
            return;
        }
        let length = self.devices[device].length();
        for _ in 0..40 {
            // Segments; labels are verified elsewhere.
            let offset = MIB + self.random.below(length - 2 * MIB);
            self.devices[device].rot(offset, self.random.next() as u8);
        }
        // What was freed or moved since the last commit is not verified, and comes back with a crash.
        self.commit().unwrap();
        self.scrub();
        // What was written anew is durable with the next commit.
        self.commit().unwrap();
    }

    /// Everything on a device but its labels is something else: what a scrub makes of it survives
    /// that others are lost, as many as there is parity.
    fn ruin_one(&mut self) {
        let device = self.random.below(self.devices.len() as u64) as usize;
        let group = self.group_of(device);
        if self.lacking(group) > 0 || self.parity(group) == 0 {
            return;
        }
        // Frames that are freed but needed by the last root are not verified after a crash.
        self.commit().unwrap();
        let mut other = vec![0; (self.devices[device].length() - 2 * MIB) as usize];
        match self.random.below(3) {
            0 => {}
            1 => other.fill(0xa5),
            _ => {
                let noise: Vec<u8> = (0..12_345).map(|_| self.random.next() as u8).collect();
                other.chunks_mut(noise.len()).for_each(|part| part.copy_from_slice(&noise[..part.len()]));
            }
        }
        self.devices[device].overwrite(MIB, &other);
        self.scrub();
        self.commit().unwrap();
        for _ in 0..2 {
            self.survives_losses();
        }
    }

    /// What is durable is all there without some devices of each group.
    fn survives_losses(&mut self) {
        let mut lost = vec![false; self.devices.len()];
        for group in 0..self.groups.len() {
            let mut members: Vec<usize> = (0..lost.len()).filter(|at| self.group_of(*at) == group).collect();
            for _ in 0..self.parity(group).saturating_sub(self.lacking(group)) {
                let at = self.random.below(members.len() as u64) as usize;
                lost[members.swap_remove(at)] = true;
            }
        }
        let copy = |at: usize| Arc::new(Simulator::with_bytes(&format!("sim{at}"), self.devices[at].bytes()));
        let left: Vec<Arc<Simulator>> = (0..lost.len()).filter(|at| !lost[*at] && !self.away[*at]).map(copy).collect();
        let store = open(&left.iter().collect::<Vec<_>>(), Access::ReadOnly).unwrap();
        for (number, pointer) in &self.states[&self.durable] {
            let read = store.read(pointer).unwrap_or_else(|error| panic!("frame {number} without {lost:?}: {error}"));
            assert!(*read == *content(*number), "frame {number} without {lost:?}");
        }
    }

    fn scrub(&mut self) {
        let mut damaged = Vec::new();
        let mut visit = |checked: &Checked| {
            if checked.damage.is_some() && !checked.mended {
                damaged.push(checked.clone());
            }
            true
        };
        match self.store().scrub(&mut visit) {
            Ok(()) => assert!(damaged.is_empty(), "{damaged:?}"),
            Err(error) => panic!("{error}"),
        }
    }

    /// The program dies or leaves, perhaps with the power, and the next one finds a state that is
    /// whole and not older than what was told to be durable. What is away may be back by then.
    fn again(&mut self) {
        let store = self.store.take().unwrap();
        if self.random.below(4) == 0 {
            self.states.insert(self.txg, self.now.clone());
            // Where it fails, it was not left in order.
            let _ = store.close(true, 1);
        }
        let health = store.on_devices().unwrap().health();
        drop(store);
        for (device, away) in self.devices.iter().zip(&self.away) {
            if !away {
                device.crash(self.random.next());
            }
        }
        for (at, health) in health.iter().enumerate() {
            let back = self.random.below(3) == 0;
            if self.away[at] && back && health.status != MemberStatus::Offline {
                self.devices[at].crash(self.random.next());
                self.away[at] = false;
            }
        }
        let given: Vec<Arc<dyn Device>> = self
            .devices
            .iter()
            .zip(&self.away)
            .filter(|(_, away)| !**away)
            .map(|(device, _)| Arc::clone(device) as Arc<dyn Device>)
            .collect();
        let import = Import { access: Access::ReadWrite, name: None, host: (1, "here".into()), time: 1_800_000_001 };
        let (store, root) = Store::open(given, &import).unwrap();
        assert!(root.txg.0 >= self.durable, "txg {} of {}", root.txg, self.durable);
        let state = &self.states[&root.txg.0];
        for (number, pointer) in state {
            let read = store.read(pointer).unwrap_or_else(|error| panic!("frame {number} {pointer:?}: {error}"));
            assert!(*read == *content(*number), "frame {number}");
        }
        let charged: u64 = state.values().map(Pointer::charged).sum();
        let space = store.space();
        assert_eq!(space.allocated - space.table, charged);
        (self.now, self.txg, self.durable) = (state.clone(), root.txg.0 + 1, root.txg.0);
        self.store = Some(store);
    }
}

/// Groups, and the lengths of their devices in turn, MiB.
type Kind = (Vec<(GroupKind, usize)>, Vec<u64>);

fn kinds() -> Vec<Kind> {
    vec![
        (vec![(GroupKind::Mirror, 2)], vec![64]),
        (vec![(GroupKind::Mirror, 3)], vec![64, 80]),
        (vec![(GroupKind::RaidZ(1), 3)], vec![64]),
        (vec![(GroupKind::RaidZ(1), 5)], vec![64, 96, 64]),
        (vec![(GroupKind::RaidZ(2), 6)], vec![64]),
        (vec![(GroupKind::RaidZ(3), 7)], vec![64]),
        (vec![(GroupKind::Mirror, 2), (GroupKind::RaidZ(1), 4)], vec![64]),
    ]
}

/// Everything that can happen to devices and to the machine, in any order.
#[test]
fn nothing_is_lost_while_groups_can_do_without_what_is_missing() {
    let rounds: u64 = std::env::var("NACRE_GROUP_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(1);
    println!("campaign: {rounds} rounds of devices that fail, on every kind of group (NACRE_GROUP_ROUNDS)");
    let from: u64 = std::env::var("NACRE_GROUP_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0);
    for round in from..from + rounds {
        for (kind, (groups, sizes)) in kinds().into_iter().enumerate() {
            println!("round {round}, {groups:?}");
            let mut model = Model::new(&groups, &sizes, round * 100 + kind as u64);
            for _ in 0..4 {
                let steps = 40 + model.random.below(80);
                for _ in 0..steps {
                    match model.random.below(40) {
                        0 => model.fail_one(),
                        1 => model.bring_one().unwrap(),
                        2 => model.resilver().unwrap(),
                        3 if !model.away.iter().any(|away| *away) => model.rot_one(),
                        4 if !model.away.contains(&true) && model.random.below(4) == 0 => model.ruin_one(),
                        _ => model.step().unwrap(),
                    }
                }
                model.again();
            }
            while model.away.iter().any(|away| *away) {
                model.bring_one().unwrap();
            }
            model.resilver().unwrap();
            // What was written with fewer devices gets all its redundancy.
            while model.store().clean_step(64 * MIB).unwrap().more {
                model.commit().unwrap();
            }
            model.scrub();
            model.ruin_one();
            model.again();
        }
    }
}

fn open(devices: &[&Arc<Simulator>], access: Access) -> Result<Store, PoolError> {
    let import = Import { access, name: None, host: (1, "here".into()), time: 1_800_000_001 };
    let devices = devices.iter().map(|device| Arc::clone(device) as Arc<dyn Device>).collect();
    Store::open(devices, &import).map(|(store, _)| store)
}

/// Any devices up to the parity may be missing; one more is refused by name, and nothing is written.
#[test]
fn whatever_may_be_missing_may_be_missing() {
    for (groups, parity) in [
        (vec![(GroupKind::Mirror, 3)], 2u32),
        (vec![(GroupKind::RaidZ(1), 4)], 1),
        (vec![(GroupKind::RaidZ(2), 5)], 2),
        (vec![(GroupKind::RaidZ(3), 5)], 3),
    ] {
        let mut model = Model::new(&groups, &[64], 5);
        for _ in 0..60 {
            model.write().unwrap();
        }
        model.commit().unwrap();
        model.store.take().unwrap().close(true, 1).unwrap();
        let count = model.devices.len();
        for missing in 0u32..1 << count {
            if missing.count_ones() > parity + 1 {
                continue;
            }
            let given: Vec<&Arc<Simulator>> =
                (0..count).filter(|at| missing >> at & 1 == 0).map(|at| &model.devices[at]).collect();
            if given.is_empty() {
                continue;
            }
            let written: Vec<u64> = given.iter().map(|device| device.operations()).collect();
            let opened = open(&given, Access::ReadOnly);
            if missing.count_ones() <= parity {
                let store = opened.unwrap();
                for (number, pointer) in &model.now {
                    assert!(*store.read(pointer).unwrap() == *content(*number));
                }
            } else {
                let refused = opened.map(drop).unwrap_err().to_string();
                let first = missing.trailing_zeros();
                assert!(refused.contains(&format!("device {first} is missing; it was at sim{first}")), "{refused}");
                let writing = open(&given, Access::ReadWrite).map(drop).unwrap_err().to_string();
                assert_eq!(writing, refused);
            }
            assert_eq!(written, given.iter().map(|device| device.operations()).collect::<Vec<_>>());
        }
    }
}

/// A device that comes back older than the others is recognised, and only what it missed is written
/// to it.
#[test]
fn a_device_that_comes_back_is_made_whole() {
    let mut model = Model::new(&[(GroupKind::RaidZ(1), 4)], &[64], 9);
    for _ in 0..80 {
        model.write().unwrap();
    }
    model.commit().unwrap();
    model.store().offline(1).unwrap();
    assert!(model.store().offline(2).unwrap_err().to_string().contains("no valid replicas"));
    let before = model.devices[1].operations();
    for _ in 0..20 {
        model.write().unwrap();
    }
    model.commit().unwrap();
    assert_eq!(model.devices[1].operations(), before, "it is offline");
    let wrong: Arc<dyn Device> = Arc::clone(&model.devices[2]) as _;
    assert!(model.store().online(1, wrong).is_err());
    model.store().online(1, Arc::clone(&model.devices[1]) as _).unwrap();
    assert_eq!(model.store().on_devices().unwrap().stale(), [1]);
    let written = model.devices[1].written();
    model.resilver().unwrap();
    assert!(model.store().on_devices().unwrap().stale().is_empty());
    let more = model.devices[1].written() - written;
    assert!(more < 4 * MIB, "{more} bytes were written to a device that missed little");
    // Now another one may go.
    let given = [&model.devices[0], &model.devices[1], &model.devices[3]];
    model.store.take().unwrap().close(true, 1).unwrap();
    let store = open(&given, Access::ReadOnly).unwrap();
    for (number, pointer) in &model.now {
        assert!(*store.read(pointer).unwrap() == *content(*number));
    }
}

/// What was freed and cannot be given back is no error; but others, in the same rows, are not lost
/// with a device after that.
#[test]
fn damage_of_what_was_freed_does_not_harm_others() {
    let mut model = Model::new(&[(GroupKind::RaidZ(1), 4)], &[64], 11);
    for _ in 0..80 {
        model.write().unwrap();
    }
    model.commit().unwrap();
    let images: Vec<Vec<u8>> = model.devices.iter().map(|device| device.bytes()).collect();
    // Frames begin at multiples of 16, with 80 bytes of their own.
    let find = |part: &[u8]| {
        let mut found = images.iter().map(|image| image.chunks(16).position(|chunk| chunk == part)).enumerate();
        found.find_map(|(device, chunk)| Some((device, chunk? as u64 * 16))).unwrap()
    };
    let long = |number: &&u64| !number.is_multiple_of(3) && content(**number).len() > 100_000;
    let numbers: Vec<u64> = model.now.keys().filter(long).copied().take(3).collect();
    for number in &numbers {
        // In two columns: no one of them can be left out.
        let content = content(*number);
        let spots = [96, 40_000].map(|at| find(&content[at..at + 16]));
        assert_ne!(spots[0].0, spots[1].0);
        let pointer = model.now.remove(number).unwrap();
        model.store().free(&pointer, Txg(model.txg));
        for (device, offset) in spots {
            model.devices[device].overwrite(offset, &[0x5a; 16]);
        }
    }
    model.commit().unwrap();
    model.scrub();
    model.commit().unwrap();
    for _ in 0..12 {
        model.survives_losses();
    }
    assert!(!numbers.is_empty());
}

/// Devices of different lengths are used up, and figures are right at each moment: what is promised
/// can be written.
#[test]
fn devices_of_different_lengths_are_used() {
    for (kind, sizes, least) in [
        (GroupKind::RaidZ(1), vec![66, 66, 130, 130], 2 * 64),
        (GroupKind::RaidZ(1), vec![66, 66, 66, 66, 66], 4 * 64),
        (GroupKind::Mirror, vec![66, 130], 64),
        (GroupKind::RaidZ(2), vec![66, 66, 66, 130, 130, 130], 4 * 64),
    ] {
        let mut model = Model::new(&[(kind, sizes.len())], &sizes, 3);
        let space = model.store().space();
        let log = 20 * MIB;
        assert!(space.size + log >= least * MIB, "{kind:?} {sizes:?}: {space:?}");
        let mut written = 0;
        while model.store().space().available > 8 * MIB {
            let before = model.now.len();
            model.write().unwrap();
            if model.now.len() <= before {
                break;
            }
            written += model.now.values().next_back().map_or(0, Pointer::charged);
            if model.now.len().is_multiple_of(64) {
                model.commit().unwrap();
            }
        }
        model.commit().unwrap();
        let after = model.store().space();
        assert!(after.available <= 8 * MIB && written > 0, "{kind:?} {sizes:?}: {after:?}");
        model.scrub();
    }
}
