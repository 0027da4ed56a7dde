//! A process that is killed, and the next one, which goes on as the same writer from what both keep in memory: in
//! a bucket that loses requests, with each log, while another machine takes the pool over, and with a commit of
//! the dead one that arrives late.

use std::path::Path;

use nacre_pool::backend::LocalLog;
use nacre_pool::log::KeptLog;

use super::*;

/// The number by which all processes of one pool write.
const OURS: u64 = 4711;

/// One of these processes.
struct Process {
    pool: PoolInBucket,
    objects: Arc<Objects>,
    kept: Arc<KeptLog>,
}

/// Where an fsync goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Local,
    Remote,
    None,
}

fn objects(bucket: Arc<dyn Bucket>, place: &Path) -> Objects {
    let writer =
        WriterId { nonce: OURS, host: "here".to_owned(), clock: Box::new(|| 1_800_000_000), uptime: Box::new(|| 1) };
    Objects::new(bucket, 7, MIB, 62 * MIB, writer).with_local_log(Some(LocalLog::open(place, 7, 1).unwrap()))
}

fn config(store: Store, kept: &Arc<KeptLog>) -> PoolConfig {
    PoolConfig { kept: Some(Arc::clone(kept)), ..PoolInBucket::config(&Arc::new(store)) }
}

impl Process {
    fn first(ground: &InBucket, place: &Path, mode: Mode) -> Self {
        let (objects, kept) = (Arc::new(objects(ground.bucket(), place)), KeptLog::new(0).unwrap());
        let (store, _) = Store::create_in(Arc::clone(&objects) as _, &new_pool(), 62 * MIB).unwrap();
        let pool = PoolInBucket { pool: Pool::create(config(store, &kept), "tank").unwrap() };
        Self::begun(pool, objects, kept, mode)
    }

    fn next(bucket: &Arc<dyn Bucket>, place: &Path, kept: &Arc<KeptLog>, mode: Mode) -> Result<Self, PoolError> {
        let objects = Arc::new(objects(Arc::clone(bucket), place).going_on());
        let kept = KeptLog::taken_over(kept.descriptor().try_clone_to_owned().unwrap()).unwrap();
        let identity = Objects::find(&**bucket)?.unwrap();
        let (store, root) = Store::open_in(Arc::clone(&objects) as _, identity, &import(Access::WithoutLog))?;
        let durable = Durable { txg: root.txg, catalog: root.catalog.unwrap(), log: root.log_start.into() };
        let pool = PoolInBucket { pool: Pool::open(config(store, &kept), &durable)? };
        Ok(Self::begun(pool, objects, kept, mode))
    }

    fn begun(pool: PoolInBucket, objects: Arc<Objects>, kept: Arc<KeptLog>, mode: Mode) -> Self {
        if mode == Mode::Local {
            objects.make_local_log().unwrap();
            objects.log_locally(true);
        }
        pool.pool.record(mode != Mode::None);
        Self { pool, objects, kept }
    }

    /// Makes a file that nobody syncs.
    fn make(&self, name: &str) -> Result<(), FileError> {
        let tank = self.pool.pool.dataset(self.pool.pool.find("tank").unwrap().unwrap()).unwrap();
        let new = |parent: &ParentView| {
            let row = InodeRow::new(FileType::Regular, 0o644, parent.now);
            Ok(NewInode { row, target: None, attributes: Vec::new() })
        };
        let (file, _) = tank.files().make(&tank.files().root(), name.as_bytes(), b"", &new)?;
        tank.files().write(&file, Some(0), name.as_bytes()).map(drop)
    }
}

fn next(ground: &InBucket, place: &Path, kept: &Arc<KeptLog>, mode: Mode, what: &str) -> Process {
    let mut why = None;
    (0..50)
        .find_map(|_| Process::next(&ground.bucket(), place, kept, mode).map_err(|error| why = Some(error)).ok())
        .unwrap_or_else(|| panic!("{what}: {why:?}"))
}

/// Whatever was answered is there after each death, synced or not.
#[test]
fn what_was_answered_is_there_after_deaths() {
    for seed in 0..12 {
        let mode = [Mode::Local, Mode::Remote, Mode::None][seed as usize % 3];
        let (ground, place) = (InBucket::new(seed, 9), tempfile::tempdir().unwrap());
        let mut random = Random(seed);
        let mut process = Process::first(&ground, place.path(), mode);
        let (mut answered, mut number, mut deaths) = (Vec::new(), 0, 0);
        for _ in 0..80 {
            let what = format!("seed {seed}, {mode:?}, death {deaths}");
            let name = format!("file {number}");
            let mut dies = false;
            match random.below(12) {
                0..4 => {
                    number += 1;
                    // What was made and could not be synced may be there.
                    match process.pool.write(&name) {
                        Ok(()) => answered.push(name),
                        Err(_) => dies = true,
                    }
                }
                4..8 => {
                    number += 1;
                    match process.make(&name) {
                        Ok(()) => answered.push(name),
                        Err(_) => dies = true,
                    }
                }
                8 => dies = process.pool.pool.commit().is_err(),
                9 | 10 => ground.bucket.fail_after(Some(random.below(12))),
                _ => dies = true,
            }
            if dies {
                deaths += 1;
                let kept = Arc::clone(&process.kept);
                drop(process);
                if random.below(2) == 0 {
                    // The next one dies as well, somewhere on its way.
                    ground.bucket.fail_after(Some(random.below(25)));
                    drop(Process::next(&ground.bucket(), place.path(), &kept, mode));
                }
                ground.bucket.fail_after(None);
                process = next(&ground, place.path(), &kept, mode, &what);
                assert_eq!(process.objects.logs_aside(), Vec::<std::path::PathBuf>::new(), "{what}");
                for name in &answered {
                    assert!(process.pool.has(name), "{name} of {number}: {what}");
                }
            }
        }
        assert!(deaths > 3, "seed {seed}: {deaths} deaths");
        drop(process);
        ground.bucket.fail_after(None);
        // Who imports it without what was kept finds all that was committed in order.
        let again = (0..50).find_map(|_| PoolInBucket::open(ground.open_store(Access::WithoutLog).ok()?).ok());
        assert!(again.is_some(), "seed {seed}");
    }
}

