//! The file systems of a pool compared with native ones: listings of directories that change
//! meanwhile, and times.

use crate::mounting::{as_root, needs, pools::Pool};
use rustix::fs::{
    AtFlags, CWD, FallocateFlags, Mode, OFlags, RawDir, SeekFrom, StatxFlags, StatxTimestamp, XattrFlags,
};
use std::{
    collections::BTreeMap,
    fs,
    io::Write,
    mem::MaybeUninit,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::{PermissionsExt, chown},
    },
    path::Path,
    thread::sleep,
    time::Duration,
};

impl Pool {
    fn again(&self) {
        self.nacre(&["pool", "export", "%"]);
        self.import();
    }
}

fn opened(directory: &Path) -> OwnedFd {
    rustix::fs::open(directory, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).unwrap()
}

/// The next names of an open directory with the positions behind them, by one getdents(2) with so
/// many bytes of room.
fn some(directory: impl AsFd, room: usize) -> Vec<(String, u64)> {
    let mut buffer = vec![MaybeUninit::uninit(); room];
    let mut names = Vec::new();
    let mut raw = RawDir::new(directory, &mut buffer);
    loop {
        let entry = raw.next().transpose().unwrap();
        let Some(entry) = entry else { return names };
        names.push((entry.file_name().to_str().unwrap().to_owned(), entry.next_entry_cookie()));
        if raw.is_buffer_empty() {
            return names;
        }
    }
}

fn rest(directory: impl AsFd, room: usize) -> Vec<String> {
    let mut names = Vec::new();
    loop {
        let some = some(&directory, room);
        if some.is_empty() {
            return names;
        }
        names.extend(some.into_iter().map(|(name, _)| name));
        assert!(names.len() < 100_000, "the listing does not end");
    }
}

/// Returns the names that a loop over a directory meets while it renames, copies or links each of
/// them.
fn met(directory: &Path, count: usize, way: &str) -> usize {
    fs::create_dir(directory).unwrap();
    (0..count).for_each(|index| fs::write(directory.join(format!("f{index}")), b"").unwrap());
    let mut met = 0;
    for entry in fs::read_dir(directory).unwrap() {
        let entry = entry.unwrap();
        let new = directory.join(format!("x{met}"));
        match way {
            "mv" => fs::rename(entry.path(), new).unwrap(),
            "cp" => fs::copy(entry.path(), new).map(drop).unwrap(),
            _ => fs::hard_link(entry.path(), new).unwrap(),
        }
        met += 1;
        assert!(met <= count * 10, "{way} of {count}: the listing does not end");
    }
    met
}

#[test]
fn a_listing_ends_whatever_comes_and_moves_meanwhile() {
    needs!(as_root());
    let pool = Pool::made("pn", "64M", &[]);
    // In one reply, and in several.
    for count in [50, 1500] {
        for way in ["mv", "cp", "ln"] {
            assert_eq!(met(&pool.at(&format!("{way}{count}")), count, way), count, "{way} of {count}");
        }
    }
}

#[test]
fn readers_of_a_changing_directory_meet_each_name_once() {
    needs!(as_root());
    /// Little more than a name.
    const SMALL: usize = 300;
    let pool = Pool::made("pn", "64M", &[]);
    let place = pool.at("d");
    fs::create_dir(&place).unwrap();
    let names: Vec<String> = (0..400).map(|index| format!("name-{index}")).collect();
    names.iter().for_each(|name| fs::write(place.join(name), b"").unwrap());
    let (first, second) = (opened(&place), opened(&place));
    let mut early = some(&first, SMALL);
    assert_eq!([&early[0], &early[1]], [&(".".to_owned(), 1), &("..".to_owned(), 2)]);
    fs::rename(place.join("name-399"), place.join("moved")).unwrap();
    fs::write(place.join("other"), b"").unwrap();
    fs::rename(place.join("other"), place.join("name-200")).unwrap();
    fs::write(place.join("new"), b"").unwrap();
    let kept =
        |listed: &[String]| names[..399].iter().all(|name| listed.iter().filter(|listed| *listed == name).count() == 1);
    // A listing that begins now has the new names.
    let late = rest(&second, SMALL);
    assert!(
        kept(&late) && late.len() == 403 && ["moved", "new"].iter().all(|name| late.contains(&(*name).to_owned())),
        "{late:?}"
    );
    // An earlier listing continues, also from a position that it has stored.
    let told = early.last().unwrap().1;
    let going_on = rest(&first, SMALL);
    rustix::fs::seek(&first, SeekFrom::Start(told)).unwrap();
    assert_eq!(rest(&first, SMALL), going_on);
    let mut all: Vec<String> = early.drain(..).map(|(name, _)| name).collect();
    all.extend(going_on);
    assert!(kept(&all) && all.len() == 402 && all.contains(&"moved".to_owned()), "{all:?}");
    // And sees all when he rewinds.
    rustix::fs::seek(&first, SeekFrom::Start(0)).unwrap();
    let mut again = rest(&first, SMALL);
    again.sort_unstable();
    let mut late = late;
    late.sort_unstable();
    assert_eq!(again, late);
}

