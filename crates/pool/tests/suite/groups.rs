//! Pools on groups of devices: devices fail, vanish, come back older, are replaced, rot; the power
//! fails in between. As long as no group misses more than it has parity, nothing is lost.

mod cases;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cases::fused::Fuse;

use nacre_pool::backend::{Backend, DeviceHealth, Disks, NewGroup, SegmentAt};
use nacre_pool::device::{Device, Random, Simulator};
use nacre_pool::label::{GroupKind, LogStart, MemberRole, MemberStatus};
use nacre_pool::store::{Access, Checked, Commit, Import, NewPool};
use nacre_pool::{
    ChecksumKind, CompressionSetting, FrameKind, Frames, NewFrame, Owner, Pointer, PoolError, Store, Txg, WriteStream,
};

const MIB: u64 = 1 << 20;

/// How often the program has died, with the power or without, while a pool was in use.
static CRASHES: AtomicU64 = AtomicU64::new(0);

fn new_pool() -> NewPool {
    NewPool { name: "tank".into(), guid: 7, host: (1, "here".into()), time: 1_800_000_000, redundant_metadata: true }
}

fn content(number: u64) -> Vec<u8> {
    let mut random = Random(number);
    let mut content = vec![0; 100 + random.below(150_000) as usize];
    // By words: a number for each byte would take much of the time of all tests here.
    for word in content.chunks_mut(8) {
        word.copy_from_slice(&random.next().to_le_bytes()[..word.len()]);
    }
    content
}

/// A pool in use, what must be in it, and its devices.
struct Model {
    /// All devices that there ever were, by their names.
    devices: BTreeMap<String, Arc<Simulator>>,
    /// Those that are not given to an import, or have failed since.
    away: BTreeSet<String>,
    store: Option<Store>,
    random: Random,
    txg: u64,
    now: BTreeMap<u64, Pointer>,
    states: BTreeMap<u64, BTreeMap<u64, Pointer>>,
    durable: u64,
    made: u64,
    /// The length of the longest device, bytes.
    length: u64,
    fuse: Fuse,
    /// Rot was put in that nobody may have found yet.
    rotten: bool,
    /// How far a resilver was that was interrupted: the segment, and the revision of the labels; by the
    /// commits that had it.
    place: Option<(u32, u64)>,
    places: BTreeMap<u64, Option<(u32, u64)>>,
}

/// The devices that are part of a pool, by their names.
fn members(store: &Store) -> impl Iterator<Item = (String, DeviceHealth)> {
    let disks = store.on_devices().unwrap();
    let names = disks.devices().into_iter().map(|device| device.name().to_owned());
    names.zip(disks.health()).filter(|(_, health)| health.status.belongs())
}

fn new_groups(groups: &[(GroupKind, usize)]) -> Vec<NewGroup> {
    groups.iter().map(|(kind, devices)| NewGroup { kind: *kind, devices: *devices }).collect()
}

impl Model {
    fn new(groups: &[(GroupKind, usize)], sizes: &[u64], seed: u64) -> Self {
        let groups = new_groups(groups);
        let count = groups.iter().map(|group| group.devices).sum();
        let size = |at: usize| sizes[at % sizes.len()] * MIB;
        let devices: Vec<Arc<Simulator>> =
            (0..count).map(|at| Arc::new(Simulator::new(&format!("sim{at}"), size(at)))).collect();
        let fuse = Fuse::default();
        let given = devices.iter().map(|device| fuse.on(device)).collect();
        let is_plain = groups.iter().all(|group| group.kind == GroupKind::Plain);
        let (store, _) = match is_plain {
            true => Store::create(given, &new_pool()).unwrap(),
            false => Store::create_groups(given, &groups, &new_pool()).unwrap(),
        };
        let length = devices.iter().map(|device| device.length()).max().unwrap();
        Self {
            devices: devices.into_iter().map(|device| (device.name().to_owned(), device)).collect(),
            away: BTreeSet::new(),
            store: Some(store),
            random: Random(seed),
            txg: 1,
            now: BTreeMap::new(),
            states: BTreeMap::from([(0, BTreeMap::new())]),
            durable: 0,
            made: 0,
            length,
            fuse,
            rotten: false,
            place: None,
            places: BTreeMap::new(),
        }
    }

    fn disks(&self) -> &Disks {
        self.store().on_devices().unwrap()
    }

