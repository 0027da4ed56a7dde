//! Random lives of a cage: files change, checkpoints begin and are written (or not), the daemon
//! dies at any step, the machine loses power. A start after a crash must always find exactly the
//! usage on disk.

use super::*;
use proptest::prelude::*;
use std::{collections::BTreeSet, sync::Arc};

/// One file: its cost on the host, its booked cost, and its owner.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct File {
    on_disk: u64,
    booked: u64,
    exists: bool,
    owner: Owner,
}

#[derive(Clone, Debug, Default)]
struct World {
    files: BTreeMap<u64, File>,
}

impl World {
    fn sums(&self, bytes: impl Fn(&File) -> u64) -> Sums {
        let mut sums = Sums::default();
        for file in self.files.values().filter(|file| file.exists) {
            add(&mut sums, file.owner, bytes(file));
        }
        sums
    }
}

fn accounts(sums: &mut Sums, owner: Owner) -> impl Iterator<Item = &mut Sum> {
    let user = sums.users.entry(owner.uid).or_default();
    let dir = owner.group.map(|group| sums.dirs.entry(group).or_default());
    [&mut sums.whole, user].into_iter().chain(dir)
}

fn add(sums: &mut Sums, owner: Owner, bytes: u64) {
    for sum in accounts(sums, owner) {
        sum.bytes += bytes;
        sum.inodes += 1;
    }
}

fn tidy(mut sums: Sums) -> Sums {
    sums.users.retain(|_, sum| *sum != Sum::default());
    sums.dirs.retain(|_, sum| *sum != Sum::default());
    sums
}

/// Computes the usage like a cage at its start after a crash. A file was in the checkpoint if its
/// charge is not 0.
fn recover(start: Start, world: &World) -> Sums {
    let Start::Crashed { mut sums, touched, exact: true } = start else { panic!("{start:?}") };
    for touched in touched {
        let file = world.files.get(&touched.id.ino).copied().unwrap_or_default();
        for sum in accounts(&mut sums, touched.owner) {
            sum.bytes -= touched.charge;
            // Every file costs something in this world, so a charge of 0 is a file that did not
            // exist.
            sum.inodes -= u64::from(touched.charge != 0);
        }
        if file.exists {
            add(&mut sums, file.owner, file.on_disk);
        }
    }
    tidy(sums)
}

#[derive(Clone, Copy, Debug)]
enum Step {
    /// A change of a file to this size, and by how much more it is booked (corrected later).
    Change {
        ino: u64,
        bytes: u64,
        slack: u64,
        owner: Owner,
    },
    Remove(u64),
    /// The accounts are corrected to the cost on disk.
    Correct(u64),
    Begin,
    Checkpoint,
    /// The daemon dies; true if a checkpoint follows the start at once.
    Crash(bool),
    PowerLoss,
    End,
}

fn steps() -> impl Strategy<Value = Step> {
    let owners = (0u32..3, prop::option::of(0usize..2)).prop_map(|(uid, group)| Owner { uid, group });
    prop_oneof![
        12 => (0u64..12, 1u64..1000, 0u64..3, owners).prop_map(|(ino, bytes, slack, owner)| Step::Change { ino, bytes, slack: slack * 100, owner }),
        3 => (0u64..12).prop_map(Step::Remove),
        3 => (0u64..12).prop_map(Step::Correct),
        1 => Just(Step::Begin),
        2 => Just(Step::Checkpoint),
        2 => any::<bool>().prop_map(Step::Crash),
        1 => Just(Step::PowerLoss),
        1 => Just(Step::End),
    ]
}

struct Cage {
    directory: TempDir,
    saved: Option<Saved>,
    world: Arc<Mutex<World>>,
    touched: BTreeSet<u64>,
    boot: u8,
}

impl Cage {
    fn new() -> Cage {
        let mut cage = Cage {
            directory: TempDir::new().unwrap(),
            saved: None,
            world: Arc::default(),
            touched: BTreeSet::new(),
            boot: 1,
        };
        assert_eq!(cage.open(), Start::New);
        cage.checkpoint();
        cage
    }

    fn boot(&self) -> BootId {
        BootId([self.boot; 16])
    }

    /// Opens the state; at each step of a checkpoint from then on, a crash is tried on a copy.
    fn open(&mut self) -> Start {
        self.saved = None;
        let (saved, start) = open(&self.directory, self.boot());
        let (path, world, boot) = (self.directory.path().to_path_buf(), Arc::clone(&self.world), self.boot());
        let ready = matches!(start, Start::Clean { .. } | Start::Crashed { .. });
        if ready {
            *saved.observer.lock() = Some(Cage::observer(path, world, boot));
        }
        self.saved = Some(saved);
        start
    }

