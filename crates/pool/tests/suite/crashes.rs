//! The whole engine on devices that lose power at any moment: files, names, attributes, snapshots,
//! clones and their administration against a model.
//!
//! After each crash the pool must be in a state that it was in between the last promise (an fsync,
//! a commit) and the crash: names, links and attributes as after one of the operations; content of
//! a file as it was then, if it had been made durable since its last change, else made of bytes
//! that it had at some time since; snapshots exactly as taken. And everything that is allocated is
//! reached by something, to the byte.
//!
//! `NACRE_POOL_ROUNDS` is the number of crashes for each seed, `NACRE_POOL_SEED` the only seed to
//! run. For long runs: `NACRE_POOL_STEPS` is the number of operations between two crashes (at most
//! 20 more), `NACRE_POOL_FULL=n` reads snapshots and accounts for everything at each n-th crash
//! only (names, attributes and contents of all datasets are compared at each).

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::crash_model::World;
use crate::pools::{Imported, Random, check, create, open, shapes};
use nacre_pool::PoolError;
use nacre_pool::device::{Device, Simulator};
use nacre_pool::engine::Dataset;
use nacre_pool::files::{AttributeChange, FileError, Inode, NewInode, ParentView};
use nacre_pool::rows::{FileType, InodeRow};
use nacre_pool::store::Access;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().expect(name))
}

/// Rounds of work and crashes on a pool of so many devices.
fn campaign(seed: u64, disks: usize, rounds: u64) {
    let mut random = Random(seed);
    let disks: Vec<_> = (0..disks).map(|at| Arc::new(Simulator::new(&format!("disk{at}"), 64 << 20))).collect();
    let mut imported = create(&disks, random.next());
    let mut world = World::new();
    let most = number("NACRE_POOL_STEPS").unwrap_or(200);
    let every = number("NACRE_POOL_FULL").unwrap_or(1);
    for round in 0..rounds {
        let what = format!("seed {seed}, round {round}");
        let full = round % every == every - 1;
        // In every third round the power fails in the middle of something.
        let sudden = round % 3 == 1;
        if sudden {
            for disk in &disks {
                disk.fail_after(1 + random.below(2 * most));
            }
        }
        let steps = 20 + random.below(most);
        for _ in 0..steps {
            if !world.step(&imported, &mut random) {
                break;
            }
        }
        if !sudden && random.below(4) == 0 && full {
            world.compare(&imported, &what);
            check(&imported);
        }
        if !sudden && random.below(5) == 0 {
            imported.pool.commit().unwrap();
            world.promise_all();
            imported.store.close(true, 5).unwrap();
        }
        if std::env::var_os("NACRE_POOL_TRACE").is_some() {
            eprintln!("crash of {what} after txg {}", imported.store.durable().0);
        }
        drop(imported);
        for disk in &disks {
            disk.crash(random.next());
        }
        imported = open(&disks, random.next(), Access::ReadWrite).unwrap_or_else(|error| panic!("{what}: {error}"));
        world.recover(&imported, full, &what);
        if full {
            check(&imported);
        }
    }
    println!(
        "campaign: seed {seed}, {} operations, {rounds} crashes (NACRE_POOL_ROUNDS, NACRE_POOL_SEED)",
        world.operation
    );
}

fn run(seeds: std::ops::Range<u64>, disks: usize) {
    let rounds = number("NACRE_POOL_ROUNDS").unwrap_or(4);
    match number("NACRE_POOL_SEED") {
        Some(seed) => campaign(seed, disks, rounds),
        None => seeds.for_each(|seed| campaign(seed, disks, rounds)),
    }
}

#[test]
fn one_device_that_loses_power_keeps_every_promise() {
    run(0..3, 1);
}

#[test]
fn two_devices_that_lose_power_keep_every_promise() {
    run(100..101, 2);
}

/// The devices of a pool that changes its shape.
struct Changing {
    disks: Vec<Arc<Simulator>>,
    made: usize,
    /// One of them has failed.
    away: Option<String>,
}

impl Changing {
    fn fresh(&mut self) -> Arc<Simulator> {
        self.made += 1;
        let new = Arc::new(Simulator::new(&format!("new{}", self.made), 64 << 20));
        self.disks.push(Arc::clone(&new));
        new
    }

    /// A change begins or goes on, or a device fails. `false`: the power has.
    fn step(&mut self, imported: &Imported, random: &mut Random) -> bool {
        match self.try_step(imported, random) {
            Ok(()) | Err(PoolError::Refused(_) | PoolError::NoSpace) => true,
            Err(PoolError::Device { .. } | PoolError::Suspended { .. }) => false,
            Err(error) => panic!("{error:?}"),
        }
    }