    fn health(&self) -> Vec<DeviceHealth> {
        self.disks().health()
    }

    /// The device of a number.
    fn device(&self, number: usize) -> &Arc<Simulator> {
        &self.devices[self.disks().devices()[number].name()]
    }

    /// The device that was the first of this number.
    fn sim(&self, number: usize) -> &Arc<Simulator> {
        &self.devices[&format!("sim{number}")]
    }

    fn is_away(&self, number: usize) -> bool {
        self.away.contains(self.disks().devices()[number].name())
    }

    /// The numbers of devices that are part of the pool.
    fn numbers(&self) -> Vec<usize> {
        let belongs = |(at, health): (usize, DeviceHealth)| health.status.belongs().then_some(at);
        self.health().into_iter().enumerate().filter_map(belongs).collect()
    }

    /// A new device.
    fn fresh(&mut self) -> (Arc<dyn Device>, u64) {
        self.made += 1;
        let longer = if self.random.below(4) == 0 { 16 * MIB } else { 0 };
        let new = Arc::new(Simulator::new(&format!("new{}", self.made), self.length + longer));
        let fused = self.fuse.on(&new);
        self.devices.insert(new.name().to_owned(), new);
        (fused, 1000 + self.made)
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
        self.places.insert(self.txg, self.place);
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

    /// Writes until no more than this is left; answers what there is then.
    fn fill(&mut self, left: u64) -> u64 {
        while self.store().space().available > left {
            let before = self.now.len();
            self.write().unwrap();
            if self.now.len() <= before {
                break;
            }
            if before.is_multiple_of(64) {
                self.commit().unwrap();
            }
        }
        self.commit().unwrap();
        self.now.values().map(Pointer::charged).sum()
    }

    fn parity(&self, group: usize) -> usize {
        self.disks().groups().get(group).map_or(0, |(_, parity)| *parity)
    }

    /// Whether a device has everything, as far as anybody knows.
    fn has_all(&self, number: usize) -> bool {
        let health = self.health()[number];
        health.status == MemberStatus::Online && !health.stale && !health.absent && !self.is_away(number)
    }

    /// The devices that hold what this one should.
    fn holders(&self, number: usize) -> Vec<usize> {
        let beside = |at: usize| self.health()[at].role.beside() == Some(number as u16);
        self.numbers().into_iter().filter(|at| *at == number || beside(*at)).collect()
    }

    /// How many devices of a group lack something, if these are not there.
    fn lacking(&self, group: usize, without: &[usize]) -> usize {
        let own = |at: &usize| self.health()[*at].is_own() && self.health()[*at].group == group;
        let has = |at: &usize| !without.contains(at) && self.has_all(*at);
        self.numbers().iter().filter(|at| own(at) && !self.holders(**at).iter().any(has)).count()
    }

    /// Whether nothing is lost without these devices.
    fn can_lose(&self, without: &[usize]) -> bool {
        (0..self.disks().groups().len().max(1)).all(|group| self.lacking(group, without) <= self.parity(group))
    }

    /// Whether all that has failed is known to the pool.
    fn is_noticed(&self) -> bool {
        let health = self.health();
        let known = |at: &usize| health[*at].status != MemberStatus::Online || health[*at].absent;
        self.numbers().iter().all(|at| !self.is_away(*at) || known(at))
    }

    fn any_number(&mut self) -> usize {
        let numbers = self.numbers();
        *self.random.pick(&numbers).unwrap()
    }

    /// A device fails, if its group can do without it.
    fn fail_one(&mut self) {
        let number = self.any_number();
        if self.is_away(number) || !self.can_lose(&[number]) {
            return;
        }
        let device = Arc::clone(self.device(number));
        // One that is about to take another's place would be needed by then.
        let soon = if self.health()[number].role.beside().is_some() { 1 } else { 40 };
        device.fail_after(self.random.below(soon));
        if self.random.below(2) == 0 {
            device.fail_reads(true);
        }
        self.away.insert(device.name().to_owned());
    }

    /// A device that was away is there again, in use; or another one instead of it.
    fn bring_one(&mut self) -> Result<(), PoolError> {
        let away: Vec<String> = self.away.iter().cloned().collect();
        let Some(name) = self.random.pick(&away).cloned() else { return Ok(()) };
        let named = |at: &usize| self.disks().devices()[*at].name() == name;
        let Some(number) = self.numbers().into_iter().find(named) else {
            // It is none of the pool's any more.
            self.away.remove(&name);
            return Ok(());
        };
        let health = self.health()[number];
        let known = health.status != MemberStatus::Online || health.absent;
        if !known && health.role == MemberRole::Spare {
            self.devices[&name].crash(self.random.next());
            self.away.remove(&name);
            return Ok(());
        }
        if !known {
            // It has not been noticed: the pool writes to it, which fails.
            return self.commit();
        }
        if self.random.below(3) == 0 && health.is_own() {
            return self.replace(number);
        }
        self.devices[&name].crash(self.random.next());
        self.store().online(number as u16, self.fuse.on(&self.devices[&name]))?;
        self.away.remove(&name);
        Ok(())
    }

    /// Whether something was done, or refused without anything having been changed.
    fn done(&self, done: Result<(), PoolError>) -> Result<(), PoolError> {
        match done {
            Err(PoolError::Refused(_)) => Ok(()),
            done => done,
        }
    }

    fn replace(&mut self, number: usize) -> Result<(), PoolError> {
        let (new, guid) = self.fresh();
        self.done(self.store().replace(number as u16, new, guid))
    }

    /// Something about which devices there are becomes another.
    fn reshape(&mut self) -> Result<(), PoolError> {
        let number = self.any_number();
        if self.devices.len() > 24 {
            return Ok(());
        }
        match self.random.below(8) {
            0 | 1 => self.replace(number),
            2 if self.holders(number).len() == 1 => {
                let (new, guid) = self.fresh();
                self.done(self.store().attach(number as u16, new, guid))
            }
            // What nobody has noticed would be lost with the copy that is taken out.
            3 | 4 if self.is_noticed() => self.done(self.store().detach(number as u16)),
            5 if self.disks().groups().len() < 4 => {
                let kinds = [(GroupKind::Plain, 1), (GroupKind::Mirror, 2), (GroupKind::RaidZ(1), 3)];
                let (kind, devices) = *self.random.pick(&kinds).unwrap();
                let (new, guids): (Vec<Arc<dyn Device>>, Vec<u64>) = (0..devices).map(|_| self.fresh()).unzip();
                let special = devices < 3 && self.random.below(2) == 0;
                let add = if special { Store::add_special } else { Store::add_groups };
                self.done(add(self.store(), &new, &guids, &new_groups(&[(kind, devices)])))
            }
            6 => {
                let (new, guid) = self.fresh();
                self.done(self.store().add_spare(new, guid))
            }
            7 => self.done(self.store().remove_spare(number as u16)),
            _ => Ok(()),
        }
    }

    /// How far a resilver was is durable, if no device has come or gone.
    fn keep_place(&mut self, next: u32, changes: u64) -> Result<(), PoolError> {
        self.commit()?;
        let revision = self.disks().identity().revision;
        if self.disks().changes() == changes {
            self.place = Some((next, revision));
            self.commit()?;
        }
        Ok(())
    }

    /// All that is there is made whole, if that is not interrupted.
    fn resilver_or_stop(&mut self) -> Result<(), PoolError> {
        let stops = self.random.below(2) == 0;
        let frames = self.random.below(80);
        self.resilver_frames(if stops { frames } else { u64::MAX })
    }

    fn resilver(&mut self) -> Result<(), PoolError> {
        self.resilver_frames(u64::MAX)
    }

    fn resilver_frames(&mut self, mut most: u64) -> Result<(), PoolError> {
        let (stale, changes) = self.store().stale_devices()?;
        let left = self.disks().left_at();
        let next = self.place.filter(|(_, revision)| left == Some(*revision)).map_or(0, |(next, _)| next);
        let first = self.store().resilver_goes_on(next);
        if next > 0 {
            self.keep_place(first, changes)?;
        }
        let (mut damaged, mut next) = (Vec::new(), first);
        let mut visit = |checked: &Checked| {
            if checked.damage.is_some() && !checked.mended {
                damaged.push(checked.clone());
            }
            most = most.saturating_sub(1);
            most > 0
        };
        let all = self.store().resilver_from(first, &mut visit, &mut |segment| next = segment + 1)?;
        self.has_power()?;
        assert!(damaged.is_empty(), "{damaged:?}");
        if !all {
            return self.keep_place(next, changes);
        }
        self.commit()?;
        match self.store().strengthen() {
            // There is no room for copies: they stay stale.
            Err(PoolError::NoSpace) => return Ok(()),
            strengthened => strengthened?,
        }
        self.commit()?;
        self.store().resilvered(&stale, changes).map(drop)
    }

    /// A device without which nothing is lost, whatever else fails.
    fn spared(&mut self) -> Option<Arc<Simulator>> {
        let number = self.any_number();
        let health = self.health()[number];
        let whole = (0..self.disks().groups().len()).all(|group| self.lacking(group, &[]) == 0);
        let paired = self.health().iter().any(|health| health.role.beside().is_some());
        let spared = whole && !paired && health.is_own() && self.parity(health.group) > 0;
        spared.then(|| Arc::clone(self.device(number)))
    }

    /// Bytes of a device rot, if its group can do without it.
    fn rot_one(&mut self) -> Result<(), PoolError> {
        let Some(device) = self.spared() else { return Ok(()) };
        let length = device.length();
        for _ in 0..40 {
            // Segments; labels are verified elsewhere.
            let offset = MIB + self.random.below(length - 2 * MIB);
            device.rot(offset, self.random.next() as u8);
        }
        self.rotten = true;
        // What was freed or moved since the last commit is not verified, and comes back with a crash.
        self.commit()?;
        self.find_rot()
    }

    fn find_rot(&mut self) -> Result<(), PoolError> {
        self.scrub()?;
        // What was written anew is durable with the next commit.
        self.commit()?;
        self.rotten = false;
        Ok(())
    }

    /// Everything on a device but its labels is something else: what a scrub makes of it survives
    /// that others are lost, as many as there is parity.
    fn ruin_one(&mut self) -> Result<(), PoolError> {
        let Some(device) = self.spared() else { return Ok(()) };
        // Frames that are freed but needed by the last root are not verified after a crash.
        self.commit()?;
        let mut other = vec![0; (device.length() - 2 * MIB) as usize];
        match self.random.below(3) {
            0 => {}
            1 => other.fill(0xa5),
            _ => {
                let noise: Vec<u8> = (0..12_345).map(|_| self.random.next() as u8).collect();
                other.chunks_mut(noise.len()).for_each(|part| part.copy_from_slice(&noise[..part.len()]));
            }
        }
        device.overwrite(MIB, &other);
        self.rotten = true;
        self.find_rot()?;
        for _ in 0..2 {
            self.survives_losses();
        }
        Ok(())
    }

    /// What is durable is all there without some devices of each group.
    fn survives_losses(&mut self) {
        let mut lost: Vec<usize> = Vec::new();
        let mut numbers = self.numbers();
        while !numbers.is_empty() {
            let at = self.random.below(numbers.len() as u64) as usize;
            lost.push(numbers.swap_remove(at));
            if !self.can_lose(&lost) {
                lost.pop();
            }
        }
        let left: Vec<Arc<Simulator>> = self
            .numbers()
            .into_iter()
            .filter(|at| !lost.contains(at) && !self.is_away(*at))
            .map(|at| Arc::new(self.device(at).copy()))
            .collect();
        let opened = open(&left.iter().collect::<Vec<_>>(), Access::ReadOnly);
        let store = opened.unwrap_or_else(|error| panic!("without {lost:?}: {error}; {:?}", self.health()));
        for (number, pointer) in &self.states[&self.durable] {
            let read = store.read(pointer).unwrap_or_else(|error| {
                let holder = store.segments_of(&BTreeSet::from([(pointer.segment, pointer.index)]));
                let holder: Vec<_> = store.segments().into_iter().filter(|one| holder.contains(&one.id)).collect();
                panic!("frame {number} without {lost:?}: {error}; {holder:?}; {:?}", self.health())
            });
            assert!(*read == *content(*number), "frame {number} without {lost:?}");
        }
    }

    fn has_power(&self) -> Result<(), PoolError> {
        if self.fuse.is_blown() { Err(PoolError::Refused("the power has failed".into())) } else { Ok(()) }
    }

    fn scrub(&mut self) -> Result<(), PoolError> {
        let mut damaged = Vec::new();
        let mut visit = |checked: &Checked| {
            if checked.damage.is_some() && !checked.mended {
                damaged.push(checked.clone());
            }
            true
        };
        self.store().scrub(&mut visit)?;
        self.has_power()?;
        assert!(damaged.is_empty(), "{damaged:?}");
        Ok(())
    }

    /// The program dies or leaves, perhaps with the power, and the next one finds a state that is
    /// whole and not older than what was told to be durable. What is away may be back by then.
    fn again(&mut self) {
        let store = self.store.take().unwrap();
        let leaves = self.random.below(4) == 0;
        if leaves {
            self.states.insert(self.txg, self.now.clone());
            self.places.insert(self.txg, self.place);
        }
        if !leaves || store.close(true, 1).is_err() {
            CRASHES.fetch_add(1, Ordering::Relaxed);
        }
        let offline = |health: &DeviceHealth| health.status == MemberStatus::Offline;
        let offline: BTreeSet<String> = members(&store).filter(|(_, one)| offline(one)).map(|(name, _)| name).collect();
        drop(store);
        self.fuse.mend();
        for (name, device) in &self.devices {
            let back = self.away.contains(name) && self.random.below(3) == 0 && !offline.contains(name);
            if !self.away.contains(name) || back {
                device.crash(self.random.next());
                self.away.remove(name);
            }
        }
        // One that was to be a device of the pool, or is to be none any more, may have no label of it.
        let is_found = |(name, device): &(&String, &Arc<Simulator>)| {
            !self.away.contains(*name) && nacre_pool::label::probe(&***device).unwrap().is_some()
        };
        let given = self.devices.iter().filter(is_found).map(|(_, device)| self.fuse.on(device)).collect();
        let import = Import { access: Access::ReadWrite, name: None, host: (1, "here".into()), time: 1_800_000_001 };
        let (store, root) = Store::open(given, &import).unwrap();
        assert!(root.txg.0 >= self.durable, "txg {} of {}", root.txg, self.durable);
        let state = &self.states[&root.txg.0];
        for (number, pointer) in state {
            let read = store.read(pointer).unwrap_or_else(|error| panic!("frame {number} {pointer:?}: {error}"));
            assert!(*read == *content(*number), "frame {number}");
        }
        let members: BTreeMap<String, DeviceHealth> = members(&store).collect();
        self.away.retain(|name| members.contains_key(name));
        self.devices.retain(|name, _| members.contains_key(name));
        for (name, health) in members {
            assert_eq!(health.absent, self.away.contains(&name), "{name}");
        }
        let charged: u64 = state.values().map(Pointer::charged).sum();
        let space = store.space();
        assert_eq!(space.allocated - space.table, charged);
        assert!(space.special <= space.allocated && space.free <= space.size);
        self.place = self.places.get(&root.txg.0).copied().flatten();
        (self.now, self.txg, self.durable) = (state.clone(), root.txg.0 + 1, root.txg.0);
        self.store = Some(store);
        if self.rotten {
            self.find_rot().unwrap();
        }
    }

    /// Something happens.
    fn happens(&mut self) -> Result<(), PoolError> {
        match self.random.below(40) {
            0 => self.fail_one(),
            1 => self.bring_one()?,
            2 => self.resilver_or_stop()?,
            3 if self.away.is_empty() => self.rot_one()?,
            4 if self.away.is_empty() && self.random.below(4) == 0 => self.ruin_one()?,
            5 => self.reshape()?,
            6 => drop(self.store().engage_spares()?),
            _ => self.step()?,
        }
        Ok(())
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
        (vec![(GroupKind::Plain, 1)], vec![64]),
        (vec![(GroupKind::Plain, 3)], vec![64, 96]),
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
                // The power fails in the middle of something, or between two things.
                let cut = (model.random.below(3) > 0).then(|| model.random.below(steps));
                for step in 0..steps {
                    if cut == Some(step) {
                        model.fuse.set(model.random.below(400));
                    }
                    let happened = model.happens();
                    if model.fuse.is_blown() {
                        break;
                    }
                    happened.unwrap();
                }
                model.again();
            }
            while !model.away.is_empty() {
                model.bring_one().unwrap();
            }
            model.resilver().unwrap();
            // What was written with fewer devices gets all its redundancy.
            while model.store().clean_step(64 * MIB).unwrap().more {
                model.commit().unwrap();
            }
            model.scrub().unwrap();
            model.ruin_one().unwrap();
            model.again();
        }
        println!("campaign: {} crashes", CRASHES.load(Ordering::Relaxed));
    }
}

