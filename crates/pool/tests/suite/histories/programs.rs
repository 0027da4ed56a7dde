//! What the programs of a history do.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use nacre_pool::PoolError;
use nacre_pool::backend::{Bucket, Objects, WriterId};
use nacre_pool::device::Random;
use nacre_pool::engine::{Dataset, Durable, Pool, PoolConfig};
use nacre_pool::files::{FileError, NewInode, ParentView};
use nacre_pool::rows::{FileType, InodeRow, Timestamp};
use nacre_pool::store::{Access, Import, NewPool, Store};

use super::facts::{Counts, FILES, Facts, Version, read_all};
use super::store::{Seen, Simulation, Still, Weather};

const SEGMENT: u64 = 1 << 20;
const SIZE: u64 = 62 << 20;
/// A file that was made, and has no content yet.
const EMPTY: Version = 1;

type Clock = Box<dyn Fn() -> u64 + Send + Sync>;
type Shared = Arc<Mutex<Facts>>;

fn lock(facts: &Mutex<Facts>) -> MutexGuard<'_, Facts> {
    facts.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn objects(bucket: Arc<dyn Bucket>, nonce: u64, clock: Clock) -> Arc<Objects> {
    let writer = WriterId { nonce, host: format!("program {nonce}"), clock, uptime: Box::new(|| 1) };
    Arc::new(Objects::new(bucket, 7, SEGMENT, SIZE, writer))
}

pub fn open_store(bucket: Arc<dyn Bucket>, access: Access, nonce: u64, clock: Clock) -> Result<Store, PoolError> {
    let nobody = || PoolError::Refused("no pool".to_owned());
    let identity = Objects::find(&*bucket)?.ok_or_else(nobody)?;
    let import = Import { access, name: None, host: (nonce, "here".to_owned()), time: 1_800_000_001 };
    Ok(Store::open_in(objects(bucket, nonce, clock), identity, &import)?.0)
}

fn config(store: &Arc<Store>, seed: u64) -> Result<PoolConfig, PoolError> {
    let (ticks, random) = (AtomicI64::new(1_800_000_000), AtomicU64::new(seed));
    Ok(PoolConfig {
        log: Some(store.log()?),
        storage: Arc::clone(store) as _,
        clock: Arc::new(move || Timestamp { seconds: ticks.fetch_add(1, Ordering::Relaxed), nanoseconds: 1 }),
        entropy: Arc::new(move || Random(random.fetch_add(1, Ordering::Relaxed)).next()),
        cache: 1 << 20,
        kept: None,
    })
}

fn name(file: u64) -> String {
    format!("f{file}")
}

fn content(file: u64, version: Version) -> Vec<u8> {
    let mut random = Random(version);
    let mut content: Vec<u8> = version.to_le_bytes().to_vec();
    content.resize_with(1000 + file as usize * 4000, || random.next() as u8);
    content
}

/// One program on the store.
struct Program {
    simulation: Arc<Simulation>,
    facts: Shared,
    number: usize,
    random: Random,
    /// How far its clock is off, seconds.
    off: i64,
}

/// What it has imported.
struct Life<'a> {
    of: &'a Program,
    store: Arc<Store>,
    pool: Pool,
    tank: Arc<Dataset>,
    nonce: u64,
    /// The generation that it began with, and its deeds so far.
    order: (u64, u64),
    /// The newest generation that it has acknowledged.
    told: u64,
    /// Something was done that was not told to be durable.
    owes: bool,
}

/// What came of a deed.
enum Came {
    /// It was refused, and nothing changed.
    Nothing,
    /// This import can do nothing any more.
    Gone,
}

fn judge<T>(result: Result<T, FileError>) -> Result<T, Came> {
    result.map_err(|error| match error {
        FileError::Pool(PoolError::NoSpace) => Came::Nothing,
        FileError::Pool(PoolError::Device { .. } | PoolError::Suspended { .. } | PoolError::Refused(_)) => Came::Gone,
        error => panic!("{error:?}"),
    })
}