    fn observer(path: PathBuf, world: Arc<Mutex<World>>, boot: BootId) -> Observer {
        Box::new(move |step| {
            let copy = copy(&path);
            let world = world.lock().clone();
            match Saved::open_in(copy.path(), &identity(), boot).unwrap().1 {
                // A clean shutdown is complete once its checkpoint is in place.
                Start::Clean { sums, .. } => assert_eq!(tidy(sums), world.sums(|file| file.on_disk), "{step}"),
                start => assert_eq!(recover(start, &world), world.sums(|file| file.on_disk), "{step}"),
            }
        })
    }

    fn saved(&self) -> &Saved {
        self.saved.as_ref().unwrap()
    }

    /// Records a file before a change.
    fn touch(&mut self, ino: u64) {
        if self.touched.insert(ino) {
            let file = self.world.lock().files.get(&ino).copied().unwrap_or_default();
            let charge = if file.exists { file.booked } else { 0 };
            self.saved().touch(id(ino), b"", charge, file.owner);
        }
    }

    /// Begins a checkpoint, and records all files whose booked cost is not corrected yet.
    fn begin(&mut self) -> Sums {
        let sums = self.world.lock().sums(|file| file.booked);
        let _ = self.saved().begin_checkpoint(&sums, true).unwrap();
        self.after_begin();
        sums
    }

    fn after_begin(&mut self) {
        self.touched.clear();
        let unsettled: Vec<u64> = self
            .world
            .lock()
            .files
            .iter()
            .filter(|(_, file)| file.exists && file.booked != file.on_disk)
            .map(|(&ino, _)| ino)
            .collect();
        for ino in unsettled {
            self.touch(ino);
        }
    }

    fn checkpoint(&mut self) {
        let saved = self.saved.take().unwrap();
        {
            let sums = self.world.lock().sums(|file| file.booked);
            // The first instant of a checkpoint is tried before the uncorrected files have been
            // recorded: the older one is still valid.
            let pending = saved.begin_checkpoint(&sums, true).unwrap();
            self.touched.clear();
            for (&ino, file) in
                self.world.lock().files.iter().filter(|(_, file)| file.exists && file.booked != file.on_disk)
            {
                saved.touch(id(ino), b"", file.booked, file.owner);
                self.touched.insert(ino);
            }
            pending.commit().unwrap();
            *saved.observer.lock() =
                Some(Cage::observer(self.directory.path().to_path_buf(), Arc::clone(&self.world), self.boot()));
        }
        self.saved = Some(saved);
    }

    /// After any start: the accounts equal the costs on disk.
    fn settle(&mut self) {
        for file in self.world.lock().files.values_mut() {
            file.booked = file.on_disk;
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Change { ino, bytes, slack, owner } => {
                self.touch(ino);
                self.world
                    .lock()
                    .files
                    .insert(ino, File { on_disk: bytes, booked: bytes + slack, exists: true, owner });
            }
            Step::Remove(ino) => {
                self.touch(ino);
                self.world.lock().files.insert(ino, File::default());
            }
            Step::Correct(ino) => {
                let unsettled = self.world.lock().files.get(&ino).is_some_and(|file| file.booked != file.on_disk);
                if unsettled {
                    self.touch(ino);
                    let mut world = self.world.lock();
                    let file = world.files.get_mut(&ino).unwrap();
                    file.booked = file.on_disk;
                }
            }
            Step::Begin => {
                self.begin();
            }
            Step::Checkpoint => self.checkpoint(),
            Step::Crash(then_checkpoint) => {
                let start = self.open();
                let world = self.world.lock().clone();
                assert_eq!(recover(start, &world), world.sums(|file| file.on_disk));
                self.settle();
                // Without a checkpoint the log continues: recorded files may be recorded again.
                self.touched.clear();
                if then_checkpoint {
                    self.checkpoint();
                }
            }
            Step::PowerLoss => {
                self.boot += 1;
                let start = self.open();
                assert!(matches!(start, Start::Lost { last: Some(_) }), "{start:?}");
                self.settle();
                self.checkpoint();
            }
            Step::End => {
                self.settle_in_order();
                let sums = self.world.lock().sums(|file| file.booked);
                self.saved().close(&sums, true).unwrap();
                self.boot += 1;
                let start = self.open();
                assert_eq!(start, Start::Clean { sums, exact: true });
                self.touched.clear();
            }
        }
    }

    fn settle_in_order(&mut self) {
        for ino in 0..12 {
            self.step(Step::Correct(ino));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    #[test]
    fn every_crash_is_recovered_exactly(steps in prop::collection::vec(steps(), 1..60)) {
        let mut cage = Cage::new();
        for step in steps {
            cage.step(step);
        }
        cage.step(Step::Crash(false));
    }
}