fn open(devices: &[&Arc<Simulator>], access: Access) -> Result<Store, PoolError> {
    let import = Import { access, name: None, host: (1, "here".into()), time: 1_800_000_001 };
    let devices = devices.iter().map(|device| Arc::clone(device) as Arc<dyn Device>).collect();
    Store::open(devices, &import).map(|(store, _)| store)
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
    let before = model.sim(1).operations();
    for _ in 0..20 {
        model.write().unwrap();
    }
    model.commit().unwrap();
    assert_eq!(model.sim(1).operations(), before, "it is offline");
    let wrong: Arc<dyn Device> = Arc::clone(model.sim(2)) as _;
    assert!(model.store().online(1, wrong).is_err());
    model.store().online(1, Arc::clone(model.sim(1)) as _).unwrap();
    assert_eq!(model.store().on_devices().unwrap().stale(), [1]);
    let written = model.sim(1).written();
    model.resilver().unwrap();
    assert!(model.store().on_devices().unwrap().stale().is_empty());
    let more = model.sim(1).written() - written;
    assert!(more < 4 * MIB, "{more} bytes were written to a device that missed little");
    // Now another one may go.
    model.store.take().unwrap().close(true, 1).unwrap();
    let store = open(&[model.sim(0), model.sim(1), model.sim(3)], Access::ReadOnly).unwrap();
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
    let long = |number: &&u64| !number.is_multiple_of(3) && content(**number).len() > 100_000;
    let numbers: Vec<u64> = model.now.keys().filter(long).copied().take(3).collect();
    for number in &numbers {
        // In two columns: no one of them can be left out.
        let (content, pointer) = (content(*number), model.now.remove(number).unwrap());
        let spots = [96, 40_000].map(|at| cases::scattered::places(&model, &pointer, &content[at..at + 16])[0]);
        assert_ne!(spots[0].0, spots[1].0);
        model.store().free(&pointer, Txg(model.txg));
        for (device, offset) in spots {
            model.sim(device).overwrite(offset, &[0x5a; 16]);
        }
    }
    model.commit().unwrap();
    model.scrub().unwrap();
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
        let written = model.fill(8 * MIB);
        let after = model.store().space();
        assert!(after.available <= 8 * MIB && written > 0, "{kind:?} {sizes:?}: {after:?}");
        model.scrub().unwrap();
    }
}