impl Program {
    fn clock(&self) -> Clock {
        let (simulation, off) = (Arc::clone(&self.simulation), self.off);
        Box::new(move || simulation.clock().saturating_add_signed(off))
    }

    fn bucket(&self) -> Arc<dyn Bucket> {
        Arc::new(Seen { of: Arc::clone(&self.simulation), program: self.number })
    }

    fn import(&self) -> Result<Life<'_>, PoolError> {
        let nonce = {
            let mut facts = lock(&self.facts);
            facts.nonces += 1;
            facts.nonces
        };
        self.simulation.tell(|| format!("program {} imports as {nonce}", self.number));
        let store = Arc::new(open_store(self.bucket(), Access::ReadWrite, nonce, self.clock())?);
        let root = store.root();
        let durable = Durable { txg: root.txg, catalog: root.catalog.expect("a catalog"), log: root.log_start.into() };
        let pool = Pool::open(config(&store, nonce)?, &durable)?;
        // The root by which the pool was taken over.
        let root = store.root();
        {
            let mut facts = lock(&self.facts);
            let older = facts.newest;
            facts.newest = root.generation.max(older);
            facts.counts.taken += u64::from(older > 0);
        }
        let tank = pool.dataset(pool.find("tank")?.expect("a file system"))?;
        let told = root.generation;
        let mut life = Life { of: self, store, pool, tank, nonce, order: (told, 0), told: told - 1, owes: false };
        self.simulation.tell(|| format!("program {} has root {told}", self.number));
        let found = life.read_files()?;
        lock(&self.facts).imported(root.generation, &found);
        life.acknowledge();
        Ok(life)
    }

    fn run(&mut self, lives: u64) {
        for _ in 0..lives {
            self.simulation.stand(self.number);
            let mut random = Random(self.random.next());
            let Ok(mut life) = self.import() else {
                lock(&self.facts).counts.refused += 1;
                continue;
            };
            for _ in 0..5 + random.below(40) {
                match life.step(&mut random) {
                    Ok(()) | Err(Came::Nothing) => {}
                    Err(Came::Gone) => break,
                }
            }
            if random.below(3) == 0 {
                drop(life.export());
            }
        }
    }
}