    fn try_step(&mut self, imported: &Imported, random: &mut Random) -> Result<(), PoolError> {
        let (pool, store) = (&imported.pool, &imported.store);
        let disks = store.on_devices().unwrap();
        if store.shape_change().is_some() && random.below(6) > 0 {
            let mut stuck = BTreeSet::new();
            let moved = store.reshape_step([1 << 18, 1 << 40][random.below(2) as usize], &mut stuck)?;
            if moved.idle {
                pool.commit()?;
                pool.commit()?;
                store.end_change()?;
            }
            pool.grown();
            return Ok(());
        }
        let health = disks.health();
        let number = random.below(health.len() as u64) as u16;
        let own = health[usize::from(number)];
        match random.below(8) {
            0 => store.give_up_change()?,
            1 if self.disks.len() < 10 => {
                let new = self.fresh();
                store.attach(number, new, random.next())?;
                return self.make_whole(imported);
            }
            2 if own.is_own()
                && self.is_whole(imported)
                && disks.groups().get(own.group).is_some_and(|of| of.1 > 0) =>
            {
                let failing = &disks.devices()[usize::from(number)];
                let failing = self.disks.iter().find(|disk| disk.name() == failing.name()).unwrap();
                failing.fail_after(random.below(9));
                failing.fail_reads(true);
                self.away = Some(failing.name().to_owned());
            }
            _ => {
                let Some(shape) = shapes::any(disks, number, random) else { return Ok(()) };
                if self.disks.len() + shape.coming > 10 {
                    return Ok(());
                }
                let new: Vec<Arc<dyn Device>> = (0..shape.coming).map(|_| self.fresh() as _).collect();
                let guids: Vec<u64> = new.iter().map(|_| random.next()).collect();
                store.begin_change(&shape, &new, &guids)?;
                pool.grown();
            }
        }
        Ok(())
    }

    fn is_whole(&self, imported: &Imported) -> bool {
        let health = imported.store.on_devices().unwrap().health();
        self.away.is_none() && health.iter().all(|one| !one.status.belongs() || !one.stale && !one.absent)
    }

    /// Devices that came back or are new get what they lack.
    fn make_whole(&self, imported: &Imported) -> Result<(), PoolError> {
        let (pool, store) = (&imported.pool, &imported.store);
        let (stale, changes) = store.stale_devices()?;
        if stale.is_empty()
            || !store.resilver(&mut |checked| checked.damage.is_none() || checked.mended, &mut |_| {})?
        {
            return Ok(());
        }
        pool.commit()?;
        store.strengthen()?;
        pool.commit()?;
        store.resilvered(&stale, changes).map(drop)
    }

    /// What an import is given: what has a label of the pool, and is there.
    fn given(&mut self) -> Vec<Arc<Simulator>> {
        self.disks.retain(|disk| nacre_pool::label::probe(&**disk).unwrap().is_some());
        self.disks.iter().filter(|disk| Some(disk.name()) != self.away.as_deref()).cloned().collect()
    }
}

/// As [`campaign`], on a pool that changes its shape meanwhile, and of which devices fail that it can do
/// without.
fn changing(seed: u64, rounds: u64) {
    let mut random = Random(seed);
    let disks: Vec<_> = (0..2).map(|at| Arc::new(Simulator::new(&format!("disk{at}"), 64 << 20))).collect();
    let mut imported = create(&disks, random.next());
    let mut devices = Changing { disks, made: 0, away: None };
    let mut world = World::new();
    let most = number("NACRE_POOL_STEPS").unwrap_or(200);
    for round in 0..rounds {
        let what = format!("changing, seed {seed}, round {round}");
        let sudden = round % 3 == 1;
        if sudden {
            for disk in &devices.disks {
                disk.fail_after(1 + random.below(2 * most));
            }
        }
        for _ in 0..20 + random.below(most) {
            let goes_on = match random.below(8) {
                0 => devices.step(&imported, &mut random),
                _ => world.step(&imported, &mut random),
            };
            if !goes_on {
                break;
            }
        }
        drop(imported);
        devices.disks.iter().for_each(|disk| disk.crash(random.next()));
        // Others may have failed before all have.
        if sudden || random.below(2) == 0 {
            devices.away = None;
        }
        let given = devices.given();
        imported = open(&given, random.next(), Access::ReadWrite).unwrap_or_else(|error| panic!("{what}: {error}"));
        world.recover(&imported, true, &what);
        if let Some(away) = devices.away.take() {
            let disks = imported.store.on_devices().unwrap();
            let number = disks.devices().iter().position(|disk| disk.name() == away);
            let back = devices.disks.iter().find(|disk| disk.name() == away);
            if let (Some(number), Some(back)) = (number, back) {
                imported.store.online(number as u16, Arc::clone(back) as _).unwrap();
            }
        }
        match devices.make_whole(&imported) {
            Ok(()) | Err(PoolError::NoSpace) => {}
            Err(error) => panic!("{what}: {error}"),
        }
        check(&imported);
    }
    println!("campaign: seed {seed}, {} operations, {rounds} crashes of a pool that changes", world.operation);
}