/// A device that works is replaced without anything being lacking meanwhile.
#[test]
fn what_is_replaced_is_used_until_the_end() {
    let mut model = Model::new(&[(GroupKind::RaidZ(1), 4)], &[64], 13);
    for _ in 0..60 {
        model.write().unwrap();
    }
    model.commit().unwrap();
    model.replace(0).unwrap();
    assert_eq!(model.health()[4].role, MemberRole::Successor(0));
    let again = Arc::new(Simulator::new("again", 64 * MIB));
    assert!(model.store().replace(0, again, 1).unwrap_err().to_string().contains("being replaced already"));
    // Another device fails: without the old one, that would be too much.
    model.sim(2).fail_after(0);
    model.sim(2).fail_reads(true);
    model.away.insert("sim2".into());
    for _ in 0..20 {
        model.write().unwrap();
    }
    model.commit().unwrap();
    assert_eq!(model.health()[2].status, MemberStatus::Faulted);
    for (number, pointer) in &model.now {
        assert!(*model.store().read(pointer).unwrap() == *content(*number));
    }
    model.resilver().unwrap();
    assert_eq!(model.disks().devices()[0].name(), "new1");
    assert_eq!(model.health()[4].status, MemberStatus::Removed);
    assert!(nacre_pool::label::probe(&**model.sim(0)).unwrap().is_none(), "the old one belongs to no pool");
    for (number, pointer) in &model.now {
        assert!(*model.store().read(pointer).unwrap() == *content(*number));
    }
    model.again();
    // The next one takes the number that is free again.
    model.replace(1).unwrap();
    assert_eq!(model.health().len(), 5);
}