impl Life<'_> {
    fn read_files(&self) -> Result<BTreeMap<u64, Version>, PoolError> {
        let mut found = BTreeMap::new();
        for file in 0..FILES {
            let of_pool = |error| match error {
                FileError::Pool(error) => error,
                error => panic!("{error:?}"),
            };
            let (inode, _) = match self.tank.files().look_up(&self.tank.files().root(), name(file).as_bytes()) {
                Err(FileError::NotFound) => continue,
                looked => looked.map_err(of_pool)?,
            };
            let mut there = vec![0; content(file, 0).len()];
            let length = self.tank.files().read(&inode, 0, &mut there).map_err(of_pool)?;
            let version = there.first_chunk().map_or(0, |version| u64::from_le_bytes(*version));
            found.insert(file, if length == 0 { EMPTY } else { version });
            assert!(length == 0 || there == content(file, version), "content of file {file}, version {version}");
        }
        Ok(found)
    }

    /// Notes the roots that were put since the last time.
    fn acknowledge(&mut self) {
        let newest = self.store.root().generation;
        for generation in self.told + 1..=newest {
            lock(&self.of.facts).acknowledged(generation, self.nonce);
        }
        self.told = newest;
    }

    fn deed(&mut self, file: u64, version: Version) {
        self.order.1 += 1;
        self.owes = true;
        lock(&self.of.facts).deed(file, self.order, version);
        let order = self.order;
        self.of.simulation.tell(|| format!("  program {}: {order:?} file {file} version {version}", self.of.number));
    }

    /// Does something that is told to be durable, if it is.
    fn told<T>(&mut self, only: Option<u64>, work: impl FnOnce(&Self) -> Result<T, FileError>) -> Result<T, Came> {
        let may_be_told = lock(&self.of.facts).may_be_told(self.order.0);
        let before = self.store.root().generation;
        let done = judge(work(self))?;
        let mut facts = lock(&self.of.facts);
        let is_told = self.owes || self.store.root().generation > before;
        assert!(may_be_told || !is_told, "import {} was told that something is durable", self.order.0);
        facts.promise(self.order, only);
        facts.counts.synced += 1;
        drop(facts);
        let order = self.order;
        self.of.simulation.tell(|| format!("  program {}: {order:?} is promised ({only:?})", self.of.number));
        self.owes = only.is_some() && self.owes;
        self.acknowledge();
        Ok(done)
    }

    fn step(&mut self, random: &mut Random) -> Result<(), Came> {
        let before = self.order;
        let done = self.try_step(random);
        if done.is_err() && self.order != before {
            // Of several deeds the last one failed, or none did and they were not made durable.
            lock(&self.of.facts).fail(self.order);
        }
        done
    }

    fn try_step(&mut self, random: &mut Random) -> Result<(), Came> {
        let file = random.below(FILES);
        match random.below(20) {
            0..11 => {
                let inode = self.write(file)?;
                if random.below(2) == 0 {
                    // What this file owes, and only that.
                    self.told(Some(file), |life| life.pool.sync_file(&life.tank, &inode))?;
                }
                Ok(())
            }
            11..14 => {
                let files = self.tank.files();
                match files.look_up(&files.root(), name(file).as_bytes()) {
                    Err(FileError::NotFound) => return Ok(()),
                    found => drop(judge(found)?),
                }
                self.deed(file, 0);
                let files = self.tank.files();
                judge(files.unlink(&files.root(), name(file).as_bytes()))
            }
            14..16 => self.told(None, |life| {
                life.store.clean_step(SEGMENT).map_err(FileError::Pool)?;
                life.pool.commit().map(drop).map_err(FileError::Pool)
            }),
            16 => {
                self.of.simulation.stand(self.of.number);
                Ok(())
            }
            _ => self.told(None, |life| life.pool.commit().map(drop).map_err(FileError::Pool)),
        }
    }

    fn write(&mut self, file: u64) -> Result<Arc<nacre_pool::files::Inode>, Came> {
        let root = self.tank.files().root();
        let inode = match self.tank.files().look_up(&root, name(file).as_bytes()) {
            Ok((inode, _)) => inode,
            Err(FileError::NotFound) => {
                let new = |parent: &ParentView| {
                    let row = InodeRow::new(FileType::Regular, 0o644, parent.now);
                    Ok(NewInode { row, target: None, attributes: Vec::new() })
                };
                self.deed(file, EMPTY);
                judge(self.tank.files().make(&root, name(file).as_bytes(), b"", &new))?.0
            }
            error => judge(error)?.0,
        };
        let version = {
            let mut facts = lock(&self.of.facts);
            facts.versions = facts.versions.max(EMPTY) + 1;
            facts.versions
        };
        self.deed(file, version);
        judge(self.tank.files().write(&inode, Some(0), &content(file, version)))?;
        Ok(inode)
    }

    fn export(mut self) -> Result<(), Came> {
        self.told(None, |life| {
            life.pool.commit().map_err(FileError::Pool)?;
            life.store.close(true, 1_800_000_002).map_err(FileError::Pool)
        })
    }
}

/// A program that fails does not keep the others waiting.
struct Leaving(Arc<Simulation>, usize);

impl Drop for Leaving {
    fn drop(&mut self) {
        self.0.leave(self.1);
    }
}