/// A bucket in which one request of a dead process arrives late: just before the next root is put.
struct Late {
    bucket: Arc<MemoryBucket>,
    late: Mutex<Option<(String, Vec<u8>)>>,
}

impl Bucket for Late {
    fn name(&self) -> &str {
        "late"
    }

    fn put(&self, key: &str, body: &[u8]) -> std::io::Result<()> {
        self.bucket.put(key, body)
    }

    fn put_new(&self, key: &str, body: &[u8]) -> std::io::Result<Put> {
        if key.starts_with("roots/")
            && let Some((key, body)) = self.late.lock().unwrap().take()
        {
            assert_eq!(self.bucket.put_new(&key, &body).unwrap(), Put::Made);
        }
        self.bucket.put_new(key, body)
    }

    fn get(&self, key: &str, range: Option<std::ops::Range<u64>>) -> std::io::Result<Option<Vec<u8>>> {
        self.bucket.get(key, range)
    }

    fn list(&self, prefix: &str, after: &str) -> std::io::Result<Vec<String>> {
        self.bucket.list(prefix, after)
    }

    fn delete(&self, key: &str) -> std::io::Result<()> {
        self.bucket.delete(key)
    }
}

fn roots(bucket: &MemoryBucket) -> Vec<String> {
    bucket.keys().into_iter().filter(|key| key.starts_with("roots/")).collect()
}

#[test]
fn a_commit_of_the_dead_process_that_arrives_late_is_gone_on_from_or_refused() {
    for arrives in [true, false] {
        let (ground, place) = (InBucket::new(1, 0), tempfile::tempdir().unwrap());
        let process = Process::first(&ground, place.path(), Mode::Remote);
        process.make("before").unwrap();
        process.pool.pool.commit().unwrap();
        process.make("in the commit").unwrap();
        // As of a process that dies before it hears of its commit: the log has it all.
        let kept = KeptLog::taken_over(copied(&process.kept)).unwrap();
        process.pool.pool.commit().unwrap();
        drop(process);
        let root = roots(&ground.bucket).pop().unwrap();
        let body = ground.bucket.get(&root, None).unwrap().unwrap();
        ground.bucket.delete(&root).unwrap();
        let late = Mutex::new(arrives.then(|| (root.clone(), body.clone())));
        let bucket: Arc<dyn Bucket> = Arc::new(Late { bucket: Arc::clone(&ground.bucket), late });
        if arrives {
            let error = Process::next(&bucket, place.path(), &kept, Mode::Remote).map(drop).unwrap_err();
            assert!(matches!(error, PoolError::Overtaken), "{error}");
            assert_eq!(ground.bucket.get(&root, None).unwrap().unwrap(), body, "it counts");
        }
        let process = Process::next(&bucket, place.path(), &kept, Mode::Remote).unwrap();
        assert_eq!(ground.bucket.put_new(&root, &body).unwrap(), Put::Exists, "it is too late now");
        assert!(process.pool.has("before") && process.pool.has("in the commit"));
        process.make("after").unwrap();
        process.pool.pool.commit().unwrap();
        let kept = Arc::clone(&process.kept);
        drop(process);
        let process = Process::next(&bucket, place.path(), &kept, Mode::Remote).unwrap();
        assert!(["before", "in the commit", "after"].iter().all(|name| process.pool.has(name)));
    }
}

/// The memory of a log as it is now.
fn copied(kept: &KeptLog) -> std::os::fd::OwnedFd {
    let from = std::fs::File::from(kept.descriptor().try_clone_to_owned().unwrap());
    let length = from.metadata().unwrap().len();
    let mut bytes = vec![0; usize::try_from(length).unwrap()];
    std::os::unix::fs::FileExt::read_exact_at(&from, &mut bytes, 0).unwrap();
    let to = std::fs::File::from(rustix::fs::memfd_create(c"test", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    std::os::unix::fs::FileExt::write_all_at(&to, &bytes, 0).unwrap();
    to.into()
}

/// Whoever has put a root meanwhile has the pool, however little he has written, and whether he has let go of it
/// again or not; and nothing is put.
#[test]
fn a_pool_that_was_taken_over_is_not_gone_on_with() {
    for writes in [false, true] {
        let (ground, place) = (InBucket::new(1, 0), tempfile::tempdir().unwrap());
        let process = Process::first(&ground, place.path(), Mode::Local);
        process.pool.write("synced").unwrap();
        process.make("answered").unwrap();
        let kept = Arc::clone(&process.kept);
        drop(process);
        let other = PoolInBucket::open(ground.open_store(Access::WithoutLog).unwrap()).unwrap();
        if writes {
            other.write("the other's").unwrap();
        }
        drop(other);
        let before = ground.bucket.keys();
        for _ in 0..2 {
            let error = Process::next(&ground.bucket(), place.path(), &kept, Mode::Local).map(drop).unwrap_err();
            assert!(error.to_string().contains("taken over by 'here'"), "{error}");
            assert_eq!(ground.bucket.keys(), before);
        }
    }
}