/// A spare stands in for a device that fails, and is given back when that is there again; or stays.
#[test]
fn spares_stand_in_and_are_given_back() {
    let mut model = Model::new(&[(GroupKind::Mirror, 2)], &[64], 17);
    let (spare, guid) = model.fresh();
    model.store().add_spare(spare, guid).unwrap();
    let short = Arc::new(Simulator::new("short", 32 * MIB));
    assert!(model.store().add_spare(short, 1).unwrap_err().to_string().contains("too small"));
    for _ in 0..60 {
        model.write().unwrap();
    }
    model.commit().unwrap();
    assert!(model.store().engage_spares().unwrap().is_empty());
    let fail = |model: &mut Model, name: &str| {
        model.devices[name].fail_after(0);
        model.devices[name].fail_reads(true);
        model.away.insert(name.to_owned());
        model.write().unwrap();
        model.commit().unwrap();
    };
    fail(&mut model, "sim0");
    assert_eq!(model.store().engage_spares().unwrap(), [(0, 2)]);
    assert_eq!(model.health()[2].role, MemberRole::SpareFor(0));
    model.resilver().unwrap();
    assert_eq!(model.lacking(0, &[]), 0);
    // Now the other may go as well.
    fail(&mut model, "sim1");
    for (number, pointer) in &model.now {
        assert!(*model.store().read(pointer).unwrap() == *content(*number));
    }
    for (number, name) in [(0, "sim0"), (1, "sim1")] {
        model.devices[name].crash(4);
        model.away.remove(name);
        model.store().online(number, Arc::clone(&model.devices[name]) as _).unwrap();
    }
    model.resilver().unwrap();
    assert_eq!((model.health()[2].role, model.lacking(0, &[])), (MemberRole::Spare, 0));
    // Or it stays for good.
    fail(&mut model, "sim1");
    model.store().engage_spares().unwrap();
    assert!(model.store().detach(0).is_err(), "nobody else has everything yet");
    model.resilver().unwrap();
    model.store().detach(1).unwrap();
    assert_eq!(model.disks().devices()[1].name(), "new1");
    model.again();
    assert_eq!(model.lacking(0, &[]), 0);
    model.scrub().unwrap();
}

