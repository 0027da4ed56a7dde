//! A log on this machine, through whole pools in a bucket that loses requests: crashes, changes from one
//! log to another, a machine that is lost, and one that takes the pool over.

use std::path::Path;

use nacre_pool::backend::LocalLog;

use super::*;

/// A pool that one machine has imported.
struct Running {
    pool: PoolInBucket,
    objects: Arc<Objects>,
}

fn log_in(place: &Path) -> LocalLog {
    LocalLog::open(place, 7, 1).unwrap()
}

fn objects(ground: &InBucket, host: &str, log: Option<LocalLog>) -> Arc<Objects> {
    let writer = WriterId {
        nonce: ground.imports.fetch_add(1, Ordering::Relaxed),
        host: host.to_owned(),
        clock: Box::new(|| 1_800_000_000),
        uptime: Box::new(|| 1),
    };
    Arc::new(Objects::new(ground.bucket(), 7, MIB, 62 * MIB, writer).with_local_log(log))
}

impl Running {
    fn create(ground: &InBucket, place: &Path) -> Self {
        Self::create_with(ground, log_in(place))
    }

    fn create_with(ground: &InBucket, log: LocalLog) -> Self {
        let objects = objects(ground, "here", Some(log));
        let (store, _) = Store::create_in(Arc::clone(&objects) as _, &new_pool(), 62 * MIB).unwrap();
        let pool = PoolInBucket { pool: Pool::create(PoolInBucket::config(&Arc::new(store)), "tank").unwrap() };
        Self::begun(pool, objects)
    }

    fn begun(pool: PoolInBucket, objects: Arc<Objects>) -> Self {
        let made = objects.make_local_log().unwrap();
        objects.log_locally(made);
        Self { pool, objects }
    }

    fn import(ground: &InBucket, host: &str, place: Option<&Path>, access: Access) -> Result<Self, PoolError> {
        Self::import_with(ground, host, place.map(log_in), access)
    }

    fn import_with(ground: &InBucket, host: &str, log: Option<LocalLog>, access: Access) -> Result<Self, PoolError> {
        let objects = objects(ground, host, log);
        let identity = Objects::find(&*ground.bucket)?.unwrap();
        let (store, root) = Store::open_in(Arc::clone(&objects) as _, identity, &import(access))?;
        let durable = Durable { txg: root.txg, catalog: root.catalog.unwrap(), log: root.log_start.into() };
        let pool = PoolInBucket { pool: Pool::open(PoolInBucket::config(&Arc::new(store)), &durable)? };
        Ok(Self::begun(pool, objects))
    }

    /// As `pool set log=` does.
    fn change(&self, local: bool, logged: bool) -> Result<(), PoolError> {
        self.pool.pool.record(false);
        self.pool.pool.commit()?;
        self.objects.log_locally(local);
        self.pool.pool.record(logged);
        Ok(())
    }
}

/// Whatever an fsync has promised is there after each crash, whichever log has it.
#[test]
fn what_was_synced_is_there_after_crashes_and_changes() {
    for seed in 0..12 {
        let (ground, place) = (InBucket::new(seed, 9), tempfile::tempdir().unwrap());
        let mut random = Random(seed);
        let mut running = Running::create(&ground, place.path());
        running.pool.pool.commit().unwrap();
        let (mut promised, mut number) = (Vec::new(), 0);
        for _ in 0..60 {
            let mut crashes = false;
            match random.below(12) {
                0..7 => {
                    let name = format!("file {number}");
                    number += 1;
                    match running.pool.write(&name) {
                        Ok(()) => promised.push(name),
                        Err(_) => crashes = true,
                    }
                }
                7 => crashes = running.pool.pool.commit().is_err(),
                8 | 9 => {
                    let (local, logged) = (random.below(2) == 0, random.below(3) > 0);
                    crashes = running.change(local, local || logged).is_err();
                }
                10 => ground.bucket.fail_after(Some(random.below(12))),
                _ => crashes = true,
            }
            if crashes {
                drop(running);
                ground.bucket.fail_after(None);
                running = (0..50)
                    .find_map(|_| Running::import(&ground, "here", Some(place.path()), Access::ReadWrite).ok())
                    .expect("an import");
                assert_eq!(running.objects.logs_aside(), Vec::<std::path::PathBuf>::new(), "seed {seed}");
                for name in &promised {
                    assert!(running.pool.has(name), "{name} of {number}, seed {seed}");
                }
            }
        }
    }
}

/// Nothing is asked of the store for an fsync, once a root names the log.
#[test]
fn a_sync_on_this_machine_asks_nobody() {
    let (ground, place) = (InBucket::new(1, 0), tempfile::tempdir().unwrap());
    let running = Running::create(&ground, place.path());
    running.pool.write("first").unwrap();
    ground.bucket.fail_after(Some(0));
    for number in 0..20 {
        running.pool.write(&format!("away {number}")).unwrap();
    }
    drop(running);
    ground.bucket.fail_after(None);
    let again = Running::import(&ground, "here", Some(place.path()), Access::ReadWrite).unwrap();
    assert!((0..20).all(|number| again.pool.has(&format!("away {number}"))));
    // While a process has the log, no other one replays it.
    again.pool.write("later").unwrap();
    let refused = Running::import(&ground, "here", Some(place.path()), Access::ReadWrite).map(drop).unwrap_err();
    assert!(refused.to_string().contains("another process on this machine"), "{refused}");
    again.pool.write("later still").unwrap();
}

