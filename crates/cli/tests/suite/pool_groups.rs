//! Pools on groups of devices, through the real program on real files: how they are made, shown and
//! imported; and files of devices that are deleted, cut short, overwritten, exchanged and replaced
//! under load, with the process killed in between. As long as no group misses more than it has
//! parity, nothing is lost.
//!
//! `NACRE_POOL_ROUNDS` is the number of rounds for each kind of group, `NACRE_POOL_SEED` another
//! beginning.

mod changing;

use crate::crashing::{Dead, Load, Random, programs};
use crate::mounting::{as_root, eventually, needs, pools::Yard};
use std::{
    fs::{self, File, OpenOptions},
    mem,
    os::unix::fs::FileExt,
    path::PathBuf,
    sync::Arc,
    thread,
    time::Duration,
};

/// A pool in groups, mounted.
struct Grouped {
    yard: Yard,
    name: String,
    at: PathBuf,
    /// The groups: which devices each has, by their numbers, and how many of them may be lost.
    groups: Vec<(Vec<usize>, usize)>,
    /// Where the device of each number is now.
    devices: Vec<PathBuf>,
    size: &'static str,
    made: usize,
}

impl Grouped {
    /// Of groups: the word, and how many devices.
    fn made(short: &str, groups: &[(&str, usize)], size: &'static str) -> Grouped {
        let yard = Yard::new();
        let (name, at) = (yard.name(short), yard.path("at"));
        let (mut words, mut devices, mut parted) = (Vec::new(), Vec::new(), Vec::new());
        for (word, count) in groups {
            if *word != "plain" {
                words.extend(word.split(' ').map(str::to_owned));
            }
            let first = devices.len();
            for _ in 0..*count {
                let path = yard.path(&format!("d{}", devices.len()));
                words.push(path.display().to_string());
                devices.push(path);
            }
            let parity = match *word {
                "plain" | "log" => 0,
                "mirror" | "special mirror" | "log mirror" => count - 1,
                raidz => raidz[5..].parse().unwrap(),
            };
            parted.push(((first..devices.len()).collect(), parity));
        }
        let create = ["pool", "create", "-f", "--size", size, "-m", at.to_str().unwrap(), &name];
        yard.nacre(&create.into_iter().chain(words.iter().map(String::as_str)).collect::<Vec<_>>());
        let made = devices.len();
        Grouped { yard, name, at, groups: parted, devices, size, made }
    }

    fn path(&self, device: usize) -> &str {
        self.devices[device].to_str().unwrap()
    }

    fn import(&self) -> String {
        self.yard.told(&["pool", "import", "-d", self.yard.place.path().to_str().unwrap(), &self.name])
    }

    fn status(&self) -> String {
        self.yard.nacre(&["pool", "status", "-v", &self.name])
    }

    fn health(&self) -> String {
        self.yard.nacre(&["pool", "list", "-H", "-o", "health", &self.name]).trim().to_owned()
    }

    /// Kills the process, as a crash would, and detaches its mounts.
    fn die(&self) {
        self.yard.end(&self.name, rustix::process::Signal::KILL);
        crate::mounting::clear(&self.at);
    }

    /// A number of the pool that a property has.
    fn figure(&self, property: &str) -> u64 {
        self.yard.nacre(&["pool", "get", "-Hp", "-o", "value", property, &self.name]).trim().parse().unwrap()
    }

    /// Whether a device is in use as far as the pool knows.
    fn is_online(&self, device: usize) -> bool {
        let state = self.yard.nacre(&["pool", "get", "-H", "-o", "value", "state", &self.name, self.path(device)]);
        state.trim() == "ONLINE"
    }

    /// Another file in the place of this device.
    fn replace(&mut self, device: usize) {
        let new = self.yard.path(&format!("d{}", self.made));
        self.made += 1;
        let old = self.path(device).to_owned();
        self.yard.nacre(&["pool", "replace", "--size", self.size, &self.name, &old, new.to_str().unwrap()]);
        let _ = fs::remove_file(&old);
        self.devices[device] = new;
    }

    /// Everything is verified and whole, and nothing was lost.
    fn is_whole(&self, what: &str) {
        self.yard.nacre(&["pool", "wait", "-t", "resilver", &self.name]);
        self.yard.nacre(&["pool", "scrub", "-w", &self.name]);
        let status = self.status();
        assert!(status.contains("errors: No known data errors"), "{what}: {status}");
        let said = self.yard.told(&["pool", "check", &self.name]);
        assert!(said.starts_with("no problems: "), "{what}: {said}");
        assert_eq!(self.health(), "ONLINE", "{what}: {status}");
    }
}

/// Whether a text has these words one after the other, with whatever blanks between them.
fn says(text: &str, words: &str) -> bool {
    text.split_whitespace().collect::<Vec<_>>().join(" ").contains(words)
}

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |value| value.parse().expect(name))
}

/// Files that stay as they are, with content of their own.
struct Kept(Vec<(String, u64, usize)>);

impl Kept {
    fn written(pool: &Grouped, random: &mut Random) -> Kept {
        fs::create_dir(pool.at.join("kept")).unwrap();
        let file = |at: usize| (format!("kept/{at}"), random.next(), [30, 5_000, 200_000, 3_000_000][at % 4]);
        let files: Vec<_> = (0..24).map(file).collect();
        for (name, seed, length) in &files {
            fs::write(pool.at.join(name), Random(*seed).bytes(*length)).unwrap();
        }
        pool.yard.nacre(&["pool", "sync", &pool.name]);
        Kept(files)
    }

    fn verify(&self, pool: &Grouped, what: &str) {
        for (name, seed, length) in &self.0 {
            let found = fs::read(pool.at.join(name)).unwrap_or_else(|error| panic!("{what}: {name}: {error}"));
            assert!(found == Random(*seed).bytes(*length), "{what}: {name} is not what was written");
        }
    }
}

/// A fault of a device's file.
#[derive(Clone, Copy, Debug)]
enum Harm {
    Deleted,
    Cut,
    Overwritten,
    /// A part of it.
    Rotten,
}