/// A pool on one device that is nearly full becomes a mirror: copies are written to the new device
/// alone, and either of the two may go then.
#[test]
fn a_full_device_becomes_a_mirror() {
    let mut model = Model::new(&[(GroupKind::Plain, 1)], &[64], 19);
    model.fill(MIB);
    assert!(model.store().detach(0).unwrap_err().to_string().contains("only applicable to mirror"));
    let short = Arc::new(Simulator::new("short", 63 * MIB));
    assert!(model.store().attach(0, short, 1).unwrap_err().to_string().contains("too small"));
    assert!(model.store().identity().groups.is_empty(), "what was refused has changed nothing");
    let written = model.sim(0).written();
    let (new, guid) = model.fresh();
    model.store().attach(0, new, guid).unwrap();
    assert!(model.store().detach(0).unwrap_err().to_string().contains("no valid replicas"));
    model.resilver().unwrap();
    assert_eq!(model.lacking(0, &[]), 0);
    let written = model.sim(0).written() - written;
    assert!(written < 16 * MIB, "{written} bytes were written to the device that had everything");
    for _ in 0..4 {
        model.survives_losses();
    }
    // The log lies on both.
    assert_eq!(model.disks().log_copies(), 2);
    model.store().detach(0).unwrap();
    let space = model.store().space();
    assert!(space.free > 0 && space.size > 40 * MIB, "{space:?}");
    model.again();
    model.write().unwrap();
    model.commit().unwrap();
    model.scrub().unwrap();
}