/// An fsync of a file with an attribute that is a frame is no commit, whichever log has it.
#[test]
fn long_attributes_are_in_the_log() {
    for is_local in [true, false] {
        let (ground, place) = (InBucket::new(1, 0), tempfile::tempdir().unwrap());
        let running = Running::create(&ground, place.path());
        running.change(is_local, true).unwrap();
        running.pool.write("first").unwrap();
        let roots = || ground.bucket.keys().iter().filter(|key| key.starts_with("roots/")).count();
        let before = roots();
        running.pool.write_with("long", &[7; 65_536]).unwrap();
        assert_eq!(roots(), before, "it was a commit");
        drop(running);
        let again = Running::import(&ground, "here", Some(place.path()), Access::ReadWrite).unwrap();
        assert_eq!(again.pool.attribute("long"), [7; 65_536]);
    }
}

/// Without the log, the pool is as at its last commit, once somebody has said so; and a log that comes
/// back after another machine has had the pool is not replayed.
#[test]
fn a_log_is_replayed_only_onto_the_state_that_it_goes_on_from() {
    let (ground, place) = (InBucket::new(1, 0), tempfile::tempdir().unwrap());
    let running = Running::create(&ground, place.path());
    running.pool.write("committed").unwrap();
    running.pool.write("on this machine").unwrap();
    drop(running);
    let nowhere = tempfile::tempdir().unwrap();
    for (host, place) in [("here", nowhere.path()), ("there", nowhere.path()), ("there", place.path())] {
        let refused = Running::import(&ground, host, Some(place), Access::ReadWrite).map(drop).unwrap_err();
        assert!(refused.to_string().contains("what was synced last is in a log on"), "{refused}");
    }
    // A look changes nothing.
    drop(ground.open_store(Access::ReadOnly).unwrap());
    let there = Running::import(&ground, "there", None, Access::WithoutLog).unwrap();
    assert!(there.pool.has("committed") && !there.pool.has("on this machine"));
    drop(there);
    let here = Running::import(&ground, "here", Some(place.path()), Access::ReadWrite).unwrap();
    assert!(here.pool.has("committed") && !here.pool.has("on this machine"));
    let [aside] = here.objects.logs_aside().try_into().unwrap();
    assert!(aside.exists());
    drop(here);
    // It is told once.
    let here = Running::import(&ground, "here", Some(place.path()), Access::ReadWrite).unwrap();
    assert_eq!(here.objects.logs_aside().len(), 0);
}

/// A log that was damaged is not taken for one that has nothing.
#[test]
fn a_damaged_log_is_refused() {
    let (ground, place) = (InBucket::new(1, 0), tempfile::tempdir().unwrap());
    let running = Running::create(&ground, place.path());
    running.pool.write("committed").unwrap();
    running.pool.write("on this machine").unwrap();
    drop(running);
    let log = std::fs::read_dir(place.path()).unwrap().next().unwrap().unwrap().path();
    let whole = std::fs::read(&log).unwrap();
    std::fs::write(&log, [vec![0; 8192], whole[8192..].to_vec()].concat()).unwrap();
    let refused = Running::import(&ground, "here", Some(place.path()), Access::ReadWrite).map(drop).unwrap_err();
    assert!(refused.to_string().contains("what was synced last is in a log on"), "{refused}");
    std::fs::write(&log, whole).unwrap();
    assert!(
        Running::import(&ground, "here", Some(place.path()), Access::ReadWrite).unwrap().pool.has("on this machine")
    );
}

/// A copy of a bucket has the same pool, and roots that name the same import.
#[test]
fn a_log_is_of_one_address() {
    let (ground, place) = (InBucket::new(1, 0), tempfile::tempdir().unwrap());
    let running = Running::create(&ground, place.path());
    running.pool.write("committed").unwrap();
    running.pool.write("on this machine").unwrap();
    drop(running);
    let of_copy = LocalLog::open(place.path(), 7, 2).unwrap();
    let refused = Running::import_with(&ground, "here", Some(of_copy), Access::ReadWrite).map(drop).unwrap_err();
    assert!(refused.to_string().contains("what was synced last is in a log on"), "{refused}");
    let here = Running::import(&ground, "here", Some(place.path()), Access::ReadWrite).unwrap();
    assert!(here.pool.has("on this machine"));
}

/// Logs of versions that knew no addresses.
#[test]
fn a_log_of_an_older_version_is_replayed_where_the_newest_root_names_it() {
    let (ground, older, place) = (InBucket::new(1, 0), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let running = Running::create_with(&ground, LocalLog::open(older.path(), 7, 0).unwrap());
    running.pool.write("committed").unwrap();
    running.pool.write("on this machine").unwrap();
    drop(running);
    let log = std::fs::read_dir(older.path()).unwrap().next().unwrap().unwrap().path();
    let of_a_copy = older.path().join("9.log");
    std::fs::copy(&log, &of_a_copy).unwrap();
    let both = |owns| log_in(place.path()).with_older(Some(older.path().to_owned()), owns);
    // It may be a copy's.
    let refused = Running::import_with(&ground, "here", Some(both(false)), Access::ReadWrite).err().unwrap();
    assert!(refused.to_string().contains(log.to_str().unwrap()), "{refused}");
    assert!(log.exists());
    let both = || both(true);
    let here = Running::import_with(&ground, "here", Some(both()), Access::ReadWrite).unwrap();
    assert!(here.pool.has("on this machine"));
    here.pool.pool.commit().unwrap();
    assert!(!log.exists() && of_a_copy.exists());
    here.pool.write("later").unwrap();
    drop(here);
    let again = Running::import_with(&ground, "here", Some(both()), Access::ReadWrite).unwrap();
    assert!(again.pool.has("on this machine") && again.pool.has("later"));
    assert!(of_a_copy.exists() && again.objects.logs_aside().is_empty());
}