#[test]
fn a_pool_that_changes_its_shape_keeps_every_promise() {
    let rounds = number("NACRE_POOL_ROUNDS").unwrap_or(4);
    match number("NACRE_POOL_SEED") {
        Some(seed) => changing(seed, rounds),
        None => (200..203).for_each(|seed| changing(seed, rounds)),
    }
}

fn tank(imported: &Imported) -> Arc<Dataset> {
    imported.pool.dataset(imported.pool.find("tank").unwrap().unwrap()).unwrap()
}

fn make(tank: &Dataset, name: &str) -> Result<Arc<Inode>, FileError> {
    let row = |parent: &ParentView| InodeRow::new(FileType::Regular, 0o644, parent.now);
    let new = |parent: &ParentView| Ok(NewInode { row: row(parent), target: None, attributes: Vec::new() });
    tank.files().make(&tank.files().root(), name.as_bytes(), b"", &new).map(|(inode, _)| inode)
}

/// Writes content as a mount does: whole records, much at once.
fn write(tank: &Dataset, inode: &Arc<Inode>, content: &[u8]) -> Result<(), FileError> {
    for (at, part) in content.chunks(1 << 20).enumerate() {
        tank.files().write(inode, Some((at as u64) << 20), part)?;
    }
    Ok(())
}

fn content(tank: &Dataset, name: &str) -> Option<Vec<u8>> {
    let (inode, row) = tank.files().look_up(&tank.files().root(), name.as_bytes()).ok()?;
    let mut content = vec![0; row.size as usize];
    assert_eq!(tank.files().read(&inode, 0, &mut content).unwrap(), content.len());
    Some(content)
}

/// Whole records go to the device long before a commit names them. The power fails at each of these
/// writes, and at each of the commit's: what was committed is whole, nothing else is there, and not a
/// byte is taken by what was written ahead: overwritten, cut off and removed before the commit.
#[test]
fn content_written_ahead_counts_from_the_commit_on() {
    let noise = |seed: u64, length: usize| -> Vec<u8> {
        let mut random = Random(seed);
        (0..length / 8).flat_map(|_| random.next().to_le_bytes()).collect()
    };
    let (old, new, newer) = (noise(1, 2 << 20), noise(2, 3 << 20), noise(3, 1 << 20));
    let last = [&newer[..], &new[newer.len()..]].concat();
    let (mut point, mut ahead) = (0, 0);
    loop {
        let disk = Arc::new(Simulator::new("disk", 64 << 20));
        let disks = [Arc::clone(&disk)];
        let imported = create(&disks, 2);
        write(&tank(&imported), &make(&tank(&imported), "kept").unwrap(), &old).unwrap();
        imported.pool.commit().unwrap();
        let before = disk.written();
        disk.fail_after(point);
        let mut work = || -> Result<(), FileError> {
            let tank = tank(&imported);
            let root = tank.files().root();
            let (kept, _) = tank.files().look_up(&root, b"kept")?;
            write(&tank, &kept, &new)?;
            write(&tank, &kept, &newer)?;
            let gone = make(&tank, "gone")?;
            write(&tank, &gone, &new)?;
            tank.files().unlink(&root, b"gone")?;
            drop(gone);
            let cut = make(&tank, "cut")?;
            write(&tank, &cut, &new)?;
            let size = Some((1 << 20) + 5);
            tank.files().set_attributes(&cut, &AttributeChange { size, ..AttributeChange::default() })?;
            ahead = ahead.max(disk.written() - before);
            imported.pool.sync_file(&tank, &kept)
        };
        let done = work();
        drop(imported);
        disk.crash(point);
        let imported = open(&disks, 3, Access::ReadWrite).unwrap_or_else(|error| panic!("write {point}: {error}"));
        check(&imported);
        let kept = content(&tank(&imported), "kept").unwrap();
        let cut = content(&tank(&imported), "cut");
        match cut {
            Some(cut) => assert!(kept == last && cut == new[..(1 << 20) + 5], "write {point}"),
            None => assert!(kept == old && done.is_err(), "write {point}"),
        }
        assert!(content(&tank(&imported), "gone").is_none());
        // The room of what is lost takes other content, and nothing else.
        write(&tank(&imported), &make(&tank(&imported), "more").unwrap(), &new).unwrap();
        imported.pool.commit().unwrap();
        check(&imported);
        assert!(content(&tank(&imported), "kept").unwrap() == kept, "write {point}");
        if done.is_ok() {
            break;
        }
        point += 1;
    }
    assert!(ahead > 6 << 20, "{ahead} bytes were written before the commit");
    println!("campaign: {point} writes at which the power fails");
}
