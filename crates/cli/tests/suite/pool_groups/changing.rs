//! Topology changes of pools in use: under load, with the process killed and a device lost in
//! between; and impossible changes.

use super::*;

impl Grouped {
    /// A path for one more device.
    fn fresh(&mut self) -> String {
        self.made += 1;
        self.yard.path(&format!("d{}", self.made - 1)).display().to_string()
    }

    fn forget(&mut self, gone: &str) {
        self.devices.retain(|path| path.to_str() != Some(gone));
    }

    /// Returns the report of the running or last topology change.
    fn change(&self) -> String {
        let status = self.status();
        let words = ["remove:", "expand:", "convert:", "rebalance:"];
        let line = status.lines().position(|line| words.iter().any(|word| line.starts_with(word)));
        line.map_or(String::new(), |at| status.lines().skip(at).take(2).collect::<Vec<_>>().join(" "))
    }
}

/// Runs loads while a change begins; a device is lost where redundancy allows it, the process is
/// killed; then the change finishes by itself.
fn through(
    pool: &mut Grouped,
    (loads, kept, random): (&mut Vec<Box<dyn Load>>, &Kept, &mut Random),
    change: &[&str],
    may_lose: Option<usize>,
) {
    let what = format!("{change:?}");
    let dead = Arc::new(Dead::default());
    let working = crate::crashing::begin(mem::take(loads), &pool.at, &dead, random);
    thread::sleep(Duration::from_millis(random.below(700)));
    // It has not ended when the process is killed.
    pool.yard.nacre(&["pool", "reshape", "--rate", "8M", &pool.name]);
    pool.yard.nacre(change);
    thread::sleep(Duration::from_millis(random.below(700)));
    if let Some(device) = may_lose {
        fs::remove_file(&pool.devices[device]).unwrap();
    }
    thread::sleep(Duration::from_millis(random.below(700)));
    dead.set();
    // No process may write into the directory below the mount when that is gone.
    pool.yard.end(&pool.name, rustix::process::Signal::KILL);
    eventually("the end of all loads", || working.iter().all(thread::JoinHandle::is_finished));
    crate::mounting::clear(&pool.at);
    let ended = working.into_iter();
    *loads = ended.map(|load| load.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect();
    pool.import();
    kept.verify(pool, &what);
    for load in loads.iter_mut() {
        load.judge(&pool.at, &what);
    }
    thread::sleep(Duration::from_millis(random.below(300)));
    pool.die();
    pool.import();
    // The device is replaced during the change, or after its end.
    let (activity, late) = match change[1] {
        "attach" => ("raidz_expand", true),
        other => (other, false),
    };
    let replaced = |pool: &mut Grouped, now: bool| may_lose.filter(|_| now).map(|device| pool.replace(device));
    replaced(pool, !late);
    pool.yard.nacre(&["pool", "reshape", "--rate", "0", &pool.name]);
    pool.yard.nacre(&["pool", "wait", "-t", activity, &pool.name]);
    let told = pool.change();
    assert!(told.contains(" on "), "{what}: {}", pool.status());
    replaced(pool, late);
    pool.yard.nacre(&["pool", "wait", &pool.name]);
    pool.is_whole(&what);
    kept.verify(pool, &what);
    pool.yard.nacre(&["pool", "clear", &pool.name]);
}

#[test]
fn shapes_change_under_load() {
    needs!(as_root());
    let seed = 7 + number("NACRE_POOL_SEED", 0);
    let mut random = Random(seed);
    let mut pool = Grouped::made("gh", &[("mirror", 2), ("mirror", 2)], "1G");
    let kept = Kept::written(&pool, &mut random);
    let mut loads = programs::all(pool.yard.place.path());
    let name = pool.name.clone();
    let with = (&mut loads, &kept, &mut random);
    through(&mut pool, with, &["pool", "remove", &name, "mirror-0"], Some(3));
    let gone = [pool.path(0).to_owned(), pool.path(1).to_owned()];
    let line = pool.yard.nacre(&["pool", "list", "-Hpv", "-o", "name,size", &name]);
    assert!(!line.contains("mirror-0") && !line.contains(&gone[0]), "{line}");
    // They are free, and become part of it again at once.
    gone.iter().for_each(|path| pool.forget(path));
    let with = (&mut loads, &kept, &mut random);
    through(&mut pool, with, &["pool", "convert", &name, "mirror-1", "raidz1", &gone[0]], Some(1));
    pool.devices.push(gone[0].clone().into());
    let (fourth, before) = (gone[1].clone(), pool.figure("size"));
    let with = (&mut loads, &kept, &mut random);
    through(&mut pool, with, &["pool", "attach", &name, "raidz1-1", &fourth], Some(0));
    pool.devices.push(fourth.clone().into());
    assert!(pool.figure("size") > before * 5 / 4, "{} {before}", pool.figure("size"));
    if number("NACRE_POOL_ROUNDS", 1) > 1 {
        let with = (&mut loads, &kept, &mut random);
        through(&mut pool, with, &["pool", "convert", &name, "raidz1-1", "raidz2"], Some(2));
        let with = (&mut loads, &kept, &mut random);
        through(&mut pool, with, &["pool", "convert", "-f", &name, "raidz2-1", "raidz1"], None);
        let with = (&mut loads, &kept, &mut random);
        through(&mut pool, with, &["pool", "remove", &name, &fourth], Some(1));
        pool.forget(&fourth);
    }
    pool.yard.nacre(&["pool", "export", &pool.name]);
    pool.import();
    kept.verify(&pool, "exported and imported");
    let promises: Vec<String> = loads.iter().map(|load| load.promises()).collect();
    println!("campaign: shapes, seed {seed} (NACRE_POOL_SEED): {}", promises.join(", "));
}

#[test]
fn devices_that_are_added_are_used_by_what_there_is() {
    needs!(as_root());
    let mut pool = Grouped::made("ge", &[("plain", 1)], "1G");
    fs::write(pool.at.join("file"), Random(4).bytes(160 << 20)).unwrap();
    pool.yard.nacre(&["pool", "sync", &pool.name]);
    let new = pool.fresh();
    pool.yard.nacre(&["pool", "add", "--size", "1G", &pool.name, &new]);
    pool.yard.nacre(&["pool", "rebalance", "-w", &pool.name]);
    let list = pool.yard.nacre(&["pool", "list", "-Hpv", "-o", "name,alloc", &pool.name]);
    let taken: Vec<u64> =
        list.lines().skip(1).map(|line| line.split('\t').next_back().unwrap().parse().unwrap()).collect();
    assert!(taken.len() == 2 && taken[0].abs_diff(taken[1]) < 48 << 20, "{list}");
    // The one that has the log leaves.
    let (first, size) = (pool.path(0).to_owned(), pool.figure("size"));
    let plan = pool.yard.nacre(&["pool", "remove", "-n", &pool.name, &first]);
    assert!(plan.contains("to be moved") && plan.contains("failures survived  0 now"), "{plan}");
    pool.yard.nacre(&["pool", "reshape", "--rate", "20M", &pool.name]);
    pool.yard.nacre(&["pool", "remove", &pool.name, &first]);
    let status = pool.status();
    assert!(says(&status, "remove: Evacuation of") && says(&status, "0 0 0 (removing)"), "{status}");
    assert!(pool.figure("size") < size * 2 / 3);
    pool.yard.nacre(&["pool", "reshape", "-p", &pool.name]);
    assert!(pool.change().contains("paused since"), "{}", pool.change());
    for second in [&["rebalance", &pool.name][..], &["remove", &pool.name, &new]] {
        let (code, said) = pool.yard.refused(&[&["pool"][..], second].concat());
        assert!(code != 0 && said.contains("is under way"), "{second:?}: {said}");
    }
    pool.die();
    pool.import();
    assert!(pool.change().contains("paused since"), "{}", pool.change());
    pool.yard.nacre(&["pool", "remove", "-s", &pool.name]);
    assert!(pool.change().contains("canceled on"), "{}", pool.change());
    // A copy of the log more is all that is left of it.
    assert!(pool.figure("size") + (64 << 20) >= size, "{} {size}", pool.figure("size"));
    pool.yard.nacre(&["pool", "reshape", "--rate", "0", &pool.name]);
    let gives = pool.yard.nacre(&["pool", "remove", "-w", &pool.name, &first]);
    assert!(gives.starts_with(&format!("removal of {first} from '{}':\n  usable ", pool.name)), "{gives}");
    // It is anybody's at once.
    let other = pool.yard.name("gf");
    pool.yard.nacre(&["pool", "create", "-m", "none", &other, &first]);
    pool.yard.nacre(&["pool", "destroy", &other]);
    fs::remove_file(&first).unwrap();
    assert!(fs::read(pool.at.join("file")).unwrap() == Random(4).bytes(160 << 20));
    pool.die();
    pool.import();
    pool.is_whole("without the first device");
    assert!(fs::read(pool.at.join("file")).unwrap() == Random(4).bytes(160 << 20));
}

#[test]
fn shapes_that_cannot_be_change_nothing() {
    needs!(as_root());
    let mut pool = Grouped::made("gx", &[("mirror", 2), ("raidz1", 3)], "256M");
    let name = pool.name.clone();
    fs::write(pool.at.join("file"), Random(5).bytes(180 << 20)).unwrap();
    pool.yard.nacre(&["pool", "sync", &name]);
    let (list, history) = (["pool", "list", "-Hpv", "-o", "name,size", &name], ["pool", "history", &name]);
    let (first, new, short, tiny) = (pool.path(0).to_owned(), pool.fresh(), pool.fresh(), pool.fresh());
    File::create(&short).unwrap().set_len(200 << 20).unwrap();
    File::create(&tiny).unwrap().set_len(2 << 20).unwrap();
    // Labels and roots of all devices, too.
    let all = || {
        let asked = [&list[..], &history, &["pool", "status", "-v", &name], &["pool", "inspect", &name]];
        asked.map(|words| pool.yard.nacre(words)).concat()
    };
    let before = all();
    for (words, why) in [
        (&["remove", &name, "raidz1-1"][..], "out of space"),
        (&["remove", &name, &first], "only whole mirrors can be removed"),
        (&["remove", &name, "mirror-0", "raidz1-1"], "several groups"),
        (&["remove", &name, "mirror-7"], "no such device in pool"),
        (&["remove", "-s", &name], "none is under way"),
        (&["reshape", "-p", &name], "none is under way"),
        (&["attach", "--size", "100M", &name, "raidz1-1", &new], "device is too small"),
        (&["attach", &name, "raidz1-1", &short], "device is too small"),
        (&["attach", "-f", &name, "raidz1-1", &first], "is part of active pool"),
        (&["attach", "--size", "256M", &name, "mirror-0", &new], "can only attach to mirrors and top-level disks"),
        (&["convert", &name, "mirror-0", "raidz2"], "raidz2 needs 3 devices at least"),
        (&["convert", &name, "mirror-0", "raidz2", &tiny], "too small"),
        (&["convert", &name, "mirror-0", "raid5"], "does not become 'raid5'"),
        (&["convert", &name, "mirror-0", "mirror"], "it is that already"),
        (&["plan", &name, "remove", "mirror-9"], "no such device in pool"),
    ] {
        let words: Vec<&str> = std::iter::once("pool").chain(words.iter().copied()).collect();
        let (code, said) = pool.yard.refused(&words);
        assert!(code != 0 && said.contains(why), "{words:?}: {said}");
        assert!(!PathBuf::from(&new).exists(), "{words:?} leaves a file");
        assert_eq!(all(), before, "{words:?}");
    }
    assert!(fs::read(&short).unwrap().iter().all(|byte| *byte == 0));
    let plan = pool.yard.nacre(&["pool", "plan", &name, "convert", "raidz1-1", "raidz2"]);
    assert!(plan.contains("failures survived  1 now, 1 meanwhile, 2 then"), "{plan}");
    let plan = pool.yard.nacre(&["pool", "plan", &name, "attach", "raidz1-1", &new]);
    assert!(plan.contains("expansion of raidz1-1") && !PathBuf::from(&new).exists(), "{plan}");
    assert_eq!(all(), before, "a plan changes nothing");
}