/// What lies on a device that answers late is computed from the others.
#[test]
fn a_slow_device_is_read_around() {
    for (kind, devices) in [(GroupKind::RaidZ(1), 4), (GroupKind::Mirror, 2)] {
        let mut model = Model::new(&[(kind, devices)], &[64], 29);
        for _ in 0..60 {
            model.write().unwrap();
        }
        model.commit().unwrap();
        let read_all = |model: &Model| {
            let before = model.sim(1).reads();
            for (number, pointer) in &model.now {
                assert!(*model.store().read(pointer).unwrap() == *content(*number));
            }
            model.sim(1).reads() - before
        };
        // But for the first, which way reads what does not depend on who is late.
        let ways = |model: &Model| -> Vec<Vec<u16>> {
            let segments = model.store().segments().into_iter().filter(|segment| !segment.place.is_empty());
            let members = segments.map(|segment| {
                let at = SegmentAt { segment: segment.id, place: &segment.place };
                (1..model.disks().ways(at)).map(|way| model.disks().member(at, way)).collect()
            });
            members.collect()
        };
        let all_ways = ways(&model);
        let healthy = read_all(&model);
        assert!(healthy > 10, "{healthy}");
        model.sim(1).slow_down(std::time::Duration::from_millis(20));
        // The others may answer late as well, as long as the machine has too much to do.
        let around = (0..50).map(|_| read_all(&model)).find(|around| around * 4 < healthy);
        assert!(around.is_some(), "a device that is late is read as often as one that is not: {healthy} times");
        assert_eq!(ways(&model), all_ways);
    }
}