fn simulation(seed: u64, programs: usize, base: &Still, weather: Weather, facts: &Shared) -> Arc<Simulation> {
    let facts = Arc::clone(facts);
    let watch = Box::new(move |change: &super::store::Change<'_>| lock(&facts).watch(change));
    Arc::new(Simulation::new(seed, programs, base, weather, watch))
}

const CALM: Weather = Weather { faults: 0, stalls: 0, cuts: 0 };

/// Pools to begin with: a new one, and one that is about to remove its first roots.
fn bases() -> &'static [(Still, Facts)] {
    static BASES: OnceLock<Vec<(Still, Facts)>> = OnceLock::new();
    BASES.get_or_init(|| {
        let facts = Shared::default();
        let simulation = simulation(1, 1, &(BTreeMap::new(), 1_800_000_000), CALM, &facts);
        let program = Program { simulation: Arc::clone(&simulation), facts, number: 0, random: Random(1), off: 0 };
        let new = NewPool {
            name: "tank".into(),
            guid: 7,
            host: (1, "here".into()),
            time: 1_800_000_000,
            redundant_metadata: false,
        };
        let store = Store::create_in(objects(program.bucket(), 0, program.clock()), &new, SIZE).expect("a pool").0;
        let store = Arc::new(store);
        Pool::create(config(&store, 1).unwrap(), "tank").unwrap().commit().unwrap();
        let still = || (simulation.still(), lock(&program.facts).clone());
        let mut bases = vec![still()];
        let mut random = Random(2);
        let mut life = program.import().unwrap();
        while life.told < 245 {
            assert!(life.step(&mut random).is_ok());
        }
        drop(life);
        bases.push(still());
        bases
    })
}

/// One history; panics where something is not as it should be.
fn history(seed: u64) -> Counts {
    let mut random = Random(seed);
    let (base, facts) = random.pick(bases()).unwrap();
    let facts = Arc::new(Mutex::new(facts.again()));
    let programs = 2 + random.below(2) as usize;
    let weather = Weather {
        faults: *random.pick(&[4, 10, 30, 0]).unwrap(),
        stalls: *random.pick(&[10, 40, 150]).unwrap(),
        cuts: *random.pick(&[0, 100, 400]).unwrap(),
    };
    let simulation = simulation(random.next(), programs, base, weather, &facts);
    let seeds: Vec<(u64, i64)> =
        (0..programs).map(|_| (random.next(), [0, 0, 3500, -3500][random.below(4) as usize])).collect();
    let run = || {
        std::thread::scope(|scope| {
            for (number, (seed, off)) in seeds.iter().enumerate() {
                let simulation = Arc::clone(&simulation);
                let facts = Arc::clone(&facts);
                scope.spawn(move || {
                    let _leaving = Leaving(Arc::clone(&simulation), number);
                    simulation.enter(number);
                    let mut random = Random(*seed);
                    let lives = 1 + random.below(3);
                    Program { simulation, facts, number, random, off: *off }.run(lives);
                });
            }
        });
        // When all is over, the last one finds all that was promised.
        simulation.settle();
        let last = Program {
            simulation: Arc::clone(&simulation),
            facts: Arc::clone(&facts),
            number: programs,
            random: Random(0),
            off: 0,
        };
        let life = last.import().expect("the last import");
        let seen = life.pool.check(&life.store, false, &mut |what| println!("{what}")).expect("a check");
        assert_eq!(seen.problems, 0, "problems in the pool");
        assert!(life.export().is_ok(), "the last export");
        drop(read_all(&simulation.still().0));
    };
    if let Err(failure) = catch_unwind(AssertUnwindSafe(run)) {
        println!("{}", simulation.trace());
        println!(
            "history of seed {seed} (NACRE_POOL_SEED={seed} NACRE_POOL_HISTORIES=1, NACRE_POOL_TRACE=1 tells more)"
        );
        resume_unwind(failure);
    }
    let facts = lock(&facts);
    Counts { requests: simulation.requests(), ..facts.counts }
}