fn harm(pool: &Grouped, device: usize, random: &mut Random) -> Harm {
    let path = &pool.devices[device];
    let file = || OpenOptions::new().write(true).open(path).unwrap();
    let length = fs::metadata(path).unwrap().len();
    let garble = |file: &File, from: u64, until: u64, random: &mut Random| {
        let noise = random.bytes(1 << 20);
        let mut at = from;
        while at < until {
            let part = noise.len().min((until - at) as usize);
            file.write_all_at(&noise[..part], at).unwrap();
            at += part as u64;
        }
    };
    match random.below(4) {
        0 => {
            fs::remove_file(path).unwrap();
            Harm::Deleted
        }
        1 => {
            file().set_len(random.below(length)).unwrap();
            Harm::Cut
        }
        2 => {
            garble(&file(), 0, length, random);
            Harm::Overwritten
        }
        _ => {
            let from = random.below(length);
            garble(&file(), from, length.min(from + length / 3), random);
            Harm::Rotten
        }
    }
}

/// Runs loads while devices are damaged, then kills the process; the pool is imported as it is, and
/// its redundancy is restored by replacing unusable devices, with more kills in between.
fn campaign(short: &str, groups: &[(&str, usize)], size: &'static str, seed: u64) {
    needs!(as_root());
    let seed = seed + number("NACRE_POOL_SEED", 0);
    let mut random = Random(seed);
    let mut pool = Grouped::made(short, groups, size);
    let kept = Kept::written(&pool, &mut random);
    let mut loads = programs::all(pool.yard.place.path());
    let (mut harmed, mut kills) = (Vec::new(), 0);
    for round in 0..number("NACRE_POOL_ROUNDS", 1) {
        let dead = Arc::new(Dead::default());
        let working = crate::crashing::begin(mem::take(&mut loads), &pool.at, &dead, &mut random);
        thread::sleep(Duration::from_millis(random.below(1500)));
        let (mut what, mut hit) = (format!("{short}, seed {seed}, round {round}:"), Vec::new());
        for (devices, parity) in &pool.groups {
            let mut left = devices.clone();
            for _ in 0..1 + random.below(*parity as u64) {
                let device = left.swap_remove(random.below(left.len() as u64) as usize);
                let how = harm(&pool, device, &mut random);
                what.push_str(&format!(" {device} {how:?}"));
                harmed.push(how);
                hit.push(device);
            }
        }
        println!("{what}");
        // No load may notice anything of it.
        thread::sleep(Duration::from_millis(random.below(2500)));
        dead.set();
        pool.die();
        kills += 1;
        eventually("the end of all loads", || working.iter().all(thread::JoinHandle::is_finished));
        let ended = working.into_iter();
        loads = ended.map(|load| load.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect();
        // Two of those that nothing has happened to lie elsewhere now: each where the other was.
        let well: Vec<usize> = (0..pool.devices.len()).filter(|device| !hit.contains(device)).collect();
        if let [first, second, ..] = well[..] {
            let (a, b) = (pool.path(first).to_owned(), pool.path(second).to_owned());
            let aside = pool.yard.path("aside");
            for (from, to) in [(&a, aside.to_str().unwrap()), (&b, &a), (&aside.display().to_string(), &b)] {
                fs::rename(from, to).unwrap();
            }
            pool.devices.swap(first, second);
        }
        pool.import();
        kept.verify(&pool, &what);
        for load in &mut loads {
            load.judge(&pool.at, &what);
        }
        for device in 0..pool.devices.len() {
            if !pool.is_online(device) {
                pool.replace(device);
                if random.below(2) == 0 {
                    thread::sleep(Duration::from_millis(random.below(400)));
                    pool.die();
                    kills += 1;
                    pool.import();
                }
            }
        }
        pool.is_whole(&what);
        kept.verify(&pool, &what);
        pool.yard.nacre(&["pool", "clear", &pool.name]);
    }
    assert_eq!(pool.yard.nacre(&["pool", "status", "-x", &pool.name]), format!("pool '{}' is healthy\n", pool.name));
    pool.yard.nacre(&["pool", "export", &pool.name]);
    pool.import();
    kept.verify(&pool, "exported and imported");
    let promises: Vec<String> = loads.iter().map(|load| load.promises()).collect();
    println!(
        "campaign: {short}, seed {seed} (NACRE_POOL_ROUNDS, NACRE_POOL_SEED): {} devices harmed, {kills} kills, {}",
        harmed.len(),
        promises.join(", ")
    );
}

#[test]
fn a_mirror_loses_nothing_with_a_device() {
    campaign("gm", &[("mirror", 2)], "1G", 1);
}

#[test]
fn raidz1_loses_nothing_with_a_device() {
    campaign("gz", &[("raidz1", 4)], "512M", 2);
}

#[test]
fn raidz2_loses_nothing_with_two_devices() {
    campaign("gy", &[("raidz2", 5)], "512M", 3);
}

#[test]
fn each_of_several_groups_can_lose_a_device() {
    campaign("gs", &[("mirror", 2), ("mirror", 2)], "512M", 4);
}

#[test]
fn groups_for_metadata_and_the_log_can_lose_a_device() {
    campaign("gc", &[("raidz1", 3), ("special mirror", 2), ("log mirror", 2)], "512M", 5);
}

/// File by file synced writes are on log devices: they are found again after a crash, whether log
/// devices are there, are added, removed, go offline or come back meanwhile.
#[test]
fn what_was_synced_is_found_again_with_devices_for_the_log() {
    needs!(as_root());
    let pool = Grouped::made("gk", &[("mirror", 2), ("log", 1)], "128M");
    let path = |name: &str| pool.yard.path(name).display().to_string();
    let done = |words: &[&str]| drop(pool.yard.nacre(&[&["pool"], words].concat()));
    let (name, log) = (pool.name.as_str(), pool.path(2));
    let written = |device: usize| -> u64 {
        let of = |property| pool.yard.nacre(&["pool", "get", "-Hp", "-o", "value", property, name, pool.path(device)]);
        of("write_bytes").trim().parse().unwrap()
    };
    let synced = |number: usize| {
        let mut file = File::create(pool.at.join(format!("s{number}"))).unwrap();
        std::io::Write::write_all(&mut file, &Random(number as u64).bytes(3000)).unwrap();
        file.sync_all().unwrap();
    };
    let (before, on_log) = (written(0), written(2));
    (0..50).for_each(synced);
    assert!(written(2) - on_log > 50 * 3000 && written(0) - before < 50 * 3000, "{before} {on_log}");
    // One program runs all the time, whatever happens to the log.
    let (dead, made) = (Dead::default(), std::sync::atomic::AtomicUsize::new(50));
    thread::scope(|scope| {
        scope.spawn(|| {
            while !dead.is_set() {
                let number = made.load(std::sync::atomic::Ordering::Relaxed);
                synced(number);
                made.store(number + 1, std::sync::atomic::Ordering::Relaxed);
            }
        });
        let goes_on = |what: &str| {
            let from = made.load(std::sync::atomic::Ordering::Relaxed);
            eventually(what, || made.load(std::sync::atomic::Ordering::Relaxed) > from + 3);
        };
        goes_on("with a device for the log");
        done(&["offline", name, log]);
        goes_on("while it is offline");
        done(&["online", name, log]);
        done(&["wait", "-t", "resilver", name]);
        goes_on("online again");
        done(&["remove", name, log]);
        goes_on("without it");
        done(&["add", "--size", "128M", name, "log", "mirror", "l0", "l1"]);
        goes_on("with a mirror");
        done(&["replace", "-w", "--size", "128M", name, &path("l0"), "l2"]);
        done(&["detach", name, &path("l1")]);
        done(&["attach", "-w", "--size", "128M", name, &path("l2"), "l3"]);
        goes_on("with other devices");
        dead.set();
    });
    let count = made.load(std::sync::atomic::Ordering::Relaxed);
    let all_there = |what: &str| {
        for number in 0..count {
            let found = fs::read(pool.at.join(format!("s{number}"))).unwrap_or_default();
            assert!(found == Random(number as u64).bytes(3000), "{what}: s{number} of {count}");
        }
    };
    pool.die();
    // Without one of a mirror nothing is lacking; without both, that is said.
    fs::rename(path("l2"), path("aside2")).unwrap();
    fs::create_dir(pool.yard.path("elsewhere")).unwrap();
    fs::rename(path("aside2"), path("elsewhere/l2")).unwrap();
    fs::rename(path("l3"), path("elsewhere/l3")).unwrap();
    let here = pool.yard.place.path().to_str().unwrap().to_owned();
    let (code, said) = pool.yard.refused(&["pool", "import", "-d", &here, name]);
    assert!(code == 1 && said.contains("one or more devices is currently unavailable"), "{said}");
    for line in ["use '-m' to import the pool anyway:", "[log]", "/l2", "/l3"] {
        assert!(said.contains(line), "{line}: {said}");
    }
    let shown = pool.yard.nacre(&["pool", "import", "-d", &here]);
    assert!(says(&shown, "the '-m' flag") && says(&shown, "l2 UNAVAIL cannot open"), "{shown}");
    fs::rename(path("elsewhere/l2"), path("l2")).unwrap();
    pool.import();
    all_there("with one device of the log");
    assert_eq!(pool.health(), "DEGRADED");
    fs::rename(path("elsewhere/l3"), path("l3")).unwrap();
    done(&["online", name, &path("l3")]);
    pool.is_whole("the other one is back");
    // What was committed is there without the log, what was only synced is not.
    pool.yard.nacre(&["pool", "sync", name]);
    pool.die();
    fs::rename(path("l2"), path("elsewhere/l2")).unwrap();
    fs::rename(path("l3"), path("elsewhere/l3")).unwrap();
    pool.yard.told(&["pool", "import", "-m", "-d", &here, name]);
    all_there("without the log");
    (count..count + 3).for_each(synced);
    assert!(says(&pool.status(), "l2 UNAVAIL") && pool.status().contains("\tlogs\n"), "{}", pool.status());
    let mirror = pool.status().lines().find_map(|line| {
        line.trim().strip_prefix("mirror-")?.split(' ').next().map(str::to_owned).filter(|number| number != "0")
    });
    done(&["remove", name, &format!("mirror-{}", mirror.unwrap())]);
    pool.die();
    pool.import();
    all_there("after all that");
    assert_eq!(fs::read(pool.at.join(format!("s{}", count + 2))).unwrap(), Random(count as u64 + 2).bytes(3000));
    pool.is_whole("without devices for the log");
}

/// Groups for metadata, devices for the log and spares are shown apart, with the room that they have.
#[test]
fn classes_of_devices_are_told_apart() {
    needs!(as_root());
    let pool = Grouped::made("ge", &[("raidz1", 3), ("special mirror", 2), ("log", 1)], "128M");
    let (name, path) = (pool.name.as_str(), |name: &str| pool.yard.path(name).display().to_string());
    pool.yard.nacre(&["pool", "add", "--size", "128M", name, "spare", "s0"]);
    let text = pool.status();
    let lines: Vec<&str> = text
        .lines()
        .skip_while(|line| !line.contains("NAME"))
        .skip(1)
        .map(|line| line.trim_start_matches('\t'))
        .take_while(|line| !line.is_empty())
        .collect();
    let names: Vec<String> = lines
        .iter()
        .map(|line| line.trim_end().replace(&format!("{}/", pool.yard.place.path().display()), ""))
        .map(|line| {
            line.trim_end().split("  ONLINE").next().unwrap().split("  AVAIL").next().unwrap().trim_end().to_owned()
        })
        .collect();
    assert_eq!(
        names,
        [
            name,
            "  raidz1-0",
            "    d0",
            "    d1",
            "    d2",
            "special",
            "  mirror-1",
            "    d3",
            "    d4",
            "logs",
            "  d5",
            "spares",
            "  s0"
        ],
        "{text}"
    );
    let list = pool.yard.nacre(&["pool", "list", "-Hpv", "-o", "name,size,alloc,free", name]);
    let rows: Vec<Vec<&str>> = list.lines().map(|line| line.split('\t').collect()).collect();
    let figure = |row: &str, column: usize| -> u64 {
        rows.iter().find(|found| found[0] == row).unwrap_or_else(|| panic!("{row}: {list}"))[column].parse().unwrap()
    };
    assert_eq!(figure(name, 1), figure("raidz1-0", 1) + figure("mirror-1", 1), "{list}");
    assert!(rows.iter().any(|row| row[..] == ["logs", "-", "-", "-"]), "{list}");
    assert!(figure("mirror-1", 2) > 0 && figure("raidz1-0", 2) < 1 << 20, "metadata lies on the mirror: {list}");
    let iostat = pool.yard.nacre(&["pool", "iostat", "-v", name]);
    for heading in ["special  ", "logs  "] {
        assert!(iostat.lines().any(|line| line.starts_with(heading) && line.ends_with('-')), "{iostat}");
    }
    let json = pool.yard.nacre(&["pool", "status", "-j", name]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let json = &json["pools"][name];
    assert_eq!(json["special"]["mirror-1"]["class"], "special", "{json}");
    assert_eq!(json["special"]["mirror-1"]["vdevs"][pool.path(3)]["class"], "special", "{json}");
    assert_eq!(json["logs"][pool.path(5)]["class"], "logs", "{json}");
    assert_eq!(json["vdevs"][name]["vdevs"].as_object().unwrap().len(), 1, "{json}");
    assert_eq!(pool.yard.nacre(&["pool", "get", "-H", "-o", "value", "feature@allocation_classes", name]), "active\n");
    // Content takes all of the room for it, and nothing of the mirror's.
    let available =
        || -> u64 { pool.yard.nacre(&["fs", "get", "-Hp", "-o", "value", "available", name]).trim().parse().unwrap() };
    let before = available();
    for file in 0..400 {
        fs::create_dir(pool.at.join(format!("d{file}"))).unwrap();
        fs::write(pool.at.join(format!("d{file}/f")), []).unwrap();
    }
    pool.yard.nacre(&["pool", "sync", name]);
    assert!(before - available() < 64 << 10, "metadata takes none of it: {before} {}", available());
    let mut file = File::create(pool.at.join("full")).unwrap();
    let mut random = Random(4);
    while std::io::Write::write_all(&mut file, &random.bytes(1 << 20)).is_ok() {}
    drop(file);
    pool.yard.nacre(&["pool", "sync", name]);
    fs::remove_file(pool.at.join("full")).unwrap();
    fs::write(pool.at.join("kept"), Random(8).bytes(4 << 20)).unwrap();
    // One device of each group goes; then a second one of the mirror.
    pool.yard.nacre(&["pool", "export", name]);
    fs::create_dir(pool.yard.path("elsewhere")).unwrap();
    let away = |device: &str| fs::rename(path(device), path(&format!("elsewhere/{device}"))).unwrap();
    ["d0", "d3"].into_iter().for_each(away);
    pool.import();
    assert!(fs::read(pool.at.join("kept")).unwrap() == Random(8).bytes(4 << 20));
    pool.yard.nacre(&["pool", "export", name]);
    away("d4");
    let here = pool.yard.place.path().to_str().unwrap().to_owned();
    let shown = pool.yard.nacre(&["pool", "import", "-d", &here]);
    assert!(says(&shown, "special mirror-1 UNAVAIL insufficient replicas"), "{shown}");
    let (_, said) = pool.yard.refused(&["pool", "import", "-m", "-d", &here, name]);
    assert!(said.contains("/d4") && said.contains("/d3") && said.contains("unavailable"), "{said}");
    ["d0", "d3", "d4"]
        .into_iter()
        .for_each(|device| fs::rename(path(&format!("elsewhere/{device}")), path(device)).unwrap());
    pool.import();
    pool.is_whole("all are back");
}

#[test]
fn figures_are_those_of_zpool() {
    needs!(as_root());
    const MIB: u64 = 1 << 20;
    for (groups, size, raw, usable) in [
        (&[("mirror", 3)][..], "256M", 256, 256),
        (&[("raidz1", 4)], "256M", 1024, 768),
        (&[("raidz2", 5)], "256M", 1280, 768),
        (&[("mirror", 2), ("mirror", 2)], "256M", 512, 512),
    ] {
        let pool = Grouped::made("gf", groups, size);
        let within = |found: u64, wanted: u64| found <= wanted * MIB && found * 100 >= wanted * MIB * 80;
        assert!(within(pool.figure("size"), raw), "{groups:?}: {}", pool.figure("size"));
        assert_eq!(pool.figure("size"), pool.figure("allocated") + pool.figure("free"));
        let room = || -> (u64, u64) {
            let line = pool.yard.nacre(&["fs", "get", "-Hp", "-o", "value", "available,used", &pool.name]);
            let mut lines = line.lines().map(|number| number.parse().unwrap());
            (lines.next().unwrap(), lines.next().unwrap())
        };
        // What is kept back for removals comes off the usable room.
        let (available, used) = room();
        assert!(available + used < usable * MIB && available + used + 140 * MIB > usable * MIB * 9 / 10, "{available}");
        let before = pool.figure("allocated");
        fs::write(pool.at.join("file"), Random(1).bytes(64 << 20)).unwrap();
        pool.yard.nacre(&["pool", "sync", &pool.name]);
        let (now, more) = (pool.figure("allocated"), (64 * raw / usable) * MIB);
        let grown = now - before;
        assert!(grown.abs_diff(more) < more / 20, "{groups:?}: {grown} for {more}");
        let (left, taken) = room();
        assert!(taken.abs_diff(used + 64 * MIB) < 3 * MIB, "{taken}");
        // The ends of segments are lost as well.
        assert!(available.abs_diff(left + 64 * MIB) < 8 * MIB, "{available} {left}");
        let list = pool.yard.nacre(&["pool", "list", "-Hpv", "-o", "name,size,alloc,health", &pool.name]);
        let lines: Vec<Vec<&str>> = list.lines().map(|line| line.split('\t').collect()).collect();
        assert_eq!(lines.len(), 1 + groups.len() + pool.devices.len(), "{list}");
        let first = if groups[0].0 == "mirror" { "mirror-0" } else { groups[0].0 };
        assert!(lines[1][0].starts_with(first) && lines[2][0] == pool.path(0) && lines[2][2] == "-", "{list}");
        let of_groups = lines.iter().filter(|line| ["mirror-", "raidz"].iter().any(|kind| line[0].starts_with(kind)));
        let sum: u64 = of_groups.map(|line| line[1].parse::<u64>().unwrap()).sum();
        assert_eq!(sum, pool.figure("size"), "{list}");
    }
}

#[test]
fn status_tells_of_groups() {
    needs!(as_root());
    let mut pool = Grouped::made("gt", &[("raidz1", 3)], "128M");
    let text = pool.status();
    for line in ["raidz1-0 ONLINE 0 0 0", "d2 ONLINE 0 0 0"] {
        assert!(says(&text, line), "{text}");
    }
    pool.yard.nacre(&["pool", "offline", &pool.name, pool.path(1)]);
    let text = pool.status();
    for line in ["state: DEGRADED", "raidz1-0 DEGRADED", "d1 OFFLINE", "taken offline by the administrator"] {
        assert!(says(&text, line), "{line}: {text}");
    }
    let (code, said) = pool.yard.refused(&["pool", "offline", &pool.name, pool.path(2)]);
    assert!(code == 1 && said.contains("no valid replicas"), "{said}");
    assert!(pool.yard.nacre(&["pool", "status", "-x", &pool.name]).contains("OFFLINE"));
    let json = pool.yard.nacre(&["pool", "status", "-j", &pool.name]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let root = &json["pools"][&pool.name]["vdevs"][&pool.name];
    let group = &root["vdevs"]["raidz1-0"];
    assert_eq!((root["vdev_type"].as_str(), group["vdev_type"].as_str()), (Some("root"), Some("raidz")));
    assert_eq!(group["vdevs"][pool.path(1)]["state"].as_str(), Some("OFFLINE"));
    fs::write(pool.at.join("missed"), Random(9).bytes(5 << 20)).unwrap();
    pool.yard.nacre(&["pool", "sync", &pool.name]);
    pool.yard.nacre(&["pool", "online", &pool.name, pool.path(1)]);
    pool.is_whole("online again");
    let text = pool.status();
    assert!(text.contains("scan: resilvered ") && text.contains("with 0 errors"), "{text}");
    let of = |property: &str, device: &str| {
        pool.yard.nacre(&["pool", "get", "-H", "-o", "value", property, &pool.name, device]).trim().to_owned()
    };
    assert_eq!((of("parity", "raidz1-0"), of("numchildren", "raidz1-0")), ("1".to_owned(), "3".to_owned()));
    assert_eq!((of("parent", pool.path(0)), of("children", "root-0")), ("raidz1-0".to_owned(), "raidz1-0".to_owned()));
    let iostat = pool.yard.nacre(&["pool", "iostat", "-Hv", &pool.name]);
    assert!(iostat.lines().any(|line| line.starts_with("raidz1-0\t")), "{iostat}");
    pool.replace(0);
    pool.is_whole("replaced");
}

#[test]
fn imports_tell_what_is_missing() {
    needs!(as_root());
    let pool = Grouped::made("gi", &[("raidz1", 3)], "128M");
    fs::write(pool.at.join("file"), b"content").unwrap();
    pool.yard.nacre(&["pool", "export", &pool.name]);
    fs::create_dir(pool.yard.path("elsewhere")).unwrap();
    let away = |device: usize| pool.yard.path("elsewhere").join(format!("d{device}"));
    fs::rename(pool.path(1), away(1)).unwrap();
    let here = pool.yard.place.path().to_str().unwrap().to_owned();
    let shown = pool.yard.nacre(&["pool", "import", "-d", &here]);
    for line in ["state: DEGRADED", "raidz1-0 DEGRADED", "UNAVAIL cannot open", "can be imported despite missing"] {
        assert!(says(&shown, line), "{line}: {shown}");
    }
    fs::rename(pool.path(2), away(2)).unwrap();
    let shown = pool.yard.nacre(&["pool", "import", "-d", &here]);
    assert!(says(&shown, "raidz1-0 UNAVAIL insufficient replicas"), "{shown}");
    let (code, said) = pool.yard.refused(&["pool", "import", "-d", &here, &pool.name]);
    assert!(code == 1 && said.contains("one or more devices is currently unavailable"), "{said}");
    assert!(said.contains(pool.path(1)) && said.contains(pool.path(2)) && !said.contains(pool.path(0)), "{said}");
    fs::rename(away(2), pool.path(2)).unwrap();
    pool.import();
    assert_eq!(
        (fs::read(pool.at.join("file")).unwrap().as_slice(), pool.health().as_str()),
        (&b"content"[..], "DEGRADED")
    );
    fs::write(pool.at.join("more"), Random(3).bytes(3 << 20)).unwrap();
    pool.yard.nacre(&["pool", "export", &pool.name]);
    // It comes back, older than the others: it does not count for one of them.
    fs::rename(away(1), pool.path(1)).unwrap();
    fs::rename(pool.path(2), away(2)).unwrap();
    let shown = pool.yard.nacre(&["pool", "import", "-d", &here]);
    for line in ["state: UNAVAIL", "raidz1-0 UNAVAIL insufficient replicas", "cannot be imported"] {
        assert!(says(&shown, line), "{line}: {shown}");
    }
    let (code, said) = pool.yard.refused(&["pool", "import", "-d", &here, &pool.name]);
    assert!(code == 1 && said.contains(pool.path(2)), "{said}");
    fs::rename(away(2), pool.path(2)).unwrap();
    pool.import();
    pool.is_whole("an older device");
    pool.yard.nacre(&["pool", "export", &pool.name]);
    // It has everything now.
    fs::rename(pool.path(0), away(0)).unwrap();
    pool.import();
    assert!(fs::read(pool.at.join("more")).unwrap() == Random(3).bytes(3 << 20));
    // A spare that has what a missing device had counts for it.
    pool.yard.nacre(&["pool", "add", "--size", "128M", &pool.name, "spare", "s0"]);
    eventually("the spare stands in", || pool.status().contains("INUSE"));
    pool.yard.nacre(&["pool", "wait", "-t", "resilver", &pool.name]);
    pool.yard.nacre(&["pool", "export", &pool.name]);
    fs::rename(pool.path(1), away(1)).unwrap();
    let shown = pool.yard.nacre(&["pool", "import", "-d", &here]);
    for line in ["state: DEGRADED", "raidz1-0 DEGRADED", "can be imported despite missing"] {
        assert!(says(&shown, line), "{line}: {shown}");
    }
    pool.import();
    assert!(fs::read(pool.at.join("more")).unwrap() == Random(3).bytes(3 << 20));
}

#[test]
fn clear_opens_a_device_that_is_there_again() {
    needs!(as_root());
    let pool = Grouped::made("gc", &[("raidz1", 3)], "128M");
    let name = pool.name.clone();
    fs::create_dir(pool.yard.path("elsewhere")).unwrap();
    let aside = pool.yard.path("elsewhere").join("device");
    let import_without = |device: usize| {
        pool.yard.nacre(&["pool", "export", &name]);
        fs::rename(pool.path(device), &aside).unwrap();
        pool.import();
        fs::write(pool.at.join("more"), Random(device as u64).bytes(3 << 20)).unwrap();
        pool.yard.nacre(&["pool", "clear", &name]);
        assert_eq!(pool.health(), "DEGRADED", "nothing lies at the path");
    };
    import_without(1);
    fs::rename(&aside, pool.path(1)).unwrap();
    pool.yard.nacre(&["pool", "clear", &name, pool.path(0)]);
    assert!(says(&pool.status(), "d1 UNAVAIL"), "another device was named: {}", pool.status());
    pool.yard.nacre(&["pool", "clear", &name, pool.path(1)]);
    pool.is_whole("cleared by name");
    import_without(2);
    fs::rename(&aside, pool.path(2)).unwrap();
    pool.yard.nacre(&["pool", "clear", &name]);
    pool.is_whole("cleared");
    // A device without the pool's labels stays out, and the refusal names the command that takes it in.
    import_without(0);
    fs::write(pool.path(0), Random(5).bytes(128 << 20)).unwrap();
    let (code, said) = pool.yard.refused(&["pool", "clear", &name]);
    assert!(code == 1 && said.contains(pool.path(0)) && said.contains("nacre pool replace"), "{said}");
    assert_eq!(pool.health(), "DEGRADED");
    pool.yard.nacre(&["pool", "replace", "-f", "-w", &name, pool.path(0)]);
    pool.is_whole("replaced");
}

#[test]
fn a_device_that_is_missing_is_not_the_one_that_lies_there_now() {
    needs!(as_root());
    let pool = Grouped::made("gn", &[("raidz1", 3)], "128M");
    fs::write(pool.at.join("file"), b"content").unwrap();
    pool.yard.nacre(&["pool", "export", &pool.name]);
    fs::rename(pool.path(1), pool.path(0)).unwrap();
    pool.import();
    let guid = pool.yard.nacre(&["pool", "status", "-g", &pool.name]);
    let guid = guid.lines().find_map(|line| line.split_once(" UNAVAIL")).unwrap().0.trim().to_owned();
    assert!(says(&pool.status(), &format!("{guid} UNAVAIL")), "{}", pool.status());
    let online = |word: &str| pool.yard.nacre(&["pool", "get", "-H", "-o", "value", "state", &pool.name, word]);
    assert_eq!((online(pool.path(0)).trim(), online(&guid).trim()), ("ONLINE", "UNAVAIL"));
    pool.yard.nacre(&["pool", "replace", "-w", "--size", "128M", &pool.name, &guid, "new"]);
    pool.is_whole("replaced");
    assert_eq!(fs::read(pool.at.join("file")).unwrap(), b"content");
}

#[test]
fn what_makes_no_sense_is_refused_and_changes_nothing() {
    needs!(as_root());
    let yard = Yard::new();
    let (name, at) = (yard.name("gr"), yard.path("at"));
    let files: Vec<String> = (0..6).map(|file| yard.path(&format!("f{file}")).display().to_string()).collect();
    let length = |file: usize| if file == 5 { 256 << 20 } else { 128 << 20 };
    files.iter().enumerate().for_each(|(file, path)| File::create(path).unwrap().set_len(length(file)).unwrap());
    let is_zero = || {
        let zeros = |path: &String, at: u64| {
            let mut there = vec![1; 1 << 20];
            File::open(path).unwrap().read_exact_at(&mut there, at).unwrap();
            there.iter().all(|byte| *byte == 0)
        };
        files.iter().enumerate().all(|(file, path)| zeros(path, 0) && zeros(path, length(file) - (1 << 20)))
    };
    let create = |words: &str| -> Vec<String> {
        let start = format!("pool create -m {} {name} {words}", at.display());
        let number = |word: &str| word.strip_prefix('%').map(|number| files[number.parse::<usize>().unwrap()].clone());
        start.split(' ').map(|word| number(word).unwrap_or_else(|| word.to_owned())).collect()
    };
    let refused = |words: &str| {
        let words = create(words);
        yard.refused(&words.iter().map(String::as_str).collect::<Vec<_>>())
    };
    for (words, why) in [
        ("mirror %0", "mirror requires at least 2 devices"),
        ("raidz %0", "raidz requires at least 2 devices"),
        ("raidz2 %0 %1", "raidz2 requires at least 3 devices"),
        ("raidz3 %0 %1 %2", "raidz3 requires at least 4 devices"),
        ("mirror", "mirror requires at least 2 devices"),
        ("%0 mirror %1 %2", "both file and mirror vdevs are present"),
        ("mirror %0 %1 raidz %2 %3", "both mirror and raidz vdevs are present"),
        ("mirror %0 %1 mirror %2 %3 %4", "both 2-way and 3-way mirror vdevs are present"),
        ("raidz %0 %1 %2 raidz2 %3 %4 %5", "both 1 and 2 device parity raidz vdevs are present"),
        ("mirror %0 %0", "is named twice"),
        ("mirror %0 %1 log %1", "is named twice"),
        ("mirror %0 %1 spare %0", "is named twice"),
        ("mirror %0 %1 log mirror %2", "mirror requires at least 2 devices"),
        ("mirror %0 %1 log raidz2 %2 %3 %4", "unsupported 'log' device: raidz"),
        ("mirror %0 %1 special raidz %2 %3", "unsupported 'special' device: raidz"),
        ("raidz2 %0 %1 %2 special mirror %3 %4", "raidz and mirror vdevs with different redundancy, 2 vs. 1 (2-way)"),
        ("mirror %0 %1 special %2", "both mirror and file vdevs are present"),
        ("mirror %0 %1 special mirror %2 %5", "mirror contains devices of different sizes"),
        ("log %0", "at least one toplevel vdev must be specified"),
        ("mirror %0 %1 mirror %2 %1", "is named twice"),
        ("mirror %0 %5", "mirror contains devices of different sizes"),
        ("mirror %0 /nonexistent/x", "/nonexistent/x"),
        ("-n mirror %0 %5", "mirror contains devices of different sizes"),
        ("-n mirror %0 %0", "is named twice"),
        ("--size 64M mirror new new", "is named twice"),
        ("--size 64M -n mirror new new", "is named twice"),
    ] {
        let (code, said) = refused(words);
        assert!(code != 0 && said.contains(why), "{words}: {code} {said}");
    }
    assert!(is_zero() && !yard.path("new").exists() && !at.exists());
    // One that holds something.
    File::options().write(true).open(&files[1]).unwrap().write_all_at(b"XFSB", 0).unwrap();
    let (_, said) = refused("mirror %0 %1");
    assert!(said.contains("contains a filesystem of type 'xfs'"), "{said}");
    File::options().write(true).open(&files[1]).unwrap().write_all_at(&[0; 4], 0).unwrap();
    assert!(is_zero());
    let words = create("-n mirror %0 %1 mirror %2 %3");
    let would = yard.nacre(&words.iter().map(String::as_str).collect::<Vec<_>>());
    let layout = format!(
        "\t{name}\n\t  mirror\n\t    {}\n\t    {}\n\t  mirror\n\t    {}\n\t    {}\n",
        files[0], files[1], files[2], files[3]
    );
    assert!(would.ends_with(&layout), "{would}");
    assert!(is_zero());
    // What is forced, and a device of another pool.
    let words = create("-f %0 mirror %1 %5");
    yard.nacre(&words.iter().map(String::as_str).collect::<Vec<_>>());
    let (_, said) = yard.refused(&["pool", "create", &yard.name("gx"), "mirror", &files[1], &files[2]]);
    assert!(said.contains(&format!("is part of active pool '{name}'")), "{said}");
    let list = yard.nacre(&["pool", "list", "-Hv", "-o", "name", &name]);
    assert_eq!(list.lines().collect::<Vec<_>>(), [&name, &files[0], "mirror-1", &files[1], &files[5]]);
    fs::write(at.join("file"), Random(5).bytes(9 << 20)).unwrap();
    yard.nacre(&["pool", "export", &name]);
    let (_, said) = yard.refused(&["pool", "create", &yard.name("gx"), "mirror", &files[1], &files[2]]);
    assert!(said.contains("is part of exported pool"), "{said}");
    yard.nacre(&["pool", "import", "-d", yard.place.path().to_str().unwrap(), &name]);
    assert!(fs::read(at.join("file")).unwrap() == Random(5).bytes(9 << 20));
    assert!(yard.nacre(&["pool", "check", &name]).contains("no problems"));
}

#[test]
fn a_deleted_file_is_done_without() {
    needs!(as_root());
    let mut pool = Grouped::made("gd", &[("mirror", 2)], "128M");
    fs::write(pool.at.join("file"), Random(5).bytes(9 << 20)).unwrap();
    fs::remove_file(pool.path(0)).unwrap();
    let text = pool.status();
    for line in ["state: DEGRADED", "mirror-0 DEGRADED", "d0 REMOVED", "removed by the administrator"] {
        assert!(says(&text, line), "{line}: {text}");
    }
    // Nothing is lost with it: the pool may be exported.
    pool.yard.nacre(&["pool", "export", &pool.name]);
    pool.import();
    assert!(fs::read(pool.at.join("file")).unwrap() == Random(5).bytes(9 << 20));
    pool.replace(0);
    pool.is_whole("replaced");
    fs::remove_file(pool.path(0)).unwrap();
    fs::remove_file(pool.path(1)).unwrap();
    let (code, said) = pool.yard.refused(&["pool", "export", &pool.name]);
    assert!(code == 5 && said.contains("was deleted"), "{said}");
}

#[test]
fn mirrors_get_more_devices_and_fewer_in_use() {
    needs!(as_root());
    let mut pool = Grouped::made("ga", &[("plain", 1)], "256M");
    let (mut random, first) = (Random(7), pool.path(0).to_owned());
    let kept = Kept::written(&pool, &mut random);
    let (a, b) = (pool.yard.path("a").display().to_string(), pool.yard.path("b").display().to_string());
    let (code, said) = pool.yard.refused(&["pool", "attach", "--size", "128M", &pool.name, &first, &a]);
    assert!(code == 1 && said.contains("too small"), "{said}");
    let (code, said) = pool.yard.refused(&["pool", "attach", "--size", "256M", &pool.name, "nosuch", &a]);
    assert!(code == 3 && said.contains("no such device in pool") && !pool.yard.path("a").exists(), "{said}");
    pool.yard.nacre(&["pool", "attach", "-w", "--size", "256M", &pool.name, &first, &a]);
    pool.is_whole("attached");
    assert!(says(&pool.status(), "mirror-0 ONLINE"), "{}", pool.status());
    // What is written meanwhile is on the third one, too.
    pool.yard.nacre(&["pool", "attach", "--size", "256M", &pool.name, &a, &b]);
    fs::write(pool.at.join("meanwhile"), Random(3).bytes(5 << 20)).unwrap();
    pool.yard.nacre(&["pool", "sync", &pool.name]);
    pool.is_whole("attached again");
    pool.die();
    fs::remove_file(&first).unwrap();
    fs::remove_file(&a).unwrap();
    pool.import();
    kept.verify(&pool, "on the third device alone");
    assert!(fs::read(pool.at.join("meanwhile")).unwrap() == Random(3).bytes(5 << 20));
    pool.yard.nacre(&["pool", "detach", &pool.name, &a]);
    pool.yard.nacre(&["pool", "detach", &pool.name, &first]);
    pool.devices[0] = PathBuf::from(&b);
    pool.is_whole("detached");
    let (code, said) = pool.yard.refused(&["pool", "detach", &pool.name, &b]);
    assert!(code == 1, "{said}");
    pool.yard.nacre(&["pool", "export", &pool.name]);
    pool.import();
    kept.verify(&pool, "exported and imported");
}

#[test]
fn a_spare_stands_in_by_itself_and_is_given_back() {
    needs!(as_root());
    let yard = Yard::new();
    let (disk, at, name) = (yard.path("disk"), yard.path("at"), yard.name("gh"));
    fs::create_dir(&disk).unwrap();
    let mount = ["-t", "tmpfs", "-o", "size=300m", "tmpfs", disk.to_str().unwrap()];
    assert!(crate::mounting::run("mount", mount).status.success());
    let room = |size: &str| {
        let words = ["-o", &format!("remount,size={size}"), disk.to_str().unwrap()].map(str::to_owned);
        assert!(crate::mounting::run("mount", words).status.success());
    };
    let create = ["pool", "create", "--size", "256M", "-O", "compression=off", "-m", at.to_str().unwrap(), &name];
    yard.nacre(&[&create[..], &["raidz1", "disk/d0", "d1", "d2"]].concat());
    yard.nacre(&["pool", "add", "--size", "256M", &name, "spare", "s0", "s1"]);
    let status = || yard.nacre(&["pool", "status", &name]);
    let spare = |number: usize| yard.path(&format!("s{number}")).display().to_string();
    assert!(status().contains("\tspares\n") && says(&status(), "s0 AVAIL"), "{}", status());
    assert!(yard.nacre(&["pool", "list", "-Hv", "-o", "name,health", &name]).contains(&format!("{}\tAVAIL", spare(0))));
    yard.nacre(&["pool", "remove", &name, &spare(1)]);
    assert!(!status().contains("s1"), "{}", status());
    let two = ["d1", "d2"].map(|device| yard.path(device).display().to_string());
    let (_, said) = yard.refused(&["pool", "remove", &name, &two[0], &two[1]]);
    assert!(said.contains("cannot remove") && said.contains("needs 2 devices"), "{said}");
    fs::write(at.join("before"), Random(1).bytes(20 << 20)).unwrap();
    yard.nacre(&["pool", "sync", &name]);
    // The disk of one has no room any more.
    let held = fs::metadata(disk.join("d0")).map(|file| std::os::unix::fs::MetadataExt::blocks(&file) / 2).unwrap();
    room(&format!("{}k", held + 512));
    fs::write(at.join("after"), Random(2).bytes(40 << 20)).unwrap();
    yard.nacre(&["pool", "sync", &name]);
    eventually("the spare stands in", || status().contains("INUSE"));
    assert!(status().contains("spare-0") && says(&status(), "d0 FAULTED"), "{}", status());
    yard.nacre(&["pool", "wait", "-t", "resilver", &name]);
    // It may be lost now, and another one as well.
    room("300m");
    yard.nacre(&["pool", "clear", &name]);
    yard.nacre(&["pool", "wait", "-t", "resilver", &name]);
    eventually("the spare is given back", || status().contains("AVAIL"));
    yard.nacre(&["pool", "scrub", "-w", &name]);
    assert!(fs::read(at.join("before")).unwrap() == Random(1).bytes(20 << 20));
    assert!(fs::read(at.join("after")).unwrap() == Random(2).bytes(40 << 20));
    assert!(yard.told(&["pool", "check", &name]).starts_with("no problems: "));
    yard.nacre(&["pool", "destroy", &name]);
    crate::mounting::clear(&disk);
}

#[test]
fn groups_are_added_and_scrubs_look_at_parts() {
    needs!(as_root());
    let pool = Grouped::made("gg", &[("mirror", 2)], "128M");
    let path = |name: &str| pool.yard.path(name).display().to_string();
    let before = pool.figure("size");
    for (words, why) in [
        (&["raidz", "x", "y", "z"][..], "pool uses mirror and new vdev is raidz"),
        (&["mirror", "x", "y", "z"], "pool uses 2-way mirror and new vdev uses 3-way mirror"),
        (&["x"], "pool uses mirror and new vdev is"),
        (&["special", "x"], "pool uses mirror and new vdev is file"),
        (&["special", "mirror", "x", "y", "z"], "pool uses 2-way mirror and new vdev uses 3-way mirror"),
        (&["log", "raidz", "x", "y"], "unsupported 'log' device: raidz"),
        (&["log", "mirror", "x"], "mirror requires at least 2 devices"),
        (&["log", "x", "x"], "is named twice"),
        (&["-n", "x"], "pool uses mirror and new vdev is file"),
        (&["mirror", "x"], "mirror requires at least 2 devices"),
    ] {
        let (_, said) = pool.yard.refused(&[&["pool", "add", "--size", "128M", &pool.name], words].concat());
        assert!(said.contains(why) && !pool.yard.path("x").exists(), "{words:?}: {said}");
    }
    let would = pool.yard.nacre(&["pool", "add", "-n", "--size", "128M", &pool.name, "mirror", "x", "y"]);
    assert!(would.ends_with(&format!("\t  mirror\n\t    {}\n\t    {}\n", path("x"), path("y"))), "{would}");
    pool.yard.nacre(&["pool", "add", "--size", "128M", &pool.name, "mirror", "x", "y"]);
    let after = pool.figure("size");
    assert!(after > before * 19 / 10 && says(&pool.status(), "mirror-1 ONLINE"), "{before} {after}");
    fs::write(pool.at.join("file"), Random(1).bytes(90 << 20)).unwrap();
    pool.yard.nacre(&["pool", "sync", &pool.name]);
    pool.is_whole("groups added");
    let scanned = |words: &[&str]| {
        pool.yard.nacre(&[&["pool", "scrub"], words, &[&pool.name]].concat());
        let json = pool.yard.nacre(&["pool", "status", "-jp", &pool.name]);
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        json["pools"][&pool.name]["scan_stats"]["examined"].as_str().unwrap().parse::<u64>().unwrap()
    };
    let all = scanned(&["-w"]);
    assert!(scanned(&["-w", "-e"]) < all / 10 && scanned(&["-w", "-C"]) < all / 4, "{all}");
    scanned(&["--rate", "1M"]);
    assert!(pool.status().contains("scrub in progress"), "{}", pool.status());
    pool.yard.nacre(&["pool", "scrub", "-w", "--rate", "0", &pool.name]);
    assert!(pool.status().contains("scrub repaired 0B"), "{}", pool.status());
}