/// Nanoseconds since 1970.
type Moment = i128;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Times {
    modified: Moment,
    changed: Moment,
    born: Moment,
}

fn asked(path: &Path, what: StatxFlags) -> rustix::fs::Statx {
    rustix::fs::statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, what).unwrap()
}

fn moment(stamp: StatxTimestamp) -> Moment {
    Moment::from(stamp.tv_sec) * 1_000_000_000 + Moment::from(stamp.tv_nsec)
}

/// Returns the times of a file; a query for single times, and the size, must give the same values.
fn times(path: &Path) -> Times {
    let (modified, changed) =
        (moment(asked(path, StatxFlags::MTIME).stx_mtime), moment(asked(path, StatxFlags::CTIME).stx_ctime));
    let size = asked(path, StatxFlags::SIZE).stx_size;
    let all = asked(path, StatxFlags::BASIC_STATS | StatxFlags::BTIME);
    assert_eq!(
        (moment(all.stx_mtime), moment(all.stx_ctime), all.stx_size),
        (modified, changed, size),
        "{}",
        path.display()
    );
    Times { modified, changed, born: moment(all.stx_btime) }
}

/// The time of modification as natively, and that of change: `-` stays, `+` is later than before.
type Native = (char, char);
/// An operation on a file.
type Act = fn(&Path);

/// Operations on a file of 8192 bytes, and their effects on its times (as on XFS).
const DONE: &[(&str, Native, Act)] = &[
    ("append", ('+', '+'), |path| appended(path).write_all(&[1; 5000]).unwrap()),
    ("write", ('+', '+'), |path| fs::write(path, [1; 100]).unwrap()),
    ("write synced", ('+', '+'), |path| {
        let mut file = appended(path);
        file.write_all(b"x").unwrap();
        file.sync_all().unwrap();
    }),
    ("truncate", ('+', '+'), |path| fs::OpenOptions::new().write(true).open(path).unwrap().set_len(7).unwrap()),
    ("truncate to 0", ('+', '+'), |path| drop(fs::File::create(path).unwrap())),
    ("allocate", ('+', '+'), |path| allocated(path, FallocateFlags::empty(), 50_000)),
    ("allocate within", ('+', '+'), |path| allocated(path, FallocateFlags::empty(), 100)),
    ("allocate behind", ('+', '+'), |path| allocated(path, FallocateFlags::KEEP_SIZE, 50_000)),
    ("punch", ('+', '+'), |path| allocated(path, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 4096)),
    ("zero", ('+', '+'), |path| allocated(path, FallocateFlags::ZERO_RANGE, 4096)),
    ("copy from", ('-', '-'), |path| copied(path, &path.with_extension("copy"))),
    ("copy to", ('+', '+'), |path| copied(&path.with_file_name("source"), path)),
    ("chmod", ('-', '+'), |path| fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap()),
    ("chown", ('-', '+'), |path| chown(path, Some(1), Some(1)).unwrap()),
    ("link", ('-', '+'), |path| fs::hard_link(path, path.with_extension("link")).unwrap()),
    ("unlink", ('-', '+'), |path| {
        fs::hard_link(path, path.with_extension("gone")).unwrap();
        fs::remove_file(path.with_extension("gone")).unwrap();
    }),
    ("rename", ('-', '+'), |path| {
        fs::rename(path, path.with_extension("moved")).unwrap();
        fs::rename(path.with_extension("moved"), path).unwrap();
    }),
    ("set attribute", ('-', '+'), |path| rustix::fs::setxattr(path, "user.a", b"b", XattrFlags::empty()).unwrap()),
    ("write and rename", ('+', '+'), |path| {
        let mut file = appended(path);
        file.write_all(&[1; 5000]).unwrap();
        apart();
        fs::rename(path, path.with_extension("moved")).unwrap();
        fs::rename(path.with_extension("moved"), path).unwrap();
    }),
    ("write and punch", ('+', '+'), |path| {
        let mut file = fs::OpenOptions::new().write(true).open(path).unwrap();
        file.write_all(&[1; 6000]).unwrap();
        apart();
        rustix::fs::fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, 4096).unwrap();
    }),
    ("write and copy from", ('+', '+'), |path| {
        let mut file = appended(path);
        file.write_all(&[1; 5000]).unwrap();
        apart();
        copied(path, &path.with_extension("copy"));
    }),
    ("read", ('-', '-'), |path| drop(fs::read(path).unwrap())),
];