type Change = fn(&Store, Vec<Arc<dyn Device>>) -> Result<(), PoolError>;
/// What it is called, the pool before it, how many devices it needs, the change itself.
type Case = (&'static str, Vec<(GroupKind, usize)>, usize, Change);

fn resilver(store: &Store, txg: u64) -> Result<(), PoolError> {
    let commit = |txg| {
        let log_start = LogStart::default();
        store.commit(&Commit { txg: Txg(txg), catalog: None, upper: &[], log_start, time: 1 })
    };
    let (stale, changes) = store.stale_devices()?;
    let whole = store.resilver(&mut |checked| checked.damage.is_none() || checked.mended, &mut |_| {})?;
    assert!(whole, "something is damaged");
    commit(txg)?;
    store.strengthen()?;
    commit(txg + 1)?;
    store.resilvered(&stale, changes).map(drop)
}

fn first(devices: Vec<Arc<dyn Device>>) -> Arc<dyn Device> {
    devices.into_iter().next().unwrap()
}

/// Wherever the power fails in a change of what the pool consists of, everything is there afterwards,
/// and what was begun is done or can be done again.
#[test]
fn a_crash_in_a_change_leaves_the_old_or_the_new() {
    let changes: Vec<Case> = vec![
        ("attach to one", vec![(GroupKind::Plain, 1)], 1, |store, new| {
            store.attach(0, first(new), 50)?;
            resilver(store, 1000)
        }),
        ("attach to one of two", vec![(GroupKind::Plain, 2)], 1, |store, new| {
            store.attach(0, first(new), 50)?;
            resilver(store, 1000)
        }),
        ("attach to a mirror", vec![(GroupKind::Mirror, 2)], 1, |store, new| {
            store.attach(1, first(new), 50)?;
            resilver(store, 1000)
        }),
        ("detach", vec![(GroupKind::Mirror, 2)], 0, |store, _| store.detach(0)),
        ("replace", vec![(GroupKind::RaidZ(1), 3)], 1, |store, new| {
            store.replace(0, first(new), 50)?;
            resilver(store, 1000)
        }),
        ("replace one", vec![(GroupKind::Plain, 1)], 1, |store, new| {
            store.replace(0, first(new), 50)?;
            resilver(store, 1000)
        }),
        ("add rows to a mirror", vec![(GroupKind::Mirror, 2)], 3, |store, new| {
            store.add_groups(&new, &[50, 51, 52], &new_groups(&[(GroupKind::RaidZ(1), 3)]))
        }),
        ("add a mirror to one", vec![(GroupKind::Plain, 1)], 2, |store, new| {
            store.add_groups(&new, &[50, 51], &new_groups(&[(GroupKind::Mirror, 2)]))
        }),
        ("add a mirror for metadata", vec![(GroupKind::Plain, 1)], 2, |store, new| {
            store.add_special(&new, &[50, 51], &new_groups(&[(GroupKind::Mirror, 2)]))
        }),
        ("add a spare", vec![(GroupKind::Mirror, 2)], 1, |store, new| store.add_spare(first(new), 50)),
    ];
    let number = |name: &str| std::env::var(name).ok().and_then(|number| number.parse::<u64>().ok());
    let (every, seed) = (number("NACRE_GROUP_CUTS").unwrap_or(131), number("NACRE_GROUP_SEED").unwrap_or(0));
    println!("campaign: power fails at each {every}th write of a change (NACRE_GROUP_CUTS)");
    for (what, groups, more, change) in changes {
        let mut model = Model::new(&groups, &[64], 23);
        for _ in 0..30 {
            model.write().unwrap();
        }
        model.commit().unwrap();
        let next = |cut| cut + if cut < 14 { 1 } else { every };
        cases::cuts::cut(what, model, more, seed, change, next, |store| resilver(store, 2000));
    }
}