/// Programs that take over a pool at the same moment, all of them: one of them has it then.
pub fn take_over_at_once(seed: u64) {
    let mut random = Random(seed);
    let (base, facts) = random.pick(bases()).unwrap();
    let facts = Arc::new(Mutex::new(facts.again()));
    let programs = 2 + random.below(2) as usize;
    let simulation = simulation(random.next(), programs, base, Weather { stalls: 4, ..CALM }, &facts);
    let have_it: Vec<bool> = std::thread::scope(|scope| {
        let run = |number| {
            let (simulation, facts) = (Arc::clone(&simulation), Arc::clone(&facts));
            move || {
                let _leaving = Leaving(Arc::clone(&simulation), number);
                simulation.enter(number);
                let program = Program { simulation, facts, number, random: Random(1), off: 0 };
                let Ok(mut life) = program.import() else { return false };
                life.told(None, |life| life.pool.commit().map(drop).map_err(FileError::Pool)).is_ok()
            }
        };
        let all: Vec<_> = (0..programs).map(|number| scope.spawn(run(number))).collect();
        all.into_iter().map(|program| program.join().expect("a program")).collect()
    });
    assert!(have_it.contains(&true), "seed {seed}: nobody has the pool");
}

/// A program goes back to an older state, while another one goes on to write and to sync: once the first
/// has the pool, nothing of the other is told to be durable.
pub fn go_back_beside_a_writer(seed: u64) -> u64 {
    let mut random = Random(seed);
    let (base, facts) = &bases()[0];
    let facts = Arc::new(Mutex::new(facts.again()));
    let simulation = simulation(random.next(), 2, base, Weather { stalls: 6, ..CALM }, &facts);
    let (has_gone_back, synced) = (AtomicU64::new(0), AtomicU64::new(0));
    let program = |number| Program {
        simulation: Arc::clone(&simulation),
        facts: Arc::clone(&facts),
        number,
        random: Random(1),
        off: 0,
    };
    std::thread::scope(|scope| {
        let (has_gone_back, synced, simulation, program) = (&has_gone_back, &synced, &simulation, &program);
        scope.spawn(move || {
            let _leaving = Leaving(Arc::clone(simulation), 0);
            simulation.enter(0);
            let program = program(0);
            let Ok(mut life) = program.import() else { return };
            for step in 0..40 {
                // Whoever has taken the pool over from the other one may go on.
                let was_gone = has_gone_back.load(Ordering::SeqCst) > life.order.0;
                let Ok(inode) = life.write(step % FILES) else { return };
                match life.pool.sync_file(&life.tank, &inode) {
                    Ok(()) => assert!(!was_gone, "seed {seed}: what was given up is told to be durable"),
                    Err(_) => return,
                }
                synced.fetch_add(1, Ordering::SeqCst);
            }
        });
        scope.spawn(move || {
            let _leaving = Leaving(Arc::clone(simulation), 1);
            simulation.enter(1);
            let program = program(1);
            (0..random.below(20)).for_each(|_| simulation.stand(1));
            let Ok(txg) = open_store(program.bucket(), Access::ReadOnly, 8, program.clock()).map(|it| it.root().txg)
            else {
                return;
            };
            let Ok(store) = open_store(program.bucket(), Access::Rewind(txg), 9, program.clock()) else { return };
            if store.confirm().is_ok() {
                has_gone_back.store(store.root().generation, Ordering::SeqCst);
            }
        });
    });
    if has_gone_back.load(Ordering::SeqCst) > 0 { synced.load(Ordering::SeqCst) } else { 0 }
}

/// Many histories, from a seed on.
pub fn campaign() {
    let number = |name: &str, otherwise: u64| {
        std::env::var(name).map_or(otherwise, |value| value.parse().unwrap_or_else(|_| panic!("{name}")))
    };
    let (count, first) = (number("NACRE_POOL_HISTORIES", 60), number("NACRE_POOL_SEED", 1));
    let mut all = Counts::default();
    (first..first + count).for_each(|seed| all.add(history(seed)));
    println!("campaign: {count} histories of programs on one object store (NACRE_POOL_HISTORIES): {all:?}");
}