/// Some ticks of the clock that times are taken from go by.
fn apart() {
    let tick = || rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
    for _ in 0..3 {
        let now = tick();
        while tick() == now {
            sleep(Duration::from_millis(1));
        }
    }
}

fn appended(path: &Path) -> fs::File {
    fs::OpenOptions::new().append(true).open(path).unwrap()
}

fn allocated(path: &Path, mode: FallocateFlags, length: u64) {
    let file = fs::OpenOptions::new().write(true).open(path).unwrap();
    rustix::fs::fallocate(file, mode, 0, length).unwrap();
}

fn copied(from: &Path, to: &Path) {
    let (from, to) = (fs::File::open(from).unwrap(), fs::File::create(to).unwrap());
    assert!(rustix::fs::copy_file_range(from, None, to, None, 4096).unwrap() > 0);
}

fn judge_times(pool: &Pool, place: &Path) {
    fs::write(place.join("source"), [7; 8192]).unwrap();
    let path = |what: &str| place.join(what.replace(' ', "-"));
    let mut shown = BTreeMap::new();
    for (what, ..) in DONE {
        fs::write(path(what), [3; 8192]).unwrap();
    }
    let mut held = Vec::new();
    for (what, (modified, changed), act) in DONE {
        let before = times(&path(what));
        apart();
        act(&path(what));
        let after = times(&path(what));
        let way = |old, new| {
            if new > old {
                '+'
            } else if new == old {
                '-'
            } else {
                '?'
            }
        };
        assert_eq!(
            (way(before.modified, after.modified), way(before.changed, after.changed)),
            (*modified, *changed),
            "{what}"
        );
        assert!(
            after.born == before.born && after.born <= after.modified && after.born <= after.changed,
            "{what}: {after:?}"
        );
        shown.insert(path(what), after);
    }
    // Appended to again and again, by one who stays and by others who come and go.
    let (held_at, often) = (place.join("held"), place.join("often"));
    held.push(fs::File::create(&held_at).unwrap());
    for _ in 0..6 {
        for (path, file) in [(&held_at, held.first_mut()), (&often, None)] {
            let before = path.exists().then(|| times(path).modified);
            apart();
            match file {
                Some(file) => file.write_all(b"line\n").unwrap(),
                None => {
                    fs::OpenOptions::new().append(true).create(true).open(path).unwrap().write_all(b"line\n").unwrap()
                }
            }
            let modified = moment(asked(path, StatxFlags::MTIME).stx_mtime);
            assert!(before.is_none_or(|before| modified > before), "{}: an old time", path.display());
            assert_eq!(times(path).modified, modified);
        }
    }
    drop(held);
    shown.extend([&held_at, &often].map(|path| (path.clone(), times(path))));
    pool.again();
    for (path, then) in shown {
        assert_eq!(times(&path), then, "{}", path.display());
    }
}

#[test]
fn times_stay_as_they_were_shown() {
    needs!(as_root());
    // Writes are collected there.
    let pool = Pool::made("pn", "3G", &[]);
    judge_times(&pool, &pool.at(""));
}

#[test]
fn times_of_direct_writes_stay_as_they_were_shown() {
    needs!(as_root());
    let pool = Pool::made("pn", "64M", &[]);
    judge_times(&pool, &pool.at(""));
    let pool = Pool::made("pn", "3G", &["-O", "sync=always"]);
    judge_times(&pool, &pool.at(""));
}
